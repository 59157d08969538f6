"""`ResumptionLayer`: the thin ASGI layer around the SDK's session manager.

It tells the store whose request this is, and does to a response what a store cannot: holds back the 200 of a resuming
GET until the store has decided and answers with the decision's status instead; closes a connection that another has
taken over, or that carries what is superseded; disconnects a reader that has stopped reading.

Everything that is not resumption's business passes through untouched: other protocols and methods, sessions that were
not opened through this layer, credentials other than the one that opened the session, protocol revision 2026-07-28. The
SDK's own refusals (401, 403, 404, 406, 421) come first and unchanged.

Deliberate differences from the SDK: a plain GET begins with a cursor, is served from the store, and replaces an earlier
one instead of being answered 409; a request whose id is still unanswered in its session is refused.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from importlib import import_module
from typing import Any, cast

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context

from mcp_resumable.errors import (
    DuplicateRequestIdError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
)
from mcp_resumable.rejection import body_text
from mcp_resumable.session import Call, Connection, Exchange, SessionBinding, current_exchange
from mcp_resumable.store import ResumableEventStore

__all__ = ["ASGIApp", "Message", "Receive", "ResumptionLayer", "Scope", "Send"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_SESSION_ID = b"mcp-session-id"
_PROTOCOL_VERSION = b"mcp-protocol-version"
_LAST_EVENT_ID = b"last-event-id"

# The revision from which clients can read an event without data. Revisions are dates, so they compare as text.
_FIRST_PRIMED_VERSION = "2025-11-25"

# In the scope of a request that has passed a layer: the stores of those layers, so that a second layer for the same
# store, further in, stays out of the way.
_PASSED = "mcp_resumable.passed"


def _revisions_with_sessions() -> frozenset[str] | None:
    """Return the revisions that the SDK leads to its sessions, as it tells them by the header; None: all of them."""
    try:
        module = import_module("mcp_types.version")
    except ImportError:  # mcp 1.x
        return None
    return frozenset(module.HANDSHAKE_PROTOCOL_VERSIONS)


_WITH_SESSIONS = _revisions_with_sessions()

# What a plain GET gets as `Last-Event-ID` so that the SDK asks the store to serve it; the store does not read it.
_NO_CLAIM = b"0"

# The SDK's default limit for a request body.
_MAX_REQUEST_BODY_SIZE = 4 * 1024 * 1024


class ResumptionLayer:
    """An ASGI layer, to be placed right around a session manager, inside of authentication.

    The store places it by itself where a session manager is given the store; only those who assemble their own stack
    need it: `ResumptionLayer(manager.asgi_app, store)`. Two layers for one store do no harm.
    """

    def __init__(
        self,
        app: ASGIApp,
        store: ResumableEventStore,
        *,
        retry_interval: int | None = None,
        max_request_body_size: int = _MAX_REQUEST_BODY_SIZE,
    ) -> None:
        """Wrap `app`.

        Args:
            app: The session manager's ASGI app.
            store: The event store that the session manager was given.
            retry_interval: Milliseconds, as given to the session manager: the `retry` of the cursors that begin a
                stream. None sends none.
            max_request_body_size: Bytes, as given to the session manager: larger bodies are passed on unread.
        """
        self.app = app
        self.store = store
        self.retry_interval = retry_interval
        self.max_request_body_size = max_request_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or self.store in scope.get(_PASSED, ()):
            return await self.app(scope, receive, send)
        scope = {**scope, _PASSED: (*scope.get(_PASSED, ()), self.store)}
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        version = _header(headers, _PROTOCOL_VERSION)
        if version is not None and _WITH_SESSIONS is not None and version not in _WITH_SESSIONS:
            return await self.app(scope, receive, send)
        method = scope["method"]
        session_id = _header(headers, _SESSION_ID)
        credential = _credential_of(scope)
        if session_id is None:
            if method == "POST":
                return await self._serve_opening(credential, scope, receive, send)
            return await self.app(scope, receive, send)
        binding = self.store.find_binding(session_id)
        if binding is None or binding.layer is not self or binding.credential != credential:
            return await self.app(scope, receive, send)
        wire = self._wire(binding, receive, send)
        if method == "DELETE":
            return await self._serve_delete(binding, wire, scope)
        if binding.status == "ended":
            return await _respond(wire.send, SessionNotFoundError(), session_id)
        if method == "POST":
            return await self._serve_post(binding, wire, scope)
        if method == "GET":
            return await self._serve_get(binding, wire, scope, primes=(version or "") >= _FIRST_PRIMED_VERSION)
        return await self.app(scope, receive, send)

    def _wire(self, binding: SessionBinding, receive: Receive, send: Send) -> _Wire:
        seconds = self.store.send_timeout
        return _Wire(receive, send, seconds, on_stall=lambda: self.store.ledger.stalled(binding, seconds))

    async def _serve_opening(self, credential: object, scope: Scope, receive: Receive, send: Send) -> None:
        binding = self.store.bind_session(self, credential)
        wire = self._wire(binding, receive, send)

        async def attach(status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
            session_id = _header(headers, _SESSION_ID)
            if status == 200 and session_id is not None:
                await self.store.attach_session(binding, session_id)

        wire.on_start = attach
        try:
            await self._serve_post(binding, wire, scope)
        finally:
            if binding.session_id is None:
                binding.end()  # Nothing was opened; whoever waits for the session id is let go.

    async def _serve_post(self, binding: SessionBinding, wire: _Wire, scope: Scope) -> None:
        self._end_with_404(binding, wire)
        request_id = await wire.read_request_id(self.max_request_body_size)
        if request_id is None:  # A notification or a response, or nothing that the SDK will take.
            return await self._run(Exchange(binding), scope, wire.receive, wire.send)
        try:
            call = await binding.begin_call(request_id, wire.connection)
        except DuplicateRequestIdError as error:
            self.store.ledger.refused_request(binding, error)
            return await _respond(wire.send, error, binding.session_id)
        if (_header(scope["headers"], _PROTOCOL_VERSION) or "") >= _FIRST_PRIMED_VERSION:
            # A tool may close or move its stream before the first frame is written: its client could not come back.
            wire.last_resort = lambda: self._first_cursor_of(binding, call)
        try:
            await self._run(Exchange(binding), scope, wire.receive, wire.send)
            await wire.finish()
        finally:
            binding.release(wire.connection)
            binding.end_service(call, was_dispatched=wire.status == 200)

    async def _serve_delete(self, binding: SessionBinding, wire: _Wire, scope: Scope) -> None:
        async def end(status: int, _headers: Iterable[tuple[bytes, bytes]]) -> None:
            if status in (200, 404):
                await self.store.session_is_over(binding)

        wire.on_start = end
        await self.app(scope, wire.receive, wire.send)

    async def _serve_get(self, binding: SessionBinding, wire: _Wire, scope: Scope, *, primes: bool) -> None:
        self._end_with_404(binding, wire)
        is_claim = bool(_header(scope["headers"], _LAST_EVENT_ID))
        if not is_claim:
            others = [(name, value) for name, value in scope["headers"] if name.lower() != _LAST_EVENT_ID]
            scope = {**scope, "headers": [*others, (_LAST_EVENT_ID, _NO_CLAIM)]}
        gate = _Gate(wire, is_claim=is_claim, primes=primes, retry_interval=self.retry_interval)
        try:
            await self._run(Exchange(binding, gate), scope, wire.receive, gate.send)
            if gate.error is not None:
                wire.on_start = None  # This answer is ours: it tells nothing of the SDK's session.
                await _respond(wire.send, gate.error, binding.session_id)
            elif gate.is_accepted:
                await wire.finish()
        finally:
            binding.release(wire.connection)

    async def _run(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        token = current_exchange.set(exchange)
        try:
            await self.app(scope, receive, send)
        finally:
            current_exchange.reset(token)

    def _first_cursor_of(self, binding: SessionBinding, call: Call) -> bytes:
        """Return the frame of the cursor before a call's first event; nothing where it has none."""
        if call.stream is None or binding.status != "live":
            return b""
        return _cursor_frame(f"{call.prefix}0", self.retry_interval)

    def _end_with_404(self, binding: SessionBinding, wire: _Wire) -> None:
        """End the session when the SDK answers that it is over (its idle time-out, for example)."""
        if wire.on_start is not None:
            return

        async def end(status: int, _headers: Iterable[tuple[bytes, bytes]]) -> None:
            if status == 404:
                await self.store.session_is_over(binding)

        wire.on_start = end


