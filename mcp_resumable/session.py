"""Whose call is this? The SDK tells a store neither the session nor the execution; a context variable does.

The layer sets `current_exchange` around each HTTP request. The SDK stores events in two places that inherit it: the
task that answers a POST (priming events), and the session's one message router, a task started by the request that
opened the session, so that what is set there must be good for the session's whole life. The session id is not known yet
at that time: `SessionBinding.session_id` is filled in when the response names it, and the router waits for that.

A binding lives as long as the router that inherited it: the store finds bindings by session id through weak references,
so a session that the SDK drops leaves nothing here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import anyio

from mcp_resumable.cursor import STANDALONE, Generation, StreamId
from mcp_resumable.errors import DuplicateRequestIdError, ResumptionError

if TYPE_CHECKING:
    from mcp_resumable.pipeline import Pipeline

__all__ = [
    "SDK_STANDALONE",
    "Call",
    "Connection",
    "Exchange",
    "ResumeGate",
    "SessionBinding",
    "current_exchange",
    "when_current_task_ends",
]


SDK_STANDALONE = "_GET_stream"
"""The SDK's name of the standalone stream, among those of the requests."""


class Connection:
    """One HTTP response that carries a stream, as far as others may touch it: any task of the loop may close it.

    Attributes:
        is_closed: Nothing of the stream reaches the wire any more; the response ends cleanly.
        is_interactive: Something was sent that the client is to answer: what is sent waits for nothing.
        in_transit: Seqs handed to the SDK and not yet written, oldest first; kept only where `on_written` is set.
        on_written: Called with each seq once it has been written.
        rank: Its number among the consumers of its stream, of all workers: the highest is the newest. None while it is
            being asked for; 0 for a POST, which every resume replaces.
    """

    __slots__ = ("_outranked_by", "_receiving", "in_transit", "is_closed", "is_interactive", "on_written", "rank")

    def __init__(self) -> None:
        self.is_closed = False
        self.is_interactive = False
        self.in_transit: deque[int] = deque()
        self.on_written: Callable[[int], None] | None = None
        self.rank: int | None = 0
        self._outranked_by = 0
        self._receiving: anyio.CancelScope | None = None

    def on_event_written(self) -> None:
        """Note that the oldest event in transit has been written."""
        seq = self.in_transit.popleft()
        if self.on_written is not None:
            self.on_written(seq)

    def outranked(self, rank: int) -> None:
        """Note that a consumer with this rank has taken the stream."""
        self._outranked_by = max(self._outranked_by, rank)
        if self.rank is not None and self.rank < self._outranked_by:
            self.close()

    def ranked(self, rank: int) -> None:
        """Note the rank that was asked for."""
        self.rank = rank
        self.outranked(rank)

    def close(self) -> None:
        """End the response cleanly; idempotent."""
        self.is_closed = True
        if self._receiving is not None:
            self._receiving.cancel()

    def reopen(self) -> None:
        """Take back a close that was about a stream which the response does not get; before it has begun."""
        self.is_closed = False

    @contextmanager
    def receiving(self) -> Generator[anyio.CancelScope]:
        """Wait for the client in here; `close` ends the wait, and so does the scope's deadline, if it is given one."""
        with anyio.CancelScope() as scope:
            if self.is_closed:
                scope.cancel()
            self._receiving = scope
            try:
                yield scope
            finally:
                self._receiving = None


