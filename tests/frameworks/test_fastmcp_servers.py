"""PrefectHQ's `fastmcp`, 3.x and 4.x, as the server: `mcp.http_app(event_store=ResumableEventStore())` is all it takes.

Its session manager gives each session an adapter around the store, which prefixes the stream ids and holds a replay
back until it is over. Every guarantee must hold all the same, so these run against its app, on a real uvicorn.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from mcp_resumable import MemoryStorage, ResumableEventStore, Retention
from tests.loops import ASYNCIO

from ..e2e.raw_client import RawClient, Response, session
from ..e2e.servers import TOOLS, Arguments, Call, RunningServer, Stage, Tool
from ..in_loop import serving, until

pytest.importorskip(
    "fastmcp",
    reason="NOT RUN: PrefectHQ's fastmcp is not installed; `make frameworks` runs this on its newest 3.x and 4.x",
)

fastmcp: Any = importlib.import_module("fastmcp")

pytestmark = [
    pytest.mark.anyio,
    # mcp 2.x: of revision 2026-07-28.
    pytest.mark.filterwarnings("ignore:The logging capability is deprecated"),
]

TIMEOUT_SECONDS = 60


@pytest.fixture
def anyio_backend() -> object:
    """Only asyncio: uvicorn knows no other loop."""
    return ASYNCIO


class FrameworkCall(Call):
    """What a tool sees of its call, through the framework's own context."""

    @property
    def request_id(self) -> str:
        return str(self._context.request_id)

    @property
    def session_id(self) -> str:
        return str(self._context.session_id)

    async def progress(self, number: int, tag: str = "") -> None:
        await self._context.report_progress(number, message=tag)

    async def log(self, data: str) -> None:
        await self._context.info(data)


def app_of(stage: Stage, options: dict[str, Any]) -> Any:
    server = fastmcp.FastMCP("framework")
    for name, tool in TOOLS.items():
        server.tool(as_function(stage, name, tool))
    return server.http_app(event_store=stage.store, **options)


def as_function(stage: Stage, name: str, tool: Tool) -> Any:
    async def function(ctx: Any, n: int = 1, tag: str = "", delay: float = 0.0) -> str:
        return await tool(stage, FrameworkCall(ctx), Arguments(n, tag, delay))

    function.__name__ = name
    function.__annotations__.update({"ctx": fastmcp.Context, "n": int, "tag": str, "delay": float, "return": str})
    return function


@asynccontextmanager
async def serve_framework(store: ResumableEventStore, **options: Any) -> AsyncGenerator[RunningServer]:
    """Serve the tools of the end-to-end tests in this event loop."""
    stage = Stage(store)
    async with serving(app_of(stage, options)) as port:
        try:
            yield RunningServer(port, "/mcp", store, stage)
        finally:
            with anyio.CancelScope(shield=True):
                await stage.release()


@dataclass(frozen=True)
class Scene:
    """A server, and a client with a session."""

    server: RunningServer
    client: RawClient
    store: ResumableEventStore

    async def hold(self, n: int = 3) -> tuple[Response, list[str]]:
        """Call `hold` with request id 7; return its response and the event ids 0..n."""
        response = await self.client.call("hold", 7, n=n, tag="7")
        return response, [frame.id or "" for frame in await response.events(n + 1)]


@asynccontextmanager
async def scene(
    retention: Retention | None = None, options: dict[str, Any] | None = None, **store_options: Any
) -> AsyncGenerator[Scene]:
    store = ResumableEventStore(MemoryStorage(retention=retention), **store_options)
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serve_framework(store, **(options or {})) as server, session(server) as client:
            yield Scene(server, client, store)


async def refused(response: Response, status: int, reason: str) -> None:
    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    body = await response.json()
    assert body["error"]["data"]["reason"] == reason


async def test_a_resume_replays_and_follows_live_and_takes_over_from_the_post() -> None:
    """The framework's adapter holds a replay back until it is over: a live tail would never be seen."""
    async with scene() as s:
        post, ids = await s.hold()
        assert [event_id.rpartition(":")[2] for event_id in ids] == ["0", "1", "2", "3"]
        tail = await s.client.get(ids[1])
        assert [frame.id for frame in await tail.events(3)] == ids[1:]
        assert await post.rest() == []  # Taken over, closed cleanly.
        hold = await s.server.hold("7")
        await hold.progress(4, 5)
        assert [frame.progress for frame in await tail.events(2)] == [4, 5]
        newer = await s.client.get(ids[3])
        assert [frame.id for frame in (await newer.events(3))[:1]] == [ids[3]]
        assert await tail.rest() == []
        await hold.finish("held")
        assert [frame.answer_text for frame in await newer.rest()] == ["held"]
        assert s.store.stats().open_tails == 0


