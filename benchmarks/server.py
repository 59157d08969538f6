"""The server that the end-to-end parts measure: `python -m benchmarks.server --store NAME`, ended by closing its stdin.

It prints its port, serves MCP under `/mcp`, and answers a GET of `/control/...` with what it measured of itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import CallToolResult, TextContent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from benchmarks.events import SMALL_BYTES
from benchmarks.measure import LoopLag, NotMeasuredError
from benchmarks.stores import store_named

__all__ = ["NO_STORE", "RunningServer", "Vitals", "raise_file_limit", "running_server"]

NO_STORE = "event_store=None"

# Between two events of the tool `storm` after its release, so that 1,000 of them are no busy loop of the tools.
_STORM_PAUSE_SECONDS = 0.1

_STARTED_SECONDS = 30.0

# Connections that wait to be accepted: a storm's at once.
_BACKLOG = 4_096

# Python's are 700, 10, 10. The oldest generation is collected a hundredth as often: that takes half a millisecond for
# each session that the SDK holds, and in a storm finds nothing to free but what was cut. The youngest sooner: a storm
# frees more than it makes, which hides from Python's count what the SDK leaves behind; at 700 it took up to 100 ms.
_GC_THRESHOLDS = (200, 30, 1_000)

# What it prints instead of a port.
_SKIPPED = "skipped: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What the server's process knows of itself.

    Attributes:
        resident_bytes: Its resident memory.
        cpu_seconds: What it has used of the CPUs so far.
        worst_stall_seconds: The longest stall of its loop since the last release.
        worst_stall_cpu_seconds: The same, counting only what the loop's own thread worked.
        worst_stall_seconds_beside_gc: The same, not counting the garbage collector.
        stalls: Stalls of more than 100 ms since then.
        worst_gc_seconds: The longest garbage collection since then.
    """

    resident_bytes: int
    cpu_seconds: float
    worst_stall_seconds: float
    worst_stall_cpu_seconds: float
    worst_stall_seconds_beside_gc: float
    stalls: int
    worst_gc_seconds: float


class _Tools:
    """The tools of the server, and what the control routes tell them."""

    def __init__(self) -> None:
        self.lag = LoopLag()
        self._released = asyncio.Event()
        self._text = "x" * SMALL_BYTES

    async def call(self, context: Any, params: Any) -> CallToolResult:
        arguments = params.arguments or {}
        match params.name:
            case "talk":
                for number in range(arguments["count"]):
                    await context.session.report_progress(number, message=self._text)
            case "pace":
                for number in range(arguments["count"]):
                    sent_at = f"{time.monotonic_ns()} "
                    await context.session.report_progress(number, message=sent_at.ljust(SMALL_BYTES, "x"))
                    await asyncio.sleep(arguments["pause"] / 1_000)
            case "storm":
                await self._storm(context, arguments["before"], arguments["after"])
            case _:
                raise LookupError(params.name)
        return CallToolResult(content=[TextContent(type="text", text="done")])

    async def _storm(self, context: Any, before: int, after: int) -> None:
        for number in range(before):
            await context.session.report_progress(number, message=self._text)
        await self._released.wait()
        await asyncio.sleep(random.random())
        for number in range(before, before + after):
            await context.session.report_progress(number, message=self._text)
            await asyncio.sleep(_STORM_PAUSE_SECONDS)

    async def vitals(self, _request: Request) -> JSONResponse:
        return JSONResponse(
            asdict(
                Vitals(
                    resident_bytes=psutil.Process().memory_info().rss,
                    cpu_seconds=time.process_time(),
                    worst_stall_seconds=self.lag.worst_seconds,
                    worst_stall_cpu_seconds=self.lag.worst_cpu_seconds,
                    worst_stall_seconds_beside_gc=self.lag.worst_seconds_beside_gc,
                    stalls=self.lag.stalls,
                    worst_gc_seconds=self.lag.worst_gc_seconds,
                )
            )
        )

    async def hold(self, _request: Request) -> JSONResponse:
        self._released = asyncio.Event()
        return JSONResponse(None)

    async def release(self, _request: Request) -> JSONResponse:
        self.lag.reset()
        self._released.set()
        return JSONResponse(None)