class ResumeGate(Protocol):
    """What a resuming GET lets the store do with its response.

    Attributes:
        is_claim: Whether the client presented a cursor; False for a plain GET.
        connection: The response, for take-over.
    """

    is_claim: bool
    connection: Connection

    async def accept(self, event_id: str | None) -> None:
        """Begin a 200 response; `event_id` is the cursor of its first frame, None for no such frame."""

    def refuse(self, error: ResumptionError) -> None:
        """Answer with the error's status instead."""


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """One request of a session that is unanswered or still being served; or its standalone stream.

    Attributes:
        request_id: The JSON-RPC request id as text; None for the standalone stream.
        stream: The stream of its current execution; None while none is open.
        origin: (generation counter, ordinal) of its first stream; None while none was opened.
        execution: Counts restarts; an event belongs to the execution in which it was handed to the store.
        prefix: The event ids of its stream without the seq.
        seq: Of the last event id that was given out, where events are stored later; see `pipeline`.
        pipeline: Its events that are not stored yet; None where each is stored before the SDK goes on.
        lost: Events since the last stored one that could not be stored.
        has_answer: Its answer was handed to the store: it is not begun anew.
        is_settled: That answer is stored, or lost: the call goes on in no other generation.
        is_answered: The SDK has it: the request id is free.
        is_answer_lost: Its answer is among the lost ones.
        connection: The POST's response while it is served.
        served: Set when the POST is over.
    """

    request_id: str | None
    stream: StreamId | None = None
    origin: tuple[int, int] | None = None
    execution: int = 0
    prefix: str = ""
    seq: int = 0
    pipeline: Pipeline | None = None
    lost: int = 0
    has_answer: bool = False
    is_settled: bool = False
    is_answered: bool = False
    is_answer_lost: bool = False
    connection: Connection | None = None
    served: anyio.Event = field(default_factory=anyio.Event)

    def use(self, generation: Generation, stream: StreamId) -> None:
        """Go on in `stream`, from its beginning."""
        self.stream = stream
        self.prefix = f"{generation}:{stream}:"
        self.seq = 0
        if self.origin is None:
            self.origin = (generation.counter, stream.ordinal)