async def test_the_rows_of_the_decision_table_have_their_status() -> None:
    async with scene(Retention(max_events=3)) as s:
        post, ids = await s.hold(n=5)
        generation, stream, _ = ids[1].split(":")
        await refused(await s.client.get("garbage"), 400, "malformed_event_id")
        await refused(await s.client.get(f"1-aaaaaaaaaaaa:{stream}:1"), 400, "unrecognized_generation")
        await refused(await s.client.get(f"{generation}:{stream}:6"), 400, "future_event_id")
        await refused(await s.client.get(ids[1]), 409, "event_evicted")
        await s.store.restart_stream(7, s.client.sid)
        assert await post.rest() == []
        await refused(await s.client.get(ids[5]), 409, "stream_superseded")
        hold = await s.server.hold("7")
        await hold.finish("held")
        counted = await (await s.client.call("count", 8, n=2)).rest()
        await refused(await s.client.get(counted[-1].id), 409, "stream_completed")
        await s.store.advance_generation(s.client.sid)
        await refused(await s.client.get(counted[-2].id), 409, "generation_mismatch")
        await s.store.end_session(s.client.sid)
        await refused(await s.client.get(counted[-2].id), 404, "session_not_found")


async def test_another_session_with_the_same_request_id_gets_nothing() -> None:
    """Two sessions share a backend; B resumes with A's id (PrefectHQ/fastmcp #4402)."""
    async with scene() as s:
        _, ids = await s.hold()
        async with session(s.server) as other:
            theirs = await (await other.call("count", 7, n=1, tag="theirs")).rest()
            await refused(await other.get(ids[1]), 400, "unrecognized_generation")
            replay = await (await other.get(theirs[0].id)).rest()
            assert [frame.id for frame in replay] == [frame.id for frame in theirs]
        resumed = await s.client.get(ids[3])
        assert (await resumed.event()).id == ids[3]


async def test_a_dead_cursor_fails_the_waiting_call_in_the_stream() -> None:
    async with scene(rejection="stream") as s:
        frames = await (await s.client.call("count", 7, n=2)).rest()
        response = await s.client.get(frames[-1].id)
        assert response.status == 200
        (error,) = await response.rest()
        assert (error.message["id"], error.reason) == (7, "stream_completed")


async def test_a_polling_tool_closes_its_connection_also_after_a_resume() -> None:
    async with scene(options={"retry_interval": 10}) as s:
        first = await s.client.call("hold", 7, n=1, tag="7")
        primed, one = await first.events(2)
        assert primed.retry == "10"
        hold = await s.server.hold("7")
        await hold.do(lambda call: call.close_sse_stream())
        assert await first.rest() == []
        second = await s.client.get(one.id)
        assert (await second.event()).id == one.id
        await hold.progress(2)
        two = await second.event()
        assert two.progress == 2
        await hold.do(lambda call: call.close_sse_stream())
        assert await second.rest() == []
        await hold.progress(3)
        await hold.finish("polled")
        third = await (await s.client.get(two.id)).rest()
        assert third[1].progress == 3
        assert third[2].answer_text == "polled"


async def test_a_plain_get_begins_with_a_cursor_and_a_second_one_replaces_it() -> None:
    async with scene() as s:
        first = await s.client.get()
        primed = await first.event()
        assert str(primed.id).endswith(":0:0")
        second = await s.client.get()
        assert (second.status, (await second.event()).id) == (200, primed.id)
        assert await first.rest() == []
        await s.client.call("hold", 7, n=0, tag="7")
        hold = await s.server.hold("7")
        await hold.announce("one")
        one = await second.event()
        assert one.message["params"]["data"] == "one"
        second.reset()
        await until(lambda: s.store.stats().open_tails == 0)
        await hold.announce("two")
        third = await s.client.get(one.id)
        assert [frame.is_message for frame in await third.events(2)] == [False, True]


async def test_delete_ends_the_session_and_its_tails() -> None:
    async with scene() as s:
        _, ids = await s.hold()
        tail = await s.client.get(ids[1])
        await tail.events(3)
        assert (await s.client.delete()).status == 200
        assert await tail.rest() == []
        assert await s.store.describe(s.client.sid) is None
        assert (await s.client.get(ids[1])).status == 404


async def test_an_id_that_is_in_flight_is_refused_and_the_first_call_is_unaffected() -> None:
    async with scene() as s:
        post, _ = await s.hold()
        second = await s.client.call("count", 7)
        assert second.status == 200
        body = await second.json()
        assert (body["id"], body["error"]["data"]["reason"]) == (7, "duplicate_request_id")
        hold = await s.server.hold("7")
        await hold.finish("first")
        assert [frame.answer_text for frame in await post.rest()] == ["first"]


async def test_the_server_may_be_started_again_with_the_same_store() -> None:
    """The framework builds a new session manager at each start of its app."""
    store = ResumableEventStore()
    with anyio.fail_after(TIMEOUT_SECONDS):
        for _ in range(2):
            async with serve_framework(store) as server, session(server) as client:
                frames = await (await client.call("count", 7, n=2)).rest()
                replay = await (await client.get(frames[1].id)).rest()
                assert [frame.id for frame in replay] == [frame.id for frame in frames[1:]]


@pytest.mark.parametrize("option", ["stateless_http", "json_response"])
async def test_a_mode_that_cannot_resume_warns_and_stores_nothing(
    option: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResumableEventStore()
    with caplog.at_level(logging.WARNING, logger="mcp_resumable"), anyio.fail_after(TIMEOUT_SECONDS):
        async with serve_framework(store, **{option: True}) as server, RawClient(server) as client:
            await client.initialize()
            response = await client.call("count", 1, n=2)
            assert response.status == 200
    assert len([record for record in caplog.records if record.name == "mcp_resumable"]) == 1
    assert store.stats().appends == 0
