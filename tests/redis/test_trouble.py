"""A server in trouble: live delivery goes on, resumes are answered 503 or with the right reset; it ends by itself."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator

import anyio
import anyio.lowlevel
import pytest

from mcp_resumable.cursor import STANDALONE
from mcp_resumable.redis import RedisStorage
from tests.e2e.raw_client import Frame, RawClient, Response, session
from tests.e2e.servers import Hold
from tests.redis.proxy import proxied
from tests.redis.server import Server, serving
from tests.redis.storages import answering
from tests.redis.workers import TIMEOUT, answered, at, crew, new_call, refusal_of

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The logging capability is deprecated")]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of the test's own, since it is harmed."""
    with serving() as server:
        yield server


async def held(client: RawClient, request_id: int = 7) -> tuple[Response, list[str]]:
    """Call `hold` at the first worker; return its response and the event ids 0..3."""
    response = await client.call("hold", request_id, n=3, tag=str(request_id))
    return response, [frame.id or "" for frame in await response.events(4)]


async def verdict(client: RawClient, event_id: str, *, served: list[Frame] | None = None) -> tuple[int, str]:
    """Present an event id until it is refused by the decision; collect what was served until then."""
    while (response := await answered(client, event_id)).status == 200:
        frames = [frame for frame in await response.rest() if frame.is_message]
        if served is not None:
            served += frames
    return await refusal_of(response)


async def live(response: Response, hold: Hold, *numbers: int) -> list[Frame]:
    """Let a call make progress, and return the frames that its first connection carries."""
    await hold.progress(*numbers)
    frames = await response.events(len(numbers))
    assert [frame.progress for frame in frames] == list(numbers)
    return frames


async def test_a_server_that_comes_back_empty_knows_no_session_and_takes_new_calls(server: Server) -> None:
    with anyio.fail_after(TIMEOUT):
        async with crew(server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
            response, ids = await held(client)
            hold = await c.workers[0].hold("7")
            server.stop()
            assert [frame.id for frame in await live(response, hold, 4, 5)] == [None, None]
            for place in (client, there):
                assert await refusal_of(await place.get(ids[3])) == (503, "storage_unavailable")
            server.start()
            assert await verdict(there, ids[3]) == (404, "session_not_found")
            assert await verdict(client, ids[3]) == (404, "session_not_found")
            await live(response, hold, 6)
            await hold.finish()
            assert (await response.rest())[-1].answer_text == "done"
            await new_call(client, 20, there)
            # Nothing is known of its numbers any more; the nonce tells that this was none of the new generation.
            assert await refusal_of(await client.get(ids[3])) == (400, "unrecognized_generation")


async def test_a_server_that_comes_back_with_its_data_began_a_new_generation(server: Server) -> None:
    """It cannot tell whether it lost its last events, so none of the earlier cursors is resumed."""
    server.stop()
    server.options = ("--appendonly", "yes", "--appendfsync", "always")
    server.start()
    with anyio.fail_after(TIMEOUT):
        async with crew(server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
            response, ids = await held(client)
            hold = await c.workers[0].hold("7")
            server.stop()
            await live(response, hold, 4)
            server.start()
            assert await verdict(there, ids[3]) == (409, "generation_mismatch")
            assert await verdict(client, ids[3]) == (409, "generation_mismatch")
            await new_call(client, 20, there)
            await hold.progress(5)
            await hold.finish()


async def test_a_server_that_freezes_costs_the_events_of_one_time_out(server: Server) -> None:
    """A second for each of the 200 events would take longer than the test may."""
    with anyio.fail_after(TIMEOUT):
        async with (
            crew(server, timeout_seconds=1) as c,
            session(c.workers[0]) as client,
            at(client, c.workers[1]) as there,
            session(c.workers[0]) as second,
        ):
            response, ids = await held(client)
            other, _ = await held(second, 8)
            _, followed = await held(client, 9)
            tail = await there.get(followed[3])
            await tail.event()
            holds = [await c.workers[0].hold(tag) for tag in "789"]
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            try:
                for number in range(4, 104):
                    await live(response, holds[0], number)
                    await live(other, holds[1], number)
                for place in (client, there):
                    assert await refusal_of(await place.get(ids[3])) == (503, "storage_unavailable")
            finally:
                server.process.send_signal(signal.SIGCONT)
            # Nothing is sent any more: the owner tells the storage of the loss by itself.
            served: list[Frame] = []
            assert await verdict(there, ids[3], served=served) == (409, "replay_gap")
            assert [frame.progress for frame in served] in ([], [4])
            assert await verdict(client, ids[3]) == (409, "replay_gap")
            assert (await live(other, holds[1], 104))[0].id
            # A tail that froze with the server goes on, or ends so that its client comes back.
            await holds[2].progress(4)
            rest = await tail.frame() or (await (await answered(there, followed[3])).events(2))[1]
            assert rest.progress == 4


def fill(server: Server) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 1)  # Without a policy that evicts; more than that is in use.


def empty(server: Server) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 0)


def demote(server: Server) -> None:
    with server.client() as client:
        # Nobody is there: it keeps its data, and takes no writes.
        client.replicaof("127.0.0.1", 1)


def promote(server: Server) -> None:
    with server.client() as client:
        client.replicaof("NO", "ONE")


def starve(server: Server) -> None:
    with server.client() as client:
        client.config_set("min-replicas-to-write", 1)


def feed(server: Server) -> None:
    with server.client() as client:
        client.config_set("min-replicas-to-write", 0)


