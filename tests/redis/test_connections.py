"""A connection to the server that breaks, or is slow, at the worst moment: each event is stored once, or is a hole."""

from __future__ import annotations

import time

import anyio
import pytest
from redis.asyncio import Connection, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from mcp_resumable import EventCursor, Generation, ResumableEventStore
from mcp_resumable.redis import RedisStorage
from mcp_resumable.session import Exchange, current_exchange
from mcp_resumable.writer import known
from tests.in_loop import until
from tests.redis.proxy import proxied
from tests.redis.server import Server
from tests.redis.storages import Log, answering, fresh_prefix, opened

pytestmark = pytest.mark.anyio

TIMEOUT = 60


async def test_an_append_whose_acknowledgement_is_cut_is_stored_once(redis_server: Server) -> None:
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy, opened(proxy.url) as storage:
            log = await Log.open(storage, "s", "7")
            await log.append(storage, b"before")
            fault = proxy.cut(b"=twice?")
            await log.append(storage, b"twice?", b"thrice?")
            assert fault.executed.is_set()
            fault = proxy.cut(b"=answer")
            await log.append(storage, b"answer", is_terminal=True)
            assert fault.executed.is_set()
            assert await log.read(storage) == [b"before", b"twice?", b"thrice?", b"answer"]
            assert await log.reasons(storage) == ["resume"] * 4 + ["stream_completed", "future_event_id"]


async def test_appends_to_one_stream_whose_acknowledgement_is_cut_are_stored_once(redis_server: Server) -> None:
    """Two in one call: when it was sent again, the first was not the stream's last any more, and was stored twice."""
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy, opened(proxy.url) as storage:
            other, log = [await Log.open(storage, "s", request_id) for request_id in "12"]
            await log.append(storage, b"before")
            # A call is under way, so that what follows is sent together.
            busy = proxy.hold(b"=busy")
            cut = proxy.cut(b"=first")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.append, storage, b"busy")
                await busy.arrived.wait()
                tasks.start_soon(log.append, storage, b"first")
                tasks.start_soon(log.append, storage, b"second")
                await anyio.wait_all_tasks_blocked()
                busy.released.set()
            assert cut.executed.is_set()
            assert await other.read(storage) == [b"busy"]
            assert await log.read(storage) == [b"before", b"first", b"second"]


async def test_an_append_that_is_given_up_after_it_was_stored_is_a_hole_and_no_duplicate(redis_server: Server) -> None:
    with anyio.fail_after(TIMEOUT):
        prefix = fresh_prefix()
        async with (
            proxied(redis_server.port) as proxy,
            opened(proxy.url, prefix=prefix) as storage,
            opened(redis_server.url, prefix=prefix) as other,
        ):
            log = await Log.open(storage, "s", "7")
            await log.append(storage, b"1")
            fault = proxy.cut(b"=2")
            proxy.server_port = None  # The connection is not made again.
            with pytest.raises((RedisError, OSError)):
                await log.append(storage, b"2")
            assert fault.executed.is_set()
            assert await log.read(other) == [b"1", b"2"]
            proxy.server_port = redis_server.port
            await answering(storage)
            log.places.append(b"2")
            # What the store does: the event is told as lost, and what comes next follows it.
            await log.append(storage, None, b"3")
            assert await log.read(other) == [b"1", b"2", None, b"3"]
            assert await log.reasons(other) == ["replay_gap"] * 3 + ["resume", "resume", "future_event_id"]


async def test_an_append_that_arrives_late_is_not_stored_behind_its_hole(redis_server: Server) -> None:
    """A packet that the network kept back stored a lost event after what had been appended since: out of order."""
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy, opened(proxy.url, timeout_seconds=0.2) as storage:
            log = await Log.open(storage, "s", "7")
            await log.append(storage, b"1")
            fault = proxy.hold(b"=late")
            with pytest.raises(TimeoutError):
                await log.append(storage, b"late")
            assert fault.arrived.is_set()
            await answering(storage)
            await log.append(storage, None, b"2")
            fault.released.set()
            await fault.executed.wait()
            assert await log.read(storage) == [b"1", None, b"2"]
            await log.append(storage, b"3")
            assert await log.reasons(storage) == [
                "replay_gap",
                "replay_gap",
                "resume",
                "resume",
                "resume",
                "future_event_id",
            ]


