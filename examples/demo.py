"""What resumption is worth, on one screen: `make demo`.

A real server (uvicorn, `ResumableEventStore()` with its defaults) and the SDK's own client talk through a proxy that
resets their TCP connection in the middle of a tool call. Then a client of our own presents one cursor for each row of
the decision table. Everything shown is checked; whatever is missing, there twice, or answered otherwise than the table
says ends the demo with exit status 1.

`--tamper lose` and `--tamper repeat` put something faulty between server and client, to see the demo fail.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import anyio
import httpx
import uvicorn
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from mcp_resumable import ResumableEventStore

IS_SDK_1 = version("mcp").startswith("1.")
if IS_SDK_1:
    from mcp.server.fastmcp import Context, FastMCP
else:
    from mcp import Client
    from mcp.server.mcpserver import Context, MCPServer

HOST = "127.0.0.1"
STEPS = 20
STEP_SECONDS = 0.1
CUT_AFTER = 8  # The connection is reset in the middle of the next event.
TAMPERED_STEP = 11  # Sent while the client is away, so it is replayed.
RETRY_MILLISECONDS = 400
LIMIT_SECONDS = 14.0
MIB = 1024 * 1024

# Row of the decision table: status, reason, outcome. By hand, from README.md.
DECISIONS = 10
TABLE: dict[int, tuple[int, str, str]] = {
    1: (404, "session_not_found", "gone"),
    2: (400, "malformed_event_id", "invalid"),
    3: (409, "generation_mismatch", "reset"),
    4: (400, "unrecognized_generation", "invalid"),
    5: (400, "future_event_id", "invalid"),
    6: (409, "stream_superseded", "reset"),
    7: (409, "stream_completed", "reset"),
    8: (409, "event_evicted", "reset"),
    9: (409, "replay_gap", "reset"),
    10: (200, "2 events replayed", "resume"),
    11: (503, "storage_unavailable", "retry"),  # Not a row: no decision without a snapshot.
}


@dataclass
class Job:
    """The tool, and how far it has come.

    Attributes:
        runs: How often it was called.
        done: Steps that the newest call has reported.
    """

    runs: int = 0
    done: int = 0

    async def count(self, steps: int, ctx: Context, seconds: float = 0.0, padding: int = 0) -> str:
        """Report `steps` steps of progress, `seconds` apart, each with `padding` bytes of text."""
        self.runs += 1
        for step in range(1, steps + 1):
            await anyio.sleep(seconds)
            await ctx.report_progress(step, steps, "x" * padding)
            self.done = step
        return f"{steps} steps done"


def build_app(store: ResumableEventStore, job: Job) -> Any:
    """Return the server's ASGI app. Passing the store is all that resumption takes."""
    if IS_SDK_1:
        server_1 = FastMCP("demo", event_store=store, retry_interval=RETRY_MILLISECONDS)
        server_1.tool()(job.count)
        return server_1.streamable_http_app()
    server = MCPServer("demo")
    server.tool()(job.count)
    return server.streamable_http_app(event_store=store, retry_interval=RETRY_MILLISECONDS)


