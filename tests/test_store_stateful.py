"""The whole store against a model that forgets nothing, driven by Hypothesis through sequences of any rules.

Two things are compared after each step:

- `Naive`, the storage's and the store's contract in its most naive form. It keeps every event for ever and only moves
  floors; everything that an incremental structure would count is counted anew. It predicts every event id, verdict,
  description and statistic, and which connection is closed.
- The history: what each execution of each call has emitted, in order. Whatever a resume delivers must be exactly the
  rest of the one history that its cursor was issued in, lost events included. It knows nothing of floors and holes.

The store is called as the layer and the SDK call it: bindings, a task for each session's router, gates for GETs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mcp.server.streamable_http import EventMessage

from mcp_resumable import (
    DuplicateRequestIdError,
    Generation,
    MemoryStorage,
    ResumableEventStore,
    ResumptionError,
    Retention,
    SessionNotFoundError,
)
from mcp_resumable.cursor import EventCursor, StreamId
from mcp_resumable.decision import Snapshot
from mcp_resumable.memory import EVENT_OVERHEAD_BYTES, STREAM_OVERHEAD_BYTES
from mcp_resumable.session import Call, Connection, Exchange, SessionBinding, current_exchange
from mcp_resumable.storage import Batch

T = TypeVar("T")
When = Literal["before", "after"]
Fault = Literal["claim", "open", "append", "snapshot", "read"]

RETENTION = Retention(
    max_events=5,
    max_bytes=400,
    max_session_bytes=4_000,
    max_total_bytes=9_000,
    max_sessions=3,
    completed_seconds=10.0,
    idle_seconds=30.0,
)

LONG_ID = "x" * 300
REQUEST_IDS: tuple[int | str, ...] = (1, "1", "a", "é:\n", "", LONG_ID)
SESSION_IDS = ("s0", "s1", "s2", "s3")
STANDALONE = "_GET_stream"

# Turns of the event loop that are more than enough for every task to come to its next wait: the longest way (an append
# wakes a tail, which reads, sends and waits again) takes four.
TURNS = 12


# What is compared with: the contract, naively.


class ModelFaultError(Exception):
    """The storage fails here."""


class ModelRefusedError(Exception):
    """The storage refuses a write."""

    def __init__(self, current: MGeneration | None) -> None:
        self.current = current


@dataclass(eq=False)
class MGeneration:
    counter: int
    nonce: str | None  # None until the store has shown it


@dataclass(eq=False)
class MStream:
    ordinal: int
    request_id: str | None
    session: MSession
    origin: tuple[int, int]
    places: list[bytes | None] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    floor: int = 0
    is_terminal: bool = False
    expires_at: float = 0.0
    is_known: bool = True
    empty_since: int = 0  # a stamp

    @property
    def text(self) -> str:
        if self.request_id is None or not self.carries_request_id:
            return str(self.ordinal)
        return f"{self.ordinal}.{urlsafe_b64encode(self.request_id.encode()).decode().rstrip('=')}"

    @property
    def carries_request_id(self) -> bool:
        return self.request_id is not None and self.request_id != LONG_ID

    @property
    def retained(self) -> list[bytes]:
        return [place for place in self.places[self.floor :] if place is not None]

    @property
    def charge(self) -> int:
        places = sum(EVENT_OVERHEAD_BYTES + len(place or b"") for place in self.places[self.floor :])
        return STREAM_OVERHEAD_BYTES + len(self.request_id or "") + places


@dataclass(eq=False)
class MSession:
    session_id: str
    generation: MGeneration
    nonces: dict[int, MGeneration]
    active_at: float
    streams: list[MStream] = field(default_factory=list)  # every one of this generation, by ordinal

    @property
    def known(self) -> list[MStream]:
        return [stream for stream in self.streams if stream.is_known]

    def newest(self, request_id: str) -> MStream | None:
        return next((stream for stream in self.known[::-1] if stream.request_id == request_id), None)


@dataclass(eq=False)
class MConnection:
    real: Connection
    is_closed: bool = False


@dataclass(eq=False)
class MCall:
    request_id: str | None
    connection: MConnection | None = None
    stream: MStream | None = None
    origin: tuple[int, int] | None = None
    lost: int = 0
    is_answered: bool = False
    is_answer_lost: bool = False
    is_served: bool = False


@dataclass(eq=False)
class MBinding:
    session_id: str
    nonce: str
    status: str = "unclaimed"
    generation: MGeneration | None = None
    calls: dict[str, MCall] = field(default_factory=dict)
    standalone: MCall = field(default_factory=lambda: MCall(None))
    unsettled: list[MCall] = field(default_factory=list)
    consumers: dict[MStream, MConnection] = field(default_factory=dict)
    carried: int = 0
    attempted: MGeneration | None = None  # what a move that failed would have led to
    adoptions: int = 0


@dataclass(eq=False)
class MTail:
    """A connection that is served from the storage: what it must have carried by now, and whether it is over."""

    binding: MBinding
    stream: MStream
    connection: MConnection
    seq: int
    is_over: bool = False
    carried: list[tuple[str | None, str]] = field(default_factory=list)

    def go_on(self) -> None:
        stream = self.stream
        while not self.is_over:
            if self.connection.is_closed or not stream.is_known or self.seq < stream.floor:
                self.is_over = True
            elif self.seq == len(stream.places):
                self.is_over = stream.is_terminal
                break
            elif (place := stream.places[self.seq]) is None:
                self.is_over = True
            else:
                self.seq += 1
                self.carried.append((event_id(stream, self.seq), place.decode()))
                if stream.request_id is None and self.binding.generation is stream.session.generation:
                    self.binding.carried = max(self.binding.carried, self.seq)


@dataclass(frozen=True)
class Served:
    """The claim is honoured, or, where `marker` is set, what it can still have is served after a marker."""

    stream: MStream
    seq: int
    marker: str | None = None


@dataclass(frozen=True)
class Refused:
    """The claim is refused for one of `reasons`; `is_answered`: with an answer in a stream."""

    reasons: frozenset[str]
    is_answered: bool = False


class Naive:
    """Storage and store as one sequential specification."""

    def __init__(self, *, rejection: str, replay_completed: bool) -> None:
        self.rejection = rejection
        self.replay_completed = replay_completed
        self.now = 0.0
        self.faults_planned: dict[Fault, When] = {}
        self.sessions: dict[str, MSession] = {}  # least recently active first
        self.past: dict[str, tuple[float, dict[int, MGeneration]]] = {}
        self.stamp = 0
        self.evicted = self.appends = self.oversized = self.faults = 0
        self.decisions: Counter[str] = Counter()

    # The storage.

    def expire(self) -> None:
        for session in self.sessions.values():
            for stream in session.known:
                if stream.is_terminal and stream.expires_at <= self.now:
                    self.evicted += len(stream.retained)
                    stream.is_known = False
        for session in list(self.sessions.values()):
            if session.active_at + RETENTION.idle_seconds <= self.now:
                if any(not stream.is_terminal for stream in session.known if stream.request_id is not None):
                    self.touch(session)
                else:
                    self.evict_session(session)
        self.past = {key: value for key, value in self.past.items() if value[0] > self.now}

    def touch(self, session: MSession) -> None:
        session.active_at = self.now
        self.sessions[session.session_id] = self.sessions.pop(session.session_id)

    def forget(self, session: MSession) -> None:
        del self.sessions[session.session_id]
        for stream in session.streams:
            stream.is_known = False

    def bury(self, session: MSession) -> None:
        self.forget(session)
        self.past[session.session_id] = (self.now + RETENTION.idle_seconds, session.nonces)
        while len(self.past) > RETENTION.max_sessions:
            del self.past[next(iter(self.past))]

    def evict_session(self, session: MSession) -> None:
        self.evicted += sum(len(stream.retained) for stream in session.known)
        self.bury(session)

    def end_session(self, session_id: str) -> None:
        if session_id in self.sessions:
            self.bury(self.sessions[session_id])

    def fault(self, operation: Fault) -> Callable[[], None]:
        """Fail before the operation where that is planned, and return what fails after it."""
        when = self.faults_planned.pop(operation, None)
        if when == "before":
            raise ModelFaultError

        def after() -> None:
            if when == "after":
                raise ModelFaultError

        return after

    def claim(self, session_id: str, nonce: str | None, *, create: bool) -> MGeneration | None:
        after = self.fault("claim")
        session = self.sessions.get(session_id)
        if session is not None:
            nonces = session.nonces
            self.forget(session)
        elif create:
            _, nonces = self.past.pop(session_id, (0.0, {}))
        else:
            after()
            return None
        generation = MGeneration(max(nonces, default=0) + 1, nonce)
        nonces[generation.counter] = generation
        session = self.sessions[session_id] = MSession(session_id, generation, nonces, self.now)
        standalone = MStream(0, None, session, (generation.counter, 0))
        session.streams.append(standalone)
        while len(self.sessions) > RETENTION.max_sessions:
            self.evict_session(next(iter(self.sessions.values())))
        self.enforce(session, standalone)
        after()
        return generation

    def writable(self, binding: MBinding) -> MSession:
        session = self.sessions.get(binding.session_id)
        if session is None:
            raise ModelRefusedError(None)
        self.touch(session)
        if session.generation is not binding.generation:
            raise ModelRefusedError(session.generation)
        return session

    def open_stream(self, binding: MBinding, call: MCall) -> MStream:
        after = self.fault("open")
        session = self.writable(binding)
        assert call.request_id is not None
        previous = session.newest(call.request_id)
        if previous is not None:
            previous.is_known = False
        place = (session.generation.counter, len(session.streams))
        stream = MStream(len(session.streams), call.request_id, session, call.origin or place)
        session.streams.append(stream)
        self.empty(stream)
        self.enforce(session, stream)
        after()
        return stream

    def append(self, binding: MBinding, stream: MStream, events: Sequence[bytes | None], *, is_terminal: bool) -> int:
        after = self.fault("append")
        session = self.writable(binding)
        if stream.session is not session or not stream.is_known or stream.is_terminal:
            raise ModelRefusedError(session.generation)
        for event in events:
            self.stamp += 1
            stream.places.append(event)
            stream.stamps.append(self.stamp)
        if is_terminal:
            stream.is_terminal = True
            stream.expires_at = self.now + RETENTION.completed_seconds
        while len(stream.places) - stream.floor > 1 and (
            len(stream.places) - stream.floor > RETENTION.max_events
            or sum(map(len, stream.retained)) > RETENTION.max_bytes
        ):
            self.evict_oldest(stream)
        self.enforce(session, stream)
        after()
        return len(stream.places)

    def evict_oldest(self, stream: MStream) -> None:
        self.evicted += stream.places[stream.floor] is not None
        stream.floor += 1
        if stream.floor == len(stream.places):
            if stream.is_terminal:
                stream.is_known = False
            self.empty(stream)

    def empty(self, stream: MStream) -> None:
        self.stamp += 1
        stream.empty_since = self.stamp

    def enforce(self, session: MSession, newest: MStream) -> None:
        for sessions, limit in (
            ([session], RETENTION.max_session_bytes),
            (list(self.sessions.values()), RETENTION.max_total_bytes),
        ):
            while sum(stream.charge for one in sessions for stream in one.known) > limit:
                empty = [
                    s for one in sessions for s in one.known if s.request_id is not None and s.floor == len(s.places)
                ]
                silent = min(empty, key=lambda s: s.empty_since, default=None)
                if silent is not None and silent is not newest and sum(s.charge for s in empty) > limit / 2:
                    silent.is_known = False
                    continue
                candidates = [s for one in sessions for s in one.known if s.floor < len(s.places)]
                oldest = min(candidates, key=lambda s: s.stamps[s.floor], default=None)
                if oldest is None or (oldest is newest and oldest.floor == len(oldest.places) - 1):
                    break
                self.evict_oldest(oldest)

    # The store's writing side.

    def bind(self, binding: MBinding) -> None:
        try:
            self.first_or_next_claim(binding)
        except ModelFaultError:
            self.faults += 1

    def first_or_next_claim(self, binding: MBinding) -> None:
        is_first = binding.status == "unclaimed"
        generation = self.claim(binding.session_id, binding.nonce if is_first else None, create=True)
        assert generation is not None
        for call in binding.calls.values():
            if is_first:
                call.origin = None
            else:
                call.lost += call.stream is not None
        self.move_to(binding, generation)

    def move_to(self, binding: MBinding, generation: MGeneration) -> None:
        running = [call for call in binding.calls.values() if call.stream is not None and not call.is_answered]
        if binding.status == "unclaimed":
            for call in running:
                call.stream = None
        else:
            self.supersede(binding, running)
            self.close_consumers(binding)
            binding.unsettled.clear()
            binding.standalone.lost = 0
        binding.generation = generation
        binding.attempted = None
        binding.status = "live"
        binding.carried = 0
        binding.standalone.stream = self.sessions[binding.session_id].streams[0]
        self.reopen(binding, running)

    def supersede(self, binding: MBinding, calls: list[MCall]) -> None:
        for call in calls:
            assert call.stream is not None
            for connection in (binding.consumers.pop(call.stream, None), call.connection):
                if connection is not None:
                    connection.is_closed = True
            call.stream = None

    def reopen(self, binding: MBinding, calls: list[MCall]) -> None:
        for call in calls:
            if call not in binding.unsettled:
                binding.unsettled.append(call)
            try:
                while call.stream is None:
                    try:
                        self.open(binding, call)
                    except ModelRefusedError as refusal:
                        if not self.has_moved(binding, refusal):
                            break
            except ModelFaultError:
                self.faults += 1
                continue
            if not call.lost and call in binding.unsettled:
                binding.unsettled.remove(call)

    def open(self, binding: MBinding, call: MCall) -> None:
        stream = call.stream = self.open_stream(binding, call)
        if call.origin is None:
            call.origin = (stream.session.generation.counter, stream.ordinal)
        if call.connection is not None and not call.connection.is_closed:
            self.take_over(binding, stream, call.connection)

    def take_over(self, binding: MBinding, stream: MStream, connection: MConnection) -> None:
        older = binding.consumers.get(stream)
        if older is not None and older is not connection:
            older.is_closed = True
        binding.consumers[stream] = connection

    def close_consumers(self, binding: MBinding) -> None:
        for connection in binding.consumers.values():
            connection.is_closed = True
        binding.consumers.clear()

    def ensure_open(self, binding: MBinding, call: MCall) -> None:
        if binding.status in ("unclaimed", "evicted"):
            self.first_or_next_claim(binding)
        while call.stream is None:
            try:
                self.open(binding, call)
            except ModelRefusedError as refusal:
                if not self.has_moved(binding, refusal):
                    if binding.status != "evicted":
                        raise
                    self.first_or_next_claim(binding)

    def has_moved(self, binding: MBinding, refusal: ModelRefusedError) -> bool:
        """Take in a refusal; tell whether the writer had taken a move of its own for failed."""
        if binding.status == "live":
            if refusal.current is None:
                binding.status = "evicted"
                binding.unsettled.clear()
                live = [call.connection for call in binding.calls.values()]
                for connection in binding.consumers.values():
                    connection.is_closed |= connection not in live
            elif refusal.current is binding.attempted:
                binding.adoptions += 1
                self.advance_to(binding, refusal.current)
                return True
            elif refusal.current is not binding.generation:
                self.end(binding, "superseded")
        return False

    def end(self, binding: MBinding, status: str = "ended") -> None:
        binding.status = status
        binding.unsettled.clear()
        self.close_consumers(binding)

    def prime(self, binding: MBinding, call: MCall) -> tuple[MStream, int] | None:
        try:
            self.ensure_open(binding, call)
        except ModelRefusedError:
            return None
        except ModelFaultError:
            self.faults += 1
            return None
        assert call.stream is not None
        return call.stream, 0

    def record(
        self, binding: MBinding, call: MCall, data: bytes | None, *, is_answer: bool
    ) -> tuple[MStream, int] | None:
        """Return where the event is; None where it went out live without an id.

        `data` None: it has no JSON text, and its place is a hole.
        """
        if call.is_answered:
            return None
        try:
            if binding.status in ("ended", "superseded"):
                return None
            self.faults += data is None
            return self.store(binding, call, data, is_answer=is_answer)
        except ModelFaultError:
            self.faults += 1
            call.lost += 1
            call.is_answer_lost = is_answer
            if call not in binding.unsettled:
                binding.unsettled.append(call)
            tail = binding.consumers.get(call.stream) if call.stream is not None else None
            if tail is not None and tail is not call.connection:
                tail.is_closed = True
            return None
        finally:
            if is_answer:
                call.is_answered = True
                self.forget_if_done(binding, call)

    def store(
        self, binding: MBinding, call: MCall, data: bytes | None, *, is_answer: bool
    ) -> tuple[MStream, int] | None:
        event = data if data is not None and len(data) <= RETENTION.max_bytes else None
        self.oversized += data is not None and event is None
        stored: tuple[MStream, int] | None = None
        if binding.generation is not None and call.stream is not None and not call.lost:
            with contextlib.suppress(ModelRefusedError):
                stored = call.stream, self.append(binding, call.stream, (event,), is_terminal=is_answer)
        while stored is None:
            if binding.status == "evicted" and call.stream is not None:
                return None
            try:
                self.ensure_open(binding, call)
                assert call.stream is not None
                events = (*[None] * call.lost, event)
                stored = call.stream, self.append(binding, call.stream, events, is_terminal=is_answer)
            except ModelRefusedError as refusal:
                if not self.has_moved(binding, refusal):
                    return None
                continue
            call.lost = 0
            if call in binding.unsettled:
                binding.unsettled.remove(call)
        self.appends += event is not None
        return stored

    def forget_if_done(self, binding: MBinding, call: MCall) -> None:
        key = call.request_id or ""
        if call.is_answered and call.is_served and binding.calls.get(key) is call:
            del binding.calls[key]

    def serve_ends(self, binding: MBinding, call: MCall) -> None:
        connection, call.connection, call.is_served = call.connection, None, True
        binding.consumers = {s: c for s, c in binding.consumers.items() if c is not connection}
        self.forget_if_done(binding, call)

    def advance(self, binding: MBinding) -> MGeneration | None:
        binding.attempted = MGeneration(0, "")  # Nobody's, where it fails before its effect.
        before = self.sessions.get(binding.session_id)
        try:
            generation = self.claim(binding.session_id, None, create=False)
        except ModelFaultError:
            after = self.sessions.get(binding.session_id)
            if after is not None and after is not before:
                binding.attempted = after.generation
            raise
        if generation is not None and binding.status != "ended":
            self.advance_to(binding, generation)
        return generation

    def advance_to(self, binding: MBinding, generation: MGeneration) -> None:
        for call in binding.calls.values():
            call.lost = 0
        self.move_to(binding, generation)

    def restart(self, binding: MBinding, call: MCall) -> None:
        call.lost = 0
        if call.stream is None:
            return
        self.supersede(binding, [call])
        self.reopen(binding, [call])

    # The store's reading side.

    def settle(self, binding: MBinding) -> None:
        if binding.status == "live" and binding.attempted is not None:
            session = self.look(binding)
            self.has_moved(binding, ModelRefusedError(session.generation if session is not None else None))
        if binding.status == "unclaimed":
            self.first_or_next_claim(binding)
        while binding.unsettled:
            call = binding.unsettled[0]
            try:
                if call.stream is None:
                    self.open(binding, call)
                assert call.stream is not None
                if call.lost:
                    self.append(binding, call.stream, [None] * call.lost, is_terminal=call.is_answer_lost)
            except ModelRefusedError as refusal:
                if self.has_moved(binding, refusal):
                    continue
            call.lost = 0
            if call in binding.unsettled:
                binding.unsettled.remove(call)

    def look(self, binding: MBinding) -> MSession | None:
        self.fault("snapshot")
        session = self.sessions.get(binding.session_id)
        if session is not None:
            self.touch(session)
        return session

    def snapshot(self, binding: MBinding) -> MSession | None:
        self.settle(binding)
        return self.look(binding)

    def verdict(self, session: MSession, claim: Claim) -> frozenset[str]:
        """Return the reasons for which the claim may be refused; `resume` is one."""
        if claim.parts is None:
            return frozenset({"malformed_event_id"})
        counter, nonce, text, seq = claim.parts
        if (counter, nonce) != (session.generation.counter, session.generation.nonce):
            earlier = session.nonces.get(counter)
            is_earlier = earlier is not None and earlier.nonce == nonce
            return frozenset({"generation_mismatch" if is_earlier else "unrecognized_generation"})
        ordinal = int(text.partition(".")[0])
        stream = session.streams[ordinal] if ordinal < len(session.streams) else None
        if stream is None:
            return frozenset({"future_event_id"})
        if stream.text != text and stream.is_known:
            return frozenset({"future_event_id"})
        if not stream.is_known:
            # Nobody knows any more which request it was for, so the claim is taken at its word.
            request_id = claimed_request_id(text)
            newest = session.newest(request_id) if request_id is not None else None
            is_superseded = newest is not None and newest.ordinal > ordinal
            return frozenset({"stream_superseded" if is_superseded else "event_evicted"})
        mark = len(stream.places)
        if seq > mark:
            return frozenset({"future_event_id"})
        is_answer_kept = stream.floor < mark and stream.places[-1] is not None
        if stream.is_terminal and (seq == mark or not is_answer_kept or not self.replay_completed):
            return frozenset({"stream_completed"})
        if seq < stream.floor:
            return frozenset({"event_evicted"})
        return frozenset({"replay_gap" if None in stream.places[seq:] else "resume"})

    def claim_outcome(self, binding: MBinding, claim: Claim) -> Served | Refused:
        try:
            session = self.snapshot(binding)
        except ModelFaultError:
            self.faults += 1
            self.decisions["storage_unavailable"] += 1
            return Refused(frozenset({"storage_unavailable"}))
        if session is None:
            self.decisions["session_not_found"] += 1
            return Refused(frozenset({"session_not_found"}))
        reasons = self.verdict(session, claim)
        if reasons == {"resume"}:
            self.decisions["resume"] += 1
            assert claim.parts is not None
            return Served(session.streams[int(claim.parts[2].partition(".")[0])], claim.parts[3])
        self.decisions[next(iter(reasons))] += 1
        if claim.parts is None or self.rejection == "status":
            return Refused(reasons)
        return self.refuse_in_stream(binding, session, claim.parts, reasons)

    def refuse_in_stream(
        self, binding: MBinding, session: MSession, parts: tuple[int, str, str, int], reasons: frozenset[str]
    ) -> Served | Refused:
        counter, _, text, _ = parts
        reason = next(iter(reasons))
        if text == "0":
            if reason in ("unrecognized_generation", "future_event_id"):
                return Refused(reasons)
            place = self.plain_outcome(binding)
            return Served(place.stream, place.seq, reason) if isinstance(place, Served) else place
        request_id = claimed_request_id(text)
        if request_id is None:
            return Refused(reasons)
        newest = session.newest(request_id)
        if reason in ("generation_mismatch", "stream_superseded") and newest is not None:
            start = Claim("", (session.generation.counter, session.generation.nonce or "", newest.text, 0))
            if (counter, int(text.partition(".")[0])) >= newest.origin:
                session = self.snapshot(binding) or session
                if self.verdict(session, start) == {"resume"}:
                    return Served(newest, 0, reason)
        return Refused(reasons, is_answered=True)

    def plain_outcome(self, binding: MBinding) -> Served | Refused:
        session: MSession | None = None
        while session is None:
            try:
                if binding.status in ("unclaimed", "evicted"):
                    self.first_or_next_claim(binding)
                session = self.snapshot(binding)
            except ModelFaultError:
                self.faults += 1
                return Refused(frozenset({"storage_unavailable"}))
            if session is None:
                if binding.status == "ended":
                    return Refused(frozenset({"session_not_found"}))
                # It makes no claim, so the session goes on in its next generation.
                self.has_moved(binding, ModelRefusedError(None))
        if session.generation is not binding.generation:
            return Refused(frozenset({"generation_mismatch"}))
        stream = session.streams[0]
        last_hole = max((seq for seq, place in enumerate(stream.places, 1) if place is None), default=0)
        binding.carried = max(binding.carried, stream.floor, last_hole)
        return Served(stream, binding.carried)


def claimed_request_id(text: str) -> str | None:
    """Return the request id that rides along in the text of a stream, None where there is none."""
    _, dot, encoded = text.partition(".")
    return urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode() if dot else None


def event_id(stream: MStream, seq: int) -> str:
    generation = stream.session.generation
    return f"{generation.counter}-{generation.nonce}:{stream.text}:{seq}"


# Claims.


@dataclass(frozen=True)
class Claim:
    """What a client presents; `parts` are counter, nonce, stream and seq, None where it is malformed."""

    text: str
    parts: tuple[int, str, str, int] | None

    @classmethod
    def of(cls, counter: int, nonce: str, stream: str, seq: int) -> Claim:
        text = f"{counter}-{nonce}:{stream}:{seq}"
        return cls(text, (counter, nonce, stream, seq) if counter > 0 and seq >= 0 else None)

    @classmethod
    def issued(cls, text: str) -> Claim:
        generation, stream, seq = text.split(":")
        counter, nonce = generation.split("-")
        return cls.of(int(counter), nonce, stream, int(seq))


MUTATIONS = ("seq", "ordinal", "counter", "nonce", "cut", "digits", "padded", "unicode")


def mutated(claim: Claim, how: str, amount: int) -> Claim:
    """Return the claim changed in one respect; `amount` is not 0."""
    assert claim.parts is not None
    counter, nonce, stream, seq = claim.parts
    match how:
        case "seq":
            return Claim.of(counter, nonce, stream, seq + amount)
        case "ordinal":
            ordinal, dot, encoded = stream.partition(".")
            other = max(int(ordinal) + amount, 0)
            return Claim.of(counter, nonce, f"{other}{dot}{encoded}" if other else "0", seq)
        case "counter":
            return Claim.of(counter + amount, nonce, stream, seq)
        case "nonce":
            return Claim.of(counter, nonce[:-1] + ("y" if nonce[-1] == "z" else "z"), stream, seq)
        case "cut":
            end = claim.text.rindex(":") + 1
            return Claim(claim.text[: abs(amount) * 7 % end], None)
        case "digits":
            return Claim(claim.text.translate({ord("0") + n: 0x0660 + n for n in range(10)}), None)
        case "padded":
            return Claim(re.sub(r":(\d+)$", r":0\1", claim.text), None)
        case _:
            return Claim(claim.text + "\u00e9\r\n"[abs(amount) % 3], None)


# The real thing.


class FaultyStorage(MemoryStorage):
    """A `MemoryStorage` that fails where it is told to, before or after the operation took effect."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(retention=RETENTION, clock=clock)
        self.faults_planned: dict[Fault, When] = {}

    async def _do(self, operation: Fault, effect: Coroutine[Any, Any, T]) -> T:
        when = self.faults_planned.pop(operation, None)
        if when == "before":
            effect.close()
            raise OSError("before")
        result = await effect
        if when == "after":
            raise OSError("after")
        return result

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        return await self._do("claim", super()._claim_generation(session_id, nonce, create=create))

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        return await self._do("open", super()._open_stream(session_id, generation, request_id, origin))

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        return await self._do("append", super()._append(session_id, generation, stream, events, is_terminal))

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        return await self._do("snapshot", super()._snapshot(session_id, cursor))

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        return await self._do("read", super()._read(session_id, generation, stream, after_seq, limit))


