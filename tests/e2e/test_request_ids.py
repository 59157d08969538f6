"""A request id names one unanswered call of a session, and each call has a stream of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from mcp_resumable import ResumableEventStore

from .raw_client import RawClient, Response, session
from .servers import RunningServer, Way, serve

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(way: Way = "fastmcp") -> AsyncIterator[tuple[RunningServer, RawClient]]:
    with anyio.fail_after(15):
        async with serve(way, ResumableEventStore()) as server, session(server) as client:
            yield server, client


async def refused_as_duplicate(response: Response, request_id: int | str) -> None:
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    body = await response.json()
    assert body["id"] == request_id
    assert type(body["id"]) is type(request_id)
    assert body["error"]["data"]["reason"] == "duplicate_request_id"


@pytest.mark.parametrize("second", [1, "1"])
@pytest.mark.parametrize("first", [1, "1"])
async def test_an_unanswered_request_id_is_refused_and_the_first_call_unaffected(
    first: int | str, second: int | str
) -> None:
    """The SDK would route both executions into one stream: it knows calls by `str` of their id."""
    async with opened() as (server, client):
        call = await client.call("hold", first, n=2, tag="first")
        assert [frame.progress for frame in (await call.events(3))[1:]] == [1, 2]
        await refused_as_duplicate(await client.call("count", second, n=5, tag="second"), second)
        hold = await server.hold("first")
        await hold.progress(3)
        await hold.finish("unaffected")
        rest = await call.rest()
        assert rest[0].progress == 3
        assert rest[1].message["id"] == first
        assert rest[1].answer_text == "unaffected"
        assert server.store.stats().refused_requests == 1


async def test_a_request_id_stays_taken_while_its_client_is_away(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("hold", 1, n=1, tag="first")
        cursor = (await call.events(2))[1].id
        assert cursor is not None
        call.reset()
        await refused_as_duplicate(await client.call("count", 1), 1)
        resuming = await client.get(cursor)
        hold = await server.hold("first")
        await hold.finish("still here")
        assert (await resuming.rest())[-1].answer_text == "still here"


async def test_an_answered_request_id_opens_a_new_stream_and_no_old_cursor_shows_it(way: Way) -> None:
    """A web client sends request id 1 for every call; resuming the first must never show a later one's rows."""
    async with opened(way) as (server, client):
        earlier = await (await client.call("count", 1, n=3, tag="earlier")).rest()
        later_call = await client.call("hold", 1, n=2, tag="later")
        later = await later_call.events(3)
        assert str(earlier[0].id).split(":")[1] != str(later[0].id).split(":")[1]
        for frame in earlier:
            response = await client.get(frame.id)
            assert response.status == 409
            assert (await response.json())["error"]["data"]["reason"] == "stream_superseded"
        hold = await server.hold("later")
        await hold.finish("later")
        assert (await later_call.rest())[-1].answer_text == "later"
        for frame in earlier:
            assert (await client.get(frame.id)).status == 409
        replay = await (await client.get(later[0].id)).rest()
        assert [frame.progress for frame in replay[1:-1]] == [1, 2]


async def test_the_same_id_in_two_sessions_is_two_calls(way: Way) -> None:
    async with opened(way) as (server, client), session(server) as other:
        mine = await client.call("hold", 1, n=1, tag="mine")
        theirs = await other.call("hold", 1, n=1, tag="theirs")
        await (await server.hold("mine")).finish("mine")
        await (await server.hold("theirs")).finish("theirs")
        assert (await mine.rest())[-1].answer_text == "mine"
        assert (await theirs.rest())[-1].answer_text == "theirs"


async def test_odd_request_ids_resume(way: Way) -> None:
    async with opened(way) as (server, client):
        odd: list[int | str] = ["a:b", "naïve ☃", "x" * 4_000, -3, 2**53, "_GET_stream "]
        for number, request_id in enumerate(odd):
            call = await client.call("hold", request_id, n=1, tag=str(number))
            cursor = (await call.events(2))[0].id
            assert cursor is not None
            resuming = await client.get(cursor)
            await (await server.hold(str(number))).finish()
            frames = await resuming.rest()
            assert frames[1].progress == 1
            assert frames[2].message["id"] == request_id
