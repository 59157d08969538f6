"""`ResumptionLayer`: the thin ASGI layer around the SDK's session manager.

It tells the store whose request this is, and does to a response what a store cannot: holds back the 200 of a resuming
GET until the store has decided and answers with the decision's status instead; closes a connection that another has
taken over, or that carries what is superseded; disconnects a reader that has stopped reading. What a reconnect storm
brings all at once it lets through a few per turn of the event loop, so that the turns stay short for everyone else.

Everything that is not resumption's business passes through untouched: other protocols and methods, sessions that were
not opened through this layer, credentials other than the one that opened the session, protocol revision 2026-07-28. The
SDK's own refusals (401, 403, 404, 406, 421) come first and unchanged.

Deliberate differences from the SDK: a plain GET begins with a cursor, is served from the store, and replaces an earlier
one instead of being answered 409; a request whose id is still unanswered in its session is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context

from mcp_resumable.errors import (
    DuplicateRequestIdError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
)
from mcp_resumable.outbox import Outbox
from mcp_resumable.rejection import body_text
from mcp_resumable.session import Call, Exchange, SessionBinding, current_exchange
from mcp_resumable.store import ResumableEventStore
from mcp_resumable.wire import ASGIApp, Gate, Message, Receive, Scope, Send, Wire, cursor_frame, header

if TYPE_CHECKING:
    from mcp.server.streamable_http import StreamableHTTPServerTransport

__all__ = ["ResumptionLayer"]

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

# Per turn of the event loop: GETs that go on, and requests that are told that their client has gone. The first is 1 to
# 2 ms of work over the next turns, the second a quarter of that, nearly all of it the SDK's. In a storm of a thousand
# sessions (benchmarks/storm.py, garbage collection aside) the longest stall fell from 290 ms to 95 with these.
_GETS_PER_TURN = 4
_GONE_PER_TURN = 32

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
        transport_for: Callable[[str], StreamableHTTPServerTransport | None] | None = None,
    ) -> None:
        """Wrap `app`.

        Args:
            app: The session manager's ASGI app.
            store: The event store that the session manager was given.
            retry_interval: Milliseconds, as given to the session manager: the `retry` of the cursors that begin a
                stream. None sends none.
            max_request_body_size: Bytes, as given to the session manager: larger bodies are passed on unread.
            transport_for: Makes the SDK's transport for one request to a session of another worker, by its id; None for
                an id that is none. Without it such requests are left to `app`.
        """
        self.app = app
        self.store = store
        self.retry_interval = retry_interval
        self.max_request_body_size = max_request_body_size
        self._transport_for = transport_for
        self._for_gets = _Turnstile(_GETS_PER_TURN)
        self._for_gone = _Turnstile(_GONE_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or self.store in scope.get(_PASSED, ()):
            return await self.app(scope, receive, send)
        headers = _headers_of(scope)
        version = headers.get(_PROTOCOL_VERSION)
        if version is not None and _WITH_SESSIONS is not None and version not in _WITH_SESSIONS:
            return await self.app(scope, receive, send)
        method: str = scope["method"]
        session_id = headers.get(_SESSION_ID)
        credential = _credential_of(scope)
        primes = (version or "") >= _FIRST_PRIMED_VERSION
        if session_id is None:
            if method == "POST":
                return await self._serve_opening(credential, self._pass(scope), receive, send, primes=primes)
            return await self.app(scope, receive, send)
        if method == "GET":
            # Before anything is looked up, so that this is a request that came a little later, and nothing else.
            await self._for_gets.pass_through()
        binding = self.store.find_binding(session_id)
        is_own = binding is not None and binding.credential == credential
        event_id = headers.get(_LAST_EVENT_ID)
        if not is_own and method == "GET" and event_id:
            # Also where the session is here and someone else's: they are not to tell it from one that is nowhere.
            return await self._serve_visit(session_id, credential, scope, receive, send, primes=primes)
        if binding is None or not is_own or binding.layer is not self:
            return await self.app(scope, receive, send)
        scope = self._pass(scope)
        wire = self._wire_for(binding, receive, send)
        if method == "DELETE":
            return await self._serve_delete(binding, wire, scope)
        if binding.status == "ended":
            return await self._refuse_as_over(binding, wire, method, event_id)
        if method == "POST":
            return await self._serve_post(binding, wire, scope, primes=primes)
        if method == "GET":
            return await self._serve_get(binding, wire, scope, is_claim=bool(event_id), primes=primes)
        return await self.app(scope, receive, send)

    def _pass(self, scope: Scope) -> Scope:
        """Return the scope of a request that this layer serves: others for its store are to stay out of the way."""
        return {**scope, _PASSED: (*scope.get(_PASSED, ()), self.store)}

    def _wire_for(self, binding: SessionBinding, receive: Receive, send: Send) -> Wire:
        seconds = self.store.send_timeout
        return Wire(receive, send, seconds, on_stall=lambda: self.store.ledger.stalled(binding, seconds))

    async def _serve_opening(
        self, credential: object, scope: Scope, receive: Receive, send: Send, *, primes: bool
    ) -> None:
        binding = self.store.bind_session(self, credential)
        wire = self._wire_for(binding, receive, send)

        async def attach(status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
            session_id = header(headers, _SESSION_ID)
            if status == 200 and session_id is not None:
                await self.store.attach_session(binding, session_id)

        wire.on_start = attach
        try:
            await self._serve_post(binding, wire, scope, primes=primes)
        finally:
            if binding.session_id is None:
                binding.end()  # Nothing was opened; whoever waits for the session id is let go.

    async def _serve_post(self, binding: SessionBinding, wire: Wire, scope: Scope, *, primes: bool) -> None:
        self._end_with_404(binding, wire)
        request_id = await wire.read_request_id(self.max_request_body_size)
        if request_id is None:  # A notification or a response, or nothing that the SDK will take.
            return await self._run(self.app, Exchange(binding), scope, wire.receive, wire.send)
        try:
            call = await binding.begin_call(request_id, wire.connection)
        except DuplicateRequestIdError as error:
            self.store.ledger.refused_request(binding, error)
            return await _respond(wire.send, error, binding.session_id)
        call.pipeline = self.store.new_pipeline()
        if primes:
            # A tool may close or move its stream before the first frame is written: its client could not come back.
            wire.last_resort = lambda: self._first_cursor_of(binding, call)
        failure: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                wire.outbox = outbox = Outbox(wire.write, wire.connection, tasks, call.pipeline)
                try:
                    await self._run(self.app, Exchange(binding), scope, self._paced(wire.receive, wire), wire.send)
                    await wire.flush()
                except Exception as exc:
                    failure = exc  # Raised below: out of a task group it would come as one of several.
                outbox.close()
            if failure is not None:
                raise failure
            await wire.finish()
        finally:
            wire.outbox = None  # They know each other: the garbage collector would have to find them.
            binding.release(wire.connection)
            binding.end_service(call, was_dispatched=wire.status == 200)

    async def _serve_visit(
        self, session_id: str, credential: object, scope: Scope, receive: Receive, send: Send, *, primes: bool
    ) -> None:
        """Serve a claim to a session of another worker, if the storage is one that workers share.

        The SDK's session manager knows nothing of that session; a transport of its own, for this one request, makes the
        SDK's checks and its response.
        """
        binding = self.store.visit_session(session_id, self, credential)
        transport = self._transport_for(session_id) if binding is not None and self._transport_for else None
        if binding is None or transport is None:
            await self.app(scope, receive, send)
            return
        wire = self._wire_for(binding, receive, send)
        gate = Gate(wire, is_claim=True, primes=primes, retry_interval=self.retry_interval)
        async with transport.connect():
            try:
                await self._run_get(binding, gate, transport.handle_request, scope)
            finally:
                with anyio.CancelScope(shield=True):
                    await transport.terminate()

    async def _serve_delete(self, binding: SessionBinding, wire: Wire, scope: Scope) -> None:
        async def end(status: int, _headers: Iterable[tuple[bytes, bytes]]) -> None:
            if status in (200, 404):
                await self.store.session_is_over(binding)

        wire.on_start = end
        await self.app(scope, wire.receive, wire.send)

    async def _serve_get(
        self, binding: SessionBinding, wire: Wire, scope: Scope, *, is_claim: bool, primes: bool
    ) -> None:
        self._end_with_404(binding, wire)
        if not is_claim:
            others = [(name, value) for name, value in scope["headers"] if name.lower() != _LAST_EVENT_ID]
            scope = {**scope, "headers": [*others, (_LAST_EVENT_ID, _NO_CLAIM)]}
        gate = Gate(wire, is_claim=is_claim, primes=primes, retry_interval=self.retry_interval)
        await self._run_get(binding, gate, self.app, scope)

    async def _run_get(self, binding: SessionBinding, gate: Gate, app: ASGIApp, scope: Scope) -> None:
        wire = gate.wire
        try:
            await self._run(app, Exchange(binding, gate), scope, self._paced(gate.receive, wire), gate.send)
            if gate.error is not None:
                wire.on_start = None  # This answer is ours: it tells nothing of the SDK's session.
                # Also where the connection was closed meanwhile: that was about the stream which it does not get.
                await _respond(partial(wire.send, even_if_closed=True), gate.error, binding.session_id)
            elif gate.is_accepted:
                await wire.finish()
        finally:
            binding.release(wire.connection)

    def _paced(self, receive: Receive, wire: Wire) -> Receive:
        """Return a `receive` that tells the SDK in its turn that the client has gone: it then ends four tasks."""

        async def paced() -> Message:
            message = await receive()
            # The standalone stream at once: what is sent to it until then counts as carried. After the end of the
            # response the news is that of the server, and nothing is left to end.
            is_news = message["type"] == "http.disconnect" and not wire.is_complete
            if is_news and wire.connection.on_written is None:
                await self._for_gone.pass_through()
            return message

        return paced

    async def _refuse_as_over(self, binding: SessionBinding, wire: Wire, method: str, event_id: str | None) -> None:
        error = SessionNotFoundError(event_id)
        if method == "GET" and event_id:  # A claim, and this the decision about it.
            self.store.ledger.refused(binding, error)
        await _respond(wire.send, error, binding.session_id)

    async def _run(self, app: ASGIApp, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        token = current_exchange.set(exchange)
        try:
            await app(scope, receive, send)
        finally:
            current_exchange.reset(token)

    def _first_cursor_of(self, binding: SessionBinding, call: Call) -> bytes:
        """Return the frame of the cursor before a call's first event; nothing where it has none.

        Where its next stream is just being opened, that is still the one of the stream that was superseded.
        """
        if not call.prefix or binding.status != "live":
            return b""
        return cursor_frame(f"{call.prefix}0", self.retry_interval)

    def _end_with_404(self, binding: SessionBinding, wire: Wire) -> None:
        """End the session when the SDK answers that it is over (its idle time-out, for example)."""
        if wire.on_start is not None:
            return

        async def end(status: int, _headers: Iterable[tuple[bytes, bytes]]) -> None:
            if status == 404:
                await self.store.session_is_over(binding)

        wire.on_start = end


class _Turnstile:
    """Lets so many through in each turn of the event loop, first come, first served.

    Who is through holds nothing, so nobody waits for what another does: only for the loop to turn.
    """

    def __init__(self, per_turn: int) -> None:
        # Not `fast_acquire`: a place is had for a turn, whether it was free or is handed over.
        self._places = anyio.Semaphore(per_turn)

    async def pass_through(self) -> None:
        """Wait for one's turn."""
        async with self._places:
            pass


def _headers_of(scope: Scope) -> dict[bytes, str]:
    """Return the first header of each name, as the SDK reads it."""
    pairs: list[tuple[bytes, bytes]] = list(scope["headers"])
    return {name.lower(): value.decode("latin-1") for name, value in reversed(pairs)}


def _credential_of(scope: Scope) -> object:
    """Return what the SDK's session manager compares to tell whether a request may use a session."""
    user = scope.get("user")
    return authorization_context(user) if isinstance(user, AuthenticatedUser) else None


async def _respond(send: Send, error: ResumptionError, session_id: str | None) -> None:
    request_id = error.request_id if isinstance(error, DuplicateRequestIdError) else None
    body = body_text(error, request_id).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if session_id is not None and not isinstance(error, SessionNotFoundError):
        headers.append((_SESSION_ID, session_id.encode("latin-1")))
    if isinstance(error, StorageUnavailableError):
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