async def test_a_stream_whose_opening_is_cut_or_late_is_the_requests_one_stream(redis_server: Server) -> None:
    """An opening that timed out, and was made again, took the stream's place when it arrived."""
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy, opened(proxy.url, timeout_seconds=0.2) as storage:
            await Log.open(storage, "s", "the server knows the script")
            cut = proxy.cut(b"cut me")
            log = await Log.open(storage, "s", "cut me")
            assert cut.executed.is_set()
            assert log.stream.ordinal == 2
            late = proxy.hold(b"late")
            with pytest.raises(TimeoutError):
                await Log.open(storage, "s", "late")
            await answering(storage)
            log = await Log.open(storage, "s", "late")
            await log.append(storage, b"1")
            late.released.set()
            await late.executed.wait()
            await log.append(storage, b"2")
            assert log.stream.ordinal == 3
            assert await log.reasons(storage) == ["resume"] * 3 + ["future_event_id"]


async def test_a_claim_whose_acknowledgement_is_cut_is_one_claim(redis_server: Server) -> None:
    """The session's first event ids promise its first generation; claimed twice, they were of an earlier one."""
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy, opened(proxy.url) as storage:
            await storage.open_session("another's")  # The server knows the script from here on.
            fault = proxy.cut(b"k3v9q0m4x7ta")
            assert await storage.open_session("s", nonce="k3v9q0m4x7ta") == Generation(1, "k3v9q0m4x7ta")
            assert fault.executed.is_set()


async def test_a_claim_that_arrives_late_does_not_take_the_session_from_its_writer(redis_server: Server) -> None:
    """A first claim that timed out, and was made again, took the session away when it arrived."""
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy, opened(proxy.url, timeout_seconds=0.2) as storage:
            await storage.open_session("another's")  # The server knows the script from here on.
            fault = proxy.hold(b"k3v9q0m4x7ta")
            with pytest.raises(TimeoutError):
                await storage.open_session("s", nonce="k3v9q0m4x7ta")
            await answering(storage)
            generation = await storage.open_session("s", nonce="k3v9q0m4x7ta")
            log = await Log.open(storage, "s", "7")
            await log.append(storage, b"1")
            fault.released.set()
            await fault.executed.wait()
            await log.append(storage, b"2")
            assert log.generation == generation
            assert await log.reasons(storage) == ["resume"] * 3 + ["future_event_id"]


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_of_the_callers_stores_once_and_stays_open(
    redis_server: Server, retries: int, protocol: int
) -> None:
    with anyio.fail_after(TIMEOUT):
        async with proxied(redis_server.port) as proxy:
            client = Redis(
                host="127.0.0.1",
                port=proxy.port,
                protocol=protocol,
                retry=Retry(NoBackoff(), retries),
                max_connections=8,
            )
            async with opened(client) as storage:
                log = await Log.open(storage, "s", "7")
                for number in range(5):
                    fault = proxy.cut(b"=event %d" % number)
                    await log.append(storage, b"event %d" % number)
                    assert fault.executed.is_set()
                assert await log.reasons(storage) == ["resume"] * 6 + ["future_event_id"]
            assert await client.ping()
            await client.aclose()


async def test_a_client_that_decodes_responses_is_refused(redis_server: Server) -> None:
    client = Redis.from_url(redis_server.url, decode_responses=True)
    with pytest.raises(ValueError, match="decode_responses"):
        RedisStorage(client)
    await client.aclose()