@pytest.mark.parametrize(
    ("harm", "mend", "reason"),
    [
        (fill, empty, "replay_gap"),
        (demote, promote, "generation_mismatch"),
        (starve, feed, "replay_gap"),
    ],
    ids=["out_of_memory", "readonly", "no_replicas"],
)
async def test_a_server_that_takes_no_writes_is_a_hole_and_ends_by_itself(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Server], None],
    mend: Callable[[Server], None],
    reason: str,
) -> None:
    with anyio.fail_after(TIMEOUT):
        async with (
            crew(server) as c,
            session(c.workers[0]) as client,
            at(client, c.workers[1]) as there,
        ):
            response, ids = await held(client)
            hold = await c.workers[0].hold("7")
            harm(server)
            for number in range(4, 24):
                frames = await live(response, hold, number)
                assert not frames[0].id
                assert await refusal_of(await there.get(ids[3])) == (503, "storage_unavailable")
                await anyio.sleep(0.05)
            mend(server)
            assert await verdict(there, ids[3]) == (409, reason)
            assert await verdict(client, ids[3]) == (409, reason)
            await hold.progress(24)
            await hold.finish()
            await new_call(client, 20, there)
            lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
            assert sum("Redis has failed" in line for line in lines) == 2, "once for each worker"
            assert sum("Redis answers again" in line for line in lines) == 2


async def test_a_lease_that_ran_out_while_the_server_had_failed_does_not_cost_a_session(server: Server) -> None:
    """The worker that reached the server first gave up the sessions of the one that had not renewed its lease yet."""
    with anyio.fail_after(TIMEOUT):
        async with (
            proxied(server.port) as way,
            crew(server, urls=[way.url, server.url]) as c,
            session(c.workers[0]) as client,
            at(client, c.workers[1]) as there,
        ):
            _, ids = await held(client)
            fill(server)
            # Reads alone still work; the session's last activity cannot be noted.
            while (await there.get(ids[3])).status != 503:  # noqa: ASYNC110  # there is no event
                await anyio.sleep(0.02)
            c.delete(f"w:{c.storages[0].worker_id}")
            way.point_at(None)
            empty(server)
            resumed = await answered(there, ids[3])
            assert resumed.status == 200
            await resumed.event()
            way.point_at(server.port)
            hold = await c.workers[0].hold("7")
            await answering(c.storages[0])
            await hold.finish()
            assert (await resumed.rest())[-1].answer_text == "done"


async def test_a_worker_that_starts_before_its_server_begins_to_keep_events_when_that_is_there(server: Server) -> None:
    server.stop()
    with anyio.fail_after(TIMEOUT):
        async with crew(server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
            response = await client.call("hold", 7, n=3, tag="7")
            frames = [frame for frame in await response.events(4) if frame.is_message]
            assert [frame.progress for frame in frames] == [1, 2, 3]
            server.start()
            await new_call(client, 20, there)
            hold = await c.workers[0].hold("7")
            assert (await live(response, hold, 4))[0].id
            await hold.finish()
            assert (await response.rest())[-1].answer_text == "done"


async def test_nonsense_on_the_channels_stops_nobody_from_listening(redis_server: Server) -> None:
    """One message that was none of ours ended the task that listens; tails heard of events by the sweep only."""
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        _, ids = await held(client)
        tail = await there.get(ids[3])
        await tail.event()
        hold = await c.workers[0].hold("7")
        with redis_server.client() as publisher:
            for nonsense in (
                b"",
                b"\xff\xfe",
                b"1.Nw x",
                b"+ 1",
                b"+ x 1.Nw",
                b"taken",
                b"taken x y z",
                b"1.Nw " + b"9" * 5_000,
            ):
                for channel in (f"d:{client.sid}", *(f"w:{storage.worker_id}" for storage in c.storages)):
                    publisher.publish(f"{{{c.prefix}}}:{channel}", nonsense)
        # Each would be heard only at the next sweep, seconds later, if nobody listened any more.
        for number in range(4, 24):
            await hold.progress(number)
            assert (await tail.event()).progress == number


async def test_a_user_who_may_not_publish_is_told_so_once_and_its_calls_are_served_live(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice a second the log said that Redis had failed, and answered again."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~*", "resetchannels", "+@all")
    url = f"redis://worker:secret@127.0.0.1:{server.port}"
    with anyio.fail_after(TIMEOUT):
        async with crew(server, 1, urls=[url]) as c, session(c.workers[0]) as client:
            call = await client.call("hold", 7, n=1, tag="7")
            hold = await c.workers[0].hold("7")
            for number in range(2, 40):
                await hold.progress(number)
                await anyio.sleep(0.05)
            await hold.finish()
            frames = [frame for frame in await call.rest() if frame.is_message]
            assert [frame.progress for frame in frames[:-1]] == list(range(1, 40))
            assert frames[-1].answer_text == "done"
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2, "by the storage, and by the store for this session"


async def test_a_storage_is_closed_in_time_while_the_server_is_frozen(server: Server) -> None:
    """What gave operations up was stopped first, and the close waited for them as long as the server was frozen."""
    storage = RedisStorage(server.url, timeout_seconds=0.5)
    generation = await storage.open_session("s")
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        with anyio.fail_after(TIMEOUT):
            async with anyio.create_task_group() as tasks:

                async def append() -> None:
                    with pytest.raises(TimeoutError):
                        await storage.append("s", generation, STANDALONE, [b"{}"], is_terminal=False)

                tasks.start_soon(append)
                while not storage._appends.under_way:
                    await anyio.lowlevel.checkpoint()
                await anyio.wait_all_tasks_blocked()
                await storage.aclose()
    finally:
        server.process.send_signal(signal.SIGCONT)
