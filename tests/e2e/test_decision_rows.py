"""Each row of the decision table, as a client meets it: the status and `reason`, before any byte of a stream.

The number in a test's name is the row's. Then the same rows with `rejection="stream"`, and the way of passing the
store that owns its process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import pytest

from mcp_resumable import ResumableEventStore, Retention

from .raw_client import Frame, RawClient, Response, session
from .servers import MANAGED_WAYS, RunningServer, Way, serve
from .storages import STORAGES, ScriptedStorage

pytestmark = pytest.mark.anyio

TIMEOUT = 60


@dataclass(frozen=True)
class Scene:
    """A server, and a client with a session."""

    server: RunningServer
    client: RawClient
    storage: ScriptedStorage

    @property
    def store(self) -> ResumableEventStore:
        return self.server.store

    async def hold(self, request_id: int | str = 7, n: int = 3) -> tuple[Response, list[str]]:
        """Call `hold` with the request id as its tag; return its response and the event ids 0..n."""
        response = await self.client.call("hold", request_id, n=n, tag=str(request_id))
        frames = await response.events(n + 1)
        return response, [frame.id or "" for frame in frames]

    async def standalone(self, *texts: str) -> tuple[Response, list[str]]:
        """Open the standalone stream and let a call of `hold` send in it; return its response and event ids."""
        response = await self.client.get()
        await self.client.call("hold", "speaker", n=0, tag="speaker")
        speaker = await self.server.hold("speaker")
        await speaker.announce(*texts)
        frames = await response.events(len(texts) + 1)
        return response, [frame.id or "" for frame in frames]


class MakeScene(Protocol):
    """Opens a scene."""

    def __call__(self, retention: Retention | None = None, **options: Any) -> AbstractAsyncContextManager[Scene]: ...


# Each way of passing the store, and each storage.
PLACES: list[tuple[Way, str]] = [
    *((way, "memory") for way in MANAGED_WAYS),
    *(("starlette", name) for name in STORAGES if name != "memory"),
]


@pytest.fixture(params=PLACES, ids="-".join)
def scene(request: pytest.FixtureRequest) -> MakeScene:
    way, name = request.param

    @asynccontextmanager
    async def make(retention: Retention | None = None, **options: Any) -> AsyncIterator[Scene]:
        storage = ScriptedStorage(STORAGES[name](request, retention or Retention()))
        store = ResumableEventStore(storage, **options)
        try:
            with anyio.fail_after(TIMEOUT):
                async with serve(way, store) as server, session(server) as client:
                    yield Scene(server, client, storage)
        finally:
            await storage.aclose()

    return make


async def refused(response: Response, status: int, reason: str, outcome: str) -> dict[str, Any]:
    """Check that a response is a refusal and nothing else; return its data."""
    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    body = await response.json()
    assert body["jsonrpc"] == "2.0"
    assert body["id"] is None
    data: dict[str, Any] = body["error"]["data"]
    assert (data["reason"], data["outcome"]) == (reason, outcome)
    return data


# What follows a cursor: a priming event with that cursor, then the messages.
def resumed(frames: list[Frame], cursor: str) -> list[int]:
    assert (frames[0].id, frames[0].data) == (cursor, "")
    return [frame.progress for frame in frames[1:]]


async def test_row_1_unknown_session_is_404(scene: MakeScene) -> None:
    async with scene() as s:
        _, ids = await s.hold()
        s.client.session_id = "0" * 32
        assert (await s.client.get(ids[1])).status == 404


async def test_row_1_ended_session_is_session_not_found(scene: MakeScene) -> None:
    async with scene() as s:
        _, ids = await s.hold()
        await s.store.end_session(s.client.sid)
        await refused(await s.client.get(ids[1]), 404, "session_not_found", "gone")


async def test_row_1_evicted_session_is_session_not_found(scene: MakeScene) -> None:
    async with scene(Retention(max_sessions=1)) as s:
        _, ids = await s.hold()
        async with session(s.server):
            await refused(await s.client.get(ids[1]), 404, "session_not_found", "gone")


@pytest.mark.parametrize(
    "event_id",
    [
        b"garbage",
        b"-1",
        b"1:2:3",
        b"x" * 5000,
        "٣-aaaaaaaaaaaa:0:0".encode(),
        b"\xff\xfe",
        b"1-aaaaaaaaaaaa:0:01",
        b"1-aaaaaaaaaaaa:0:0 ,1-aaaaaaaaaaaa:0:0",
        b"1-aaaaaaaaaaaa:1.Nx:0",
        b"../../etc/passwd",
    ],
    ids=lambda value: repr(value[:20]),
)
async def test_row_2_malformed(scene: MakeScene, event_id: bytes) -> None:
    async with scene() as s:
        response = await s.client.get(event_id)
        await refused(response, 400, "malformed_event_id", "invalid")
        assert event_id not in repr(response.headers).encode("latin-1")


async def test_row_3_earlier_generation_is_generation_mismatch(scene: MakeScene) -> None:
    async with scene() as s:
        _, ids = await s.hold()
        generation = await s.store.advance_generation(s.client.sid)
        data = await refused(await s.client.get(ids[1]), 409, "generation_mismatch", "reset")
        assert data["generation"] == str(generation)
        assert generation.counter == 2


async def test_row_4_foreign_generation_is_unrecognized(scene: MakeScene) -> None:
    async with scene() as s:
        _, ids = await s.hold()
        async with session(s.server) as other:
            call = await other.call("count", 7, n=1)
            theirs = (await call.events(2))[1].id
            assert theirs is not None
            foreign = await refused(await s.client.get(theirs), 400, "unrecognized_generation", "invalid")
        generation = ids[1].split(":")[0]
        never = await refused(
            await s.client.get(ids[1].replace(generation, "1-aaaaaaaaaaaa")), 400, "unrecognized_generation", "invalid"
        )
        # An id of another session cannot be told from one that was never issued.
        assert foreign == never


async def test_row_5_never_opened_stream_or_seq_is_future(scene: MakeScene) -> None:
    async with scene() as s:
        _, ids = await s.hold()
        generation, stream, _ = ids[3].split(":")
        data = await refused(await s.client.get(f"{generation}:{stream}:4"), 400, "future_event_id", "invalid")
        assert (data["seq"], data["replay_floor"], data["high_water_mark"]) == (4, 0, 3)
        await refused(await s.client.get(f"{generation}:99.Nw:0"), 400, "future_event_id", "invalid")
        await refused(await s.client.get(f"{generation}:0:1"), 400, "future_event_id", "invalid")


async def test_row_6_restarted_request_is_superseded(scene: MakeScene) -> None:
    async with scene() as s:
        _, ids = await s.hold()
        await s.store.restart_stream(7, s.client.sid)
        for cursor in ids:
            await refused(await s.client.get(cursor), 409, "stream_superseded", "reset")


async def test_row_7_received_answer_is_stream_completed(scene: MakeScene) -> None:
    async with scene() as s:
        frames = await (await s.client.call("count", 7, n=2)).rest()
        answer, before = frames[-1].id, frames[-2].id
        assert answer is not None
        assert before is not None
        await refused(await s.client.get(answer), 409, "stream_completed", "reset")
        # A retained answer that was not received is what the client waits for.
        replayed = await (await s.client.get(before)).rest()
        assert [frame.id for frame in replayed] == [before, answer]
        assert replayed[1].data == frames[-1].data


async def test_row_7_strict_rule_resets_every_completed_stream(scene: MakeScene) -> None:
    async with scene(replay_completed=False) as s:
        frames = await (await s.client.call("count", 7, n=2)).rest()
        assert frames[-2].id is not None
        await refused(await s.client.get(frames[-2].id), 409, "stream_completed", "reset")


async def test_row_8_below_the_floor_is_event_evicted(scene: MakeScene) -> None:
    async with scene(Retention(max_events=2)) as s:
        _, ids = await s.hold(n=4)
        data = await refused(await s.client.get(ids[1]), 409, "event_evicted", "reset")
        assert (data["seq"], data["replay_floor"], data["high_water_mark"]) == (1, 2, 4)
        response = await s.client.get(ids[2])
        assert resumed(await response.events(3), ids[2]) == [3, 4]


async def test_row_8_dropped_stream_is_event_evicted(scene: MakeScene) -> None:
    async with scene(Retention(completed_seconds=1e-6)) as s:
        frames = await (await s.client.call("count", 7, n=2)).rest()
        assert frames[1].id is not None
        await refused(await s.client.get(frames[1].id), 409, "event_evicted", "reset")


async def test_row_9_hole_is_replay_gap(scene: MakeScene) -> None:
    async with scene() as s:
        s.storage.fail_append(2)
        response, ids = await s.hold(n=3)
        assert ids[2] == ""
        for cursor in (ids[0], ids[1]):
            await refused(await s.client.get(cursor), 409, "replay_gap", "reset")
        resuming = await s.client.get(ids[3])
        assert resumed(await resuming.events(1), ids[3]) == []
        assert await response.rest() == []  # Taken over, closed cleanly.


async def test_row_10_everything_else_resumes(scene: MakeScene) -> None:
    async with scene() as s:
        first, ids = await s.hold()
        for place in (0, 1, 3):
            response = await s.client.get(ids[place])
            assert response.status == 200
            assert response.is_stream
            assert resumed(await response.events(4 - place), ids[place]) == list(range(place + 1, 4))
        hold = await s.server.hold("7")
        await hold.progress(4)
        await hold.finish("held")
        live = await response.rest()
        assert live[0].progress == 4
        assert live[1].answer_text == "held"
        assert await first.rest() == []


# rejection="stream": refuse to splice, not to serve.


async def failed_in_stream(response: Response, reason: str, request_id: int | str = 7) -> None:
    """Check that a response is a stream of one error for the request that waits, and nothing else."""
    assert response.status == 200
    assert response.is_stream
    frames = await response.rest()
    assert len(frames) == 1
    assert frames[0].message["id"] == request_id
    assert "error" in frames[0].message
    assert frames[0].reason == reason


def is_marker(frame: Frame, reason: str) -> bool:
    return frame.message["method"] == "notifications/message" and frame.reason == reason


async def test_stream_row_1_keeps_its_status(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        _, ids = await s.hold()
        await s.store.end_session(s.client.sid)
        await refused(await s.client.get(ids[1]), 404, "session_not_found", "gone")


async def test_stream_row_2_keeps_its_status(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        await refused(await s.client.get("garbage"), 400, "malformed_event_id", "invalid")


async def test_stream_storage_that_cannot_answer_keeps_its_status(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        _, ids = await s.hold()
        s.storage.down = frozenset({"snapshot"})
        response = await s.client.get(ids[1])
        assert response.headers["retry-after"] == "1"
        await refused(response, 503, "storage_unavailable", "retry")


async def test_stream_row_3_serves_the_current_execution_after_advance(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        first, ids = await s.hold()
        generation = await s.store.advance_generation(s.client.sid)
        assert await first.rest() == []  # One connection never carries two generations.
        hold = await s.server.hold("7")
        await hold.progress(11, 12)
        response = await s.client.get(ids[2])
        assert response.status == 200
        frames = await response.events(4)
        assert frames[0].id is not None
        assert frames[0].id.startswith(f"{generation}:")
        assert is_marker(frames[1], "generation_mismatch")
        assert [frame.progress for frame in frames[2:]] == [11, 12]
        await hold.progress(13)
        await hold.finish("held")
        live = await response.rest()
        assert live[0].progress == 13
        assert live[1].answer_text == "held"
        # What it has now is of the current generation, and resumes.
        assert frames[2].id is not None
        replay = await (await s.client.get(frames[2].id)).rest()
        assert [frame.id for frame in replay[1:]] == [frames[3].id, live[0].id, live[1].id]


async def test_stream_row_3_of_a_call_that_is_over_fails_it(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        frames = await (await s.client.call("count", 7, n=2)).rest()
        await s.store.advance_generation(s.client.sid)
        assert frames[1].id is not None
        await failed_in_stream(await s.client.get(frames[1].id), "generation_mismatch")


async def test_stream_row_4_fails_the_call(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        _, ids = await s.hold()
        _, stream, seq = ids[1].split(":")
        await failed_in_stream(await s.client.get(f"1-aaaaaaaaaaaa:{stream}:{seq}"), "unrecognized_generation")
        # Nobody waits for an answer in the standalone stream.
        await refused(await s.client.get("1-aaaaaaaaaaaa:0:0"), 400, "unrecognized_generation", "invalid")


async def test_stream_row_5_fails_the_call(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        _, ids = await s.hold()
        generation, stream, _ = ids[1].split(":")
        await failed_in_stream(await s.client.get(f"{generation}:{stream}:99"), "future_event_id")
        await refused(await s.client.get(f"{generation}:0:99"), 400, "future_event_id", "invalid")


async def test_stream_row_6_serves_the_current_execution_after_restart(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        first, ids = await s.hold()
        hold = await s.server.hold("7")
        await hold.do(lambda call: s.store.restart_stream(call.request_id))
        assert await first.rest() == []  # One connection never carries two executions.
        await hold.progress(21)
        response = await s.client.get(ids[3])
        frames = await response.events(3)
        assert frames[0].id is not None
        assert frames[0].id.endswith(":0")
        assert is_marker(frames[1], "stream_superseded")
        assert frames[2].progress == 21
        await hold.finish("again")
        assert [frame.answer_text for frame in await response.rest()] == ["again"]


async def test_stream_row_6_of_an_earlier_call_with_the_same_id_fails_it(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        earlier = await (await s.client.call("count", 7, n=2, tag="earlier")).rest()
        later, _ = await s.hold(n=1)
        assert earlier[1].id is not None
        await failed_in_stream(await s.client.get(earlier[1].id), "stream_superseded")
        hold = await s.server.hold("7")
        await hold.finish("later")
        assert (await later.rest())[-1].answer_text == "later"


async def test_stream_row_7_fails_the_call(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        frames = await (await s.client.call("count", 7, n=2)).rest()
        assert frames[-1].id is not None
        await failed_in_stream(await s.client.get(frames[-1].id), "stream_completed")


async def test_stream_row_8_fails_the_call(scene: MakeScene) -> None:
    async with scene(Retention(max_events=2), rejection="stream") as s:
        _, ids = await s.hold(n=4)
        await failed_in_stream(await s.client.get(ids[1]), "event_evicted")


async def test_stream_row_9_fails_the_call(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        s.storage.fail_append(2)
        _, ids = await s.hold("seven")
        await failed_in_stream(await s.client.get(ids[1]), "replay_gap", "seven")


async def test_stream_row_10_resumes_without_a_marker(scene: MakeScene) -> None:
    async with scene(rejection="stream") as s:
        _, ids = await s.hold()
        response = await s.client.get(ids[1])
        assert resumed(await response.events(3), ids[1]) == [2, 3]


@pytest.mark.parametrize("reason", ["generation_mismatch", "event_evicted", "replay_gap"])
async def test_stream_reset_of_the_standalone_stream_goes_on_live(scene: MakeScene, reason: str) -> None:
    async with scene(Retention(max_events=2), rejection="stream") as s:
        if reason == "replay_gap":
            s.storage.fail_append(2)
            _, ids = await s.standalone("one")
            speaker = await s.server.hold("speaker")
            await speaker.announce("lost")
            await s.storage.until_failed(1)
        else:
            first, ids = await s.standalone("one")
            speaker = await s.server.hold("speaker")
            if reason == "generation_mismatch":
                await s.store.advance_generation(s.client.sid)
            else:
                for text in ("two", "three", "four"):
                    await speaker.announce(text)
                    await first.event()  # What no connection has carried would be served first.
        response = await s.client.get(ids[1])
        assert response.status == 200
        marker = (await response.events(2))[1]
        assert is_marker(marker, reason)
        await speaker.announce("live")
        assert (await response.event()).message["params"]["data"] == "live"


async def test_run_owns_its_process_and_decides_alike() -> None:
    """`mcp.run("streamable-http")` builds its app, its session manager and its server by itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.e2e.servers", str(port)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        with anyio.fail_after(30):
            assert process.stdout is not None
            printed = b""
            while b"Uvicorn running" not in printed:
                printed += await process.stdout.receive()
            async with session(Place(port, "/mcp")) as client:
                frames = await (await client.call("count", 7, n=3)).rest()
                ids = [frame.id or "" for frame in frames]
                await refused(await client.get("garbage"), 400, "malformed_event_id", "invalid")
                await refused(await client.get(ids[4]), 409, "stream_completed", "reset")
                never = ids[1].replace(ids[1].split(":")[0], "1-aaaaaaaaaaaa")
                await refused(await client.get(never), 400, "unrecognized_generation", "invalid")
                await refused(await client.get(ids[3][:-1] + "9"), 400, "future_event_id", "invalid")
                resuming = await client.get(ids[1])
                assert [frame.id for frame in await resuming.rest()] == ids[1:]
                advanced = await (await client.call("advance", 8)).event()
                assert advanced.id is not None
                await refused(await client.get(advanced.id), 409, "generation_mismatch", "reset")
    finally:
        process.terminate()
        with anyio.CancelScope(shield=True), anyio.move_on_after(10) as grace:
            await process.wait()
        if grace.cancelled_caught:
            process.kill()
        await process.aclose()


@dataclass(frozen=True)
class Place:
    """Where a server of another process listens."""

    port: int
    path: str
