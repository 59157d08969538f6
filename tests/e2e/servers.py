"""MCP servers for the tests: the same tools on both SDK lines, in each way that a store can be passed.

| way         | how the store gets in                                                                         |
|-------------|-----------------------------------------------------------------------------------------------|
| `fastmcp`   | 1.x `FastMCP(event_store=)`, 2.x `MCPServer.streamable_http_app(event_store=)`                |
| `starlette` | `StreamableHTTPSessionManager(app=, event_store=)` over a low-level server, under Starlette   |
| `fastapi`   | the same under FastAPI                                                                        |
| `run`       | `mcp.run("streamable-http")`, which owns its process: this file is then the program           |

All but `run` are served inside the test's own event loop, so that a test reaches the store, and the tools, directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import anyio
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from mcp_resumable import ResumableEventStore
from tests.in_loop import serving

__all__ = ["IS_V1", "MANAGED_WAYS", "Call", "Hold", "RunningServer", "Stage", "Way", "serve"]

Way = Literal["fastmcp", "starlette", "fastapi"]
MANAGED_WAYS: tuple[Way, ...] = ("fastmcp", "starlette", "fastapi")

IS_V1 = importlib.util.find_spec("mcp.server.mcpserver") is None
"""Whether the installed SDK is of the 1.x line."""

# Whatever differs between the two lines is reached as Any.
_high: Any = importlib.import_module("mcp.server.fastmcp" if IS_V1 else "mcp.server.mcpserver")
_low: Any = importlib.import_module("mcp.server.lowlevel")
_types: Any = importlib.import_module("mcp.types" if IS_V1 else "mcp_types")

T = TypeVar("T")


class Call:
    """What a tool sees of the call that it serves, alike on both lines."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def request_id(self) -> str:
        """The JSON-RPC request id, as text."""
        return str(self._context.request_id)

    @property
    def session_id(self) -> str:
        """What `Mcp-Session-Id` names."""
        return str(self._context.request.headers["mcp-session-id"])

    async def progress(self, number: int, tag: str = "") -> None:
        """Send a progress notification in the call's stream."""
        session = self._context.session
        if IS_V1:
            await session.send_progress_notification(
                self._context.meta.progressToken, number, message=tag, related_request_id=self.request_id
            )
        else:
            await session.report_progress(number, message=tag)

    async def log(self, data: str) -> None:
        """Send a log notification in the call's stream."""
        await self._context.session.send_log_message("info", data, related_request_id=self.request_id)

    async def announce(self, data: str) -> None:
        """Send a log notification in the session's standalone stream."""
        await self._context.session.send_log_message("info", data)

    async def close_sse_stream(self) -> None:
        """Let the SDK close the call's connection; the call goes on."""
        await self._context.close_sse_stream()


class Hold:
    """A call of the tool `hold`, as the test that directs it sees it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._orders: asyncio.Queue[tuple[Callable[[Call], Awaitable[Any]], asyncio.Future[Any]]] = asyncio.Queue()
        self._answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def do(self, work: Callable[[Call], Awaitable[T]]) -> T:
        """Let the tool do something in its own task; return what it returned, or raise what it raised."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((work, outcome))
        return await outcome

    async def progress(self, *numbers: int, tag: str = "") -> None:
        """Let the tool send progress notifications."""
        for number in numbers:
            await self.do(lambda call, number=number: call.progress(number, tag))  # type: ignore[misc]

    async def announce(self, *texts: str) -> None:
        """Let the tool send notifications in the standalone stream."""
        for text in texts:
            await self.do(lambda call, text=text: call.announce(text))  # type: ignore[misc]

    async def finish(self, text: str = "done") -> None:
        """Let the tool return `text`."""
        self._answer.set_result(text)
        self._orders.put_nowait((_nothing, asyncio.get_running_loop().create_future()))

    @property
    def is_over(self) -> bool:
        """Whether it was told to answer."""
        return self._answer.done()

    async def obey(self) -> str:
        """Serve the test until it says `finish`; called by the tool."""
        while not self._answer.done():
            work, outcome = await self._orders.get()
            try:
                outcome.set_result(await work(self.call))
            except Exception as exc:
                outcome.set_exception(exc)
        return self._answer.result()


async def _nothing(_call: Call) -> None:
    """Wakes a tool that waits for orders."""


