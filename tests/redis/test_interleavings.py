"""What another worker can do at each await of this one: forced, not hoped for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from mcp_resumable.redis import RedisStorage
from mcp_resumable.redis.pulse import Pulse
from mcp_resumable.storage import StreamDescription
from tests.e2e.raw_client import LATEST, RawClient, Response, session
from tests.e2e.servers import serve
from tests.held_storage import Trap
from tests.in_loop import until
from tests.redis.server import Server
from tests.redis.storages import fresh_prefix, opened
from tests.redis.workers import Crew, at, crew

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The logging capability is deprecated")]

NEVER = 600.0
"""Seconds of a lease that no pulse renews within a test."""


def hold(storage: RedisStorage, operation: str, *, answered: bool = False) -> Trap:
    """Hold the next call of a storage's operation, before it takes effect, or when it is `answered`."""
    trap = Trap(None)
    original = getattr(storage, operation)

    async def held(*arguments: Any, **options: Any) -> Any:
        setattr(storage, operation, original)
        if answered:
            answer = await original(*arguments, **options)
            await trap.spring()
            return answer
        await trap.spring()
        return await original(*arguments, **options)

    setattr(storage, operation, held)
    return trap


async def held(client: RawClient) -> tuple[Response, list[str]]:
    """Call `hold` at the first worker; return its response and the event ids 0..3."""
    response = await client.call("hold", 7, n=3, tag="7")
    return response, [frame.id or "" for frame in await response.events(4)]


async def nothing() -> None:
    pass


async def streams_of(storage: RedisStorage, client: RawClient) -> tuple[StreamDescription, ...]:
    description = await storage.describe(client.sid)
    assert description is not None
    return description.streams


async def test_a_take_over_before_the_doorbell_is_heard_closes_the_older_connection(redis_server: Server) -> None:
    """Two workers served one stream to two connections, until its end."""
    async with crew(redis_server, 3) as c, session(c.workers[0]) as client:
        _, ids = await held(client)
        async with at(client, c.workers[1]) as first, at(client, c.workers[2]) as second:
            trap = hold(c.storages[1], "_wait")
            older = await first.get(ids[3])
            assert (await older.event()).id == ids[3]
            await trap.until_reached()
            newer = await second.get(ids[3])
            assert (await newer.event()).id == ids[3]
            trap.release()
            assert await older.rest() == []
            hold_ = await c.workers[0].hold("7")
            await hold_.progress(4)
            assert (await newer.event()).progress == 4


async def test_a_session_opened_after_the_lease_ran_out_has_an_owner_that_lives(redis_server: Server) -> None:
    """A worker that was slow for a lease opened a session, which the first who resumed it elsewhere gave up."""
    async with crew(redis_server, lease_seconds=NEVER) as c, session(c.workers[0]):
        c.delete(f"w:{c.storages[0].worker_id}")
        async with session(c.workers[0]) as client, at(client, c.workers[1]) as there:
            _, ids = await held(client)
            resumed = await there.get(ids[3])
            assert resumed.status == 200
            assert (await resumed.event()).id == ids[3]


async def test_a_session_that_ends_in_silence_ends_its_tails_on_other_workers(redis_server: Server) -> None:
    """It was ended in the storage by its worker's next operation, which a quiet worker has none of."""
    async with (
        crew(redis_server, lease_seconds=2) as c,
        session(c.workers[0]) as client,
        at(client, c.workers[1]) as there,
    ):
        _, ids = await held(client)
        resumed = await there.get(ids[3])
        assert (await resumed.event()).id == ids[3]
        store = c.workers[0].store
        binding = store.find_binding(client.sid)
        assert binding is not None
        # As when the SDK reaps a session that no client of this worker uses.
        store._writer.router_is_over(binding)
        assert await resumed.rest() == []
        assert (await there.get(ids[3])).status == 404