class Gate:
    """A GET's response."""

    def __init__(self, *, is_claim: bool) -> None:
        self.is_claim = is_claim
        self.connection = Connection()
        self.accepted: list[str | None] = []
        self.error: ResumptionError | None = None

    async def accept(self, event_id: str | None) -> None:
        self.accepted.append(event_id)

    def refuse(self, error: ResumptionError) -> None:
        self.error = error


@dataclass(eq=False)
class Post:
    """A call as client and test know it: its history is what it has emitted in its current execution."""

    session: Session
    request_id: int | str
    call: Call
    model: MCall
    connection: MConnection
    history: History
    live_prefixes: set[str] = field(default_factory=set)


@dataclass(eq=False)
class History:
    """What one execution emitted in one generation, in order: payload and event id, `""` where it has none."""

    events: list[tuple[str, str]] = field(default_factory=list)
    is_answered: bool = False


@dataclass(eq=False)
class Session:
    binding: SessionBinding
    model: MBinding
    router: asyncio.Task[None]
    inbox: asyncio.Queue[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]]
    standalone: History = field(default_factory=History)
    posts: list[Post] = field(default_factory=list)
    is_replaced: bool = False


@dataclass(eq=False)
class Tail:
    gate: Gate
    task: asyncio.Task[None]
    model: MTail
    carried: list[tuple[str | None, str]]


