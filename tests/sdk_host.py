"""The SDK's real session manager in this event loop, driven by hand: no sockets, no time, either SDK line.

`Host` serves one tool, `work`, that does what the test tells it to, step by step. `Request` is one HTTP exchange with
the manager: what the server sends can be read frame by frame, and the client can go away or stop reading at any moment.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from mcp_resumable import ResumableEventStore
from mcp_resumable.session import Exchange, SessionBinding, current_exchange
from tests.held_storage import SharedHeldStorage

PATIENCE_SECONDS = 30.0
"""Longest wait for anything in a test; never an assertion about speed."""

HEADERS = {
    "host": "127.0.0.1:80",
    "accept": "application/json, text/event-stream",
    "content-type": "application/json",
}


@dataclass(frozen=True)
class Frame:
    """One SSE event as the client sees it."""

    id: str | None
    data: str
    retry: int | None = None

    @property
    def message(self) -> Any:
        return json.loads(self.data)

    @property
    def seq(self) -> int:
        assert self.id is not None
        return int(self.id.rpartition(":")[2])

    @property
    def step(self) -> Any:
        """What the tool emitted: the step's text, or `answer` for its result."""
        message = self.message
        return message["params"]["message"] if "params" in message else "answer"


class Request:
    """One HTTP exchange."""

    def __init__(self, method: str, headers: dict[str, str], body: bytes) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": "/mcp",
            "raw_path": b"/mcp",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._body: bytes | None = body
        self._gone = anyio.Event()
        self._reading = anyio.Event()
        self._reading.set()
        self._arrived = anyio.Event()
        self._rest = b""
        self.started = anyio.Event()
        self.done = anyio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self._reading.wait()
        await anyio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            assert not self.started.is_set(), "the response began twice"
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            self.started.set()
            return
        assert self.started.is_set(), "a body before the response began"
        assert not self.is_complete, "a body after its end"
        self._rest += message.get("body", b"")
        self.is_complete = not message.get("more_body", False)
        self._arrived.set()

    async def run(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            self.done.set()
            self.started.set()
            self._arrived.set()

    def disconnect(self) -> None:
        """The client goes away."""
        self._gone.set()

    def freeze(self) -> None:
        """The client stops reading."""
        self._reading = anyio.Event()

    def thaw(self) -> None:
        self._reading.set()

    def arrived(self) -> list[Frame]:
        """Return the events that are there and were not returned yet."""
        frames: list[Frame] = []
        while (frame := self._next_frame()) is not None:
            frames.append(frame)
        return frames

    def _next_frame(self) -> Frame | None:
        while True:
            head, found, tail = self._rest.partition(b"\r\n\r\n")
            if not found:
                return None
            self._rest = tail
            lines = [line.partition(": ") for line in head.decode().split("\r\n") if not line.startswith(":")]
            if lines:
                fields = {name: value for name, _, value in lines}
                retry = fields.get("retry")
                return Frame(fields.get("id"), fields.get("data", ""), int(retry) if retry else None)

    async def frame(self) -> Frame | None:
        """Return the next event; None when the body has ended."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                frame = self._next_frame()
                if frame is not None:
                    return frame
                if self.is_complete or self.done.is_set():
                    assert not self._rest, f"the body ended within a frame: {self._rest!r}"
                    return None
                self._arrived = anyio.Event()
                await self._arrived.wait()

    async def frames(self) -> list[Frame]:
        """Return every event up to the end of the body."""
        collected: list[Frame] = []
        while (frame := await self.frame()) is not None:
            collected.append(frame)
        return collected

    async def json(self) -> Any:
        """Return the whole body, parsed."""
        with anyio.fail_after(PATIENCE_SECONDS):
            await self.done.wait()
        return json.loads(self._rest)

    async def reason(self) -> str:
        """Return the reason of a refusal."""
        body = await self.json()
        return str(body["error"]["data"]["reason"])

    async def until_started(self) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            await self.started.wait()

    async def until_done(self) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            await self.done.wait()


@dataclass
class Client:
    """One session of the host, from the client's side."""

    host: Host
    session_id: str
    version: str = "2025-11-25"
    opened_with: list[Frame] = field(default_factory=list)

    def request(self, method: str, *, body: Any = None, cursor: str | None = None, **headers: str) -> Request:
        all_headers = {
            **HEADERS,
            "mcp-session-id": self.session_id,
            "mcp-protocol-version": self.version,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        if cursor is not None:
            all_headers["last-event-id"] = cursor
        return self.host.start(method, all_headers, b"" if body is None else json.dumps(body).encode())

    async def call(self, request_id: int | str = 1) -> Request:
        """Call the tool and wait until it runs."""
        self.host.tools.pop((self.session_id, str(request_id)), None)
        request = self.post(request_id)
        await request.until_started()
        with anyio.fail_after(PATIENCE_SECONDS):
            while (self.session_id, str(request_id)) not in self.host.tools:
                await anyio.lowlevel.checkpoint()
        return request

    def post(self, request_id: int | str = 1) -> Request:
        """Send the call of the tool, and wait for nothing."""
        params = {"name": "work", "arguments": {}, "_meta": {"progressToken": str(request_id)}}
        return self.request("POST", body={"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params})

    def tool(self, request_id: int | str = 1) -> Tool:
        return self.host.tools[self.session_id, str(request_id)]

    def get(self, cursor: str | None = None, **headers: str) -> Request:
        return self.request("GET", cursor=cursor, **headers)

    async def ping(self, request_id: int | str = "ping") -> Any:
        request = self.request("POST", body={"jsonrpc": "2.0", "id": request_id, "method": "ping"})
        frames = await request.frames()
        return frames[-1].message


class Tool:
    """One running call of the tool, on the server's side."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self._steps, self._told = anyio.create_memory_object_stream[Callable[[], Awaitable[None]]](math.inf)
        self.ended = anyio.Event()
        self.result = "finished"

    async def run(self) -> str:
        async with self._told, self._steps:
            async for step in self._told:
                await step()
        self.ended.set()
        return self.result

    def soon(self, step: Callable[[], Awaitable[None]]) -> None:
        """Have the tool do something in its own task and context, after what it has been told before."""
        self._steps.send_nowait(step)

    async def do(self, step: Callable[[], Awaitable[None]]) -> None:
        """Have the tool do something in its own task and context, and wait until it has."""
        finished = anyio.Event()
        failure: list[Exception] = []

        async def wrapped() -> None:
            try:
                await step()
            except Exception as exc:
                failure.append(exc)
            finally:
                finished.set()

        self.soon(wrapped)
        with anyio.fail_after(PATIENCE_SECONDS):
            await finished.wait()
        if failure:
            raise failure[0]

    async def emit(self, *texts: str) -> None:
        """Have the tool report progress, one event for each text."""
        for text in texts:
            await self.do(lambda text=text: self.context.report_progress(1.0, 2.0, text))  # type: ignore[misc]

    def finish(self) -> None:
        """Have the tool return its result."""
        self._steps.close()


class Host:
    """A server with one tool, over the SDK's own session manager."""

    def __init__(self, store: ResumableEventStore, task_group: TaskGroup, **options: Any) -> None:
        self.store = store
        self.task_group = task_group
        self.tools: dict[tuple[str, str], Tool] = {}
        self.requests: list[Request] = []
        self.server, self.manager = _build(store, self._work, options)

    async def _work(self, context: Any) -> str:
        request = context.request_context.request
        tool = Tool(context)
        self.tools[request.headers["mcp-session-id"], str(context.request_id)] = tool
        return await tool.run()

    def start(self, method: str, headers: dict[str, str], body: bytes = b"") -> Request:
        request = Request(method, headers, body)
        self.requests.append(request)
        self.task_group.start_soon(request.run, self.manager.handle_request)
        return request

    async def open(self, version: str = "2025-11-25") -> Client:
        """Open a session."""
        params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        body = {"jsonrpc": "2.0", "id": "init", "method": "initialize", "params": params}
        request = self.start("POST", HEADERS, json.dumps(body).encode())
        frames = await request.frames()
        client = Client(self, request.headers["mcp-session-id"], version, frames)
        ready = client.request("POST", body={"jsonrpc": "2.0", "method": "notifications/initialized"})
        await ready.until_done()
        return client

    async def notify(self, client: Client, text: str) -> None:
        """Have the server send a notification on the session's standalone stream."""
        tool = client.tool("notifier")
        session = tool.context.session
        await tool.do(lambda: session.send_progress_notification("nobody's", 1.0, 2.0, text))


@asynccontextmanager
async def hosting(store: ResumableEventStore, **options: Any) -> AsyncGenerator[Host]:
    """Run a host; everything it started is gone afterwards."""
    async with anyio.create_task_group() as requests:
        host = Host(store, requests, **options)
        storage = getattr(store, "storage", None)  # None: a server without a store.
        if isinstance(storage, SharedHeldStorage):
            storage.task_group = requests
        async with host.manager.run():
            yield host
            # The 2.x SDK waits a second at its end for a call that still runs.
            for tool in host.tools.values():
                tool.finish()
            for request in host.requests:
                request.thaw()
            await anyio.wait_all_tasks_blocked()
            for request in host.requests:
                request.disconnect()
            requests.cancel_scope.cancel()


def _build(store: ResumableEventStore, work: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    # By name, since each line of the SDK has only one of the two.
    if version("mcp").startswith("1."):
        module: Any = import_module("mcp.server.fastmcp")
        server: Any = module.FastMCP("host", event_store=store, **options)
        _add_tool(server, work, module.Context)
        server.streamable_http_app()
    else:
        module = import_module("mcp.server.mcpserver")
        server = module.MCPServer("host")
        _add_tool(server, work, module.Context)
        server.streamable_http_app(event_store=store, **options)
    return server, server.session_manager


def _add_tool(server: Any, work: Any, context_type: Any) -> None:
    async def tool(ctx: Any) -> str:
        return str(await work(ctx))

    tool.__annotations__["ctx"] = context_type
    server.add_tool(tool, name="work")


async def store_as_the_router(
    store: ResumableEventStore, binding: SessionBinding, stream_id: str, message: object
) -> str:
    """Have the store take a message that the SDK would not make, as the session's router hands it over."""
    reset = current_exchange.set(Exchange(binding))
    try:
        return await store.store_event(stream_id, message)
    finally:
        current_exchange.reset(reset)
