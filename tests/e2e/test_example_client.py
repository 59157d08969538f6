"""`examples/client.py` does what a refusal says, against real servers, on the installed line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from mcp import ClientSession

from examples import client
from examples.client import Call
from mcp_resumable import ResumableEventStore, Retention
from mcp_resumable.rejection import REJECTION_CODE

from ..sdk_error import sdk_error
from . import servers
from .proxy import proxied
from .servers import Arguments, RunningServer, Stage, serve
from .storages import ScriptedStorage

pytestmark = pytest.mark.anyio

# Milliseconds, as the server tells clients: they wait a second where it does not.
RETRY = 10


@asynccontextmanager
async def served(store: ResumableEventStore) -> AsyncIterator[RunningServer]:
    with anyio.fail_after(30):
        async with serve("fastmcp", store, retry_interval=RETRY) as server:
            yield server


def text_of(answer: Any) -> str:
    text: str = answer.content[0].text
    return text


async def test_an_answer_is_returned_with_what_came_before_it() -> None:
    async with served(ResumableEventStore(rejection="stream")) as server:
        call = Call("count", {"n": 3})
        assert text_of(await call.make(server.url)) == "counted 3 "
        assert call.progress == [1, 2, 3]


async def test_on_a_reset_it_discards_what_it_has_and_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ScriptedStorage(retention=Retention(max_events=1))
    store = ResumableEventStore(storage, rejection="stream")
    calls: list[servers.Call] = []
    is_cut = anyio.Event()

    async def work(_stage: Stage, call: servers.Call, _arguments: Arguments) -> str:
        calls.append(call)
        await call.progress(10 * len(calls))
        if len(calls) == 1:
            await is_cut.wait()
            for number in (11, 12, 13):
                await call.progress(number)
        return f"from call {len(calls)}"

    monkeypatch.setitem(servers.TOOLS, "work", work)
    async with served(store) as server, proxied(server.port) as proxy, anyio.create_task_group() as tasks:
        call = Call("work", {})
        answers: list[Any] = []

        async def use_the_client() -> None:
            answers.append(await call.make(f"http://127.0.0.1:{proxy.port}/mcp"))

        tasks.start_soon(use_the_client)
        await proxy.until_carried(1)  # Without an id the client has nothing to come back with.
        proxy.stop_taking()
        await proxy.cut()
        is_cut.set()
        await storage.until_stored(calls[0].session_id, calls[0].request_id, 5)
        proxy.passing.set()
    assert text_of(answers[0]) == "from call 2"
    assert call.progress == [20]
    assert store.stats().decisions == {"event_evicted": 1}
    assert calls[0].session_id == calls[1].session_id, "the session is well"


async def test_what_a_marker_voids_is_discarded() -> None:
    async with served(ResumableEventStore(rejection="stream")) as server:
        call = Call("restart", {"n": 2})
        assert text_of(await call.make(server.url)) == "restarted"
        assert call.progress == [101, 102]


async def test_on_gone_it_initializes_again() -> None:
    store = ResumableEventStore(rejection="stream")
    session_ids: list[str] = []

    class Unlucky(Call):
        """Its first session ends before it can call."""

        @asynccontextmanager
        async def _connected(self, url: str) -> AsyncIterator[ClientSession]:
            async with super()._connected(url) as session:
                (session_id,) = set(store._bindings) - set(session_ids)
                session_ids.append(session_id)
                if len(session_ids) == 1:
                    await store.end_session(session_id)
                yield session

    async with served(store) as server:
        call = Unlucky("count", {"n": 2})
        assert text_of(await call.make(server.url)) == "counted 2 "
        assert call.progress == [1, 2]
        assert len(session_ids) == 2


async def test_as_a_program_it_prints_what_came_of_the_call() -> None:
    async with served(ResumableEventStore(rejection="stream")) as server:
        arguments = [server.url, "count", json.dumps({"n": 2, "tag": "\x1b[2J é"})]
        done = await anyio.run_process(
            [sys.executable, client.__file__, *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(client.__file__).parent.parent)},
            stderr=sys.stderr,
        )
        progress, answer = done.stdout.decode().splitlines()
        assert progress == "progress: 1.0 2.0"
        assert "counted 2 " in answer
        assert answer.isascii()
        assert answer.isprintable()


# What no server says to these clients in a stream.


class ScriptedSession:
    """Fails as it is told to, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def call_tool(self, _tool: str, _arguments: dict[str, Any], *, progress_callback: Any) -> str:
        self.calls += 1
        await progress_callback(self.calls, None, None)
        if self.errors:
            raise self.errors.pop(0)
        return "answered"


def refusal(outcome: str, **fields: object) -> Exception:
    return sdk_error(REJECTION_CODE, {"reason": "a_reason", "outcome": outcome, **fields})


class Scripted(Call):
    """A call over scripted sessions."""

    sessions: list[ScriptedSession]

    @asynccontextmanager
    async def _connected(self, url: str) -> AsyncIterator[ClientSession]:  # noqa: ARG002
        yield cast(ClientSession, self.sessions.pop(0))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited."""
    seconds: list[float] = []

    async def sleep(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr(anyio, "sleep", sleep)
    return seconds


async def make(*sessions: ScriptedSession) -> tuple[str, list[float]]:
    call = Scripted("tool", {})
    call.sessions = list(sessions)
    return await call.make("http://127.0.0.1/mcp"), call.progress


async def test_on_retry_it_waits_as_long_as_it_is_told_but_not_for_ever(waits: list[float]) -> None:
    session = ScriptedSession(refusal("retry", retry_after_seconds=7), refusal("retry", retry_after_seconds=10**9))
    assert await make(session) == ("answered", [3])
    assert waits == [7, 60]


async def test_without_a_time_to_wait_for_it_waits_a_second(waits: list[float]) -> None:
    assert await make(ScriptedSession(refusal("retry"))) == ("answered", [2])
    assert waits == [1]


@pytest.mark.parametrize(
    "error",
    [
        refusal("invalid"),
        sdk_error(REJECTION_CODE, {"outcome": "reset"}),
        sdk_error(-32602, {"reason": "event_evicted", "outcome": "reset"}),
        TimeoutError("no answer"),
    ],
)
async def test_anything_else_is_raised_as_it_is(error: Exception) -> None:
    session = ScriptedSession(error)
    with pytest.raises(type(error)) as raised:
        await make(session)
    assert raised.value is error
    assert session.calls == 1


@pytest.mark.parametrize("outcome", ["reset", "gone", "retry"])
async def test_it_does_not_go_on_for_ever(outcome: str, waits: list[float]) -> None:
    sessions = [ScriptedSession(*[refusal(outcome, retry_after_seconds=0)] * 10) for _ in range(10)]
    with pytest.raises(type(refusal(outcome))):
        await make(*sessions)
    assert sum(session.calls for session in sessions) == 3
    assert waits == [0] * (3 if outcome == "retry" else 0)