def tampered(app: Any, how: str) -> Any:
    """Return `app` behind something that swallows one event of the call, or sends it twice."""
    marked = f'"progress":{TAMPERED_STEP}'.encode()

    async def faulty(scope: Any, receive: Any, send: Any) -> None:
        async def send_tampered(message: Any) -> None:
            for _ in range({"lose": 0, "repeat": 2}[how] if marked in message.get("body", b"") else 1):
                await send(message)

        await app(scope, receive, send_tampered)

    return faulty


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[int]:
    """Serve `app` on a loopback port of its own; who connects before it is up waits in the listener's queue."""
    with socket.create_server((HOST, 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@dataclass
class CuttingProxy:
    """Passes bytes between client and server, and resets one connection in the middle of an event.

    Attributes:
        server_port: Where the server listens.
        on_resume: Called with the `Last-Event-ID` of a request, before the request is passed on.
        cuts: Connections that were reset.
    """

    server_port: int
    on_resume: Callable[[str], None]
    cuts: int = 0
    _upward: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[int]:
        """Listen on a loopback port."""
        server = await asyncio.start_server(self._serve, HOST, 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._upward:
                task.cancel()
            await asyncio.gather(*self._upward, return_exceptions=True)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(HOST, self.server_port)
        self._upward.append(asyncio.create_task(self._pass_requests(from_client, to_server)))
        events = 0
        while chunk := await from_server.read(MIB):
            marks = [mark.start() for mark in re.finditer(b"notifications/progress", chunk)]
            if events + len(marks) > CUT_AFTER and not self.cuts:
                self.cuts += 1
                to_client.write(chunk[: marks[CUT_AFTER - events]])
                _reset(to_client)
                _reset(to_server)
                return
            events += len(marks)
            to_client.write(chunk)
        to_client.close()

    async def _pass_requests(self, from_client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        try:
            while chunk := await from_client.read(MIB):
                if claim := re.search(rb"(?i)^last-event-id: *(\S+)", chunk, re.MULTILINE):
                    self.on_resume(claim[1].decode())
                to_server.write(chunk)
        finally:
            to_server.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    # Closing with a linger time of zero sends RST instead of FIN: no goodbye, what is in flight is lost.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def call_with_sdk(url: str, on_progress: Any) -> str:
    """Call the tool with the SDK's own client and return its answer."""
    arguments = {"steps": STEPS, "seconds": STEP_SECONDS}
    if IS_SDK_1:
        async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
            await session.initialize()
            result: Any = await session.call_tool("count", arguments, progress_callback=on_progress)
    else:
        async with Client(url, mode="legacy") as client:
            result = await client.call_tool("count", arguments, progress_callback=on_progress)
    return str(result.content[0].text)


@dataclass
class RawClient:
    """A client that presents whatever cursor it is told to."""

    url: str
    http: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=lambda: {"accept": "application/json, text/event-stream"})

    @property
    def session_id(self) -> str:
        """What `Mcp-Session-Id` names."""
        return self.headers["mcp-session-id"]

    async def _post(self, message: dict[str, Any]) -> httpx.Response:
        response = await self.http.post(self.url, headers=self.headers, json={"jsonrpc": "2.0", **message})
        return response.raise_for_status()

    async def initialize(self) -> list[str]:
        """Open a session and return the event ids of the answer's stream."""
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        response = await self._post({"id": 0, "method": "initialize", "params": params})
        self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
        self.headers["mcp-protocol-version"] = "2025-11-25"
        await self._post({"method": "notifications/initialized"})
        return event_ids(response.text)

    async def call(self, request_id: int, steps: int, padding: int = 0) -> list[str]:
        """Call the tool and return the event ids of its stream: the place before the first event, then each event."""
        arguments = {"steps": steps, "padding": padding}
        params = {"name": "count", "arguments": arguments, "_meta": {"progressToken": request_id}}
        response = await self._post({"id": request_id, "method": "tools/call", "params": params})
        return event_ids(response.text)

    async def resume(self, event_id: str) -> tuple[int, str, str]:
        """Present a cursor and return status, reason and outcome of the answer."""
        response = await self.http.get(self.url, headers={**self.headers, "last-event-id": event_id})
        if response.headers["content-type"].startswith("text/event-stream"):
            _, *replayed = event_ids(response.text)  # The first frame repeats the cursor.
            return response.status_code, f"{len(replayed)} events replayed", "resume"
        data = response.json()["error"]["data"]
        return response.status_code, data["reason"], data["outcome"]

    async def end(self) -> None:
        """End the session."""
        await self.http.delete(self.url, headers=self.headers)


def event_ids(body: str) -> list[str]:
    """Return the event ids of an SSE stream."""
    return re.findall(r"^id: (\S+)", body, re.MULTILINE)


async def show_cut(console: Console, server_port: int, job: Job) -> list[str]:
    """Cut a call in the middle, show what its client saw, and return what is wrong with it."""
    seen: list[int] = []
    claims: list[tuple[str, int, int]] = []

    async def on_progress(progress: float, _total: float | None, _message: str | None) -> None:
        seen.append(int(progress))

    def on_resume(event_id: str) -> None:
        claims.append((event_id, len(seen), job.done))

    proxy = CuttingProxy(server_port, on_resume)
    console.print(f"[bold]1. A tool reports {STEPS} steps; its client's connection is cut in the middle[/bold]")
    async with proxy.listening() as port:
        answer = await call_with_sdk(f"http://{HOST}:{port}/mcp", on_progress)
    claim, before, done = claims[0] if claims else ("", len(seen), len(seen))
    for label, text in (
        ("saw", spelled(seen[:before])),
        ("cut", f"TCP reset in the middle of event {CUT_AFTER + 1}; the tool ran on, to step {done}"),
        ("came back", f"with Last-Event-ID {claim}"),
        ("replayed", spelled([step for step in seen[before:] if step <= done])),
        ("then live", spelled([step for step in seen[before:] if step > done])),
        ("answer", answer),
    ):
        console.print(f"   [dim]{label:<12}[/dim]{text}")

    expected = list(range(1, STEPS + 1))
    problems = [f"step {step} is missing" for step in expected if step not in seen]
    problems += [f"step {step} came {seen.count(step)} times" for step in expected if seen.count(step) > 1]
    if not problems and seen != expected:
        problems.append(f"the steps came in another order: {spelled(seen)}")
    if (proxy.cuts, len(claims), job.runs) != (1, 1, 1):
        problems.append(f"{proxy.cuts} cuts, {len(claims)} resumes and {job.runs} runs of the tool instead of one each")
    if answer != f"{STEPS} steps done":
        problems.append(f"the answer is {answer!r}")
    verdict(console, problems, f"{STEPS} of {STEPS} steps in order, none missing, none twice; the tool ran once")
    return problems


async def show_table(console: Console, server_port: int, store: ResumableEventStore) -> list[str]:
    """Present a cursor for each row of the decision table, show the answers, and return what is wrong with them."""
    answers: list[tuple[int, str, tuple[int, str, str]]] = []
    url = f"http://{HOST}:{server_port}/mcp"
    async with httpx.AsyncClient(timeout=LIMIT_SECONDS, trust_env=False) as http:
        client, stranger = RawClient(url, http), RawClient(url, http)
        await client.initialize()
        foreign = (await stranger.initialize())[-1]

        async def present(row: int, what: str, event_id: str) -> None:
            answers.append((row, what, await client.resume(event_id)))

        short = await client.call(1, steps=3)
        used_twice = await client.call(2, steps=1)
        await client.call(2, steps=1)
        long = await client.call(3, steps=10, padding=MIB)
        holed = await client.call(4, steps=1, padding=9 * MIB)
        await present(2, "not an event id: 42", "42")
        await present(4, "an event id of another session", foreign)
        await present(5, "event 9999 of a call that sent 4", re.sub(r"\d+$", "9999", short[0]))
        await present(6, "a call whose request id was used again since", used_twice[1])
        await present(7, "event 4 of 4: the answer was received", short[-1])
        await present(8, "the start of a call of 10 MiB; 8 MiB are kept", long[0])
        await present(9, "the start of a call with an event of 9 MiB", holed[0])
        await present(10, "event 2 of 4", short[2])
        with patch.object(store.storage, "snapshot", side_effect=ConnectionError):
            await present(11, "event 2 of 4, while the storage is down", short[2])
        await store.advance_generation(client.session_id)
        await present(3, "event 2 of 4, after store.advance_generation()", short[2])
        await client.end()
        await present(1, "event 2 of 4, after the session has ended", short[2])
        await stranger.end()

    console.print("\n[bold]2. One cursor for each row of the decision table[/bold]")
    table = Table("row", "what the client presents", "HTTP", "reason", "outcome", box=None, header_style="dim")
    problems: list[str] = []
    for row, what, answer in sorted(answers):
        if answer != TABLE[row]:
            problems.append(f"row {row}: the answer is {answer}, the table says {TABLE[row]}")
        status, reason, outcome = answer
        style = "" if answer == TABLE[row] else "bold red"
        table.add_row(f"{row:>3}" if row <= DECISIONS else "", what, str(status), reason, outcome, style=style)
    console.print(table)
    missing = TABLE.keys() - {row for row, _, _ in answers}
    problems += [f"row {row} was not shown" for row in sorted(missing)]
    verdict(console, problems, f"{len(answers)} of {len(TABLE)} answers as the table says")
    return problems


def spelled(steps: list[int]) -> str:
    """Return the steps as text."""
    return " ".join(map(str, steps)) or "nothing"


def verdict(console: Console, problems: list[str], success: str) -> None:
    """Print what is wrong, or that nothing is."""
    for problem in problems:
        console.print(f"   [bold red]✘ {problem}[/bold red]")
    if not problems:
        console.print(f"   [bold green]✔ {success}[/bold green]")


async def main(tamper: str | None = None) -> int:
    """Run the demo and return its exit status."""
    logging.disable(logging.CRITICAL)  # The SDK and uvicorn report each cut and each refusal.
    console = Console(width=100, highlight=False)
    began = time.monotonic()
    heading = f"mcp_resumable {version('mcp_resumable')} on mcp {version('mcp')}"
    console.print(f"{heading}: uvicorn, the SDK's client, and a proxy between them\n")
    store, job = ResumableEventStore(), Job()
    app = build_app(store, job)
    try:
        with anyio.fail_after(LIMIT_SECONDS):
            async with serving(tampered(app, tamper) if tamper else app) as port:
                problems = await show_cut(console, port, job)
                problems += await show_table(console, port, store)
    except TimeoutError:
        problems = [f"not done after {LIMIT_SECONDS:.0f} seconds"]
        verdict(console, problems, "")
    console.print("\n[bold]3. What the operator sees: print(store.stats())[/bold]")
    console.print(Padding(str(store.stats()), (0, 0, 1, 3)))
    seconds = time.monotonic() - began
    if problems:
        console.print(f"[bold red]FAILED in {seconds:.1f} s: {'; '.join(problems)}[/bold red]")
        return 1
    console.print(f"[bold green]Nothing lost, nothing twice, nothing guessed. {seconds:.1f} s[/bold green]")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cut a tool call in the middle and see nothing missing.")
    parser.add_argument("--tamper", choices=["lose", "repeat"], help="put a fault between server and client")
    sys.exit(anyio.run(main, parser.parse_args().tamper))