class DuckMessage:
    """As little of a message as the store may ask for; `text` None has no JSON text."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def model_dump_json(self, **_options: object) -> str:
        if self._text is None:
            raise ValueError("no JSON text")
        return self._text


class DuckNotification(DuckMessage):
    method = "notifications/progress"


def real_message(text: str) -> tuple[Any, str]:
    """Return the installed SDK's own message, and how the SDK spells it."""
    types: Any = import_module("mcp.types")
    if hasattr(types, "jsonrpc_message_adapter"):
        message = types.jsonrpc_message_adapter.validate_json(text)
        return message, message.model_dump_json(by_alias=True, exclude_unset=True)
    message = types.JSONRPCMessage.model_validate_json(text)
    return message, message.model_dump_json(by_alias=True, exclude_none=True)


def message_of(text: str, kind: str, *, is_answer: bool) -> tuple[Any, str]:
    """Return a message and its JSON text."""
    if kind == "real":
        return real_message(text)
    return (DuckMessage if is_answer else DuckNotification)(None if kind == "broken" else text), text


# What is rare comes last: Hypothesis shrinks to what comes first.
KINDS = st.sampled_from(["duck"] * 8 + ["real"] * 4 + ["broken"])
SIZES = st.sampled_from([0] * 8 + [60, 150, 500])
FAULTS: st.SearchStrategy[When | None] = st.sampled_from([None] * 14 + ["before", "after"])
PICKS = st.integers(0, 2**16)
SELDOM = st.sampled_from([False] * 5 + [True])