class _Wire:
    """One exchange with the ASGI server: closable from elsewhere, and never blocked for ever.

    Attributes:
        connection: What others may close.
        status: Of the response that was begun, None before.
        on_start: Called with status and headers before the response begins.
        on_stall: Called when the client is given up because it does not read.
        last_resort: The only frame of a stream that would else end without any.
    """

    def __init__(self, receive: Receive, send: Send, send_timeout: float, on_stall: Callable[[], None]) -> None:
        self.connection = Connection()
        self.on_stall = on_stall
        self.status: int | None = None
        self.on_start: Callable[[int, Iterable[tuple[bytes, bytes]]], Awaitable[None]] | None = None
        self.last_resort: Callable[[], bytes] | None = None
        self._receive = receive
        self._send = send
        self._send_timeout = send_timeout
        self._unread: deque[Message] = deque()
        self._is_event_stream = False
        self._has_begun = False
        self._has_frame = False
        self._is_complete = False
        self._is_stalled = False

    async def read_request_id(self, max_body_size: int) -> int | str | None:
        """Read the body ahead and return the id of the JSON-RPC request in it; None where there is none.

        `receive` then gives the body to the SDK as if it were unread.
        """
        body = bytearray()
        while len(body) <= max_body_size:
            message = await self._receive()
            self._unread.append(message)
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return _request_id_of(body)
        return None

    async def receive(self) -> Message:
        """Receive from the client; a closed connection looks like a client that has gone."""
        if self._unread:
            return self._unread.popleft()
        with self.connection.receiving():
            return await self._receive()
        return {"type": "http.disconnect"}

    async def send(self, message: Message, *, even_if_closed: bool = False) -> None:
        """Send to the client; what comes after a close is dropped, and a client that does not read is given up."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            content_type = _header(message["headers"], b"content-type") or ""
            self._is_event_stream = content_type.startswith("text/event-stream")
            if self.on_start is not None:
                await self.on_start(message["status"], message["headers"])
        elif self._is_complete or (self.connection.is_closed and not even_if_closed):
            return
        elif not message.get("more_body", False) and not message.get("body", b""):
            message = {**message, "body": self._last_frame()}
        with anyio.move_on_after(self._send_timeout) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            self._is_stalled = True
            self.connection.close()
            self.on_stall()
            return
        self._has_begun = True
        if message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
            body = message.get("body", b"")
            if body and not body.startswith(b":"):  # not a keep-alive comment
                self._has_frame = True
                if self.connection.in_transit:
                    self.connection.on_event_written()

    async def finish(self) -> None:
        """End the body cleanly where the SDK did not, because the connection was closed or the server shuts down."""
        if not self._has_begun or self._is_complete or self._is_stalled:
            return
        self._is_complete = True
        with anyio.move_on_after(self._send_timeout):
            await self._send({"type": "http.response.body", "body": self._last_frame(), "more_body": False})

    def _last_frame(self) -> bytes:
        if self.last_resort is None or self._has_frame or not self._is_event_stream:
            return b""
        return self.last_resort()


class _Gate:
    """The response of a GET: held back until the store has decided. See `ResumeGate`.

    Attributes:
        error: Why the claim is refused, None where it is not.
        is_accepted: The response has begun.
    """

    def __init__(self, wire: _Wire, *, is_claim: bool, primes: bool, retry_interval: int | None) -> None:
        self.is_claim = is_claim
        self.connection = wire.connection
        self.error: ResumptionError | None = None
        self.is_accepted = False
        self._wire = wire
        self._primes = primes
        self._retry_interval = retry_interval
        self._start: Message | None = None
        self._started = anyio.Event()

    async def accept(self, event_id: str | None) -> None:
        # The SDK begins its response and asks the store in two tasks, in no certain order.
        await self._started.wait()
        await self._wire.send(cast(Message, self._start))
        self.is_accepted = True
        if event_id is not None and self._primes:
            # Also where the connection was closed meanwhile: a client without a cursor could not come back.
            frame = _cursor_frame(event_id, self._retry_interval)
            await self._wire.send({"type": "http.response.body", "body": frame, "more_body": True}, even_if_closed=True)

    def refuse(self, error: ResumptionError) -> None:
        self.error = error

    async def send(self, message: Message) -> None:
        """Take what the SDK sends: its own answers go on, a stream waits for the decision."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
            self._started.set()
        elif self._start is None or self.is_accepted:
            await self._wire.send(message)
        elif self.error is None and not message.get("more_body", False):
            # The store ended without a decision, which it must not.
            self.error = StorageUnavailableError()
        # Otherwise a keep-alive comment before the decision, or the empty end of a refused stream.


