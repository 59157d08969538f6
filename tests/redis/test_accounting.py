"""What is charged is what is held, and the ceilings hold, however several instances share the data."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import anyio
import pytest

from mcp_resumable import Generation, Retention
from mcp_resumable.cursor import STANDALONE, StreamId
from mcp_resumable.redis import RedisStorage
from mcp_resumable.storage import AppendRefusedError
from tests.in_loop import until
from tests.redis.recount import recount
from tests.redis.server import Server
from tests.redis.storages import fresh_prefix, opened

pytestmark = pytest.mark.anyio

TIMEOUT = 60

RETENTION = Retention(
    max_events=6,
    max_bytes=600,
    max_session_bytes=9_000,
    max_total_bytes=30_000,
    max_sessions=6,
    completed_seconds=40,
    idle_seconds=100,
)


class Actor:
    """Does something at random to one of several instances."""

    def __init__(self, seed: int, storages: list[RedisStorage]) -> None:
        self.random = random.Random(seed)
        self.storages = storages
        self.clock = 0.0
        self.streams: list[tuple[str, Generation, StreamId]] = []

    async def act(self) -> None:
        choose = self.random
        storage = choose.choice(self.storages)
        session_id = f"s{choose.randrange(9)}"
        self.clock += choose.choice((0, 0, 0, 0.2, 1, 5))
        try:
            match choose.choices(range(8), (2, 1, 6, 30, 3, 1, 1, 0.3))[0]:
                case 0:
                    generation = await storage.open_session(session_id)
                    self.streams.append((session_id, generation, STANDALONE))
                case 1:
                    await storage.advance_generation(session_id)
                case 2 if self.streams:
                    session_id, generation, _ = choose.choice(self.streams)
                    request_id = choose.choice(("1", "2", "ä", "\ud800", "x" * 150))
                    stream = await storage.open_stream(session_id, generation, request_id)
                    self.streams.append((session_id, generation, stream))
                case 3 if self.streams:
                    session_id, generation, stream = choose.choice(self.streams[-20:])
                    events = [
                        None if choose.random() < 0.1 else b"e" * choose.randrange(200)
                        for _ in range(choose.randrange(1, 4))
                    ]
                    is_terminal = stream != STANDALONE and choose.random() < 0.15
                    await storage.append(session_id, generation, stream, events, is_terminal=is_terminal)
                case 4:
                    await storage.snapshot(session_id, None)
                case 5:
                    await storage.end_session(session_id)
                case 6:
                    await storage.describe(session_id)
                case _:
                    self.clock += choose.choice((30, 90))
        except AppendRefusedError:
            pass


@pytest.mark.parametrize("seed", range(3))
async def test_the_counters_are_what_a_recount_says(redis_server: Server, seed: int) -> None:
    prefix = fresh_prefix()
    with anyio.fail_after(TIMEOUT):
        async with AsyncExitStack() as stack:
            storages: list[RedisStorage] = []
            actor = Actor(seed, storages)
            for _ in range(3):
                instance = opened(redis_server.url, prefix=prefix, retention=RETENTION, clock_shift=lambda: actor.clock)
                storages.append(await stack.enter_async_context(instance))
            for turn in range(1500):
                await actor.act()
                if turn % 25 == 0:
                    counted = recount(redis_server, prefix)
                    assert counted.problems == [], f"seed {seed}, turn {turn}"
                    assert counted.total <= RETENTION.max_total_bytes
                    assert max(counted.charges.values(), default=0) <= RETENTION.max_session_bytes
                    assert len(counted.charges) <= RETENTION.max_sessions
            assert sum(storage.evicted_events for storage in storages) > 100


async def test_a_flood_over_several_instances_stays_below_the_ceilings(redis_server: Server) -> None:
    retention = Retention(max_bytes=50_000, max_session_bytes=100_000, max_total_bytes=400_000, max_sessions=20)
    prefix = fresh_prefix()
    with anyio.fail_after(TIMEOUT):
        async with AsyncExitStack() as stack:
            storages = [
                await stack.enter_async_context(opened(redis_server.url, prefix=prefix, retention=retention))
                for _ in range(3)
            ]

            async def flood(number: int) -> None:
                storage, session_id = storages[number % 3], f"s{number}"
                generation = await storage.open_session(session_id)
                sizes = random.Random(number)
                for request_id in range(5):
                    stream = await storage.open_stream(session_id, generation, str(request_id))
                    for _ in range(20):
                        size = sizes.choice((1, 310, 3_000))
                        await storage.append(session_id, generation, stream, [b"x" * size] * 5)

            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(flood, number)
                await until(lambda: all(storage.evicted_events > 0 for storage in storages))
                for _ in range(10):
                    counted = recount(redis_server, prefix)
                    assert counted.problems == []
                    assert counted.total <= retention.max_total_bytes
                    assert max(counted.charges.values()) <= retention.max_session_bytes
                    await anyio.lowlevel.checkpoint()
            counted = recount(redis_server, prefix)
            assert counted.problems == []
            assert retention.max_total_bytes * 0.9 < counted.total <= retention.max_total_bytes


# A notification of 200 bytes is 310 of JSON; of them the server uses 324 for each.
@pytest.mark.parametrize(("streams", "events", "size"), [(1, 2_000, 310), (1, 5_000, 1), (500, 1, 1), (50, 20, 310)])
async def test_what_is_charged_is_no_less_than_what_the_server_uses(
    redis_server: Server, streams: int, events: int, size: int
) -> None:
    """A flood of tiny events, or of tiny streams, must not pass the ceilings."""
    prefix = fresh_prefix()
    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url, prefix=prefix) as storage:
            generation = await storage.open_session("s" * 32)
            for request_id in range(streams):
                stream = await storage.open_stream("s" * 32, generation, str(request_id))
                for _ in range(0, events, 100):
                    await storage.append("s" * 32, generation, stream, [b"x" * size] * min(events, 100))
    with redis_server.client() as client:
        keys = client.keys(f"{{{prefix}}}:*")
        used = sum(client.execute_command("MEMORY", "USAGE", key, "SAMPLES", "0") for key in keys)
    charged = recount(redis_server, prefix).total
    assert used <= charged