class Store(RuleBasedStateMachine):
    """The store, its storage, and everything that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.sessions: list[Session] = []
        self.tails: list[Tail] = []
        self.claims: list[tuple[str, Claim]] = []
        self.histories: dict[str, tuple[History, str]] = {}
        self.serial = 0
        self.nonces: set[str] = set()

    @initialize(rejection=st.sampled_from(["status", "stream"]), replay_completed=st.sampled_from([True, True, False]))
    def build(self, rejection: Literal["status", "stream"], replay_completed: bool) -> None:
        self.naive = Naive(rejection=rejection, replay_completed=replay_completed)
        self.storage = FaultyStorage(lambda: self.naive.now)
        self.store = ResumableEventStore(self.storage, rejection=rejection, replay_completed=replay_completed)
        for session_id in SESSION_IDS[:2]:
            self.open_session(session_id, primed=True, fault=None, kind="duck", sure=True)
            self.begin_call(-1, 1, primed=True, opens=None, claim=None)
            self.emit(-1, [(0, "duck", None, None)] * 2)

    def teardown(self) -> None:
        async def cancel() -> None:
            tasks = [session.router for session in self.sessions] + [tail.task for tail in self.tails]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(cancel())
        self.loop.close()

    # How the rules do things.

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def plan(self, **faults: When | None) -> None:
        planned: dict[Fault, When] = {name: when for name, when in faults.items() if when is not None}  # type: ignore[misc]
        self.naive.faults_planned = dict(planned)
        self.storage.faults_planned = planned

    def pick_session(self, pick: int) -> Session:
        """Return a session that the layer would serve."""
        served = self.served
        return served[pick % len(served)]

    @property
    def served(self) -> list[Session]:
        return [one for one in self.sessions if one.model.status != "ended" and not one.is_replaced]

    @property
    def unanswered(self) -> list[Post]:
        return [post for session in self.served for post in session.posts if not post.model.is_answered]

    def payload(self, size: int, *, is_answer: bool, request_id: int | str = 0) -> str:
        self.serial += 1
        unique = f"{self.serial}{'.' * size}"
        message: dict[str, object] = {"jsonrpc": "2.0", "id": request_id, "result": {"u": unique}}
        if not is_answer:
            params = {"progressToken": 1, "progress": 1.0, "message": unique}
            message = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
        return json.dumps(message, separators=(",", ":"), ensure_ascii=False)

    def claim_is_issued(self, session: Session, text: str, history: History) -> None:
        """Note an event id that a client has."""
        prefix = text.rpartition(":")[0]
        place = self.histories.setdefault(f"{session.model.session_id} {prefix}", (history, text))
        assert place[0] is history, "one stream carries two executions"
        self.claims.append((session.model.session_id, Claim.issued(text)))

    def emit_in_router(
        self,
        session: Session,
        stream_id: str,
        model: MCall,
        place: Post | Session,
        text: str,
        kind: str,
        *,
        is_answer: bool,
    ) -> str:
        message, text = message_of(text, kind, is_answer=is_answer)

        async def route() -> str:
            answered: asyncio.Future[str] = self.loop.create_future()
            session.inbox.put_nowait((self.store.store_event(stream_id, message), answered))
            text_id = await answered
            await self.turn()
            return text_id

        data = None if kind == "broken" else text.encode()
        with self.histories_of(session):
            stored = self.naive.record(session.model, model, data, is_answer=is_answer)
        history = place.history if isinstance(place, Post) else place.standalone
        text_id = self.do(route())
        self.learn()
        for tail in self.tails:
            tail.model.go_on()
        assert text_id == ("" if stored is None else event_id(*stored))
        history.events.append((text, text_id))
        if text_id:
            self.claim_is_issued(session, text_id, history)
        return text_id

    def learn(self) -> None:
        """Learn the random part of generations that were claimed; never seen before, and then for ever the same."""
        for session_id, session in self.naive.sessions.items():
            if session.generation.nonce is None:
                description = self.do(self.store.describe(session_id))
                assert description is not None
                nonce = description.generation.nonce
                assert nonce not in self.nonces
                self.nonces.add(nonce)
                session.generation.nonce = nonce

    @contextlib.contextmanager
    def histories_of(self, session: Session) -> Generator[None]:
        """Begin new histories where this finds the session in the generation of a move that was taken for failed."""
        adoptions, unanswered = session.model.adoptions, [post for post in session.posts if not post.model.is_answered]
        try:
            yield
        finally:
            if session.model.adoptions != adoptions:
                for post in unanswered:  # Its answer belongs there, if this was it.
                    post.history = History()
                session.standalone = History()

    def histories_move(self, session: Session, posts: Sequence[Post], *, with_standalone: bool = False) -> None:
        """From here on these calls emit in another stream."""
        for post in posts:
            if not post.model.is_answered:
                post.history = History()
        if with_standalone:
            session.standalone = History()

    # Sessions.

    @rule(session_id=st.sampled_from(SESSION_IDS), primed=st.booleans(), fault=FAULTS, kind=KINDS, sure=SELDOM)
    def open_session(self, session_id: str, primed: bool, fault: When | None, kind: str, sure: bool) -> None:
        if not sure and any(one.model.session_id == session_id for one in self.served):
            return
        for old in self.sessions:
            if old.model.session_id == session_id:
                # One of the two would claim it again: workers that fight for a session are not this test's business.
                if old.model.status == "unclaimed":
                    return
                old.is_replaced = True
        binding = self.store.bind_session(self, None)
        self.nonces.add(binding.nonce)
        model = MBinding(session_id, binding.nonce)
        inbox: asyncio.Queue[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]] = asyncio.Queue()

        async def route() -> None:
            current_exchange.set(Exchange(binding))
            while True:
                action, answered = await inbox.get()
                answered.set_result(await action)

        async def begin() -> tuple[Session, Call, Connection, str]:
            connection = Connection()
            call = await binding.begin_call("init", connection)
            token = current_exchange.set(Exchange(binding))
            promised = await self.store.store_event("init", None) if primed else ""
            current_exchange.reset(token)
            await self.store.attach_session(binding, session_id)
            return Session(binding, model, self.loop.create_task(route()), inbox), call, connection, promised

        self.plan(claim=fault)
        session, call, connection, promised = self.do(begin())
        self.sessions.append(session)
        assert promised == (f"1-{binding.nonce}:1.aW5pdA:0" if primed else "")
        opening = MConnection(connection)
        model.calls["init"] = MCall("init", opening)
        if primed:
            # The promise stands for a stream until the session id is known.
            model.calls["init"].stream = MStream(1, "init", MSession(session_id, MGeneration(1, ""), {}, 0), (1, 1))
        self.naive.bind(model)
        post = Post(session, "init", call, model.calls["init"], opening, History())
        session.posts.append(post)
        if primed:
            self.claims.append((session_id, Claim.issued(promised)))
        self.finish(post, 0, kind, serve=True)

    @precondition(lambda self: self.served)
    @rule(pick=PICKS, fault=FAULTS)
    def advance_generation(self, pick: int, fault: When | None) -> None:
        session = self.pick_session(pick)
        self.plan(claim=fault)
        expected: MGeneration | Exception | None
        try:
            expected = self.naive.advance(session.model)
        except ModelFaultError as exc:
            expected = exc
        try:
            generation = self.do(self.store.advance_generation(session.model.session_id))
        except SessionNotFoundError:
            assert expected is None
        except OSError:
            assert isinstance(expected, ModelFaultError)
            self.learn()
        else:
            self.histories_move(session, session.posts, with_standalone=True)
            self.learn()
            assert isinstance(expected, MGeneration)
            assert (generation.counter, generation.nonce) == (expected.counter, expected.nonce)

    @precondition(lambda self: self.served)
    @rule(pick=PICKS, sure=SELDOM)
    def end_session(self, pick: int, sure: bool) -> None:
        session = self.pick_session(pick)
        if not sure:
            return
        self.naive.end(session.model)
        self.naive.end_session(session.model.session_id)
        self.do(self.store.end_session(session.model.session_id))

    @precondition(lambda self: self.served)
    @rule(pick=PICKS, sure=SELDOM)
    def sdk_drops_the_session(self, pick: int, sure: bool) -> None:
        session = self.pick_session(pick)
        if not sure:
            return
        self.naive.end(session.model)
        # The router watches itself from its first event on; before that only the layer can tell.
        session.router.cancel()
        if not session.binding.is_router_watched:
            self.do(self.store.session_is_over(session.binding))
        self.naive.end_session(session.model.session_id)

    @rule(seconds=st.sampled_from([0.5] * 6 + [6.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.naive.now += seconds
        self.naive.expire()
        self.do(self.store.describe("nobody"))  # there is no timer: what has expired goes with the next operation

    # Calls.

    @precondition(lambda self: self.served)
    @rule(pick=PICKS, request_id=st.sampled_from(REQUEST_IDS), primed=st.booleans(), opens=FAULTS, claim=FAULTS)
    def begin_call(
        self, pick: int, request_id: int | str, primed: bool, opens: When | None, claim: When | None
    ) -> None:
        session = self.pick_session(pick)
        key = str(request_id)
        for post in session.posts:
            if post.model.request_id == key and not post.model.is_answered:
                return self.repeat_request_id(session, post, request_id)
            if post.model.request_id == key and not post.model.is_served:
                self.stop_serving(post)
        self.plan(open=opens, claim=claim)
        connection = MConnection(Connection())

        async def begin() -> tuple[Call, str]:
            call = await session.binding.begin_call(request_id, connection.real)
            token = current_exchange.set(Exchange(session.binding))
            promised = await self.store.store_event(key, None) if primed else ""
            current_exchange.reset(token)
            return call, promised

        model = session.model.calls[key] = MCall(key, connection)
        with self.histories_of(session):
            stored = self.naive.prime(session.model, model) if primed else None
        call, promised = self.do(begin())
        self.learn()
        assert promised == ("" if stored is None else event_id(*stored))
        post = Post(session, request_id, call, model, connection, History())
        session.posts = [one for one in session.posts if one.model.request_id != key] + [post]
        return None if not promised else self.claim_is_issued(session, promised, post.history)

    def repeat_request_id(self, session: Session, post: Post, request_id: int | str) -> None:
        async def begin() -> None:
            await session.binding.begin_call(request_id, Connection())

        with pytest.raises(DuplicateRequestIdError):
            self.do(begin())
        assert session.binding.calls[str(request_id)] is post.call

    @precondition(lambda self: self.unanswered)
    @rule(pick=PICKS, events=st.lists(st.tuples(SIZES, KINDS, FAULTS, FAULTS), min_size=1, max_size=4))
    def emit(self, pick: int, events: list[tuple[int, str, When | None, When | None]]) -> None:
        post = self.unanswered[pick % len(self.unanswered)]
        for size, kind, append, open_stream in events:
            self.plan(append=append, open=open_stream)
            self.emit_in_call(post, self.payload(size, is_answer=False), kind, is_answer=False)

    @precondition(lambda self: self.unanswered)
    @rule(pick=PICKS, size=SIZES, kind=KINDS, append=FAULTS, serve=st.booleans())
    def answer(self, pick: int, size: int, kind: str, append: When | None, serve: bool) -> None:
        self.plan(append=append)
        self.finish(self.unanswered[pick % len(self.unanswered)], size, kind, serve=serve)

    def finish(self, post: Post, size: int, kind: str, *, serve: bool) -> None:
        text = self.payload(size, is_answer=True, request_id=post.request_id)
        self.emit_in_call(post, text, kind, is_answer=True)
        post.history.is_answered = True
        if serve and not post.model.is_served:
            self.stop_serving(post)

    def emit_in_call(self, post: Post, text: str, kind: str, *, is_answer: bool) -> None:
        session = post.session
        text_id = self.emit_in_router(session, str(post.request_id), post.model, post, text, kind, is_answer=is_answer)
        if text_id and not post.connection.real.is_closed and not post.model.is_served:
            post.live_prefixes.add(text_id.rpartition(":")[0])
            assert len(post.live_prefixes) == 1, "one connection carries two executions or generations"

    @precondition(lambda self: any(not post.model.is_served for one in self.served for post in one.posts))
    @rule(pick=PICKS)
    def client_leaves_the_call(self, pick: int) -> None:
        posts = [post for one in self.served for post in one.posts if not post.model.is_served]
        self.stop_serving(posts[pick % len(posts)])

    def stop_serving(self, post: Post) -> None:
        binding = post.session.binding
        self.naive.serve_ends(post.session.model, post.model)
        binding.release(post.connection.real)
        binding.end_service(post.call, was_dispatched=True)

    @precondition(lambda self: self.unanswered)
    @rule(pick=PICKS, fault=FAULTS)
    def restart_stream(self, pick: int, fault: When | None) -> None:
        post = self.unanswered[pick % len(self.unanswered)]
        session = post.session
        self.plan(open=fault)
        with self.histories_of(session):
            self.naive.restart(session.model, post.model)
        self.do(self.store.restart_stream(post.request_id, session.model.session_id))
        self.histories_move(session, [post])

    @precondition(lambda self: self.served)
    @rule(pick=PICKS, size=SIZES, kind=KINDS, append=FAULTS)
    def notify(self, pick: int, size: int, kind: str, append: When | None) -> None:
        session = self.pick_session(pick)
        if session.model.status == "unclaimed":
            return
        self.plan(append=append)
        text = self.payload(size, is_answer=False)
        self.emit_in_router(session, STANDALONE, session.model.standalone, session, text, kind, is_answer=False)

    @precondition(lambda self: any(one.is_replaced and one.model.status == "live" for one in self.sessions))
    @rule(pick=PICKS, size=SIZES)
    def replaced_writer_writes(self, pick: int, size: int) -> None:
        replaced = [one for one in self.sessions if one.is_replaced and one.model.status == "live"]
        session = replaced[pick % len(replaced)]
        self.plan()
        text = self.payload(size, is_answer=False)
        stored = self.emit_in_router(
            session, STANDALONE, session.model.standalone, session, text, "duck", is_answer=False
        )
        assert not stored

    # Resumes.

    @precondition(lambda self: self.served and self.claims)
    @rule(picks=st.lists(PICKS, min_size=1, max_size=4), at=PICKS, fault=FAULTS, among=st.sampled_from([4, 12, 1000]))
    def resume(self, picks: list[int], at: int, fault: When | None, among: int) -> None:
        session = self.pick_session(at)
        own = [claim for session_id, claim in self.claims if session_id == session.model.session_id][-among:]
        for pick in picks if own else ():
            self.plan(snapshot="before" if fault else None)
            self.present(session, own[pick % len(own)])

    @precondition(lambda self: self.unanswered)
    @rule(pick=PICKS, missed=st.lists(st.integers(0, 6), min_size=1, max_size=3))
    def come_back_to_a_call(self, pick: int, missed: list[int]) -> None:
        post = self.unanswered[pick % len(self.unanswered)]
        issued = [text_id for _, text_id in post.history.events if text_id]
        for events in missed if issued else ():
            self.plan()
            self.present(post.session, Claim.issued(issued[-1 - events % len(issued)]))

    @precondition(lambda self: self.unanswered)
    @rule(pick=PICKS, at=PICKS)
    def come_back_to_an_earlier_execution(self, pick: int, at: int) -> None:
        post = self.unanswered[pick % len(self.unanswered)]
        encoded = urlsafe_b64encode(str(post.request_id).encode()).decode().rstrip("=")
        current = post.model.stream
        earlier = [
            claim
            for session_id, claim in self.claims
            if session_id == post.session.model.session_id
            and claim.text.split(":")[1].endswith(f".{encoded}")
            and (current is None or not claim.text.startswith(event_id(current, 0)[:-1]))
        ]
        if earlier:
            self.plan()
            self.present(post.session, earlier[at % len(earlier)])

    @precondition(lambda self: self.served and self.claims)
    @rule(pick=PICKS, at=PICKS, how=st.sampled_from(MUTATIONS), amount=st.integers(-4, 7).filter(bool))
    def resume_with_a_cursor_that_was_never_issued(self, pick: int, at: int, how: str, amount: int) -> None:
        session = self.pick_session(at)
        own = [claim for session_id, claim in self.claims if session_id == session.model.session_id]
        if own:
            self.plan()
            self.present(session, mutated(own[pick % len(own)], how, amount))

    @precondition(lambda self: self.served and self.claims)
    @rule(pick=PICKS, at=PICKS)
    def resume_with_another_sessions_cursor(self, pick: int, at: int) -> None:
        session = self.pick_session(at)
        own = {claim.text for session_id, claim in self.claims if session_id == session.model.session_id}
        others = [claim for _, claim in self.claims if claim.text not in own]
        if others:
            self.plan()
            outcome = self.present(session, others[pick % len(others)])
            allowed = {"unrecognized_generation", "session_not_found", "storage_unavailable"}
            assert isinstance(outcome, Refused)
            assert outcome.reasons <= allowed

    @precondition(lambda self: self.served)
    @rule(pick=PICKS, fault=FAULTS)
    def plain_get(self, pick: int, fault: When | None) -> None:
        session = self.pick_session(pick)
        self.plan(snapshot="before" if fault else None)
        with self.histories_of(session):
            outcome = self.naive.plain_outcome(session.model)
        self.connect(session, None, outcome)

    @precondition(lambda self: self.tails)
    @rule(pick=PICKS)
    def client_leaves_the_tail(self, pick: int) -> None:
        tail = self.tails[pick % len(self.tails)]
        tail.task.cancel()
        tail.model.is_over = True

    def present(self, session: Session, claim: Claim) -> Served | Refused:
        with self.histories_of(session):
            outcome = self.naive.claim_outcome(session.model, claim)
        note(f"{claim.text!a}: {outcome if isinstance(outcome, Refused) else event_id(outcome.stream, outcome.seq)}")
        self.connect(session, claim, outcome)
        return outcome

    def connect(self, session: Session, claim: Claim | None, outcome: Served | Refused) -> None:
        """Serve a GET, compare what comes of it with the outcome, and leave a tail that waits to later steps."""
        gate = Gate(is_claim=claim is not None)
        carried: list[tuple[str | None, str]] = []

        async def send(event: EventMessage) -> None:
            assert not gate.connection.is_closed
            carried.append((event.event_id, event.message.model_dump_json(by_alias=True)))
            if gate.connection.in_transit:
                gate.connection.on_event_written()

        async def serve() -> None:
            current_exchange.set(Exchange(session.binding, gate))
            try:
                await self.store.replay_events_after(claim.text if claim is not None else "0", send)
            finally:
                session.binding.release(gate.connection)

        task = self.loop.create_task(serve())
        self.do(self.turn())
        self.learn()
        if isinstance(outcome, Refused):
            assert task.done()
            task.result()
            self.check_refusal(gate, carried, outcome)
            return
        assert gate.error is None
        connection = MConnection(gate.connection)
        self.naive.take_over(session.model, outcome.stream, connection)
        model = MTail(session.model, outcome.stream, connection, outcome.seq)
        assert gate.accepted == [event_id(outcome.stream, outcome.seq)]
        if outcome.marker is not None:
            marker_id, marker = carried.pop(0)
            assert marker_id == gate.accepted[0]
            assert json.loads(marker)["params"]["data"]["reason"] == outcome.marker
        self.tails.append(Tail(gate, task, model, carried))
        model.go_on()
        if outcome.stream.ordinal:
            self.check_against_history(session, gate.accepted[0], carried, is_over=task.done())

    def check_refusal(
        self,
        gate: Gate,
        carried: list[tuple[str | None, str]],
        outcome: Refused,
    ) -> None:
        if outcome.is_answered:
            assert gate.error is None
            assert gate.accepted == [None]
            ((answer_id, answer),) = carried
            assert answer_id is None
            reason = json.loads(answer)["error"]["data"]["reason"]
        else:
            assert gate.error is not None
            assert gate.accepted == []
            assert carried == []
            reason = gate.error.reason
        assert reason in outcome.reasons

    def check_against_history(
        self, session: Session, cursor: str | None, carried: list[tuple[str | None, str]], *, is_over: bool
    ) -> None:
        """What a resume replays is all that its execution has emitted after the cursor, lost events included."""
        assert cursor is not None
        prefix, _, seq = cursor.rpartition(":")
        known = self.histories.get(f"{session.model.session_id} {prefix}")
        if known is None:
            # A stream that was opened and has issued no id: it is empty, or holds an answer that was stored although
            # the storage said that it was not.
            texts = [text for _, text in carried]
            assert texts == [] or any(
                texts == [text for text, _ in post.history.events]
                for post in session.posts
                if post.model.stream is not None and event_id(post.model.stream, 0).rpartition(":")[0] == prefix
            )
            return
        history, _ = known
        ids = [text_id for _, text_id in history.events]
        if seq == "0":
            first = 0
        elif cursor in ids:
            first = ids.index(cursor) + 1
        else:
            return  # A mutated cursor at the place of an event that went out without its id.
        assert [text for _, text in carried] == [text for text, _ in history.events[first:]]
        assert is_over == history.is_answered

    # What holds after every step.

    async def turn(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @invariant()
    def store_and_model_agree(self) -> None:
        self.plan()
        self.do(self.turn())
        for session in self.sessions:
            posts = [post for post in session.posts if not post.model.is_answered]
            moved = [post for post in posts if self.is_elsewhere(post)]
            self.histories_move(session, moved)
        self.check_tails()
        for session_id in SESSION_IDS:
            self.check_description(session_id)
        for session in self.served:
            for post in session.posts:
                if not post.model.is_served:
                    assert post.connection.real.is_closed == post.connection.is_closed
        self.check_stats()

    def is_elsewhere(self, post: Post) -> bool:
        """Tell whether the call goes on in another stream than the one that its history is of."""
        current = post.model.stream
        issued = {text_id.rpartition(":")[0] for _, text_id in post.history.events if text_id}
        primes = {
            key.partition(" ")[2]
            for key, (history, _) in self.histories.items()
            if history is post.history and key.startswith(f"{post.session.model.session_id} ")
        }
        prefixes = issued | primes
        return bool(prefixes) and (current is None or event_id(current, 0).rpartition(":")[0] not in prefixes)

    def check_tails(self) -> None:
        async def client_sees_the_end() -> None:
            # What the layer does: a closed connection looks like a client that has gone.
            for tail in self.tails:
                if tail.gate.connection.is_closed:
                    tail.task.cancel()
            await self.turn()

        self.do(client_sees_the_end())
        for tail in self.tails:
            tail.model.go_on()
            assert tail.carried == tail.model.carried
            assert tail.task.done() == tail.model.is_over
            if tail.task.done() and not tail.task.cancelled():
                tail.task.result()
        for tail in [tail for tail in self.tails if tail.model.is_over]:
            self.tails.remove(tail)
            consumers = tail.model.binding.consumers
            if consumers.get(tail.model.stream) is tail.model.connection:
                del consumers[tail.model.stream]

    def check_description(self, session_id: str) -> None:
        description = self.do(self.store.describe(session_id))
        session = self.naive.sessions.get(session_id)
        if session is None:
            assert description is None
            return
        assert description is not None
        generation = description.generation
        assert generation.counter == session.generation.counter
        if session.generation.nonce is None:
            assert generation.nonce not in self.nonces
            self.nonces.add(generation.nonce)
            session.generation.nonce = generation.nonce
        assert generation.nonce == session.generation.nonce
        assert [
            (
                stream.stream,
                stream.request_id,
                stream.replay_floor,
                stream.high_water_mark,
                stream.is_terminal,
                stream.retained_events,
                stream.retained_bytes,
            )
            for stream in description.streams
        ] == [
            (
                stream.text,
                stream.request_id,
                stream.floor,
                len(stream.places),
                stream.is_terminal,
                len(stream.retained),
                sum(map(len, stream.retained)),
            )
            for stream in session.known
        ]

    def check_stats(self) -> None:
        stats = self.store.stats()
        naive = self.naive
        assert stats.decisions == dict(naive.decisions)
        assert (stats.appends, stats.oversized, stats.faults, stats.evicted_events, stats.open_tails) == (
            naive.appends,
            naive.oversized,
            naive.faults,
            naive.evicted,
            len(self.tails),
        )
        assert stats.sessions == len(self.served)


Store.TestCase.settings = settings(
    max_examples=150,
    # CI repeats itself; every other run explores.
    derandomize=os.environ.get("CI") == "true",
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class TestStore(Store.TestCase):  # type: ignore[misc,name-defined,valid-type,unused-ignore]
    """Any sequence of steps leaves the store where the model is."""

    def setUp(self) -> None:
        super().setUp()
        # Tens of thousands of planned faults, each with its traceback.
        logging.getLogger("mcp_resumable").disabled = True

    def tearDown(self) -> None:
        logging.getLogger("mcp_resumable").disabled = False
        super().tearDown()


@pytest.mark.anyio
async def test_end_of_a_superseded_writer_leaves_the_session_to_its_successor() -> None:
    """The machine above keeps the router of a replaced session running, because its end took the new session along."""
    storage = MemoryStorage()
    earlier, later = ResumableEventStore(storage), ResumableEventStore(storage)
    binding = earlier.bind_session(None, None)
    await earlier.attach_session(binding, "s")
    successor = later.bind_session(None, None)
    await later.attach_session(successor, "s")
    await earlier.session_is_over(binding)
    assert await later.describe("s") is not None