async def test_a_client_of_a_cluster_that_cannot_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with redis-py before 8: each operation failed."""
    client = RedisCluster.from_url("redis://127.0.0.1:1")
    monkeypatch.delattr(RedisCluster, "pubsub", raising=False)
    with pytest.raises(ValueError, match="redis-py 8"):
        RedisStorage(client)
    await client.aclose()


async def test_connections_that_the_server_has_closed_cost_no_event(redis_server: Server) -> None:
    """Several were kept, all of them dead: the second attempt took a dead one too, and the event was lost."""
    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url) as storage:
            logs = [await Log.open(storage, f"session {number}") for number in range(4)]

            async def busy() -> None:
                async with anyio.create_task_group() as tasks:
                    for log in logs:
                        tasks.start_soon(storage.find_owner, log.session_id)

            await busy()
            assert len(storage._calls.scripts._idle) > 2
            with redis_server.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for log in logs:
                await log.append(storage, b"1")
            assert storage._calls.failure is None


async def test_connections_that_are_closed_when_they_are_written_to_cost_no_event(redis_server: Server) -> None:
    """Of uvloop such a write is a RuntimeError: an event was lost, and the lease with the task that renews it."""
    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url) as storage:
            log = await Log.open(storage, "s")
            for step in range(3):
                kept = storage._calls.scripts._idle
                assert kept
                for connection in kept:
                    connection._writer.transport.abort()
                if step == 0:
                    await log.append(storage, b"1")
                elif step == 1:
                    assert await log.read(storage) == [b"1"]
                else:
                    await storage._pulse._renew_lease()
            assert storage._calls.failure is None


@pytest.mark.parametrize("command", ["info", "publish", "exists", "delete"])
async def test_a_transport_that_is_closed_is_a_lost_connection_to_whatever_is_asked(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """As uvloop says it; what is asked by itself, and not by a script."""

    async def fails(*_: object) -> None:
        raise RuntimeError("the handler is closed")

    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url) as storage:
            monkeypatch.setattr(storage._calls.client, command, fails)
            if command in ("info", "publish"):
                with pytest.raises(RedisConnectionError, match="the handler is closed"):
                    await storage.find_owner("s")
                assert storage._calls.failure is not None
            elif command == "exists":
                with pytest.raises(RedisConnectionError, match="the handler is closed"):
                    await storage._pulse._exists("key")
            else:
                storage._pulse.is_leased = True
                await storage._pulse.retire()


# Where the reader and the listener both have redis-py connect again, it leaves one of the two to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
async def test_a_reader_asks_in_vain_on_a_connection_that_is_closed_and_is_served_all_the_same(
    redis_server: Server,
) -> None:
    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url) as storage:
            log = await Log.open(storage, "s")
            await log.append(storage, b"1")
            listener = storage._listener
            await until(lambda: listener._pubsub is not None)
            first = known(listener._pubsub)
            known(first.connection)._writer.transport.abort()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(storage.wait, "s", log.generation, log.stream, 1)
                await anyio.wait_all_tasks_blocked()
                await log.append(storage, b"2")
            assert await log.read(storage) == [b"1", b"2"]
            await until(lambda: listener._pubsub not in (None, first))


async def test_an_event_loop_that_stalls_is_no_server_that_does_not_answer(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand clients that came back at once kept the loop busy for longer than the time-out: all had a hole."""
    read_response = Connection.read_response

    async def stall(connection: Connection) -> object:
        monkeypatch.setattr(Connection, "read_response", read_response)
        time.sleep(0.6)  # noqa: ASYNC251  # The answer comes meanwhile.
        return await read_response(connection)

    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url, timeout_seconds=0.2) as storage:
            log = await Log.open(storage, "s", "7")
            monkeypatch.setattr(Connection, "read_response", stall)
            await log.append(storage, b"1")
            assert await log.read(storage) == [b"1"]
            assert storage._calls.failure is None


async def test_a_storage_that_is_closed_stores_what_was_handed_over_before(redis_server: Server) -> None:
    """It was told to be lost, in the log, at each stop of a busy server."""

    class Notification:
        method = "notifications/progress"

        def model_dump_json(self, **_options: object) -> str:
            return "{}"

    with anyio.fail_after(TIMEOUT):
        prefix = fresh_prefix()
        async with opened(redis_server.url, prefix=prefix) as storage:
            store = ResumableEventStore(storage)
            binding = store.bind_session(None, None)
            await store.attach_session(binding, "s")
            current_exchange.set(Exchange(binding))
            ids = [await store.store_event("_GET_stream", Notification()) for _ in range(10)]
        assert store.stats().faults == 0
        async with opened(redis_server.url, prefix=prefix) as other:
            cursor = EventCursor.parse(ids[0])
            assert cursor is not None
            batch = await other.read("s", cursor.generation, cursor.stream, 0, 100)
            assert batch is not None
            assert len(batch.events) == len(ids)