async def _serve(store: str, valkey_url: str | None, *, prefix: str | None, measure_lag: bool, tune_gc: bool) -> None:
    raise_file_limit()
    # A store that fails in a storm would else fill the terminal, and measure that.
    logging.getLogger().addHandler(logging.NullHandler())
    async with AsyncExitStack() as resources:
        tools = _Tools()
        server = Server("benchmark", on_call_tool=tools.call)
        manager = StreamableHTTPSessionManager(server, max_sessions=None)
        if store != NO_STORE:
            subject = store_named(store)(valkey_url)
            subject.prefix = prefix or subject.prefix
            await resources.enter_async_context(subject)
            manager = subject.manager(server, event_store=subject.store)
            # Not an argument of every manager.
            manager.max_sessions = None
        app = Starlette(
            routes=[
                Route("/control/vitals", tools.vitals),
                Route("/control/hold", tools.hold),
                Route("/control/release", tools.release),
                Mount("/mcp", app=manager.handle_request),
            ],
            lifespan=lambda _app: manager.run(),
        )
        config = uvicorn.Config(app, log_config=None, backlog=_BACKLOG, timeout_graceful_shutdown=1)
        http = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        if measure_lag:
            lag = asyncio.create_task(tools.lag.run())
            resources.callback(lag.cancel)
        if tune_gc:
            # What an operator may do; a library leaves its host's garbage collector alone.
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        # The socket listens already, so a client that comes too early only waits.
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        http.should_exit = True
        await serving


def raise_file_limit() -> int:
    """Raise this process's limit of open files to what is permitted, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in a process of its own."""

    name: str
    port: int

    async def vitals(self) -> Vitals:
        """Return what it measured of itself."""
        return Vitals(**json.loads(await self._control("vitals")))

    async def hold(self) -> None:
        """Have the calls of `storm` that are made from now on wait."""
        await self._control("hold")

    async def release(self) -> None:
        """Let the calls of `storm` go on, and forget the stalls so far."""
        await self._control("release")

    async def _control(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET /control/{path} HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(f"the server's control answered {head[:80]!r}")
        return body


@asynccontextmanager
async def running_server(
    store: str,
    valkey_url: str | None,
    *,
    prefix: str | None = None,
    measure_lag: bool = False,
    tune_gc: bool = False,
) -> AsyncIterator[RunningServer]:
    """Run a server with that store; it is gone afterwards. Those with the same `prefix` share what they store."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.server", f"--store={store}"),
        *([f"--valkey={valkey_url}"] if valkey_url else []),
        *([f"--prefix={prefix}"] if prefix else []),
        *(["--measure-lag"] if measure_lag else []),
        *(["--tune-gc"] if tune_gc else []),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _STARTED_SECONDS)
        if line.startswith(_SKIPPED.encode()):
            raise NotMeasuredError(line.decode().strip().removeprefix(_SKIPPED))
        if not line.strip().isdigit():
            raise RuntimeError("the server did not start")
        yield RunningServer(store, int(line))
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


def main() -> None:
    """Serve until stdin is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--valkey")
    parser.add_argument("--prefix")
    parser.add_argument("--measure-lag", action="store_true")
    parser.add_argument("--tune-gc", action="store_true")
    arguments = parser.parse_args()
    try:
        asyncio.run(
            _serve(
                arguments.store,
                arguments.valkey,
                prefix=arguments.prefix,
                measure_lag=arguments.measure_lag,
                tune_gc=arguments.tune_gc,
            )
        )
    except NotMeasuredError as exc:
        sys.stdout.write(f"{_SKIPPED}{exc}\n")


if __name__ == "__main__":
    main()
