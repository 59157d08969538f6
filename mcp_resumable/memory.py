"""`MemoryStorage`: everything in this process, gone with it.

Every operation is synchronous inside, so each is atomic against every other task of the event loop. Costs are O(1), or
O(events returned or evicted); nothing scans what is retained, and there is no timer: what has expired is dropped by the
next operation that could see it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from mcp_resumable.cursor import STANDALONE, EventCursor, Generation, StreamId
from mcp_resumable.decision import (
    Dropped,
    NeverOpened,
    Retained,
    Snapshot,
    StreamState,
    Successor,
    Superseded,
)
from mcp_resumable.eviction import EmptyStreams, EvictionOrder
from mcp_resumable.ring import RingBuffer
from mcp_resumable.storage import (
    MAX_BATCH_EVENTS,
    AppendRefusedError,
    Batch,
    Retention,
    SessionDescription,
    Storage,
    StreamDescription,
    new_nonce,
)

__all__ = ["EVENT_OVERHEAD_BYTES", "STREAM_OVERHEAD_BYTES", "MemoryStorage"]

EVENT_OVERHEAD_BYTES = 72
"""Charged for an event beside its text: the header of a bytes object (33), rounding (up to 15), a slot in the ring (9)
and one in each of the two eviction orders (16)."""

STREAM_OVERHEAD_BYTES = 1024
"""Charged for a stream: its object, ring, id and the entries that find it; up to 950 measured on CPython 3.11."""

# Part of a ceiling that unfinished streams without a retained event may take; above it they are dropped, oldest first.
# A call that is silent for long is as a rule worth more than old events, but a flood of such calls must not evict all.
_EMPTY_STREAMS_SHARE = 0.5

# Earlier generations of one session whose nonces are remembered, to tell "earlier" (409) from "never" (400).
_MAX_REMEMBERED_GENERATIONS = 1_000


class MemoryStorage(Storage):
    """The default storage: one process, no dependencies.

    Not safe for use from several threads or event loops. A restart forgets every session, as the SDK itself does.
    """

    def __init__(
        self,
        *,
        retention: Retention | None = None,
        nonce: Callable[[], str] = new_nonce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep what `retention` allows.

        Args:
            retention: The limits that evict; bounded defaults.
            nonce: Source of generations' random parts; for tests.
            clock: Seconds, monotonic; for tests.
        """
        super().__init__(retention=retention, nonce=nonce)
        self._clock = clock
        # Each append asks for these; the model takes twice as long to tell.
        limits = self.retention
        self._limits = limits.max_events, limits.max_bytes, limits.max_session_bytes, limits.max_total_bytes
        # Least recently active first.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # What is left of sessions that are over: when to forget it, and the nonces of the generations they had.
        self._past: OrderedDict[str, tuple[float, dict[int, str]]] = OrderedDict()
        # Completed streams that are retained, and when their time is over; the first is due first.
        self._completed: OrderedDict[_Stream, float] = OrderedDict()
        self._order = EvictionOrder[_Stream]()
        self._empty = EmptyStreams[_Stream]()
        # Invariant: the sum of the charges of all sessions.
        self._charged_bytes = 0
        # Nothing expires before this time.
        self._next_expiry = math.inf

    @property
    def charged_bytes(self) -> int:
        """Bytes that count against `retention.max_total_bytes`: those of the events, and what keeping them takes."""
        return self._charged_bytes

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        now = self._now()
        session = self._sessions.get(session_id)
        if session is None and not create:
            return None
        if session is not None:
            nonces = session.nonces
            self._forget_session(session)
        else:
            _, nonces = self._past.pop(session_id, (now, {}))
        generation = Generation(next(reversed(nonces), 0) + 1, nonce)
        nonces[generation.counter] = nonce
        if len(nonces) > _MAX_REMEMBERED_GENERATIONS:
            del nonces[next(iter(nonces))]
        session = _Session(session_id=session_id, generation=generation, nonces=nonces, active_at=now)
        self._sessions[session_id] = session
        standalone = self._add_stream(session, STANDALONE, None, (generation.counter, 0))
        self._next_expiry = min(self._next_expiry, now + self.retention.idle_seconds)
        while len(self._sessions) > self.retention.max_sessions:
            self._evict_session(next(iter(self._sessions.values())), now)
        self._enforce_ceilings(session, newest=standalone)
        return generation

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        session = self._writable(session_id, generation)
        stream_id = StreamId.of_request(session.next_ordinal, request_id)
        previous = session.latest.get(request_id)
        if previous is not None:
            self._drop_stream(previous)
        stream = self._add_stream(session, stream_id, request_id, origin or (generation.counter, stream_id.ordinal))
        session.latest[request_id] = stream
        session.unanswered += 1
        self._note_empty(stream)
        self._enforce_ceilings(session, newest=stream)
        return stream_id

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        session = self._writable(session_id, generation)
        kept = session.streams.get(stream.ordinal)
        if kept is None or kept.id != stream or kept.is_terminal:
            raise AppendRefusedError(session.generation)
        ring = kept.ring
        max_events, max_bytes, max_session_bytes, max_total_bytes = self._limits
        if session.empty:
            session.empty.discard(kept)
            self._empty.discard(kept)
        seq = charge = 0
        for event in events:
            seq = ring.append(event)
            self._order.append(kept)
            session.order.append(kept)
            charge += EVENT_OVERHEAD_BYTES if event is None else EVENT_OVERHEAD_BYTES + len(event)
        session.charged_bytes += charge
        self._charged_bytes += charge
        if is_terminal:
            kept.is_terminal = True
            session.unanswered -= 1
            expires_at = session.active_at + self.retention.completed_seconds
            self._completed[kept] = expires_at
            self._next_expiry = min(self._next_expiry, expires_at)
        # Invariant: the newest event is never evicted by its own append.
        while seq - ring.replay_floor > max_events or (ring.retained_bytes > max_bytes and seq - ring.replay_floor > 1):
            self._evict_event(kept)
            self._order.forget(kept, 1)
            session.order.forget(kept, 1)
        if session.charged_bytes > max_session_bytes or self._charged_bytes > max_total_bytes:
            self._enforce_ceilings(session, newest=kept)
        if kept.changed is not None:
            kept.wake()
        return seq

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        session = self._active(session_id)
        if session is None:
            return None
        generation = session.generation
        if cursor is None:
            return Snapshot(generation=generation, claimed="never", stream=NeverOpened())
        request_id = cursor.stream.request_id
        if request_id is not None:
            newest = session.latest.get(request_id)
        else:
            newest = session.streams.get(cursor.stream.ordinal)
        successor = None if newest is None else newest.as_successor
        if cursor.generation != generation:
            is_earlier = session.nonces.get(cursor.generation.counter) == cursor.generation.nonce
            return Snapshot(
                generation=generation,
                claimed="earlier" if is_earlier else "never",
                stream=NeverOpened(),
                successor=successor if request_id is not None or cursor.stream == STANDALONE else None,
            )
        return Snapshot(
            generation=generation,
            claimed="current",
            stream=_state_of(session, cursor.stream, cursor.seq, newest),
            successor=successor,
        )

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        kept = self._readable(session_id, generation, stream)
        if kept is None:
            return None
        try:
            events = kept.ring.after(after_seq, limit)
        except IndexError:
            return None
        return Batch(events, kept.is_terminal and after_seq + len(events) == kept.ring.high_water_mark)

    async def _wait(self, session_id: str, generation: Generation, stream: StreamId, after_seq: int) -> None:
        kept = self._readable(session_id, generation, stream)
        # No await between this test and the wait, and each change wakes: no append can be missed.
        if kept is None or kept.is_terminal or kept.ring.high_water_mark != after_seq:
            await anyio.lowlevel.checkpoint()
            return
        if kept.changed is None:
            kept.changed = anyio.Event()
        await kept.changed.wait()

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        now = self._now()
        session = self._sessions.get(session_id)
        if session is None or (generation is not None and generation != session.generation):
            return False
        self._bury_session(session, now)
        return True

    async def _describe(self, session_id: str) -> SessionDescription | None:
        self._now()
        session = self._sessions.get(session_id)
        if session is None:
            return None
        return SessionDescription(
            session_id=session_id,
            generation=session.generation,
            streams=tuple(stream.describe() for stream in session.streams.values()),
        )

    def _active(self, session_id: str) -> _Session | None:
        now = self._clock()
        if now >= self._next_expiry:
            self._expire(now)
        session = self._sessions.get(session_id)
        if session is not None:
            session.active_at = now
            self._sessions.move_to_end(session_id)
        return session

    def _writable(self, session_id: str, generation: Generation) -> _Session:
        session = self._active(session_id)
        if session is None:
            raise AppendRefusedError(None)
        if session.generation != generation:
            raise AppendRefusedError(session.generation)
        return session

    def _readable(self, session_id: str, generation: Generation, stream: StreamId) -> _Stream | None:
        session = self._active(session_id)
        if session is None or session.generation != generation:
            return None
        kept = session.streams.get(stream.ordinal)
        return kept if kept is not None and kept.id == stream else None

    def _add_stream(
        self, session: _Session, stream_id: StreamId, request_id: str | None, origin: tuple[int, int]
    ) -> _Stream:
        as_successor = Successor(stream=stream_id, origin=origin)
        stream = _Stream(id=stream_id, request_id=request_id, session=session, as_successor=as_successor)
        session.streams[stream_id.ordinal] = stream
        session.next_ordinal = stream_id.ordinal + 1
        session.charged_bytes += stream.own_charge
        self._charged_bytes += stream.own_charge
        return stream

    def _evict_event(self, stream: _Stream) -> None:
        is_hole = stream.ring.has_hole_after(stream.ring.replay_floor) and stream.ring.after(
            stream.ring.replay_floor, 1
        ) == [None]
        freed = stream.ring.evict_oldest() + EVENT_OVERHEAD_BYTES
        stream.session.charged_bytes -= freed
        self._charged_bytes -= freed
        self.evicted_events += not is_hole
        if len(stream.ring):
            return
        if stream.is_terminal:
            self._drop_stream(stream)
        elif stream.request_id is not None:
            self._note_empty(stream)

    def _note_empty(self, stream: _Stream) -> None:
        stream.session.empty.add(stream, stream.own_charge)
        self._empty.add(stream, stream.own_charge)

    def _enforce_ceilings(self, session: _Session, newest: _Stream) -> None:
        """Evict oldest first until session and store fit; `newest` keeps the event that was just appended."""
        limit = self.retention.max_session_bytes
        while session.charged_bytes > limit and self._evict_oldest(session.order, session.empty, limit, newest):
            pass
        limit = self.retention.max_total_bytes
        while self._charged_bytes > limit and self._evict_oldest(self._order, self._empty, limit, newest):
            pass

    def _evict_oldest(
        self, order: EvictionOrder[_Stream], empty: EmptyStreams[_Stream], limit: int, newest: _Stream
    ) -> bool:
        """Evict the oldest event, or the oldest empty stream where those take too much; tell whether there was one."""
        stream = empty.oldest_above(limit * _EMPTY_STREAMS_SHARE)
        if stream is not None and stream is not newest:
            self._drop_stream(stream)
            return True
        stream = order.oldest()
        if stream is None or (stream is newest and len(stream.ring) == 1):
            return False
        order.popleft()
        (stream.session.order if order is self._order else self._order).forget(stream, 1)
        self._evict_event(stream)
        return True

    def _drop_stream(self, stream: _Stream) -> None:
        """Forget a stream and all that it holds; its readers are woken and find nothing."""
        session = stream.session
        del session.streams[stream.id.ordinal]
        if stream.request_id is not None:
            if session.latest.get(stream.request_id) is stream:
                del session.latest[stream.request_id]
            session.unanswered -= not stream.is_terminal
        session.order.forget(stream, len(stream.ring))
        session.charged_bytes -= self._release(stream)

    def _forget_session(self, session: _Session) -> None:
        del self._sessions[session.session_id]
        for stream in session.streams.values():
            self._release(stream)
        session.streams.clear()
        session.latest.clear()
        session.order = EvictionOrder[_Stream]()

    def _release(self, stream: _Stream) -> int:
        """Give back what the store holds for a stream, wake its readers, and return the charge that this frees."""
        places = len(stream.ring)
        freed = stream.own_charge + stream.ring.retained_bytes + EVENT_OVERHEAD_BYTES * places
        self._charged_bytes -= freed
        self._order.forget(stream, places)
        self._completed.pop(stream, None)
        self._empty.discard(stream)
        stream.session.empty.discard(stream)
        # What still names the stream (an order) must not hold its events.
        stream.ring = RingBuffer()
        stream.wake()
        return freed

    def _bury_session(self, session: _Session, now: float) -> None:
        """Forget a session but for the generation numbers that it used."""
        self._forget_session(session)
        expires_at = now + self.retention.idle_seconds
        self._past[session.session_id] = (expires_at, session.nonces)
        self._next_expiry = min(self._next_expiry, expires_at)
        if len(self._past) > self.retention.max_sessions:
            self._past.popitem(last=False)

    def _evict_session(self, session: _Session, now: float) -> None:
        self.evicted_events += sum(stream.retained_events for stream in session.streams.values())
        self._bury_session(session, now)

    def _now(self) -> float:
        """Return the time, after dropping what is too old at that time."""
        now = self._clock()
        if now >= self._next_expiry:
            self._expire(now)
        return now

    def _expire(self, now: float) -> None:
        """Drop what is too old: completed streams, idle sessions, what is left of past ones."""
        while self._completed:
            stream, expires_at = next(iter(self._completed.items()))
            if expires_at > now:
                break
            self.evicted_events += stream.retained_events
            self._drop_stream(stream)
        idle_seconds = self.retention.idle_seconds
        for _ in range(len(self._sessions)):
            session = next(iter(self._sessions.values()))
            if session.active_at + idle_seconds > now:
                break
            if session.unanswered:
                # A call that says nothing for an hour is not an idle session. Looked at again one idle time from now.
                session.active_at = now
                self._sessions.move_to_end(session.session_id)
            else:
                self._evict_session(session, now)
        while self._past:
            session_id, (expires_at, _) = next(iter(self._past.items()))
            if expires_at > now:
                break
            del self._past[session_id]
        self._next_expiry = min(
            next(iter(self._completed.values())) if self._completed else math.inf,
            next(iter(self._sessions.values())).active_at + idle_seconds if self._sessions else math.inf,
            next(iter(self._past.values()))[0] if self._past else math.inf,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    id: StreamId
    request_id: str | None
    session: _Session
    # What snapshots say of it, as long as it is the newest of its request. Made once: each decision needs it.
    as_successor: Successor
    ring: RingBuffer = field(default_factory=RingBuffer)
    is_terminal: bool = False
    # Made by the first reader that waits, set and forgotten by the next change.
    changed: anyio.Event | None = None

    @property
    def own_charge(self) -> int:
        return STREAM_OVERHEAD_BYTES + len(self.request_id or "")

    @property
    def retained_events(self) -> int:
        floor, count = self.ring.replay_floor, len(self.ring)
        if not self.ring.has_hole_after(floor):
            return count
        return sum(event is not None for event in self.ring.after(floor, count))

    def wake(self) -> None:
        if self.changed is not None:
            self.changed.set()
            self.changed = None

    def describe(self) -> StreamDescription:
        return StreamDescription(
            stream=str(self.id),
            request_id=self.request_id,
            replay_floor=self.ring.replay_floor,
            high_water_mark=self.ring.high_water_mark,
            is_terminal=self.is_terminal,
            retained_events=self.retained_events,
            retained_bytes=self.ring.retained_bytes,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    session_id: str
    generation: Generation
    nonces: dict[int, str]
    active_at: float
    streams: dict[int, _Stream] = field(default_factory=dict[int, _Stream])
    # The newest stream of each request id.
    latest: dict[str, _Stream] = field(default_factory=dict[str, _Stream])
    next_ordinal: int = 0
    unanswered: int = 0
    charged_bytes: int = 0
    order: EvictionOrder[_Stream] = field(default_factory=EvictionOrder["_Stream"])
    empty: EmptyStreams[_Stream] = field(default_factory=EmptyStreams["_Stream"])


def _state_of(session: _Session, claimed: StreamId, seq: int, newest: _Stream | None) -> StreamState:
    stream = session.streams.get(claimed.ordinal)
    if stream is not None:
        if stream.id != claimed:
            return NeverOpened()
        ring, is_terminal = stream.ring, stream.is_terminal
        mark, floor = ring.high_water_mark, ring.replay_floor
        is_rest_short = is_terminal and floor <= seq < mark <= seq + MAX_BATCH_EVENTS
        return Retained(
            high_water_mark=mark,
            replay_floor=floor,
            last_hole=ring.last_hole,
            is_terminal=is_terminal,
            rest=ring.after(seq, MAX_BATCH_EVENTS) if is_rest_short else None,
        )
    if claimed.ordinal >= session.next_ordinal:
        return NeverOpened()
    return Superseded() if newest is not None and newest.id.ordinal > claimed.ordinal else Dropped()
