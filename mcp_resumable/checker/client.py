"""A raw client for streamable HTTP that believes nothing: what the checks send, and what came back.

It talks to the one URL that it was given, follows no redirect, uses no proxy, and is bounded in requests, bytes and
time. What a server sends may be anything; whatever of it is shown goes through `printable` first.

Every request has a connection of its own, so that closing a response cuts that connection and nothing else. A read that
is given up closes its connection too.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast
from uuid import uuid4

import anyio
import httpx

__all__ = [
    "REVISION",
    "Call",
    "Ending",
    "Frame",
    "FrameParser",
    "Json",
    "Limits",
    "Response",
    "ServerFaultError",
    "Session",
    "Target",
    "Wire",
    "parse_object",
    "printable",
]

REVISION = "2025-11-25"
"""The last protocol revision with sessions and `Last-Event-ID`."""

Json = dict[str, object]
Ending = Literal["open", "answered", "closed", "cut", "silent", "abandoned"]
"""How a response stands: not read further, its answer was read, closed by the server, cut by it, nothing came for a
while, cut by us."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_UNPRINTABLE = re.compile(r"[^ -~…]")
# Bytes of a body that is no stream: only shown, and looked into for a JSON-RPC error.
_MAX_PLAIN_BODY = 65_536
# The kernel's least, doubled by it: a client that does not read fills it with two packets.
_SMALL_RECEIVE_BUFFER = 4_096


class ServerFaultError(Exception):
    """Raised when a server answers not at all, or what no client could read; the message is printable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may cost.

    Attributes:
        timeout_seconds: For whatever has to come: a response, and each of its events.
        silence_seconds: After which a stream that has nothing to come is taken to stay open.
        max_seconds: Of the whole run.
        max_requests: Of the whole run.
        max_body_bytes: Of one response.
        max_frame_bytes: Of one event.
        max_frames: Of one response.
        min_call_seconds: A call that is over sooner cannot be cut in the middle.
        min_load_bytes: What a call must send to block a server whose client does not read. 6,000,000: the Python SDK's
            block after 2 to 5 MB of buffers.
    """

    timeout_seconds: float = 15.0
    silence_seconds: float = 2.0
    max_seconds: float = 600.0
    max_requests: int = 1_000
    max_body_bytes: int = 64 * 2**20
    max_frame_bytes: int = 8 * 2**20
    max_frames: int = 50_000
    min_call_seconds: float = 0.2
    min_load_bytes: int = 6_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test, and the tool that is called.

    Attributes:
        url: Of its endpoint.
        tool: Sends several messages before its answer, the same in each call.
        arguments: For a slow call.
        load_arguments: For a fast and large one; None: there is none.
        poll_arguments: For a call whose connection the server closes before the answer; None: there is none.
        headers: To be sent with each request.
    """

    url: str
    tool: str
    arguments: Json = field(default_factory=dict[str, object])
    load_arguments: Json | None = None
    poll_arguments: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def printable(value: object, limit: int = 80) -> str:
    """Return text that is safe to show: ASCII without control characters, and `…` where it was longer than `limit`."""
    text = str(value)
    short = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), short)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One event as it came, also one without data; a field that is absent is None.

    Attributes:
        id: Its event id.
        data: Its data, `""` where it has none.
        retry: Its `retry`, unparsed.
        message: Its data as a JSON object; None where it is none.
    """

    id: str | None = None
    data: str = ""
    retry: str | None = None
    message: Json | None = None

    @property
    def is_answer(self) -> bool:
        """Whether it carries a JSON-RPC response or error."""
        return self.message is not None and "method" not in self.message

    @property
    def is_error(self) -> bool:
        """Whether it carries a JSON-RPC error."""
        return self.is_answer and isinstance(cast("Json", self.message).get("error"), dict)


