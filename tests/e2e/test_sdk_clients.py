"""The SDK's own clients, unmodified, over connections that break.

Both lines' clients meet both lines' servers where `MCP_RESUMABLE_OTHER_PYTHON` names an interpreter with the other
line installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_resumable import ResumableEventStore, Retention

from . import sdk_client
from .proxy import proxied
from .sdk_client import Outcome
from .servers import RunningServer, serve
from .storages import ScriptedStorage

pytestmark = pytest.mark.anyio

CallTool = Callable[[str, str, dict[str, Any]], Awaitable[Outcome]]

OTHER_PYTHON = os.environ.get("MCP_RESUMABLE_OTHER_PYTHON", "")

# Milliseconds, as the server tells clients: they wait a second where it does not.
RETRY = 10


async def call_from_the_other_line(url: str, tool: str, arguments: dict[str, Any]) -> Outcome:
    program = Path(sdk_client.__file__)
    completed = await anyio.run_process(
        [OTHER_PYTHON, str(program), url, tool, json.dumps(arguments)], check=False, stderr=sys.stderr
    )
    assert completed.returncode == 0
    return Outcome(**json.loads(completed.stdout))


@pytest.fixture(params=["own", "other"])
def call_tool(request: pytest.FixtureRequest) -> CallTool:
    """A tool call by each line's client."""
    if request.param == "own":
        return sdk_client.call
    if not OTHER_PYTHON:
        pytest.skip("NOT RUN: set MCP_RESUMABLE_OTHER_PYTHON to an interpreter with the other line of the SDK")
    return call_from_the_other_line


@asynccontextmanager
async def served(store: ResumableEventStore) -> AsyncIterator[RunningServer]:
    with anyio.fail_after(30):
        async with serve("fastmcp", store, retry_interval=RETRY) as server:
            yield server


@pytest.mark.parametrize("carried", [1, 2, 17])
async def test_a_call_completes_over_a_cut_connection(call_tool: CallTool, carried: int) -> None:
    async with served(ResumableEventStore()) as server, proxied(server.port, [carried]) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/mcp"
        outcome = await call_tool(url, "count", {"n": 60, "delay": 0.003})
        assert proxy.cuts == 1
        assert outcome.text == "counted 60 "
        assert outcome.progress == list(range(1, 61))
        assert server.store.stats().decisions == {"resume": 1}


async def test_a_call_completes_over_a_cut_and_many_clean_ends(call_tool: CallTool) -> None:
    """Tails of 50 ms: the client resumes again and again."""
    store = ResumableEventStore(max_tail_seconds=0.05)
    async with served(store) as server, proxied(server.port, [5]) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/mcp"
        outcome = await call_tool(url, "count", {"n": 100, "delay": 0.004})
        assert outcome.text == "counted 100 "
        assert outcome.progress == list(range(1, 101))
        assert store.stats().decisions["resume"] > 1


async def test_a_resume_that_is_cut_loses_nothing(call_tool: CallTool) -> None:
    """A Python client whose resume is cut presents the cursor of the resume's beginning: it asks for repetition."""
    async with served(ResumableEventStore()) as server, proxied(server.port, [5, 5]) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/mcp"
        outcome = await call_tool(url, "count", {"n": 60, "delay": 0.003})
        assert proxy.cuts == 2
        assert outcome.text == "counted 60 "
        assert sorted(set(outcome.progress)) == list(range(1, 61))


async def test_a_tool_that_closes_its_connection_is_polled(call_tool: CallTool) -> None:
    async with served(ResumableEventStore()) as server:
        outcome = await call_tool(server.url, "poll", {"n": 4})
        assert outcome.text == "polled"
        assert outcome.progress == list(range(1, 9))


async def test_with_rejection_stream_a_waiting_call_fails_at_once(call_tool: CallTool) -> None:
    """By status, a 1.x client hangs for ever and a 2.x client learns no reason."""
    storage = ScriptedStorage(retention=Retention(max_events=1))
    store = ResumableEventStore(storage, rejection="stream")
    async with served(store) as server, proxied(server.port) as proxy, anyio.create_task_group() as tasks:
        outcomes: list[Outcome] = []

        async def use_the_client() -> None:
            url = f"http://127.0.0.1:{proxy.port}/mcp"
            outcomes.append(await call_tool(url, "hold", {"n": 1, "tag": "held"}))
            # The tool goes on until it is told.
            await (await server.hold("held")).finish()

        tasks.start_soon(use_the_client)
        hold = await server.hold("held")
        await proxy.until_carried(1)  # Without an id the client has nothing to come back with.
        proxy.stop_taking()
        await proxy.cut()
        await hold.progress(2, 3, 4, 5)
        await storage.until_stored(hold.call.session_id, hold.call.request_id, 5)
        proxy.passing.set()
    assert outcomes[0].text is None
    assert outcomes[0].error is not None
    assert outcomes[0].error["reason"] == "event_evicted"
    assert outcomes[0].error["outcome"] == "reset"


@pytest.mark.parametrize("how", ["restart", "advance"])
async def test_with_rejection_stream_a_waiting_call_gets_the_current_execution(call_tool: CallTool, how: str) -> None:
    async with served(ResumableEventStore(rejection="stream")) as server, anyio.create_task_group() as tasks:
        outcomes: list[Outcome] = []

        async def use_the_client() -> None:
            outcomes.append(await call_tool(server.url, "hold", {"n": 1, "tag": "held"}))

        tasks.start_soon(use_the_client)
        hold = await server.hold("held")
        if how == "restart":
            await hold.do(lambda call: server.store.restart_stream(call.request_id))
        else:
            await hold.do(lambda call: server.store.advance_generation(call.session_id))
        await hold.progress(101, 102)
        await hold.finish("of the current execution")
    assert outcomes[0].text == "of the current execution"
    assert outcomes[0].progress[-2:] == [101, 102]