@dataclass(eq=False, kw_only=True)
class SessionBinding:
    """One session in this process: what the router writes to, and who reads.

    Attributes:
        store: The store that the session's events go to.
        layer: The layer that the session was opened through; no other may touch it.
        credential: Who opened the session, as the SDK tells credentials apart; None without authentication.
        nonce: The random part of its first generation, promised before the session id is known.
        session_id: None until the response to the opening request names it.
        generation: The generation that it writes in; None while none is claimed.
        status: `unclaimed` until the storage has answered the first claim; `evicted` when retention dropped the
            session, or another worker gave it up (its next request claims anew); `superseded` when another writer
            claimed it; `ended` when it is over; `visiting` for a session of another worker, which is only read here.
        outlives_server: It stays in the storage when its server stops, for other workers to read what is complete.
        owner: The worker that serves a session that is `visiting`.
        is_orphaned: That worker was found dead.
        noted_seq: What that worker knows of `carried_seq`.
        visits: The bindings of the same session, where it is `visiting`.
        calls: Unanswered or still served requests by request id as text.
        standalone: The standalone stream's place.
        unsettled: Calls of which the storage does not know all: lost events, or a stream that is to be opened anew.
        consumers: The newest connection of each stream.
        carried_seq: Highest seq of the standalone stream that any connection has written.
        changes: Counts what makes a snapshot that was being read meanwhile worthless.
        attempted_nonce: The random part of the generation to which a move has failed, or is under way: the storage may
            be in that one. None where it is known to be in `generation`.
        is_fault_logged: The last fault is known to the log; reset by the next success.
        is_router_watched: The end of the SDK's router will be noticed.
        lock: Held while generation or streams move, or lost events are settled. Never needed to append.
        attached: Set when the session id is known, or never will be.
    """

    store: object
    layer: object
    credential: object
    nonce: str
    session_id: str | None = None
    generation: Generation | None = None
    status: Literal["unclaimed", "live", "evicted", "superseded", "ended", "visiting"] = "unclaimed"
    outlives_server: bool = False
    owner: str = ""
    is_orphaned: bool = False
    noted_seq: int = 0
    visits: object = None
    calls: dict[str, Call] = field(default_factory=dict[str, Call])
    standalone: Call = field(default_factory=lambda: Call(request_id=None, stream=STANDALONE))
    unsettled: dict[Call, None] = field(default_factory=dict["Call", None])
    consumers: dict[StreamId, Connection] = field(default_factory=dict[StreamId, Connection])
    carried_seq: int = 0
    changes: int = 0
    attempted_nonce: str | None = None
    is_fault_logged: bool = False
    is_router_watched: bool = False
    lock: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    attached: anyio.Event = field(default_factory=anyio.Event)

    async def begin_call(self, request_id: int | str, connection: Connection) -> Call:
        """Take in a request.

        A request id may be used again once its call is answered; the POST of the earlier call is let to end first,
        since the SDK knows the two only by their id.

        Raises:
            DuplicateRequestIdError: When a call with this id is unanswered.
        """
        key = str(request_id)
        if key == SDK_STANDALONE:  # Taken, as far as the SDK can tell, for the whole of the session.
            raise DuplicateRequestIdError(request_id)
        while (earlier := self.calls.get(key)) is not None:
            if not earlier.is_answered:
                raise DuplicateRequestIdError(request_id)
            await earlier.served.wait()
        call = self.calls[key] = Call(request_id=key, connection=connection)
        return call

    def end_service(self, call: Call, *, was_dispatched: bool) -> None:
        """Note that the POST of a call is over; one that the SDK refused was never a call."""
        call.connection = None
        call.served.set()
        self.forget_if_done(call, or_never_began=not was_dispatched)

    def forget_if_done(self, call: Call, *, or_never_began: bool = False) -> None:
        """Free the request id of a call that is answered and no longer served."""
        is_done = (call.is_answered or or_never_began) and call.served.is_set()
        if is_done and call.request_id is not None and self.calls.get(call.request_id) is call:
            del self.calls[call.request_id]

    def take_over(self, stream: StreamId, connection: Connection) -> bool:
        """Make `connection` the one consumer of `stream`; an older one is closed. Tell whether one was open."""
        older = self.consumers.get(stream)
        self.consumers[stream] = connection
        if older is None or older is connection or older.is_closed:
            return False
        older.close()
        return True

    def release(self, connection: Connection) -> None:
        """Forget a connection that is over."""
        for stream in [stream for stream, consumer in self.consumers.items() if consumer is connection]:
            del self.consumers[stream]

    def taken_over(self, stream: str, rank: int) -> None:
        """Close the consumer of a stream that another worker's connection has replaced."""
        for consumed, connection in list(self.consumers.items()):
            if str(consumed) == stream:
                connection.outranked(rank)

    def close_consumers(self) -> None:
        """Close every connection that carries a stream of this session."""
        for connection in self.consumers.values():
            connection.close()
        self.consumers.clear()

    def close_stream(self, request_id: str | None) -> None:
        """Close the tail that carries a request's stream, or the standalone stream; a POST belongs to the SDK."""
        call = self.standalone if request_id is None else self.calls.get(request_id)
        consumer = self.consumers.get(call.stream) if call is not None and call.stream is not None else None
        if consumer is not None and call is not None and consumer is not call.connection:
            consumer.close()

    def close_tails(self) -> None:
        """Close every connection that is served from the storage; those of the POSTs are served by the SDK."""
        live = [call.connection for call in self.calls.values()]
        for connection in self.consumers.values():
            if connection not in live:
                connection.close()

    def end(self, status: Literal["superseded", "ended"] = "ended") -> None:
        """Stop writing, for good; everything open is closed and everyone waiting is let go."""
        self.status = status
        self.changes += 1
        self.unsettled.clear()
        self.close_consumers()
        self.attached.set()

    def follow(self, generation: Generation) -> None:
        """Go on in what is now the generation of a session that is visited."""
        if generation != self.generation:
            self.generation = generation
            self.carried_seq = self.noted_seq = 0

    def written(self, generation: Generation, seq: int) -> None:
        """Note that a connection has written this event of a generation's standalone stream."""
        if generation == self.generation:  # It may have moved while the event was being written.
            self.carried_seq = max(self.carried_seq, seq)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One HTTP request as the store sees it.

    Attributes:
        binding: Its session.
        gate: The response of a GET; None for a POST and in the session's router.
    """

    binding: SessionBinding
    gate: ResumeGate | None = None


current_exchange: ContextVar[Exchange | None] = ContextVar("mcp_resumable.current_exchange", default=None)


def when_current_task_ends(callback: Callable[[], None]) -> None:
    """Call `callback` once the task that runs this is over, where the event loop can tell (asyncio; not trio)."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    if task is not None:
        task.add_done_callback(lambda _: callback())