def parse_object(text: str | bytes) -> Json | None:
    """Return the JSON object that `text` spells; None where it spells none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("Json", value) if isinstance(value, dict) else None


class FrameParser:
    """Turns the bytes of an SSE body into frames; lines end as the SSE standard has it."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._frame_bytes = 0
        self._after_cr = False
        self._fields: dict[str, str] = {}
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes and return the frames that they complete.

        Raises:
            ServerFaultError: When a frame is larger than allowed.
        """
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while found := _LINE_END.search(self._buffer, max(start, self._searched)):
            line = bytes(self._buffer[start : found.start()])
            start = found.end()
            # The second half of a CR LF may still come.
            self._after_cr = found[0] == b"\r" and start == len(self._buffer)
            self._frame_bytes += len(line)
            frame = self._take(line)
            if frame is not None:
                frames.append(frame)
        del self._buffer[:start]
        self._searched = len(self._buffer)
        if self._frame_bytes + len(self._buffer) > self._max_frame_bytes:
            raise ServerFaultError(f"an event is larger than {self._max_frame_bytes} bytes")
        return frames

    def _take(self, line: bytes) -> Frame | None:
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name in ("id", "retry"):
            self._fields[name] = value
        return None

    def _dispatch(self) -> Frame | None:
        fields, data, text = self._fields, self._data, "\n".join(self._data)
        self._fields, self._data, self._frame_bytes = {}, [], 0
        if not fields and not data:  # Comments, or another blank line.
            return None
        return Frame(id=fields.get("id"), data=text, retry=fields.get("retry"), message=parse_object(text))


class Response:
    """One response, being read.

    Attributes:
        sent: What it answers, for people; printable.
        status: Its HTTP status.
        media_type: Its content type, without parameters.
        session_id: Its `Mcp-Session-Id`.
        location: Where it redirects to; not followed.
        frames: What was read of its stream.
        body: What was read of it where it is no stream.
        ending: How it stands.
        body_bytes: How much was read.
    """

    def __init__(self, sent: str, response: httpx.Response, limits: Limits) -> None:
        self.sent = sent
        self.status = response.status_code
        self.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.session_id: str | None = response.headers.get("mcp-session-id")
        self.location: str | None = response.headers.get("location")
        self.frames: list[Frame] = []
        self.body = b""
        self.ending: Ending = "open"
        self.body_bytes = 0
        self._response = response
        self._chunks: AsyncIterator[bytes] = response.aiter_raw()
        self._parser = FrameParser(limits.max_frame_bytes)
        self._unread: deque[Frame] = deque()
        self._messages = 0
        self._limits = limits

    @property
    def is_stream(self) -> bool:
        """Whether it is an SSE stream."""
        return self.status == 200 and self.media_type == "text/event-stream"

    @property
    def messages(self) -> list[Frame]:
        """The frames with data."""
        return [frame for frame in self.frames if frame.data]

    @property
    def cursor(self) -> str | None:
        """The event id that a client would come back with."""
        return next((frame.id for frame in reversed(self.frames) if frame.id), None)

    @property
    def retry_seconds(self) -> float | None:
        """The last `retry` that was sent; None where none was, or it is no number."""
        found = next((frame.retry for frame in reversed(self.frames) if frame.retry), "")
        return int(found) / 1000 if re.fullmatch("[0-9]{1,9}", found) else None

    @property
    def received(self) -> str:
        """What came, for people; printable."""
        head = f"{self.status} {printable(self.media_type) or 'without a content type'}"
        if not self.is_stream:
            to = f" to {printable(self.location, 200)}" if self.location else ""
            return f"{head}{to} {printable(self.body.decode('utf-8', 'replace'), 200)}".rstrip()
        answers = sum(frame.is_answer for frame in self.messages)
        cursors = len(self.frames) - len(self.messages)
        counts = f"{len(self.messages) - answers} messages, {answers} answers, {cursors} events without data"
        ending = {
            "open": "not read further",
            "answered": "not read further",
            "closed": "closed by the server",
            "cut": "cut by the server",
            "silent": "open, and nothing more",
            "abandoned": "cut by the checker",
        }[self.ending]
        return f"{head}: {counts}, then {ending}"

    async def read_frames(self, count: int, seconds: float) -> Ending:
        """Read until there are that many frames, or the answer, or the end.

        Args:
            count: Of frames, with those that were read before.
            seconds: That each of them may take; then the connection is closed, and `ending` is `"silent"`.
        """
        return await self._read(lambda: len(self.frames) >= count, seconds)

    async def read_messages(self, count: int, seconds: float) -> Ending:
        """Read until there are that many messages, or the answer, or the end; otherwise as `read_frames`."""
        return await self._read(lambda: self._messages >= count, seconds)

    async def read_to_answer(self, seconds: float) -> Ending:
        """Read until the answer or the end; otherwise as `read_frames`."""
        return await self._read(lambda: False, seconds)

    async def read_to_end(self, silence: float) -> Ending:
        """Read to the end, also past an answer; otherwise as `read_frames`."""
        while self.ending in ("open", "answered"):
            self.ending = "open"
            await self.read_frames(len(self.frames) + 1, silence)
        return self.ending

    async def read_body(self, seconds: float) -> None:
        """Read what is no stream; what is too large is left."""
        with anyio.move_on_after(seconds) as scope:
            while self.ending == "open" and len(self.body) < _MAX_PLAIN_BODY:
                chunk = await self._chunk()
                if chunk is None:
                    break
                self.body += chunk
        if scope.cancelled_caught:
            await self._close("silent")
        await self.abandon()

    async def abandon(self) -> None:
        """Cut the connection; idempotent."""
        await self._close("abandoned" if self.ending in ("open", "answered") else self.ending)

    async def _read(self, is_enough: Callable[[], bool], seconds: float) -> Ending:
        with anyio.move_on_after(seconds) as scope:
            while self.ending == "open" and not is_enough():
                if not self._unread and not await self._fill():
                    break
                frame = self._unread.popleft()
                scope.deadline = anyio.current_time() + seconds
                self.frames.append(frame)
                self._messages += bool(frame.data)
                if len(self.frames) > self._limits.max_frames:
                    raise ServerFaultError(f"a response has more than {self._limits.max_frames} events")
                if frame.is_answer:
                    self.ending = "answered"
        if scope.cancelled_caught:
            await self._close("silent")
        return self.ending

    async def _fill(self) -> bool:
        """Read the next frames; False at the end."""
        while not self._unread:
            chunk = await self._chunk()
            if chunk is None:
                return False
            self._unread.extend(self._parser.feed(chunk))
        return True

    async def _chunk(self) -> bytes | None:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            await self._close("closed")
            return None
        except (httpx.HTTPError, httpx.StreamError):
            await self._close("cut")
            return None
        self.body_bytes += len(chunk)
        if self.body_bytes > self._limits.max_body_bytes:
            raise ServerFaultError(f"a response is larger than {self._limits.max_body_bytes} bytes")
        return chunk

    async def _close(self, ending: Ending) -> None:
        self.ending = ending
        with anyio.CancelScope(shield=True), contextlib.suppress(httpx.HTTPError, anyio.BrokenResourceError):
            await self._response.aclose()


class Wire:
    """Sends requests to the target, and keeps what came back for the report.

    Attributes:
        responses: Of the check that runs.
    """

    def __init__(self, target: Target, limits: Limits) -> None:
        self.target = target
        self.limits = limits
        self.responses: list[Response] = []
        self._requests = 0
        is_https = target.url.lower().startswith("https:")
        # Made once, for reading the certificates takes 20 ms; the bare one trusts nobody, and is never asked.
        self._tls = httpx.create_ssl_context() if is_https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def new_client(self, *, is_small: bool = False) -> httpx.AsyncClient:
        """Return an HTTP client of one session, or one whose connections hold little unread."""
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_RECEIVE_BUFFER)] if is_small else []
        transport = httpx.AsyncHTTPTransport(
            verify=self._tls, socket_options=options, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )
        return httpx.AsyncClient(transport=transport, timeout=None, trust_env=False, follow_redirects=False)

    async def send(
        self, client: httpx.AsyncClient, method: str, headers: Mapping[str, str | bytes], sent: str, body: bytes = b""
    ) -> Response:
        """Send a request and return the response, of which the head was read.

        Raises:
            ServerFaultError: When there is no response.
        """
        self._requests += 1
        # A session that was opened is ended in any case.
        if self._requests > self.limits.max_requests and method != "DELETE":
            raise ServerFaultError(f"the run took more than {self.limits.max_requests} requests")
        # The server's bytes are not to be inflated here.
        ours = {"accept-encoding": "identity", "user-agent": "mcp-resumable", **headers}
        all_headers = {**{name.lower(): value for name, value in self.target.headers.items()}, **ours}
        response: httpx.Response | None = None
        try:
            with anyio.move_on_after(self.limits.timeout_seconds):
                request = client.build_request(method, self.target.url, headers=_encoded(all_headers), content=body)
                response = await client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, ValueError) as exc:
            raise ServerFaultError(f"{sent}: {printable(f'{type(exc).__name__}: {exc}', 200)}") from exc
        if response is None:
            raise ServerFaultError(f"{sent}: no response within {self.limits.timeout_seconds:g} s")
        answer = Response(sent, response, self.limits)
        self.responses.append(answer)
        if not answer.is_stream:
            await answer.read_body(self.limits.timeout_seconds)
        return answer

    async def abandon_all(self) -> None:
        """Cut every connection that is still open."""
        for response in self.responses:
            await response.abandon()


def _encoded(headers: Mapping[str, str | bytes]) -> dict[bytes, bytes]:
    """Return headers as bytes: an event id goes back as the bytes that it came as."""
    return {
        name.encode("ascii"): value if isinstance(value, bytes) else value.encode("utf-8")
        for name, value in headers.items()
    }


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the tool.

    Attributes:
        request_id: Its JSON-RPC request id.
        mark: Its progress token, which tells its notifications from those of any other call.
        response: Of its POST.
    """

    request_id: int
    mark: str
    response: Response

    def is_foreign(self, frame: Frame) -> bool:
        """Whether a message is of another call."""
        if frame.message is None:
            return False
        if frame.is_answer:
            return frame.message.get("id") != self.request_id and frame.message.get("id") is not None
        params = frame.message.get("params")
        mark = cast("Json", params).get("progressToken", self.mark) if isinstance(params, dict) else self.mark
        return mark != self.mark


