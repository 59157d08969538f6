"""A client made of sockets: HTTP/1.1 and SSE, spelled out, so that a test sees and does what no library lets it.

It can cut a connection with a reset, close one half of it, stop reading, and present any bytes as `Last-Event-ID`.
Every request has a connection of its own.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import anyio

__all__ = ["LATEST", "CutError", "Endpoint", "Frame", "RawClient", "Response", "session"]

LATEST = "2025-11-25"
"""The last protocol revision that has sessions."""

_END_OF_FRAME = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Endpoint(Protocol):
    """Where a server listens on the loopback address."""

    @property
    def port(self) -> int: ...

    @property
    def path(self) -> str: ...


class CutError(ConnectionError):
    """Raised when a connection ends inside of a response."""


@dataclass(frozen=True)
class Frame:
    """One SSE frame; a field that is absent is None."""

    id: str | None = None
    event: str | None = None
    data: str | None = None
    retry: str | None = None

    @classmethod
    def parse(cls, text: str) -> Frame:
        """Return the frame that `text`, without its blank line, spells."""
        fields: dict[str, str] = {}
        for line in text.splitlines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name in fields else value
        return cls(**fields)

    @property
    def is_message(self) -> bool:
        """Whether it carries a JSON-RPC message."""
        return bool(self.data)

    @property
    def message(self) -> dict[str, Any]:
        """The JSON-RPC message that it carries."""
        assert self.data, f"no message in {self}"
        message: dict[str, Any] = json.loads(self.data)
        return message

    @property
    def progress(self) -> int:
        """The number of the progress notification that it carries."""
        assert self.message.get("method") == "notifications/progress", self
        return int(self.message["params"]["progress"])

    @property
    def is_answer(self) -> bool:
        """Whether it carries a response or an error."""
        return self.is_message and "method" not in self.message

    @property
    def answer_text(self) -> str:
        """The text of the tool's result that it carries."""
        text: str = self.message["result"]["content"][0]["text"]
        return text

    @property
    def reason(self) -> str:
        """The `reason` of the rejection that it carries, as an error or as a marker."""
        message = self.message
        data = message["error"]["data"] if "error" in message else message["params"]["data"]
        reason: str = data["reason"]
        return reason


class Response:
    """One HTTP response, being read."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()  # As it came from the wire.
        self._body = bytearray()  # Without the chunks' framing.
        self._is_complete = False
        self.status = 0
        self.headers: dict[str, str] = {}

    async def read_head(self) -> None:
        """Read status and headers."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            await self._fill()
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self.status = int(lines[0].split(" ", 2)[1])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    @property
    def is_stream(self) -> bool:
        """Whether it is an SSE stream."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def frame(self) -> Frame | None:
        """Return the next frame; None at the clean end of the response. Keep-alives are passed over.

        Raises:
            CutError: When the connection ended without that end.
        """
        while True:
            while (end := _END_OF_FRAME.search(self._body)) is None:
                if not await self._more_body():
                    assert not self._body, f"the stream ended within a frame: {bytes(self._body)!r}"
                    return None
            text = self._body[: end.start()].decode()
            del self._body[: end.end()]
            if not text.startswith(":"):
                return Frame.parse(text)

    async def event(self) -> Frame:
        """Return the next frame, which must be there."""
        frame = await self.frame()
        assert frame is not None, "the stream has ended"
        return frame

    async def events(self, number: int) -> list[Frame]:
        """Return the next frames, which must be there."""
        return [await self.event() for _ in range(number)]

    async def rest(self) -> list[Frame]:
        """Return all frames up to the clean end."""
        frames = []
        while (frame := await self.frame()) is not None:
            frames.append(frame)
        return frames

    async def body(self) -> bytes:
        """Return the whole body."""
        while await self._more_body():
            pass
        return bytes(self._body)

    async def json(self) -> dict[str, Any]:
        """Return the body, parsed."""
        parsed: dict[str, Any] = json.loads(await self.body())
        return parsed

    def reset(self) -> None:
        """Cut the connection with an RST."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent; go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()

    async def _more_body(self) -> bool:
        """Read the next part of the body; False where there is none."""
        if self._is_complete:
            return False
        if self.headers.get("transfer-encoding") == "chunked":
            while (end := self._buffer.find(b"\r\n")) < 0:
                await self._fill()
            size = int(self._buffer[:end], 16)
            while len(self._buffer) < end + 2 + size + 2:
                await self._fill()
            self._body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]
            self._is_complete = size == 0
        else:
            size = int(self.headers.get("content-length", "0"))
            while len(self._buffer) < size:
                await self._fill()
            self._body += self._buffer[:size]
            self._is_complete = True
        return True

    async def _fill(self) -> None:
        await anyio.wait_readable(self._socket)
        try:
            data = self._socket.recv(65536)
        except ConnectionError as exc:
            raise CutError from exc
        if not data:
            raise CutError
        self._buffer += data