@dataclass
class Stage:
    """Where tools and tests meet.

    Attributes:
        store: The server's store.
    """

    store: ResumableEventStore
    _holds: dict[str, asyncio.Future[Hold]] = field(default_factory=dict)

    async def hold(self, tag: str) -> Hold:
        """Wait until a call of `hold` with this tag has begun, and return it."""
        return await self._arrival(tag)

    def arrived(self, tag: str, hold: Hold) -> None:
        """Note that a call of `hold` has begun."""
        self._arrival(tag).set_result(hold)

    async def release(self) -> None:
        """Let every call of `hold` that still runs answer: a 2.x server waits a second for each at its end."""
        for arrival in self._holds.values():
            if arrival.done() and not arrival.result().is_over:
                await arrival.result().finish()
        self._holds.clear()

    def _arrival(self, tag: str) -> asyncio.Future[Hold]:
        return self._holds.setdefault(tag, asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class Arguments:
    """What every tool takes.

    Attributes:
        n: Number of events, or of characters.
        tag: Comes back in each event.
        delay: Seconds between events.
    """

    n: int = 1
    tag: str = ""
    delay: float = 0.0


Tool = Callable[[Stage, Call, Arguments], Awaitable[str]]


async def count(_stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send progress 1..n, then answer."""
    for number in range(1, arguments.n + 1):
        await call.progress(number, arguments.tag)
        await anyio.sleep(arguments.delay)
    return f"counted {arguments.n} {arguments.tag}"


async def log(_stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send n log notifications, then answer."""
    for number in range(1, arguments.n + 1):
        await call.log(f"{arguments.tag} {number}")
    return f"logged {arguments.n}"


async def hold(stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send progress 1..n, then do what the test says, until it says to answer."""
    for number in range(1, arguments.n + 1):
        await call.progress(number, arguments.tag)
    held = Hold(call)
    stage.arrived(arguments.tag, held)
    return await held.obey()


async def restart(stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send progress 1..n, begin the call's stream anew, send 101..100+n, answer."""
    for number in range(1, arguments.n + 1):
        await call.progress(number, arguments.tag)
    await stage.store.restart_stream(call.request_id)
    for number in range(101, 101 + arguments.n):
        await call.progress(number, arguments.tag)
    return "restarted"


async def advance(stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send progress 1..n, advance the own session's generation, send 101..100+n, answer with the generation."""
    for number in range(1, arguments.n + 1):
        await call.progress(number, arguments.tag)
    generation = await stage.store.advance_generation(call.session_id)
    for number in range(101, 101 + arguments.n):
        await call.progress(number, arguments.tag)
    return str(generation)


async def end(stage: Stage, call: Call, _arguments: Arguments) -> str:
    """End the own session."""
    await stage.store.end_session(call.session_id)
    return "ended"


async def describe(stage: Stage, call: Call, _arguments: Arguments) -> str:
    """Answer with what the store knows of the own session."""
    return str(await stage.store.describe(call.session_id))


async def stats(stage: Stage, _call: Call, _arguments: Arguments) -> str:
    """Answer with what the store has done."""
    return str(stage.store.stats())


async def large(_stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send progress 1, a log notification of n characters, progress 2, answer."""
    await call.progress(1, arguments.tag)
    await call.log("x" * arguments.n)
    await call.progress(2, arguments.tag)
    return "sent"


async def poll(_stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send progress 1..n, let the SDK close the connection, send n+1..2n, answer."""
    for number in range(1, arguments.n + 1):
        await call.progress(number, arguments.tag)
    await call.close_sse_stream()
    for number in range(arguments.n + 1, 2 * arguments.n + 1):
        await call.progress(number, arguments.tag)
    return "polled"


TOOLS: dict[str, Tool] = {
    tool.__name__: tool for tool in (count, log, hold, restart, advance, end, describe, stats, large, poll)
}


@dataclass(frozen=True)
class RunningServer:
    """A server that takes requests.

    Attributes:
        port: On the loopback address.
        path: Of its endpoint.
        store: Its store.
        stage: Where its tools can be met.
    """

    port: int
    path: str
    store: ResumableEventStore
    stage: Stage

    @property
    def url(self) -> str:
        """Of its endpoint."""
        return f"http://127.0.0.1:{self.port}{self.path}"

    async def hold(self, tag: str) -> Hold:
        """Wait until a call of `hold` with this tag has begun, and return it."""
        return await self.stage.hold(tag)


@contextlib.asynccontextmanager
async def serve(way: Way, store: ResumableEventStore, **options: Any) -> AsyncIterator[RunningServer]:
    """Serve the tools in this event loop.

    Args:
        way: How the store is passed.
        store: The store.
        options: For the session manager, as it names them: `retry_interval`, `session_idle_timeout`, ...
    """
    stage = Stage(store)
    app, path = app_of(way, stage, options)
    async with serving(app) as port:
        try:
            yield RunningServer(port, path, store, stage)
        finally:
            with anyio.CancelScope(shield=True):
                await stage.release()


def app_of(way: Way, stage: Stage, options: dict[str, Any]) -> tuple[Any, str]:
    """Return the ASGI app, and the path of its endpoint."""
    # The high-level servers of mcp 1.29.1 and 2.0.0 do not take this one.
    if way == "fastmcp" and "session_idle_timeout" not in options:
        return _high_level_app(stage, options), "/mcp"
    manager = StreamableHTTPSessionManager(_low_level_server(stage), event_store=stage.store, **options)
    if way == "fastapi":
        from fastapi import FastAPI

        fastapi = FastAPI(lifespan=lambda _app: manager.run())
        fastapi.mount("/mcp", manager.handle_request)
        return fastapi, "/mcp/"
    from starlette.applications import Starlette
    from starlette.routing import Mount

    routes = [Mount("/mcp", app=manager.handle_request)]
    return Starlette(routes=routes, lifespan=lambda _app: manager.run()), "/mcp/"


def _high_level_app(stage: Stage, options: dict[str, Any]) -> Any:
    options = {"stateless_http" if name == "stateless" else name: value for name, value in options.items()}
    if IS_V1:
        return _high_level_server(stage, event_store=stage.store, **options).streamable_http_app()
    return _high_level_server(stage).streamable_http_app(event_store=stage.store, **options)


def _high_level_server(stage: Stage, **options: Any) -> Any:
    server = _high.FastMCP("e2e", **options) if IS_V1 else _high.MCPServer("e2e", **options)
    for name, tool in TOOLS.items():
        server.add_tool(_as_function(stage, tool), name=name, description=tool.__doc__)
    return server


def _as_function(stage: Stage, tool: Tool) -> Callable[..., Awaitable[str]]:
    """Return a tool as the high-level server wants it: a function whose signature is the tool's."""

    async def function(ctx: Any, n: int = 1, tag: str = "", delay: float = 0.0) -> str:
        return await tool(stage, Call(ctx.request_context), Arguments(n, tag, delay))

    # By value: the name of the context's type differs between the lines.
    function.__annotations__.update(ctx=_high.Context, n=int, tag=str, delay=float)
    function.__annotations__["return"] = str
    return function


def _low_level_server(stage: Stage) -> Any:
    schema = {"type": "object"}
    tools = [_types.Tool(name=name, description=tool.__doc__, inputSchema=schema) for name, tool in TOOLS.items()]

    async def answer(context: Any, name: str, arguments: dict[str, Any] | None) -> list[Any]:
        text = await TOOLS[name](stage, Call(context), Arguments(**(arguments or {})))
        return [_types.TextContent(type="text", text=text)]

    if IS_V1:
        server = _low.Server("e2e")

        @server.call_tool(validate_input=False)  # type: ignore[untyped-decorator]  # reached as Any
        async def _call(name: str, arguments: dict[str, Any]) -> list[Any]:
            return await answer(server.request_context, name, arguments)

        @server.list_tools()  # type: ignore[untyped-decorator]  # reached as Any
        async def _list() -> list[Any]:
            return tools

        return server

    async def on_call_tool(context: Any, params: Any) -> Any:
        return _types.CallToolResult(content=await answer(context, params.name, params.arguments))

    async def on_list_tools(_context: Any, _params: Any) -> Any:
        return _types.ListToolsResult(tools=tools)

    return _low.Server("e2e", on_call_tool=on_call_tool, on_list_tools=on_list_tools)


def main() -> None:
    """Run the way `run`: `python -m tests.e2e.servers PORT [status|stream]`."""
    port = int(sys.argv[1])
    rejection: Literal["status", "stream"] = "stream" if "stream" in sys.argv[2:] else "status"
    store = ResumableEventStore(rejection=rejection)
    stage = Stage(store)
    if IS_V1:
        _high_level_server(stage, event_store=store, port=port).run("streamable-http")
    else:
        _high_level_server(stage).run("streamable-http", event_store=store, port=port)


if __name__ == "__main__":
    main()
