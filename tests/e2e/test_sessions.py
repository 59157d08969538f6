"""What ends a session ends its history, and what is one session's is no other's."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from mcp_resumable import ResumableEventStore, Retention
from tests.in_loop import until

from .raw_client import LATEST, RawClient, Response, session
from .servers import IS_V1, RunningServer, Way, serve
from .storages import ScriptedStorage

pytestmark = pytest.mark.anyio

TIMEOUT = 60


@asynccontextmanager
async def opened(
    way: Way = "fastmcp", store: ResumableEventStore | None = None, *, version: str = LATEST, **options: Any
) -> AsyncIterator[tuple[RunningServer, RawClient]]:
    with anyio.fail_after(TIMEOUT):
        async with (
            serve(way, store or ResumableEventStore(), **options) as server,
            session(server, version=version) as client,
        ):
            yield server, client


async def reason_of(response: Response) -> tuple[int, str]:
    return response.status, (await response.json())["error"]["data"]["reason"]


async def test_delete_ends_a_session_and_its_events(way: Way) -> None:
    """Rows that survive DELETE were resumed from later, and a tail was never woken."""
    async with opened(way) as (server, client):
        call = await client.call("hold", 7, n=2, tag="7")
        cursor = (await call.events(3))[1].id
        tail = await client.get(cursor)
        await tail.events(2)
        standalone = await client.get()
        await standalone.event()
        assert (await client.delete()).status == 200
        assert await tail.rest() == []
        assert await standalone.rest() == []
        assert await server.store.describe(client.sid) is None
        for response in (await client.get(cursor), await client.get(), await client.call("count", 8)):
            assert response.status == 404
        assert server.store.stats().open_tails == 0


async def test_a_deleted_session_is_session_not_found_while_its_tool_still_runs(way: Way) -> None:
    async with opened(way) as (_, client):
        call = await client.call("hold", 7, n=1, tag="7")
        cursor = (await call.events(2))[1].id
        await client.delete()
        response = await client.get(cursor)
        assert response.status == 404
        body = await response.json()
        # The SDK may have dropped the session by now and answers then by itself, as for one that never was.
        assert body["error"].get("data", {"reason": "session_not_found"})["reason"] == "session_not_found"


async def test_the_operator_ends_a_session(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("hold", 7, n=2, tag="7")
        cursor = (await call.events(3))[1].id
        call.reset()
        tail = await client.get(cursor)
        await tail.events(2)
        standalone = await client.get()
        await standalone.event()
        await server.store.end_session(client.sid)
        assert await tail.rest() == []
        assert await standalone.rest() == []
        assert await reason_of(await client.get(cursor)) == (404, "session_not_found")
        assert await reason_of(await client.get()) == (404, "session_not_found")
        assert await reason_of(await client.call("count", 8)) == (404, "session_not_found")
        # A late event does not revive it.
        hold = await server.hold("7")
        await hold.progress(3)
        await hold.finish()
        assert await server.store.describe(client.sid) is None
        # Another session of the server is untouched.
        async with session(server) as other:
            assert (await (await other.call("count", 7)).rest())[-1].is_answer


async def test_a_tool_ends_its_own_session(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("end", 7)
        await call.rest()
        assert await server.store.describe(client.sid) is None
        assert (await client.get()).status == 404


async def test_a_tool_describes_its_own_session(way: Way) -> None:
    async with opened(way) as (server, client):
        text = (await (await client.call("describe", 7)).rest())[-1].answer_text
        assert f"session {client.sid!r}: generation 1-" in text
        assert "(request '7'): seq 0..0, open, 0 events, 0 bytes" in text
        assert (await (await client.call("stats", 8)).rest())[-1].answer_text.startswith("1 sessions, 0 open tails; ")
        assert server.store.stats().appends == 3


async def test_the_sdk_ends_an_idle_session(way: Way) -> None:
    """The session is over in the store too, though no client ever comes back to be told."""
    with anyio.fail_after(TIMEOUT):
        store = ResumableEventStore()
        async with serve(way, store, session_idle_timeout=0.2) as server, session(server) as client:
            await (await client.call("count", 7, n=3)).rest()
            await until(lambda: store.stats().sessions == 0)
            assert await store.describe(client.sid) is None
            assert (await client.get()).status == 404


async def test_equal_calls_of_two_sessions_share_nothing(way: Way) -> None:
    async with opened(way) as (server, client), session(server) as other:
        mine = await (await client.call("count", 7, n=3, tag="mine")).rest()
        theirs = await (await other.call("count", 7, n=3, tag="theirs")).rest()
        assert not {frame.id for frame in mine} & {frame.id for frame in theirs}
        replay = await (await client.get(mine[0].id)).rest()
        assert [frame.message["params"]["message"] for frame in replay[1:-1]] == ["mine"] * 3
        # Whether the id exists in the other session makes no difference to what the client is told.
        issued = theirs[1].id
        assert issued is not None
        never = f"1-000000000000:{issued.split(':')[1]}:1"
        told = [await client.get(event_id) for event_id in (issued, never)]
        assert [response.status for response in told] == [400, 400]
        assert await told[0].body() == await told[1].body()
        # The other's rows are untouched.
        replay = await (await other.get(theirs[0].id)).rest()
        assert [frame.message["params"]["message"] for frame in replay[1:-1]] == ["theirs"] * 3


async def test_a_foreign_cursor_of_the_standalone_stream_shows_nothing(way: Way) -> None:
    async with opened(way) as (server, client), session(server) as other:
        await client.call("hold", 7, n=0, tag="7")
        speaker = await server.hold("7")
        mine = await client.get()
        await speaker.announce("secret")
        cursor = (await mine.events(2))[0].id
        assert await reason_of(await other.get(cursor)) == (400, "unrecognized_generation")


async def test_two_servers_of_one_store_do_not_serve_each_others_sessions(way: Way) -> None:
    store = ResumableEventStore()
    with anyio.fail_after(TIMEOUT):
        async with serve(way, store) as one, serve("starlette", store) as two:  # noqa: SIM117  # servers, then clients
            async with session(one) as client, session(two) as other, RawClient(two) as stray:
                mine = await (await client.call("count", 1, n=2, tag="one")).rest()
                theirs = await (await other.call("count", 1, n=2, tag="two")).rest()
                for own, frames, tag in ((client, mine, "one"), (other, theirs, "two")):
                    replay = await (await own.get(frames[0].id)).rest()
                    assert [frame.message["params"]["message"] for frame in replay[1:-1]] == [tag] * 2
                stray.session_id = client.session_id
                assert (await stray.get(mine[0].id)).status == 404
                assert (await (await client.call("count", 2)).rest())[-1].is_answer


async def test_two_servers_with_a_store_each_share_nothing(way: Way) -> None:
    stores = ResumableEventStore(), ResumableEventStore()
    with anyio.fail_after(TIMEOUT):
        async with serve(way, stores[0]) as one, serve(way, stores[1]) as two:  # noqa: SIM117  # servers, then clients
            async with session(one) as client, session(two) as other:
                mine = await (await client.call("count", 1, n=2)).rest()
                assert await reason_of(await other.get(mine[1].id)) == (400, "unrecognized_generation")
                assert await stores[1].describe(client.sid) is None
                assert [store.stats().sessions for store in stores] == [1, 1]


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18"])
async def test_an_older_client_gets_no_priming_event_and_resumes(way: Way, version: str) -> None:
    """Clients of these revisions cannot parse an event with empty data."""
    async with opened(way, version=version) as (server, client):
        call = await client.call("hold", 7, n=3, tag="7")
        frames = await call.events(3)
        assert [frame.progress for frame in frames] == [1, 2, 3]
        response = await client.get(frames[0].id)
        assert [frame.id for frame in await response.events(2)] == [frames[1].id, frames[2].id]
        standalone = await client.get()
        hold = await server.hold("7")
        await hold.announce("first")
        first = await standalone.event()
        assert first.message["params"]["data"] == "first"
        await hold.finish()
        assert [frame.answer_text for frame in await response.rest()] == ["done"]
        assert await reason_of(await client.get("garbage")) == (400, "malformed_event_id")


async def test_an_older_client_with_rejection_stream_gets_marker_and_messages_only(way: Way) -> None:
    async with opened(way, ResumableEventStore(rejection="stream"), version="2025-06-18") as (server, client):
        call = await client.call("hold", 7, n=1, tag="7")
        cursor = (await call.event()).id
        hold = await server.hold("7")
        await hold.do(lambda call: server.store.restart_stream(call.request_id))
        response = await client.get(cursor)
        marker = await response.event()
        assert marker.reason == "stream_superseded"
        assert marker.id is not None
        assert marker.id.endswith(":0")
        await hold.progress(2)
        assert (await response.event()).progress == 2


@pytest.mark.skipif(IS_V1, reason="revision 2026-07-28 is of the 2.x line")
async def test_revision_2026_07_28_passes_untouched(way: Way) -> None:
    async with opened(way) as (server, _):
        appends = server.store.stats().appends
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
            "progressToken": "t",
        }
        params = {"name": "count", "arguments": {"n": 2}, "_meta": meta}
        async with RawClient(server) as modern:
            response = await modern.request(
                "POST",
                body=json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode(),
                headers={
                    "content-type": "application/json",
                    "mcp-protocol-version": "2026-07-28",
                    "mcp-method": "tools/call",
                    "mcp-name": "count",
                    # Means nothing in this revision.
                    "last-event-id": "garbage",
                },
            )
            assert response.status == 200
            if response.is_stream:
                frames = await response.rest()
                assert all(frame.id is None for frame in frames)
                answer = frames[-1].message
            else:
                answer = await response.json()
            assert answer["result"]["content"][0]["text"] == "counted 2 "
        assert server.store.stats().appends == appends
        assert server.store.stats().sessions == 1


@pytest.mark.parametrize(("option", "mode"), [("stateless", "stateless mode"), ("json_response", "json_response=True")])
async def test_a_mode_that_cannot_resume_warns_once_and_stores_nothing(
    way: Way, option: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = ScriptedStorage()
    store = ResumableEventStore(storage)
    with caplog.at_level(logging.WARNING, logger="mcp_resumable"), anyio.fail_after(TIMEOUT):
        # 1.x FastMCP names it `stateless_http`; the manager's name is used throughout.
        async with serve(way, store, **{option: True}) as server, RawClient(server) as client:
            await client.initialize()
            for request_id in (1, 2, 3):
                response = await client.call("count", request_id, n=3)
                if response.is_stream:
                    frames = await response.rest()
                    assert all(frame.id is None for frame in frames)
                    assert frames[-1].answer_text == "counted 3 "
                else:
                    assert (await response.json())["result"]["content"][0]["text"] == "counted 3 "
    warnings = [record.getMessage() for record in caplog.records if record.name == "mcp_resumable"]
    assert len(warnings) == 1
    assert mode in warnings[0]
    assert storage.appends == 0
    assert store.stats().sessions == 0


async def test_a_session_that_retention_has_dropped_goes_on_in_its_next_generation(way: Way) -> None:
    storage = ScriptedStorage(retention=Retention(max_sessions=1))
    async with opened(way, ResumableEventStore(storage)) as (server, client):
        old = await (await client.call("count", 7, n=2)).rest()
        async with session(server):
            new = await (await client.call("count", 7, n=2)).rest()
        assert str(new[1].id).startswith("2-")
        assert await reason_of(await client.get(old[1].id)) == (409, "generation_mismatch")
        replay = await (await client.get(new[1].id)).rest()
        assert [frame.id for frame in replay] == [frame.id for frame in new[1:]]


async def test_a_dropped_session_whose_resume_was_refused_goes_on_at_its_next_call(way: Way) -> None:
    storage = ScriptedStorage(retention=Retention(max_sessions=1))
    async with opened(way, ResumableEventStore(storage)) as (server, client):
        old = await (await client.call("count", 7, n=2)).rest()
        async with session(server):
            assert await reason_of(await client.get(old[1].id)) == (404, "session_not_found")
        new = await (await client.call("count", 7, n=2)).rest()
        assert str(new[1].id).startswith("2-")
