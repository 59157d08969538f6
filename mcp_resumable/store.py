"""`ResumableEventStore`: the SDK's `EventStore` over a `Storage`.

Two rules of the SDK shape it. `store_event` runs in the session's one message router: if it raised there, every call of
the session would hang for ever, so a fault becomes a hole and the message goes out live without an id. And what
`replay_events_after` returns is handed back to the SDK's live path, whose hand-over loses events, so it returns only
when the stream is over: the whole of a resumed stream, replay and live tail, is served from the storage here.

Deliberate differences from the SDK's interface: a priming event (`message=None`) takes no seq and stores nothing, so a
poll costs nothing; `replay_events_after` always returns None.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import Any, Literal
from weakref import WeakValueDictionary

from mcp.server.streamable_http import EventCallback, EventMessage, EventStore

from mcp_resumable.cursor import Generation
from mcp_resumable.errors import ResumptionError, SessionNotFoundError
from mcp_resumable.ledger import Ledger, StoreStats
from mcp_resumable.memory import MemoryStorage
from mcp_resumable.pipeline import Pipeline
from mcp_resumable.reader import Reader
from mcp_resumable.session import SessionBinding, current_exchange
from mcp_resumable.shared import SharedStorage
from mcp_resumable.storage import SessionDescription, Storage
from mcp_resumable.workers import WorkerLink
from mcp_resumable.writer import Writer

__all__ = ["ResumableEventStore"]

# The SDK's have 32 characters. What a client presents becomes part of a storage's keys, and of lines in the log.
_MAX_SESSION_ID_LENGTH = 256


class ResumableEventStore(EventStore):
    """An event store that resumes a stream only where that is safe. Pass it as `event_store`; that is all.

    It serves one event loop, and any number of servers in it. Importing this package has seen to it that a session
    manager that is given one gets the `ResumptionLayer`.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        *,
        rejection: Literal["status", "stream"] = "status",
        replay_completed: bool = True,
        send_timeout: float = 10.0,
        max_tail_seconds: float = 900.0,
    ) -> None:
        """Build a store.

        Args:
            storage: Where events are kept; a `MemoryStorage` of its own by default. One that is passed in is not
                closed by the store.
            rejection: How a refused client is told. `"status"`: by HTTP status. `"stream"`: by a fresh stream that
                fails the waiting call, or serves its current execution from the beginning.
            replay_completed: Whether the rest of a completed stream is replayed while its answer is retained. False
                resets every completed stream.
            send_timeout: Seconds that a client may take to read; then its connection is closed. 10: a resume costs a
                slow client little, a frozen one costs its whole session.
            max_tail_seconds: Longest life of a connection that is served from the storage; then it is closed cleanly
                and the client resumes. 900: well before load balancers reset what is old.

        Raises:
            ValueError: When an argument is out of range; the message names it.
        """
        _check("storage", storage, _is_storage_or_none(storage), "a Storage")
        _check("rejection", rejection, rejection in ("status", "stream"), "'status' or 'stream'")
        _check("replay_completed", replay_completed, replay_completed in (True, False), "a bool")
        for name, seconds in (("send_timeout", send_timeout), ("max_tail_seconds", max_tail_seconds)):
            _check(name, seconds, _is_positive_and_finite(seconds), "a positive, finite number of seconds")
        self.storage: Storage = storage if storage is not None else MemoryStorage()
        self.rejection = rejection
        self.replay_completed = replay_completed
        self.send_timeout = send_timeout
        self.max_tail_seconds = max_tail_seconds
        self.ledger = Ledger(self.storage)
        self._writer = Writer(self.storage, self.ledger)
        self._reader = Reader(
            self.storage,
            self._writer,
            self.ledger,
            rejection=rejection,
            replay_completed=replay_completed,
            max_tail_seconds=max_tail_seconds,
        )
        self._bindings: WeakValueDictionary[str, SessionBinding] = WeakValueDictionary()
        self._workers: WorkerLink | None = None
        if isinstance(self.storage, SharedStorage):
            self._workers = WorkerLink(self._bindings, self._writer, self.ledger)
            self.storage.serve(self._workers)

    async def store_event(self, stream_id: str, message: Any) -> str:
        """Store an event of the current session and return its id; called by the SDK.

        Never raises because of the storage or the message: what cannot be stored is delivered live without an id.

        Args:
            stream_id: `str` of the request id, or the SDK's name of the standalone stream.
            message: A JSON-RPC message of the SDK; None for a priming event, which stores nothing.

        Returns:
            The event id; `""` (no id) where the event was not stored. With a `SharedStorage` it may be the one that the
            event is to have: the layer holds the event back until it is stored, and takes the id off where it is not.

        Raises:
            RuntimeError: When a priming event is asked for outside of the `ResumptionLayer`: whose it is would be a
                guess. Any other event is then delivered without an id.
        """
        exchange = current_exchange.get()
        if exchange is None or exchange.binding.store is not self:
            if message is None:
                raise RuntimeError(_LAYER_MISSING)
            self.ledger.unbound(_LAYER_MISSING)
            return ""
        if message is None:
            return await self._writer.prime(exchange.binding, stream_id)
        return await self._writer.record(exchange.binding, stream_id, message)

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> None:
        """Serve the rest of a stream, replay and live tail; called by the SDK in the task of a resuming GET.

        Returns when the stream is over, or its connection is to be closed.

        Args:
            last_event_id: What the client presented; any string.
            send_callback: Takes the events in ascending seq, each once.

        Raises:
            ResumptionError: When the claim is refused, and there is no layer to turn that into a response.
            RuntimeError: When it is called outside of the `ResumptionLayer`.
        """
        exchange = current_exchange.get()
        if exchange is None or exchange.gate is None or exchange.binding.store is not self:
            raise RuntimeError(_LAYER_MISSING)
        gate = exchange.gate

        def send(text: str, event_id: str | None) -> Awaitable[None]:
            message: Any = _StoredMessage(text)  # The SDK only asks a message for its JSON text.
            return send_callback(EventMessage(message, event_id))

        try:
            if gate.is_claim:
                await self._reader.serve_claim(exchange.binding, gate, last_event_id, send)
            else:
                await self._reader.serve_plain(exchange.binding, gate, send)
        except ResumptionError as error:
            gate.refuse(error)

    async def advance_generation(self, session_id: str) -> Generation:
        """Begin a new generation of a session: its state was reset, nothing issued before may be resumed.

        Every open connection of the session is closed, and what it was still to carry live is not sent. Calls that are
        running go on in the new generation.

        Args:
            session_id: What `Mcp-Session-Id` names.

        Returns:
            The new generation.

        Raises:
            SessionNotFoundError: When the session is unknown or over.
            Exception: Whatever the storage raises where it cannot answer; call again, since it may have moved or not.
                If it has, the session goes on in the new generation with its next event or GET.
        """
        await self._writer.end_what_is_over()
        binding = self._bindings.get(session_id)
        if binding is None:
            generation = await self.storage.advance_generation(session_id)
        else:
            generation = await self._writer.advance(binding)
        if generation is None:
            raise SessionNotFoundError
        return generation

    async def restart_stream(self, request_id: int | str, session_id: str | None = None) -> None:
        """Begin the stream of an unanswered request anew: its work is executed again from the start.

        Cursors of the earlier execution no longer resume, and its open connection is closed: what it was still to carry
        live is not sent. To be called before the new execution sends anything.

        Args:
            request_id: The JSON-RPC request id; inside a tool, `ctx.request_id`.
            session_id: What `Mcp-Session-Id` names. None: the session of the tool that calls this.

        Raises:
            SessionNotFoundError: When the session is not one of this process, or is over.
            LookupError: When the session has no unanswered request with this id, or `session_id` is None outside of a
                tool.
        """
        if session_id is not None:
            binding = self._bindings.get(session_id)
        else:
            exchange = current_exchange.get()
            if exchange is None or exchange.binding.store is not self:
                raise LookupError("session_id may be left out only inside a tool of a session of this store")
            binding = exchange.binding
        if binding is None or binding.status == "ended":
            raise SessionNotFoundError
        await self._writer.restart(binding, str(request_id))

    async def end_session(self, session_id: str) -> None:
        """End a session: its events are gone and its open connections are closed; its next request is answered 404.

        Does nothing where the session is unknown or over.

        Args:
            session_id: What `Mcp-Session-Id` names.
        """
        binding = self._bindings.get(session_id)
        if binding is not None:
            binding.end()
        await self.storage.end_session(session_id)

    async def describe(self, session_id: str) -> SessionDescription | None:
        """Return what is known of a session, for people; None where it is unknown or over."""
        await self._writer.end_what_is_over()
        return await self.storage.describe(session_id)

    def stats(self) -> StoreStats:
        """Return what this store has done so far."""
        ledger = self.ledger
        return StoreStats(
            decisions=dict(ledger.decisions),
            appends=ledger.appends,
            replayed_events=ledger.replayed_events,
            oversized=ledger.oversized,
            faults=ledger.faults,
            refused_requests=ledger.refused_requests,
            stalled_readers=ledger.stalled_readers,
            take_overs=ledger.take_overs,
            evicted_events=self.storage.evicted_events,
            open_tails=ledger.open_tails,
            sessions=sum(binding.status != "ended" for binding in self._bindings.values()),
        )

    def bind_session(self, layer: object, credential: object) -> SessionBinding:
        """Return the binding for a session that is about to be opened; its session id is not known yet."""
        return SessionBinding(store=self, layer=layer, credential=credential, nonce=self.storage.new_nonce())

    def new_pipeline(self) -> Pipeline | None:
        """Return what a call's events go through where the storage is shared: their frames must be held for it."""
        return Pipeline() if self._workers is not None else None

    def find_binding(self, session_id: str) -> SessionBinding | None:
        """Return the binding of a session of this process, also for a while after it ended."""
        return self._bindings.get(session_id)

    def visit_session(self, session_id: str, layer: object, credential: object) -> SessionBinding | None:
        """Return a binding for a session that another worker may serve; None where there can be none."""
        if self._workers is None or len(session_id) > _MAX_SESSION_ID_LENGTH:
            return None
        return self._workers.visit(session_id, credential, store=self, layer=layer)

    async def attach_session(self, binding: SessionBinding, session_id: str) -> None:
        """Give a binding its session id, as the response to the opening request names it."""
        self._bindings[session_id] = binding
        await self._writer.attach(binding, session_id)

    def server_ends(self, layer: object) -> None:
        """Take in that the server behind a layer is about to end its sessions."""
        for binding in self._bindings.values():
            if self._workers is not None and binding.layer is layer:
                binding.outlives_server = True

    async def server_is_over(self) -> None:
        """Let other workers know where the last session of this one has ended with its server."""
        if self._writer.shared is not None and all(binding.status == "ended" for binding in self._bindings.values()):
            await self._writer.shared.retire()

    async def session_is_over(self, binding: SessionBinding) -> None:
        """End a session that the SDK has ended."""
        self._writer.router_is_over(binding)
        try:
            await self._writer.end_what_is_over()
        except Exception as exc:
            self.ledger.fault(binding, exc)


def _check(name: str, value: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def _is_storage_or_none(value: object) -> bool:
    return value is None or isinstance(value, Storage)


def _is_positive_and_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_LAYER_MISSING = (
    "this ResumableEventStore was called outside of the ResumptionLayer, so whose event it is cannot be known; "
    "pass the store to FastMCP, MCPServer or StreamableHTTPSessionManager when they are built"
)


class _StoredMessage:
    """Stands for a message where the SDK only asks for its JSON text: a replay is neither parsed nor dumped again."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def model_dump_json(self, **_options: object) -> str:
        return self.text