async def test_a_tail_ends_when_another_client_finds_its_owner_dead(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who came first after the lease had run out was told; who waited already was passed over, for seconds."""
    # No pulse may do in time what is to be done at once.
    monkeypatch.setattr("mcp_resumable.redis.pulse._SWEEP_PULSES", 1_000_000)
    monkeypatch.setattr(Pulse, "_look_at_owners", lambda _self: nothing())
    monkeypatch.setattr(Pulse, "_renew_lease", lambda _self: nothing())
    async with (
        crew(redis_server, lease_seconds=NEVER) as c,
        session(c.workers[0]) as client,
        session(c.workers[0]) as other,
        at(client, c.workers[1]) as there,
        at(other, c.workers[1]) as other_there,
    ):
        _, ids = await held(client)
        cursor = (await other.ping(1)).id
        first = hold(c.storages[1], "_wait")
        tail = await there.get(ids[3])
        assert (await tail.event()).id == ids[3]
        await first.until_reached()
        # It reads once more when it is subscribed, and then waits.
        second = hold(c.storages[1], "_wait")
        first.release()
        await second.until_reached()
        second.release()
        c.delete(f"w:{c.storages[0].worker_id}")
        await other_there.get(cursor)
        assert await tail.rest() == []
        assert (await there.get(ids[3])).status == 404


async def test_an_owner_is_not_given_up_right_after_the_storage_failed(redis_server: Server) -> None:
    """After a Redis that was away for a lease, whoever reached it first gave up the others' sessions."""
    async with (
        crew(redis_server, lease_seconds=NEVER) as c,
        session(c.workers[0]) as client,
        at(client, c.workers[1]) as there,
    ):
        _, ids = await held(client)
        c.storages[1]._calls.failure = OSError("away")
        assert (await there.get(ids[3])).status == 503
        with anyio.fail_after(10):
            await until(lambda: c.storages[1]._calls.failure is None)
        c.delete(f"w:{c.storages[0].worker_id}")
        resumed = await there.get(ids[3])
        assert resumed.status == 200
        assert (await resumed.event()).id == ids[3]
        hold_ = await c.workers[0].hold("7")
        await hold_.progress(4)
        assert (await resumed.event()).progress == 4


async def test_a_generation_that_moves_while_a_stream_is_opened_gets_the_stream(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        trap = hold(c.storages[0], "_open_stream")
        responses: list[Response] = []

        async def call() -> None:
            responses.append(await client.call("count", 7, n=2))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await trap.until_reached()
            generation = await c.workers[1].store.advance_generation(client.sid)
            trap.release()
        frames = await responses[0].rest()
        assert [frame.id for frame in frames] == [f"{generation}:1.Nw:{seq}" for seq in range(4)]
        resumed = await there.get(f"{generation}:1.Nw:0")
        assert [frame.id for frame in await resumed.rest()] == [frame.id for frame in frames]


async def test_an_append_that_a_move_overtakes_is_stored_in_the_new_generation_once(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        response, ids = await held(client)
        hold_ = await c.workers[0].hold("7")
        trap = hold(c.storages[0], "_append")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_.progress, 4)
            await trap.until_reached()
            generation = await c.workers[1].store.advance_generation(client.sid)
            assert await response.rest() == []
            trap.release()
        await hold_.progress(5)
        await hold_.finish()
        resumed = await there.get(f"{generation}:1.Nw:0")
        frames = await resumed.rest()
        assert [frame.progress for frame in frames[1:-1]] == [4, 5]
        assert frames[-1].answer_text == "done"
        for place in (client, there):
            assert (await place.get(ids[3])).status == 409


async def test_a_session_that_ends_while_a_visitor_decides_is_not_found(redis_server: Server) -> None:
    for operation in ("_snapshot", "_read"):
        async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
            _, ids = await held(client)
            trap = hold(c.storages[1], operation)
            responses: list[Response] = []

            async def resume(there: RawClient = there, cursor: str = ids[3], into: list[Response] = responses) -> None:
                into.append(await there.get(cursor))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(resume)
                await trap.until_reached()
                assert (await client.delete()).status == 200
                trap.release()
            assert responses[0].status == 404


async def move(c: Crew, session_id: str) -> None:
    """Begin a new generation, at the worker that does not serve the session."""
    await c.workers[1].store.advance_generation(session_id)


async def end(c: Crew, session_id: str) -> None:
    """End the session, at the worker that does not serve it."""
    await c.workers[1].store.end_session(session_id)


@pytest.mark.parametrize("supersede", [move, end])
async def test_the_rest_of_a_complete_call_is_served_whole_as_of_its_snapshot(
    redis_server: Server, supersede: Callable[[Crew, str], Awaitable[None]]
) -> None:
    """It is in hand by then, and nothing tells a visitor: all of it, not a part, and nothing of what came after."""
    async with crew(redis_server, 3) as c, session(c.workers[0]) as client, at(client, c.workers[2]) as there:
        frames = await (await client.call("count", 7, n=3)).rest()
        ids = [frame.id or "" for frame in frames]
        trap = hold(c.storages[2], "_snapshot", answered=True)
        responses: list[Response] = []

        async def resume() -> None:
            responses.append(await there.get(ids[1]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resume)
            await trap.until_reached()
            await supersede(c, client.sid)
            trap.release()
        assert [frame.id for frame in await responses[0].rest()] == ids[1:]
        assert (await there.get(ids[1])).status == (409 if supersede is move else 404)


@pytest.mark.parametrize("supersede", [move, end])
async def test_the_rest_of_a_complete_call_is_refused_where_the_owner_hears_before_it_begins(
    redis_server: Server, supersede: Callable[[Crew, str], Awaitable[None]]
) -> None:
    """What was in hand was of a session that the worker knew to be over."""
    async with crew(redis_server) as c, session(c.workers[0]) as client:
        frames = await (await client.call("count", 7, n=3)).rest()
        binding = c.workers[0].store.find_binding(client.sid)
        assert binding is not None
        changes = binding.changes
        trap = hold(c.storages[0], "_snapshot", answered=True)
        responses: list[Response] = []

        async def resume() -> None:
            responses.append(await client.get(frames[1].id))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resume)
            await trap.until_reached()
            await supersede(c, client.sid)
            with anyio.fail_after(10):
                await until(lambda: binding.changes != changes)
            trap.release()
        assert responses[0].status == (409 if supersede is move else 404)


async def test_two_moves_at_once_leave_the_owner_in_the_newest_generation(redis_server: Server) -> None:
    """A running call had no stream there until its next event: its client was told that it had not gone on."""
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        await held(client)
        hold_ = await c.workers[0].hold("7")
        # The owner has moved its session, and not yet opened the running call's stream there.
        trap = hold(c.storages[0], "_open_stream")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(c.workers[0].store.advance_generation, client.sid)
            await trap.until_reached()
            generation = await c.workers[1].store.advance_generation(client.sid)
            trap.release()
        assert generation.counter == 3
        # The call goes on there, and its client finds it, before it sends anything.
        assert [stream.stream for stream in await streams_of(c.storages[1], client)] == ["0", "1.Nw"]
        await hold_.progress(4)
        await hold_.finish()
        # Its answer is on its way; nothing tells when it is stored.
        while len(streams := await streams_of(c.storages[1], client)) == 1 or not streams[1].is_terminal:  # noqa: ASYNC110
            await anyio.sleep(0.005)
        assert [stream.high_water_mark for stream in streams] == [0, 2]
        resumed = await there.get(f"{generation}:{streams[1].stream}:0")
        assert [frame.is_answer for frame in await resumed.rest()] == [False, False, True]


async def test_two_fail_overs_at_once_leave_a_hole_where_the_first_has_lost_events(redis_server: Server) -> None:
    """The second one made a call look whole that had lost what it had sent before the first."""
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        await held(client)
        hold_ = await c.workers[0].hold("7")

        def fail_over() -> None:
            with redis_server.client() as redis:
                redis.hset(f"{{{c.prefix}}}:s:{client.sid}", "r", "0" * 40)  # As if another server had issued it.

        fail_over()
        trap = hold(c.storages[0], "_open_stream")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_.progress, 4)
            await trap.until_reached()
            fail_over()
            trap.release()
        while len(streams := await streams_of(c.storages[1], client)) == 1 or not streams[1].high_water_mark:  # noqa: ASYNC110
            await anyio.sleep(0.005)
        description = await c.storages[1].describe(client.sid)
        assert description is not None
        assert description.generation.counter == 3
        for place in (client, there):
            response = await place.get(f"{description.generation}:{streams[1].stream}:0")
            assert (await response.json())["error"]["data"]["reason"] == "replay_gap"


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_an_owner_that_was_given_up_unawares_refuses_the_first_resume(
    redis_server: Server, rejection: str
) -> None:
    """It served what it had, or nothing, with a 200, until it knew."""
    async with crew(redis_server, lease_seconds=NEVER, rejection=rejection) as c, session(c.workers[0]) as client:
        _, ids = await held(client)
        # No notice: as if it had been paused until now.
        with redis_server.client() as redis:
            redis.hset(f"{{{c.prefix}}}:s:{client.sid}", "d", 1)
        for cursor in (ids[3], ids[0]):
            response = await client.get(cursor)
            if rejection == "status":
                assert response.status == 404
            else:
                assert [frame.reason for frame in await response.rest()] == ["session_not_found"]


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_an_owner_that_hears_of_its_end_while_it_reads_refuses_the_resume(
    redis_server: Server, rejection: str
) -> None:
    """The news closed the connection that was being decided about, and its client got a 200 with nothing."""
    async with crew(redis_server, lease_seconds=NEVER, rejection=rejection) as c, session(c.workers[0]) as client:
        _, ids = await held(client)
        binding = c.workers[0].store.find_binding(client.sid)
        assert binding is not None
        trap = hold(c.storages[0], "_read")
        responses: list[Response] = []

        async def resume() -> None:
            responses.append(await client.get(ids[1]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resume)
            await trap.until_reached()
            c.expire_lease(0)
            assert await c.storages[1].abandon_session(client.sid)
            await until(lambda: binding.status == "evicted")
            trap.release()
        if rejection == "status":
            assert responses[0].status == 404
        else:
            assert [frame.reason for frame in await responses[0].rest()] == ["session_not_found"]


async def make_deaf(c: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no notice reach the first worker any more, nor a pulse make good for it."""
    monkeypatch.setattr(c.storages[0]._pulse, "_renew_lease", nothing)
    listener = c.storages[0]._listener
    with anyio.fail_after(10), c.redis.client() as redis:
        await until(lambda: listener._pubsub is not None)
        assert listener._pubsub is not None
        await listener._pubsub.unsubscribe(listener._notices)
        await until(lambda: redis.pubsub_numsub(listener._notices) == [(listener._notices, 0)])


async def post(client: RawClient) -> None:
    frames = await (await client.call("count", 8, n=2)).rest()
    # It is answered, since nobody knew; nothing of it is kept.
    assert frames[-1].is_answer
    assert [frame.id for frame in frames if frame.id] == []


async def resume(client: RawClient) -> None:
    assert (await client.get(f"1-{'0' * 12}:1.Nw:1")).status == 404
    await post(client)


async def listen(client: RawClient) -> None:
    assert (await client.get()).status == 404


@pytest.mark.parametrize(
    ("request_", "version"), [(post, LATEST), (post, "2025-06-18"), (resume, LATEST), (listen, LATEST)]
)
async def test_an_end_of_which_the_owner_was_not_told_is_not_undone_by_its_next_request(
    redis_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    request_: Callable[[RawClient], Awaitable[None]],
    version: str,
) -> None:
    """The owner took it for an eviction, and began the session's next generation."""
    async with (
        crew(redis_server) as c,
        session(c.workers[0], version=version) as client,
        at(client, c.workers[1]) as there,
    ):
        cursor = (await client.ping(7)).id
        await make_deaf(c, monkeypatch)
        await c.workers[1].store.end_session(client.sid)
        await request_(client)
        assert await c.storages[1].describe(client.sid) is None
        assert (await client.call("count", 9, n=2)).status == 404
        for place in (client, there):
            assert (await place.get(cursor)).status == 404
        assert await c.storages[1].describe(client.sid) is None


async def test_an_end_of_which_the_owner_was_not_told_reaches_it_with_a_pulse(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of the end is not kept for ever: an owner that was quiet for longer would have undone it."""
    async with crew(redis_server) as c, session(c.workers[0]) as client:
        response, _ = await held(client)
        renew_lease = c.storages[0]._pulse._renew_lease
        await make_deaf(c, monkeypatch)
        await c.workers[1].store.end_session(client.sid)
        await renew_lease()
        assert await response.rest() == []
        assert (await client.call("count", 9, n=2)).status == 404


async def test_the_id_of_a_session_that_was_ended_elsewhere_can_be_used_again(redis_server: Server) -> None:
    """Also by the worker that served it, where no store of it does any more."""
    prefix = fresh_prefix()
    async with opened(redis_server.url, prefix=prefix) as owner, opened(redis_server.url, prefix=prefix) as other:
        for counter, claimant in enumerate((owner, owner, other), start=1):
            generation = await claimant.open_session("s")
            assert generation.counter == counter
            assert await claimant.own_session("s", generation, "")
            assert await other.end_session("s")


async def test_a_worker_keeps_its_lease_while_one_of_its_servers_still_runs(redis_server: Server) -> None:
    async with crew(redis_server, 1) as c, session(c.workers[0]):
        async with serve("starlette", c.workers[0].store) as second, session(second):
            pass
        keys = c.keys()
        assert f"{{{c.prefix}}}:w:{c.storages[0].worker_id}".encode() in keys