class Session:
    """One session of the target.

    Attributes:
        name: For people: A, B, ...
        session_id: What `Mcp-Session-Id` names; None before it is opened.
        revision: The protocol revision that was agreed upon.
        server: What the server says that it is; printable.
    """

    def __init__(self, wire: Wire, name: str) -> None:
        self.name = name
        self.session_id: str | None = None
        self.revision = REVISION
        self.server = ""
        self._wire = wire
        self._client = wire.new_client()
        self._frozen_client: httpx.AsyncClient | None = None
        self._last_request_id = 0

    async def open(self) -> Response:
        """Initialize; return the response.

        Raises:
            ServerFaultError: When no session was opened.
        """
        info = {"name": "mcp-resumable", "version": "1"}
        params = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": info}
        response: Response | None = None
        # Shielded: a session whose id was not read yet could not be ended.
        with anyio.CancelScope(shield=True):
            response = await self.post({"id": self.next_id(), "method": "initialize", "params": params})
            self.session_id = response.session_id if response.status == 200 else None
        assert response is not None  # Nothing cancels that scope.
        await response.read_to_answer(self._wire.limits.timeout_seconds)
        answer = response.frames[-1].message if response.frames else parse_object(response.body)
        result = (answer or {}).get("result")
        if response.status != 200 or not isinstance(result, dict):
            raise ServerFaultError(f"initialize was answered {response.received}")
        if self.session_id is None:
            raise ServerFaultError("initialize was answered without an Mcp-Session-Id: there is nothing to resume")
        result = cast("Json", result)
        self.revision = printable(result.get("protocolVersion"))
        server = result.get("serverInfo")
        if isinstance(server, dict):
            named = cast("Json", server)
            self.server = " ".join(printable(named[key]) for key in ("name", "version") if named.get(key))
        await (await self.post({"method": "notifications/initialized"})).abandon()
        return response

    def next_id(self) -> int:
        """Return a request id that was not used before."""
        self._last_request_id += 1
        return self._last_request_id

    async def call(
        self, arguments: Json | None = None, *, request_id: int | None = None, is_frozen: bool = False
    ) -> Call:
        """Call the tool.

        Args:
            arguments: None: those of a slow call.
            request_id: None: a new one.
            is_frozen: Whether the connection is to hold little unread.
        """
        request_id = self.next_id() if request_id is None else request_id
        mark = uuid4().hex
        target = self._wire.target
        params = {
            "name": target.tool,
            "arguments": target.arguments if arguments is None else arguments,
            "_meta": {"progressToken": mark},
        }
        message: Json = {"id": request_id, "method": "tools/call", "params": params}
        return Call(request_id, mark, await self.post(message, is_frozen=is_frozen))

    async def ping(self) -> bool:
        """Whether the session answers a ping in time."""
        try:
            response = await self.post({"id": self.next_id(), "method": "ping"})
            await response.read_to_answer(self._wire.limits.timeout_seconds)
        except ServerFaultError:
            return False
        await response.abandon()
        return response.status == 200 and (response.ending == "abandoned" or not response.is_stream)

    async def post(self, message: Json, *, is_frozen: bool = False) -> Response:
        """Send a JSON-RPC message."""
        request_id = f" id {message['id']}" if "id" in message else ""
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        client = self._client
        if is_frozen:
            self._frozen_client = client = self._frozen_client or self._wire.new_client(is_small=True)
        return await self._wire.send(
            client,
            "POST",
            {**headers, **self._session_headers()},
            f"POST {message['method']}{request_id}, session {self.name}",
            json.dumps({"jsonrpc": "2.0", **message}).encode(),
        )

    async def get(self, cursor: str | bytes | None = None) -> Response:
        """Open the standalone stream, or resume after a cursor."""
        headers: dict[str, str | bytes] = {"accept": "text/event-stream", **self._session_headers()}
        sent = "GET"
        if cursor is not None:
            headers["last-event-id"] = cursor
            shown = cursor if isinstance(cursor, str) else cursor.decode("latin-1")
            sent = f"GET Last-Event-ID: {printable(shown)}"
        return await self._wire.send(self._client, "GET", headers, f"{sent}, session {self.name}")

    async def delete(self) -> Response:
        """End the session."""
        return await self._wire.send(self._client, "DELETE", self._session_headers(), f"DELETE, session {self.name}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if self._frozen_client is not None:
            await self._frozen_client.aclose()

    def _session_headers(self) -> dict[str, str]:
        if self.session_id is None:
            return {}
        return {"mcp-session-id": self.session_id, "mcp-protocol-version": self.revision}
