"""Nothing is left of sessions that are over: no task, stream, timer or buffer, and memory stays flat.

The sessions here do all that sessions do: calls that end and that are cut, resumes that are read and that are cut,
plain GETs, polling, refusals, moves of the generation. They end by DELETE, by the operator, or by nobody: the SDK's
idle time-out ends them.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from mcp_resumable import MemoryStorage, ResumableEventStore, SessionNotFoundError
from mcp_resumable.session import Call, Connection, Exchange, SessionBinding

from .sdk_host import HEADERS, PATIENCE_SECONDS, Client, Host, hosting

pytestmark = pytest.mark.anyio

SESSIONS = int(os.environ.get("MCP_RESUMABLE_LEAK_SESSIONS", "120"))
"""Of the memory test. 2,000 in `make soak`; few by default, since 2,000 take minutes."""

CALLS = 20
"""Of each of those sessions."""

# A stream that is forgotten stays named in the order of evictions until 64 such entries are there (memory._MIN_STALE).
MAX_STALE = 64

# mcp 1.29.1 and 2.0.0 keep the transport of each session that was deleted, and open a session for a request that they
# then refuse.
SDK_LEAKS = not hasattr(StreamableHTTPSessionManager, "_admit_session")

KINDS: tuple[type, ...] = (
    SessionBinding,
    Call,
    Connection,
    Exchange,
    MemoryObjectReceiveStream,
    MemoryObjectSendStream,
    StreamableHTTPServerTransport,
)


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def census() -> Counter[str]:
    """Count what is alive: tasks, timers that are to fire, and objects that a session is made of."""
    gc.collect()
    counted: Counter[str] = Counter(type(item).__name__ for item in gc.get_objects() if type(item) in KINDS)
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        counted["tasks"] = trio.lowlevel.current_statistics().tasks_living
        counted["timers"] = int(trio.lowlevel.current_statistics().seconds_to_next_deadline != float("inf"))
    else:
        counted["tasks"] = len(asyncio.all_tasks(loop))
        counted["timers"] = sum(not handle.cancelled() for handle in getattr(loop, "_scheduled", ()))  # uvloop: untold
    return +counted


async def drop_cancelled_timers() -> None:
    """Have asyncio let go of timers that were cancelled, and with them of the contexts that they were made in.

    It keeps them until they would have fired, or until there are more than 100 and most are cancelled. Here they are.
    trio and uvloop keep none.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    for _ in range(4 * 100 + len(getattr(loop, "_scheduled", ()))):
        loop.call_later(3600, print, context=contextvars.Context()).cancel()
    await anyio.lowlevel.checkpoint()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # there is no event
            await anyio.sleep(0.005)


async def use(client: Client) -> None:
    """Do in a session all that a client and a server do to streams."""
    store = client.host.store
    plain = client.get()
    await plain.frame()
    # A call that is read to its end.
    whole = await client.call(1)
    await client.tool(1).emit("a", "b")
    duplicate = client.post(1)
    assert await duplicate.reason() == "duplicate_request_id"
    client.tool(1).finish()
    frames = await whole.frames()
    assert frames[-1].step == "answer"
    completed = client.get(frames[-1].id)
    assert await completed.reason() == "stream_completed"
    # One that is cut, whose resume is cut, and whose resume takes over from a third.
    cut = await client.call(2)
    await client.tool(2).emit("a")
    primed = await cut.frame()
    assert primed is not None
    cut.disconnect()
    await cut.until_done()
    resumed = client.get(primed.id)
    await resumed.frame()
    await resumed.frame()
    resumed.disconnect()
    await resumed.until_done()
    older, newer = client.get(primed.id), None
    await older.frame()
    newer = client.get(primed.id)
    await newer.frame()
    await older.until_done()
    # The tool closes its client's connection, begins anew, and the generation advances.
    await client.tool(2).do(client.tool(2).context.close_sse_stream)
    await newer.until_done()
    await store.restart_stream(2, client.session_id)
    await client.tool(2).emit("a again")
    await store.advance_generation(client.session_id)
    dead = client.get(primed.id)
    assert await dead.reason() == "generation_mismatch"
    client.tool(2).finish()
    await plain.until_done()
    # The standalone stream, read, taken over, and cut.
    older = client.get()
    await older.frame()
    newer = client.get()
    await newer.frame()
    await older.until_done()
    newer.disconnect()
    await newer.until_done()
    malformed = client.get("garbage")
    assert await malformed.reason() == "malformed_event_id"


async def take_baseline(host: Host) -> Counter[str]:
    """Count once the first session is over.

    sse-starlette starts a task of its own at the first stream in an event loop, in that request's context, and it lives
    as long as the loop: the first session's binding, of all, stays with it.
    """
    client = await host.open()
    await client.request("DELETE").until_done()
    forget(host)
    forget_for_the_sdk(host)
    await anyio.wait_all_tasks_blocked()
    return census()


async def refuse_to_open(host: Host) -> None:
    """Send an opening request that the SDK refuses: nothing is opened."""
    if SDK_LEAKS:
        return
    request = host.start("POST", {**HEADERS, "accept": "text/plain"}, b"{}")
    await request.until_done()
    assert request.status == 406


def forget(host: Host) -> None:
    """Let the test's own side go."""
    host.requests.clear()
    host.tools.clear()