def _request_id_of(body: bytes | bytearray) -> int | str | None:
    try:
        message: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or "method" not in message:
        return None
    request_id = cast("dict[str, object]", message).get("id")
    # True is an int to isinstance, and no request id to the SDK.
    return request_id if isinstance(request_id, int | str) and not isinstance(request_id, bool) else None


def _cursor_frame(event_id: str, retry_interval: int | None) -> bytes:
    """Return an event with an id and no data: a cursor."""
    retry = f"retry: {retry_interval}\r\n" if retry_interval is not None else ""
    return f"id: {event_id}\r\n{retry}data: \r\n\r\n".encode("ascii")


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Return the first header of that name, as the SDK reads it."""
    for key, value in headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return None


def _credential_of(scope: Scope) -> object:
    """Return what the SDK's session manager compares to tell whether a request may use a session."""
    user = scope.get("user")
    return authorization_context(user) if isinstance(user, AuthenticatedUser) else None


async def _respond(send: Send, error: ResumptionError, session_id: str | None) -> None:
    request_id = error.request_id if isinstance(error, DuplicateRequestIdError) else None
    body = body_text(error, request_id).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if session_id is not None:
        headers.append((_SESSION_ID, session_id.encode("latin-1")))
    if isinstance(error, StorageUnavailableError):
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
