"""A cluster: each storage is on one of its shards, whichever that is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import anyio
import pytest
from redis.asyncio import RedisCluster

from mcp_resumable import EventCursor, Generation, ResumableEventStore
from mcp_resumable.cursor import StreamId
from mcp_resumable.redis import RedisStorage
from mcp_resumable.storage import Batch
from tests.redis.server import Server, free_port, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shards() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        # Of its own: the default, 10,000 above the other one, may be taken, or no port at all.
        buses = [free_port(), free_port()]
        servers = [stack.enter_context(serving(*options, "--cluster-port", str(bus))) for bus in buses]
        for number, (server, slots) in enumerate(zip(servers, ((0, 8191), (8192, 16383)), strict=True)):
            with server.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
                if number:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, buses[0])
        for server in servers:
            with server.client() as client:
                for _ in range(500):
                    if client.execute_command("CLUSTER INFO")["cluster_state"] == "ok":
                        break
                    time.sleep(0.02)
        yield servers


async def next_event(storage: RedisStorage, generation: Generation, stream: StreamId) -> None:
    while await storage.read("s", generation, stream, 1, 10) == Batch([], False):
        await storage.wait("s", generation, stream, 1)


async def test_a_storage_works_on_each_shard(shards: list[Server]) -> None:
    used: set[int] = set()
    async with RedisCluster(host="127.0.0.1", port=shards[0].port) as client:
        for prefix in ("a", "b", "c", "d"):
            shard = client.get_node_from_key(f"{{{prefix}}}")
            assert shard is not None
            used.add(int(shard.port))
            storages = [RedisStorage(client, prefix=prefix) for _ in range(2)]
            here, there = storages
            generation = await here.open_session("s")
            assert await here.own_session("s", generation, "")
            stream = await here.open_stream("s", generation, "1")
            await here.append("s", generation, stream, [b"a"])
            assert await there.read("s", generation, stream, 0, 10) == Batch([b"a"], False)
            cursor = EventCursor(generation=generation, stream=stream, seq=1)
            assert await there.snapshot("s", cursor) is not None

            with anyio.fail_after(4):  # before the sweep, which would find it too
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(next_event, there, generation, stream)
                    await anyio.wait_all_tasks_blocked()
                    await here.append("s", generation, stream, [b"b"])
            for storage in storages:
                await storage.aclose()
    assert used == {server.port for server in shards}


async def test_a_client_of_a_cluster_that_decodes_is_refused(shards: list[Server]) -> None:
    async with RedisCluster(host="127.0.0.1", port=shards[0].port, decode_responses=True) as client:
        with pytest.raises(ValueError, match="decode"):
            ResumableEventStore(RedisStorage(client))