def forget_for_the_sdk(host: Host) -> None:
    """Let go, once every session is over, of what the SDK itself keeps."""
    if SDK_LEAKS:
        host.manager._server_instances.clear()


async def check_nothing_is_left(
    host: Host, baseline: Counter[str], bindings: list[weakref.ref[SessionBinding]], clock: Clock
) -> None:
    store, storage = host.store, host.store.storage
    forget(host)
    await until(lambda: census()["tasks"] <= baseline["tasks"] and store.stats().sessions == 0)
    forget_for_the_sdk(host)
    await anyio.wait_all_tasks_blocked()
    await drop_cancelled_timers()
    left = census()
    assert left - baseline == Counter()
    assert [ref for ref in bindings if ref() is not None] == []
    assert store.stats().open_tails == 0
    # What is over here is ended in the storage by the next operation, whatever it is.
    with pytest.raises(SessionNotFoundError):
        await store.advance_generation("any")
    # On trio nothing tells of the end of a task, so what the SDK ended by itself goes by its age.
    clock.now += storage.retention.idle_seconds + 1
    assert await store.describe("any") is None
    clock.now += storage.retention.idle_seconds + 1
    assert await store.describe("any") is None
    internals: Any = storage
    assert len(internals._sessions) == 0
    assert len(internals._past) == 0
    assert len(internals._completed) == 0
    assert internals._charged_bytes == 0
    assert len(internals._order) == internals._order._stale_count < MAX_STALE
    assert not store._writer.over


async def test_nothing_is_left_of_sessions_that_were_deleted() -> None:
    clock = Clock()
    store = ResumableEventStore(MemoryStorage(clock=clock))
    async with hosting(store) as host:
        baseline = await take_baseline(host)
        bindings: list[weakref.ref[SessionBinding]] = []
        for turn in range(6):
            client = await host.open()
            binding = store.find_binding(client.session_id)
            assert binding is not None
            bindings.append(weakref.ref(binding))
            del binding
            await use(client)
            tail = await client.call(3) if turn % 2 else client.get()  # Open until the session ends.
            await tail.frame()
            if turn % 3 == 0:
                await store.end_session(client.session_id)
            deleted = client.request("DELETE")
            await deleted.until_done()
            await tail.until_done()
            for tool in host.tools.values():
                tool.finish()
            await refuse_to_open(host)
            del client, tail, deleted, tool
        await check_nothing_is_left(host, baseline, bindings, clock)


async def test_nothing_is_left_of_sessions_that_were_abandoned_and_ended_by_the_sdk() -> None:
    clock = Clock()
    store = ResumableEventStore(MemoryStorage(clock=clock))
    async with hosting(store) as host:
        # An attribute, since the high-level servers of mcp 1.29.1 and 2.0.0 do not pass it on.
        host.manager.session_idle_timeout = 0.5
        baseline = await take_baseline(host)
        bindings: list[weakref.ref[SessionBinding]] = []
        for _ in range(20):
            client = await host.open()
            binding = store.find_binding(client.session_id)
            assert binding is not None
            bindings.append(weakref.ref(binding))
            del binding
            post = await client.call(1)
            await client.tool(1).emit("a")
            primed = await post.frame()
            assert primed is not None
            tail = client.get(primed.id)
            await tail.frame()
            client.tool(1).finish()
            await tail.frames()
            plain = client.get()
            await plain.frame()
            plain.disconnect()
            await plain.until_done()
            del client, post, tail, plain
        await check_nothing_is_left(host, baseline, bindings, clock)


@pytest.mark.no_cover
async def test_memory_is_flat_over_many_sessions() -> None:
    """What was held after a quarter of the sessions is held after all of them."""
    clock = Clock()
    store = ResumableEventStore(MemoryStorage(clock=clock))
    async with hosting(store) as host:

        async def run(sessions: int) -> None:
            for _ in range(sessions):
                # A past session's generation numbers are remembered for an hour: at most 60 of them here.
                clock.now += 60
                client = await host.open()
                for number in range(CALLS):
                    await call(client, number)
                await client.request("DELETE").until_done()
                forget(host)
                await until(lambda: store.stats().sessions == 0)
                forget_for_the_sdk(host)
            await drop_cancelled_timers()
            gc.collect()

        await run(SESSIONS // 4)
        early, early_peak = sys.getallocatedblocks(), peak_bytes()
        await run(SESSIONS - SESSIONS // 4)
        late, late_peak = sys.getallocatedblocks(), peak_bytes()
    # Blocks, which the interpreter counts at no cost: a binding alone is more than 10, the events of a session more
    # than 60. What else moves (pools, caches, the 60 past sessions) is some hundreds, at any number of sessions.
    assert late - early < 2_000
    # Large buffers are not among the blocks; 16 MB is what a fragmented heap may take.
    assert late_peak - early_peak < 16 * 1024 * 1024


def peak_bytes() -> int:
    """Return the most memory that the process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


async def call(client: Client, number: int) -> None:
    """Make a call with some events; every fourth is cut and resumed."""
    post = await client.call(number)
    tool = client.tool(number)
    await tool.emit("x" * 200, "y" * 200)
    if number % 4 == 0:
        primed = await post.frame()
        assert primed is not None
        post.disconnect()
        await post.until_done()
        post = client.get(primed.id)
    tool.finish()
    frames = await post.frames()
    assert [frame.step for frame in frames if frame.data] == ["x" * 200, "y" * 200, "answer"]