class RawClient:
    """One client: at most one session, any number of connections."""

    def __init__(self, endpoint: Endpoint, *, version: str = LATEST, headers: dict[str, str] | None = None) -> None:
        self.endpoint = endpoint
        self.version = version
        self.headers = headers or {}
        self.session_id: str | None = None
        self._responses: list[Response] = []

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for response in self._responses:
            response.reset()

    @property
    def sid(self) -> str:
        """The session id, which must be known."""
        assert self.session_id is not None
        return self.session_id

    async def initialize(self, request_id: int | str = "init") -> list[Frame]:
        """Open a session; return the frames of the answer."""
        params = {
            "protocolVersion": self.version,
            "capabilities": {},
            "clientInfo": {"name": "raw", "version": "1"},
        }
        response = await self.post({"id": request_id, "method": "initialize", "params": params})
        assert response.status == 200, await response.body()
        self.session_id = response.headers.get("mcp-session-id")
        frames = await response.rest() if response.is_stream else [Frame(data=(await response.body()).decode())]
        assert frames[-1].message["result"]["protocolVersion"] == self.version
        initialized = await self.post({"method": "notifications/initialized"})
        assert initialized.status == 202
        return frames

    async def call(self, tool: str, request_id: int | str, **arguments: Any) -> Response:
        """Call a tool; return its response, of which the head is read."""
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": f"token of {request_id}"}}
        return await self.post({"id": request_id, "method": "tools/call", "params": params})

    async def ping(self, request_id: int | str) -> Frame:
        """Ping the session; return the frame of the answer."""
        response = await self.post({"id": request_id, "method": "ping"})
        assert response.status == 200
        return (await response.rest())[-1]

    async def post(self, message: dict[str, Any]) -> Response:
        """Send a JSON-RPC message."""
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        return await self.request("POST", body=body, headers={"content-type": "application/json"})

    async def get(self, last_event_id: str | bytes | None = None, *, receive_buffer: int = 0) -> Response:
        """Open a stream: the standalone one, or what `last_event_id` resumes."""
        raw = last_event_id.encode() if isinstance(last_event_id, str) else last_event_id
        return await self.request("GET", last_event_id=raw, receive_buffer=receive_buffer)

    async def delete(self) -> Response:
        """End the session."""
        return await self.request("DELETE")

    async def request(
        self,
        method: str,
        *,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        last_event_id: bytes | None = None,
        receive_buffer: int = 0,
    ) -> Response:
        """Send a request on a new connection and read the head of the response."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        response = Response(sock)
        self._responses.append(response)
        try:
            sock.connect(("127.0.0.1", self.endpoint.port))
        except BlockingIOError:
            await anyio.wait_writable(sock)
        all_headers = {
            "host": f"127.0.0.1:{self.endpoint.port}",
            "accept": "application/json, text/event-stream",
            "content-length": str(len(body)),
            **self.headers,
            **(headers or {}),
        }
        if self.session_id is not None:
            all_headers |= {"mcp-session-id": self.session_id, "mcp-protocol-version": self.version}
        head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items()).encode()
        if last_event_id is not None:
            head += b"last-event-id: " + last_event_id + b"\r\n"
        unsent = memoryview(f"{method} {self.endpoint.path} HTTP/1.1\r\n".encode() + head + b"\r\n" + body)
        while unsent:
            await anyio.wait_writable(sock)
            unsent = unsent[sock.send(unsent) :]
        await response.read_head()
        return response


@asynccontextmanager
async def session(endpoint: Endpoint, *, version: str = LATEST) -> AsyncIterator[RawClient]:
    """Open a session; its connections are cut at the end."""
    async with RawClient(endpoint, version=version) as client:
        await client.initialize()
        yield client
