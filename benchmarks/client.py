"""A client that costs little: one socket for each exchange, and no more of HTTP and SSE than the server sends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["Exchange", "Session", "open_session"]

_PROTOCOL_VERSION = "2025-11-25"
_ID = re.compile(rb"(?:^|\r\n)id: ([^\r\n]*)")
_DATA = re.compile(rb"(?:^|\r\n)data: ([^\r\n]+)")
_SESSION_ID = re.compile(rb"\r\nmcp-session-id: ([^\r\n]*)", re.IGNORECASE)


class Exchange(asyncio.Protocol):
    """One request and its response.

    Attributes:
        status: Of the response; 0 before it.
        session_id: What the response names, or "".
        messages: The JSON texts that arrived, in order; events without data are not among them.
        last_event_id: Of the last event that had one, or "".
        ended: Set once the connection is over.
    """

    def __init__(self) -> None:
        self.status = 0
        self.session_id = ""
        self.messages: list[bytes] = []
        self.last_event_id = ""
        self.began = asyncio.Event()
        self.ended = asyncio.Event()
        self._arrived = asyncio.Event()
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. A chunk holds whole events, so what frames a chunk never parts one."""
        *frames, self._rest = (self._rest + data).split(b"\r\n\r\n")
        for frame in frames:
            if not self.status and frame.startswith(b"HTTP/1.1 "):
                self.status = int(frame[9:12])
                found = _SESSION_ID.search(frame)
                self.session_id = found[1].decode() if found else ""
                self.began.set()
                continue
            found = _ID.search(frame)
            if found:
                self.last_event_id = found[1].decode()
            found = _DATA.search(frame)
            if found:
                self.messages.append(found[1])
        self._arrived.set()

    def connection_lost(self, _exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.began.set()
        self.ended.set()
        self._arrived.set()

    @property
    def is_answered(self) -> bool:
        """Whether the last message is the answer."""
        return bool(self.messages) and b'"method":' not in self.messages[-1][:60]

    async def until(self, count: int) -> None:
        """Wait until that many messages have arrived, or the connection is over."""
        while len(self.messages) < count and not self.ended.is_set():
            self._arrived.clear()
            await self._arrived.wait()

    def cut(self) -> None:
        """Cut the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    def write(self, data: bytes) -> None:
        """Send the request."""
        assert self._transport is not None
        self._transport.write(data)


class Session:
    """One session of a server."""

    def __init__(self, port: int, session_id: str = "") -> None:
        self.port = port
        self.session_id = session_id

    async def post(self, message: Mapping[str, Any]) -> Exchange:
        """Send a message; the response is under way."""
        return await self._start("POST", json.dumps(message).encode())

    async def call(self, request_id: int, tool: str, **arguments: int) -> Exchange:
        """Call a tool that reports progress; the response is under way."""
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "t"}}
        return await self.post({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params})

    async def ping(self, request_id: int) -> None:
        """Ping, and wait for the answer."""
        exchange = await self.post({"jsonrpc": "2.0", "id": request_id, "method": "ping"})
        await exchange.until(1)
        if not exchange.is_answered:
            raise RuntimeError(f"a ping was answered with status {exchange.status}")
        exchange.cut()

    async def get(self, last_event_id: str = "") -> Exchange:
        """Open the standalone stream, or resume; the response is under way."""
        return await self._start("GET", b"", last_event_id)

    async def end(self) -> None:
        """End the session."""
        exchange = await self._start("DELETE", b"")
        await exchange.began.wait()
        if exchange.status not in (200, 204):
            raise RuntimeError(f"the end of a session was answered with status {exchange.status}")
        exchange.cut()

    async def _start(self, method: str, body: bytes, last_event_id: str = "") -> Exchange:
        lines = [
            f"{method} /mcp/ HTTP/1.1",
            f"host: 127.0.0.1:{self.port}",
            "connection: close",
            "accept: application/json, text/event-stream",
        ]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        if self.session_id:
            lines += [f"mcp-session-id: {self.session_id}", f"mcp-protocol-version: {_PROTOCOL_VERSION}"]
        if last_event_id:
            lines.append(f"last-event-id: {last_event_id}")
        loop = asyncio.get_running_loop()
        _, exchange = await loop.create_connection(Exchange, "127.0.0.1", self.port)
        exchange.write("\r\n".join([*lines, "", ""]).encode() + body)
        return exchange


async def open_session(port: int, *, is_told: bool = True) -> Session:
    """Open a session; `is_told` is whether the server is told that it is open, as it should before a call."""
    session = Session(port)
    params = {"protocolVersion": _PROTOCOL_VERSION, "capabilities": {}, "clientInfo": {"name": "b", "version": "1"}}
    exchange = await session.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
    await exchange.until(1)
    if exchange.status != 200 or not exchange.session_id:
        raise RuntimeError(f"initialize was answered with status {exchange.status}")
    await exchange.ended.wait()
    session.session_id = exchange.session_id
    if is_told:
        accepted = await session.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        await accepted.began.wait()
    return session
