"""A session of one worker, resumed on another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from mcp_resumable import ResumableEventStore
from mcp_resumable.redis.pulse import Pulse
from tests.e2e.raw_client import RawClient, Response, session
from tests.e2e.servers import serve
from tests.in_loop import until
from tests.redis.server import Server
from tests.redis.workers import at, crew, new_call

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The logging capability is deprecated")]


async def held(client: RawClient, request_id: int = 7) -> tuple[Response, list[str]]:
    """Call `hold` at the first worker; return its response and the event ids 0..3."""
    response = await client.call("hold", request_id, n=3, tag=str(request_id))
    frames = await response.events(4)
    return response, [frame.id or "" for frame in frames]


async def reason_of(response: Response, status: int) -> str:
    assert response.status == status
    body = await response.json()
    reason: str = body["error"]["data"]["reason"]
    return reason


async def test_a_call_is_resumed_on_another_worker_to_its_answer(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        response, ids = await held(client)
        response.reset()
        hold = await c.workers[0].hold("7")
        resumed = await there.get(ids[1])
        assert resumed.status == 200
        frames = await resumed.events(3)
        assert (frames[0].id, frames[0].data) == (ids[1], "")
        assert [frame.progress for frame in frames[1:]] == [2, 3]
        await hold.progress(4, 5)
        assert [frame.progress for frame in await resumed.events(2)] == [4, 5]
        await hold.finish("there")
        rest = await resumed.rest()
        assert [frame.answer_text for frame in rest] == ["there"]


async def test_the_first_connection_is_closed_when_another_worker_takes_its_stream(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        response, ids = await held(client)
        resumed = await there.get(ids[3])
        assert (await resumed.events(1))[0].id == ids[3]
        assert await response.rest() == []
        hold = await c.workers[0].hold("7")
        await hold.progress(4)
        assert (await resumed.event()).progress == 4


async def test_the_first_connection_is_closed_when_another_store_over_the_same_storage_takes_its_stream(
    redis_server: Server,
) -> None:
    """No notice tells: the server sends none to the worker that asked."""
    async with crew(redis_server, 1) as c:
        store = ResumableEventStore(c.storages[0])
        async with serve("starlette", store) as other, session(c.workers[0]) as client, at(client, other) as there:
            response, ids = await held(client)
            resumed = await there.get(ids[3])
            assert (await resumed.events(1))[0].id == ids[3]
            assert await response.rest() == []
            assert (await client.get(ids[3])).status == 200
            assert await resumed.rest() == []


async def test_a_resume_of_an_open_call_asks_the_server_twice(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time for two things: to be the stream's newest consumer, and what follows."""
    async with crew(redis_server, 1) as c, session(c.workers[0]) as client:
        _, ids = await held(client)
        calls, asked = c.storages[0]._calls, list[tuple[str, int]]()

        async def ask(script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
            asked.append((script, len(arguments)))
            return await ask_for(script, arguments)

        ask_for = calls.ask
        monkeypatch.setattr(calls, "ask", ask)
        resumed = await client.get(ids[1])
        assert [frame.id for frame in await resumed.events(3)] == ids[1:]
        assert asked[:2] == [("snapshot", 8), ("read", 2 * 5)]


async def test_a_resume_of_a_complete_call_waits_for_one_answer_of_the_server(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crew(redis_server, 1) as c, session(c.workers[0]) as client:
        ids = await new_call(client, 7)
        calls, held_back = c.storages[0]._calls, anyio.Event()

        async def ask(script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
            if script != "snapshot":
                await held_back.wait()
            return await ask_for(script, arguments)

        ask_for = calls.ask
        monkeypatch.setattr(calls, "ask", ask)
        try:
            with anyio.fail_after(5):
                assert [frame.id for frame in await (await client.get(ids[0])).rest()] == ids
        finally:
            held_back.set()


async def test_a_complete_call_with_a_long_rest_is_resumed_to_its_answer(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        ids = [frame.id for frame in await (await client.call("count", 7, n=300)).rest()]
        for place in (client, there):
            for seq in (0, 172, 173, 174, 300):
                assert [frame.id for frame in await (await place.get(ids[seq])).rest()] == ids[seq:]


async def test_the_newest_consumer_wins_from_worker_to_worker(redis_server: Server) -> None:
    async with crew(redis_server, 3) as c, session(c.workers[0]) as client:
        _, ids = await held(client)
        hold = await c.workers[0].hold("7")
        async with AsyncExitStack() as stack:
            consumer = None
            for turn in range(9):
                there = await stack.enter_async_context(at(client, c.workers[turn % 3]))
                newest = await there.get(ids[3])
                assert (await newest.event()).id == ids[3]
                if consumer is not None:
                    assert await consumer.rest() == []
                await hold.progress(4 + turn)
                assert [frame.progress for frame in await newest.events(turn + 1)] == list(range(4, 5 + turn))
                consumer = newest
            await hold.finish()
            assert consumer is not None
            assert (await consumer.rest())[-1].is_answer


async def test_the_rows_of_the_decision_hold_on_another_worker(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        _, ids = await held(client)
        stream = ids[0].rsplit(":", 1)[0]
        assert await reason_of(await there.get("nonsense"), 400) == "malformed_event_id"
        assert await reason_of(await there.get("1-aaaaaaaaaaaa:1.Nw:0"), 400) == "unrecognized_generation"
        assert await reason_of(await there.get(f"{stream}:9"), 400) == "future_event_id"
        hold = await c.workers[0].hold("7")
        await hold.finish()
        assert (await (await there.get(ids[3])).rest())[-1].is_answer
        assert await reason_of(await there.get(f"{stream}:4"), 409) == "stream_completed"
        await c.workers[0].store.advance_generation(client.sid)
        assert await reason_of(await there.get(ids[0]), 409) == "generation_mismatch"
        assert (await client.delete()).status == 200
        assert await reason_of(await there.get(ids[0]), 404) == "session_not_found"
        there.session_id = "0" * 32
        assert await reason_of(await there.get(ids[0]), 404) == "session_not_found"


async def test_what_belongs_to_the_owner_is_404_on_another_worker(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        assert (await there.post({"id": 1, "method": "ping"})).status == 404
        assert (await there.get()).status == 404
        assert (await there.delete()).status == 404
        assert (await client.ping(2)).is_answer


async def test_an_oversized_session_id_is_neither_looked_up_nor_logged(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        _, ids = await held(client)
        there.session_id = "x" * 257
        assert (await there.get(ids[0])).status == 404
        assert c.workers[1].store.stats().decisions == {}


async def test_the_sdks_checks_come_first_on_another_worker(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        _, ids = await held(client)
        there.headers = {"accept": "application/json"}
        assert (await there.get(ids[0])).status == 406


async def test_the_standalone_stream_is_resumed_on_another_worker_and_repeats_nothing_at_its_owner(
    redis_server: Server,
) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        await held(client)
        hold = await c.workers[0].hold("7")
        opened = await client.get()
        place = (await opened.event()).id
        await hold.announce("a")
        assert "a" in ((await opened.event()).data or "")
        resumed = await there.get(place)
        assert await opened.rest() == []
        await hold.announce("b")
        assert [frame.message["params"]["data"] for frame in (await resumed.events(3))[1:]] == ["a", "b"]
        # What was written is known to all before the next is waited for.
        with anyio.fail_after(5):
            carried = 0
            while carried < 2:  # there is no event
                await anyio.sleep(0.005)
                found = await c.storages[0].find_owner(client.sid)
                carried = found.carried_seq if found is not None else 0
        again = await client.get()
        assert await resumed.rest() == []
        first = await again.event()
        assert first.data == ""
        await hold.announce("c")
        assert (await again.event()).message["params"]["data"] == "c"


async def test_a_generation_moved_on_another_worker_goes_on_at_the_owner(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        response, ids = await held(client)
        hold = await c.workers[0].hold("7")
        generation = await c.workers[1].store.advance_generation(client.sid)
        assert await response.rest() == []
        assert await reason_of(await client.get(ids[3]), 409) == "generation_mismatch"
        await hold.progress(4)
        current = f"{generation}:1.Nw:0"
        for place in (client, there):
            resumed = await place.get(current)
            assert [frame.progress for frame in (await resumed.events(2))[1:]] == [4]
        await hold.finish()
        assert (await resumed.rest())[-1].is_answer


async def test_a_session_claimed_by_another_worker_is_lost_to_its_owner(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client:
        response, ids = await held(client)
        hold = await c.workers[0].hold("7")
        await c.storages[1].open_session(client.sid)
        await hold.progress(4)
        assert [frame.progress for frame in await response.rest()] in ([], [4])
        assert await reason_of(await client.get(ids[3]), 409) == "generation_mismatch"
        description = await c.storages[1].describe(client.sid)
        assert description is not None
        assert description.retained_events == 0


async def test_a_session_ended_on_another_worker_ends_at_its_owner(redis_server: Server) -> None:
    async with crew(redis_server) as c, session(c.workers[0]) as client, at(client, c.workers[1]) as there:
        response, ids = await held(client)
        resumed = await there.get(ids[3])
        await resumed.event()
        await c.workers[1].store.end_session(client.sid)
        assert await resumed.rest() == []
        assert await response.rest() == []
        with anyio.fail_after(5):
            binding = c.workers[0].store.find_binding(client.sid)
            assert binding is not None
            await until(lambda: binding.status == "ended")
        assert await reason_of(await client.get(ids[3]), 404) == "session_not_found"


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_a_dead_owner_is_told_to_who_resumes(redis_server: Server, rejection: str) -> None:
    async with (
        crew(redis_server, rejection=rejection) as c,
        session(c.workers[0]) as client,
        at(client, c.workers[1]) as there,
    ):
        complete = await client.call("count", 8, n=2)
        answered = [frame.id or "" for frame in await complete.rest()]
        _, ids = await held(client)
        standalone = await client.get()
        place = (await standalone.event()).id
        c.expire_lease(0)
        # What is complete can still be had, before the session is given up and after.
        assert (await (await there.get(answered[0])).rest())[-1].is_answer
        for _ in range(2):
            refusal = await there.get(ids[3])
            if rejection == "status":
                assert await reason_of(refusal, 404) == "session_not_found"
            else:
                (answer,) = await refusal.rest()
                assert (answer.reason, answer.message["id"]) == ("session_not_found", 7)
        assert (await (await there.get(answered[0])).rest())[-1].is_answer
        assert await reason_of(await there.get(place), 404) == "session_not_found"
        # It lives after all: what was given up stays given up, and it can go on with a new request.
        await Pulse._renew_lease(c.storages[0]._pulse)
        hold = await c.workers[0].hold("7")
        await hold.progress(4)
        refusal = await there.get(ids[3])
        assert refusal.status == (404 if rejection == "status" else 200)
        fresh = await client.call("count", 9, n=1)
        assert (await fresh.rest())[-1].is_answer


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_a_tail_ends_when_the_owner_dies(redis_server: Server, rejection: str) -> None:
    async with (
        crew(redis_server, rejection=rejection, lease_seconds=2) as c,
        session(c.workers[0]) as client,
        at(client, c.workers[1]) as there,
    ):
        _, ids = await held(client)
        resumed = await there.get(ids[3])
        await resumed.event()
        await c.storages[0].aclose()
        rest = [frame for frame in await resumed.rest() if frame.is_message]
        if rejection == "stream":
            assert [(frame.reason, frame.message["id"]) for frame in rest] == [("session_not_found", 7)]
        else:
            assert rest == []
