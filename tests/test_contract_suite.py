"""Tests of the contract suite: it passes a storage of another design, and it catches those that break a promise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
import anyio.lowlevel
import pytest

from mcp_resumable import EventCursor, Generation, Retention, Storage
from mcp_resumable.cursor import STANDALONE, StreamId
from mcp_resumable.decision import Dropped, NeverOpened, Retained, Snapshot, StreamState, Successor, Superseded
from mcp_resumable.storage import AppendRefusedError, Batch, SessionDescription, StreamDescription
from mcp_resumable.testing import StorageContract, StorageHarness


@dataclass(eq=False, kw_only=True)
class StreamRow:
    session_id: str
    generation: Generation
    stream: StreamId
    request_id: str | None
    origin: tuple[int, int]
    high_water_mark: int = 0
    answered_at: float | None = None
    is_superseded: bool = False
    is_dropped: bool = False

    @property
    def is_kept(self) -> bool:
        return not self.is_superseded and not self.is_dropped


@dataclass(eq=False, kw_only=True)
class EventRow:
    stream: StreamRow
    seq: int
    event: bytes | None

    @property
    def size(self) -> int:
        return len(self.event or b"")


@dataclass
class Database:
    """Three tables, scanned for everything."""

    now: float = 0.0
    issued: dict[str, list[Generation]] = field(default_factory=dict)
    active_at: dict[str, float] = field(default_factory=dict)
    """Of the sessions that are not over."""
    streams: list[StreamRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    """In order of appending."""


class NaiveStorage(Storage):
    """Flat lists, a scan for each question, and a poll for what is new; right, and slow."""

    poll_seconds = 0.001

    def __init__(self, database: Database, retention: Retention) -> None:
        super().__init__(retention=retention)
        self.database = database

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        self._expire()
        database = self.database
        if self._current(session_id) is None and not create:
            return None
        self._clear(session_id)
        generation = Generation(self._next_counter(session_id), nonce)
        database.issued.setdefault(session_id, []).append(generation)
        database.active_at[session_id] = database.now
        database.streams.append(
            StreamRow(
                session_id=session_id,
                generation=generation,
                stream=STANDALONE,
                request_id=None,
                origin=(generation.counter, 0),
            )
        )
        while len(database.active_at) > self.retention.max_sessions:
            self._forget(min(database.active_at, key=lambda each: database.active_at[each]))
        return generation

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        self._check_writer(session_id, generation)
        streams = self._streams(session_id, generation)
        stream = StreamId.of_request(len(streams), request_id)
        for earlier in streams:
            if earlier.request_id == request_id and earlier.is_kept:
                earlier.is_superseded = True
                self._remove_events_of(earlier)
        self.database.streams.append(
            StreamRow(
                session_id=session_id,
                generation=generation,
                stream=stream,
                request_id=request_id,
                origin=origin or (generation.counter, stream.ordinal),
            )
        )
        self._evict(None)
        return stream

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        self._check_writer(session_id, generation)
        row = self._kept(session_id, generation, stream)
        if row is None or row.answered_at is not None:
            raise AppendRefusedError(self._current(session_id))
        for event in events:
            row.high_water_mark = self._next_seq(row)
            self.database.events.append(EventRow(stream=row, seq=row.high_water_mark, event=event))
        if is_terminal:
            row.answered_at = self.database.now
        self._evict(self.database.events[-1])
        return row.high_water_mark

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        self._touch(session_id)
        current = self._current(session_id)
        if current is None:
            return None
        if cursor is None:
            return Snapshot(generation=current, claimed="never", stream=NeverOpened())
        successor = self._successor(session_id, current, cursor.stream)
        if cursor.generation != current:
            is_earlier = cursor.generation in self.database.issued.get(session_id, [])
            return Snapshot(
                generation=current,
                claimed="earlier" if is_earlier else "never",
                stream=NeverOpened(),
                successor=successor,
            )
        return Snapshot(
            generation=current, claimed="current", stream=self._state(session_id, cursor), successor=successor
        )

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        self._touch(session_id)
        row = self._kept(session_id, generation, stream) if generation == self._current(session_id) else None
        if row is None or not self._floor(row) <= after_seq <= row.high_water_mark:
            return None
        events = [each.event for each in self._events(row) if each.seq > after_seq][:limit]
        is_last = after_seq + len(events) == row.high_water_mark
        return Batch(tuple(events), row.answered_at is not None and is_last)

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        self._expire()
        current = self._current(session_id)
        is_known = current is not None and generation in (None, current)
        if is_known:
            self._forget(session_id)
        return is_known

    async def _describe(self, session_id: str) -> SessionDescription | None:
        self._expire()
        current = self._current(session_id)
        if current is None:
            return None
        return SessionDescription(
            session_id=session_id,
            generation=current,
            streams=tuple(self._description(row) for row in self._streams(session_id, current) if row.is_kept),
        )

    def _current(self, session_id: str) -> Generation | None:
        return self.database.issued[session_id][-1] if session_id in self.database.active_at else None

    def _next_counter(self, session_id: str) -> int:
        return max((generation.counter for generation in self.database.issued.get(session_id, [])), default=0) + 1

    def _check_writer(self, session_id: str, generation: Generation) -> None:
        self._touch(session_id)
        current = self._current(session_id)
        if current != generation:
            raise AppendRefusedError(current)

    def _next_seq(self, row: StreamRow) -> int:
        return row.high_water_mark + 1

    def _streams(self, session_id: str, generation: Generation) -> list[StreamRow]:
        return [row for row in self.database.streams if row.session_id == session_id and row.generation == generation]

    def _kept(self, session_id: str, generation: Generation, stream: StreamId) -> StreamRow | None:
        for row in self._streams(session_id, generation):
            if row.stream == stream and row.is_kept:
                return row
        return None

    def _events(self, row: StreamRow) -> list[EventRow]:
        return [each for each in self.database.events if each.stream is row]

    def _floor(self, row: StreamRow) -> int:
        return min((each.seq for each in self._events(row)), default=row.high_water_mark + 1) - 1

    def _successor(self, session_id: str, current: Generation, claimed: StreamId) -> Successor | None:
        if claimed.request_id is None and claimed != STANDALONE:
            return None
        return self._newest(session_id, current, claimed.request_id)

    def _newest(self, session_id: str, current: Generation, request_id: str | None) -> Successor | None:
        for row in self._streams(session_id, current):
            if row.is_kept and row.request_id == request_id:
                return Successor(stream=row.stream, origin=row.origin)
        return None

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        for row in self._streams(session_id, cursor.generation):
            if row.stream == cursor.stream:
                if row.is_superseded:
                    return Superseded()
                if row.is_dropped:
                    return Dropped()
                return Retained(
                    high_water_mark=row.high_water_mark,
                    replay_floor=self._floor(row),
                    last_hole=max((each.seq for each in self._events(row) if each.event is None), default=0),
                    is_terminal=row.answered_at is not None,
                )
        return NeverOpened()

    def _description(self, row: StreamRow) -> StreamDescription:
        events = self._events(row)
        return StreamDescription(
            stream=str(row.stream),
            request_id=row.request_id,
            replay_floor=self._floor(row),
            high_water_mark=row.high_water_mark,
            is_terminal=row.answered_at is not None,
            retained_events=sum(each.event is not None for each in events),
            retained_bytes=sum(each.size for each in events),
        )

    def _clear(self, session_id: str) -> None:
        """Remove all streams and events of a session."""
        self.database.streams = [row for row in self.database.streams if row.session_id != session_id]
        self.database.events = [each for each in self.database.events if each.stream.session_id != session_id]

    def _forget(self, session_id: str) -> None:
        del self.database.active_at[session_id]
        self._clear(session_id)

    def _remove_events_of(self, row: StreamRow) -> None:
        self.database.events = [each for each in self.database.events if each.stream is not row]

    def _touch(self, session_id: str) -> None:
        self._expire()
        if session_id in self.database.active_at:
            self.database.active_at[session_id] = self.database.now

    def _expire(self) -> None:
        database, retention = self.database, self.retention
        for row in database.streams:
            if row.answered_at is not None and row.answered_at + retention.completed_seconds <= database.now:
                row.is_dropped = True
                self._remove_events_of(row)
        for session_id, active_at in list(database.active_at.items()):
            if active_at + retention.idle_seconds <= database.now and not any(
                row.request_id is not None and row.answered_at is None and row.is_kept
                for row in database.streams
                if row.session_id == session_id
            ):
                self._forget(session_id)

    def _evict(self, newest: EventRow | None) -> None:
        """Remove the oldest events until all limits are kept; `newest` stays."""
        retention = self.retention
        for row in self.database.streams:
            events = self._events(row)
            while len(events) > retention.max_events or sum(each.size for each in events) > retention.max_bytes:
                self.database.events.remove(events.pop(0))
        session_ids = {row.session_id for row in self.database.streams}
        for limit, groups in (
            (retention.max_session_bytes, [{session_id} for session_id in session_ids]),
            (retention.max_total_bytes, [session_ids]),
        ):
            for group in groups:
                events = [each for each in self.database.events if each.stream.session_id in group]
                while events and events[0] is not newest and self._charge(group) > limit:
                    self._remove(events.pop(0))

    def _charge(self, session_ids: set[str]) -> int:
        events = [each for each in self.database.events if each.stream.session_id in session_ids]
        streams = [row for row in self.database.streams if row.session_id in session_ids and row.is_kept]
        return 1024 * len(streams) + sum(72 + each.size for each in events)

    def _remove(self, oldest: EventRow) -> None:
        self.database.events.remove(oldest)
        row = oldest.stream
        if row.answered_at is not None and not self._events(row):
            row.is_dropped = True


class NaiveHarness(StorageHarness):
    def __init__(self, storage: NaiveStorage) -> None:
        self._storage = storage

    @property
    def storage(self) -> NaiveStorage:
        return self._storage

    async def open_again(self) -> Storage | None:
        return type(self._storage)(self._storage.database, self._storage.retention)

    async def advance(self, seconds: float) -> bool:
        self._storage.database.now += seconds
        return True

    async def lose_metadata(self, session_id: str) -> None:
        # Streams and events are left behind.
        del self._storage.database.issued[session_id]
        del self._storage.database.active_at[session_id]


class TestNaiveStorage(StorageContract):
    @asynccontextmanager
    async def harness(self, retention: Retention) -> AsyncIterator[NaiveHarness]:
        yield NaiveHarness(NaiveStorage(Database(), retention))


class ReusesNumbers(NaiveStorage):
    """Counts generations in what it knows of the session, which is gone when the session is over."""

    def _forget(self, session_id: str) -> None:
        super()._forget(session_id)
        del self.database.issued[session_id]


class RevivesSessions(NaiveStorage):
    """Takes events that are left behind for a session: what it lost is made up from them."""

    def _touch(self, session_id: str) -> None:
        for row in self.database.streams:
            if row.session_id == session_id and session_id not in self.database.issued:
                self.database.issued[session_id] = [row.generation]
                self.database.active_at[session_id] = self.database.now
        super()._touch(session_id)


class TellsAStaleFloor(NaiveStorage):
    """Keeps the floor beside the events, and is late by one eviction."""

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        state = super()._state(session_id, cursor)
        if isinstance(state, Retained):
            return replace(state, replay_floor=max(0, state.replay_floor - 1))
        return state


class TellsARestThatIsNone(NaiveStorage):
    """Tells what it has so far, of a stream that is open too."""

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        state = super()._state(session_id, cursor)
        row = self._kept(session_id, cursor.generation, cursor.stream)
        if isinstance(state, Retained) and row is not None:
            return replace(state, rest=[each.event for each in self._events(row) if each.seq > cursor.seq])
        return state


class TellsAllForTheRest(NaiveStorage):
    """Tells a complete stream from its beginning."""

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        state = super()._state(session_id, cursor)
        row = self._kept(session_id, cursor.generation, cursor.stream)
        if isinstance(state, Retained) and row is not None and state.is_terminal:
            return replace(state, rest=[each.event for each in self._events(row)])
        return state


class TellsARestOfAnyLength(NaiveStorage):
    """Holds as much beside the storage as a stream has, for each slow client."""

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        state = super()._state(session_id, cursor)
        row = self._kept(session_id, cursor.generation, cursor.stream)
        if isinstance(state, Retained) and row is not None and state.is_terminal:
            return replace(state, rest=[each.event for each in self._events(row) if each.seq > cursor.seq])
        return state


class SkipsASeq(NaiveStorage):
    """Assigns each stream's tenth seq to nothing."""

    def _next_seq(self, row: StreamRow) -> int:
        seq = super()._next_seq(row)
        return seq + 1 if seq == 10 else seq


class AcceptsSupersededWriters(NaiveStorage):
    """Asks only whether the session is known, and writes to its current generation."""

    def _check_writer(self, session_id: str, generation: Generation) -> None:
        super()._check_writer(session_id, self._current(session_id) or generation)

    def _kept(self, session_id: str, generation: Generation, stream: StreamId) -> StreamRow | None:
        return super()._kept(session_id, self._current(session_id) or generation, stream)


class PassesOverHoles(NaiveStorage):
    """Does not keep a row for what could not be kept."""

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        batch = await super()._read(session_id, generation, stream, after_seq, limit)
        return batch and replace(batch, events=[event for event in batch.events if event is not None])


class AppendsInTwoSteps(NaiveStorage):
    """Reads the high-water mark, and lets others run before it writes."""

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        row = self._kept(session_id, generation, stream)
        high_water_mark = row.high_water_mark if row is not None else 0
        await anyio.lowlevel.checkpoint()
        if row is not None:
            row.high_water_mark = high_water_mark
        return await super()._append(session_id, generation, stream, events, is_terminal)


class ChecksTheWriterTooEarly(NaiveStorage):
    """Checks the writer's generation, and lets others run before it writes to the one that is current then."""

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        self._check_writer(session_id, generation)
        await anyio.lowlevel.checkpoint()
        current = self._current(session_id) or generation
        return await super()._append(session_id, current, stream, events, is_terminal)


class ClaimsInTwoSteps(NaiveStorage):
    """Reads the highest number, and lets others run before it issues the next."""

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        counter = self._next_counter(session_id)
        await anyio.lowlevel.checkpoint()
        generation = await super()._claim_generation(session_id, nonce, create=create)
        if generation is None:
            return None
        late = Generation(counter, generation.nonce)
        self.database.issued[session_id][-1] = late
        for row in self._streams(session_id, generation):
            row.generation = late
        return late


class WaitsForTheNextAppend(NaiveStorage):
    """Does not see what was appended before the wait, nor what ends a stream."""

    async def _wait(self, session_id: str, generation: Generation, stream: StreamId, after_seq: int) -> None:
        row = self._kept(session_id, generation, stream)
        seen = after_seq if row is None else row.high_water_mark
        while row is None or row.high_water_mark == seen:
            await super()._wait(session_id, generation, stream, seen)


class EndsWhatAnotherHasClaimed(NaiveStorage):
    """Does not ask whose end it is."""

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:  # noqa: ARG002  # the fault
        return await super()._end_session(session_id, None)


class EndsInTwoSteps(NaiveStorage):
    """Compares the generation, and lets others run before it ends the session."""

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        if generation not in (None, self._current(session_id)):
            return False
        await anyio.lowlevel.checkpoint()
        return await super()._end_session(session_id, None)


class MixesGenerations(NaiveStorage):
    """Finds streams by session and stream id, and leaves what it does not know of where it is."""

    def _clear(self, session_id: str) -> None:
        if session_id in self.database.issued:
            super()._clear(session_id)

    def _streams(self, session_id: str, generation: Generation) -> list[StreamRow]:  # noqa: ARG002  # the fault
        return [row for row in self.database.streams if row.session_id == session_id]


class ForgetsWhatItOpened(NaiveStorage):
    """Tells a stream that retention has dropped as one that never was."""

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        state = super()._state(session_id, cursor)
        return NeverOpened() if isinstance(state, Dropped) else state


class TakesTheStandaloneStreamForAnother(NaiveStorage):
    """Finds the successor by the request id of the cursor, also where that is none."""

    def _successor(self, session_id: str, current: Generation, claimed: StreamId) -> Successor | None:
        return self._newest(session_id, current, claimed.request_id)


class TakesAnOrdinalForARequest(NaiveStorage):
    """Finds the successor by the ordinal, where the cursor has no request id."""

    def _successor(self, session_id: str, current: Generation, claimed: StreamId) -> Successor | None:
        if claimed.request_id is not None:
            return super()._successor(session_id, current, claimed)
        row = self._kept(session_id, current, claimed)
        return None if row is None else Successor(stream=row.stream, origin=row.origin)


class KeepsNumbersIn64Bits(NaiveStorage):
    """Takes a larger ordinal for what is left of it."""

    def _state(self, session_id: str, cursor: EventCursor) -> StreamState:
        claimed = StreamId(cursor.stream.ordinal % 2**64, cursor.stream.request_id)
        return super()._state(session_id, cursor._replace(stream=claimed))


class StoresSomeOfAnAppend(NaiveStorage):
    """Takes as many events at once as its database has parameters."""

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        return await super()._append(session_id, generation, stream, events[:999], is_terminal)


class CountsWhatIsGone(NaiveStorage):
    """Takes off what it evicts, and forgets to do so for what it removes on another ground."""

    gone_bytes = 0

    def _remove_events_of(self, row: StreamRow) -> None:
        self.gone_bytes += sum(each.size for each in self._events(row))
        super()._remove_events_of(row)

    def _charge(self, session_ids: set[str]) -> int:
        return super()._charge(session_ids) + self.gone_bytes


class ForgetsWhenItIsClosed(NaiveStorage):
    """Writes to its database later than it says."""

    async def aclose(self) -> None:
        self._clear("s")


class OneInstanceHarness(NaiveHarness):
    async def open_again(self) -> Storage | None:
        return await StorageHarness.open_again(self)  # the default


class ClocklessHarness(NaiveHarness):
    async def advance(self, seconds: float) -> bool:
        return await StorageHarness.advance(self, seconds)  # the default


class ContractOf(StorageContract):
    """The suite over one kind of naive storage, for a look at what it finds."""

    def __init__(self, make_storage: type[NaiveStorage], make_harness: type[NaiveHarness], wait_seconds: float) -> None:
        self.make_storage = make_storage
        self.make_harness = make_harness
        self.wait_seconds = wait_seconds

    @asynccontextmanager
    async def harness(self, retention: Retention) -> AsyncIterator[NaiveHarness]:
        yield self.make_harness(self.make_storage(Database(), retention))


def outcomes(
    make_storage: type[NaiveStorage], make_harness: type[NaiveHarness] = NaiveHarness, *, wait_seconds: float = 5.0
) -> dict[str, str]:
    """Return which tests of the suite fail and which are skipped; whatever else one raises is raised."""
    contract, found = ContractOf(make_storage, make_harness, wait_seconds), dict[str, str]()
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                anyio.run(getattr(contract, name))
            except AssertionError:
                found[name] = "failed"
            except pytest.skip.Exception:
                found[name] = "skipped"
    return found


# For each broken promise, every test that catches it; all others pass.
CAUGHT_BY: dict[type[NaiveStorage], set[str]] = {
    ReusesNumbers: {
        "test_a_session_that_is_opened_again_after_its_end_knows_its_old_cursors",
        "test_counters_increase_over_advancing_ending_and_reopening",
        "test_counters_increase_over_eviction_in_favour_of_other_sessions",
        "test_counters_increase_over_idle_eviction",
        "test_what_was_stored_survives_a_restart",
    },
    RevivesSessions: {"test_lost_metadata_makes_the_session_unknown"},
    MixesGenerations: {"test_lost_metadata_is_never_mistaken_for_the_session_that_is_opened_next"},
    TellsAStaleFloor: {
        "test_a_snapshot_and_a_read_during_appends_are_consistent",
        "test_an_answer_that_evicts_everything_else_can_still_be_replayed",
        "test_each_row_of_the_decision_table_is_reached",
        "test_max_bytes_evicts_the_oldest_of_the_stream",
        "test_max_events_evicts_the_oldest_of_the_stream",
        "test_max_session_bytes_evicts_the_oldest_of_the_session",
        "test_max_total_bytes_evicts_the_oldest_of_the_store",
        "test_the_newest_event_survives_its_own_append",
        "test_tiny_events_are_charged_for_more_than_their_text",
        "test_what_one_instance_writes_another_reads",
        "test_what_was_stored_survives_a_restart",
    },
    TellsARestThatIsNone: {"test_the_rest_of_a_stream_in_a_snapshot_is_what_a_read_returns"},
    TellsAllForTheRest: {"test_the_rest_of_a_stream_in_a_snapshot_is_what_a_read_returns"},
    TellsARestOfAnyLength: {"test_the_rest_of_a_stream_in_a_snapshot_is_what_a_read_returns"},
    SkipsASeq: {
        "test_seqs_are_contiguous_from_1",
        # Those that append ten events or more to a stream.
        "test_a_snapshot_and_a_read_during_appends_are_consistent",
        "test_an_answer_that_evicts_everything_else_can_still_be_replayed",
        "test_an_append_of_thousands_of_events_is_one_step",
        "test_concurrent_appends_keep_each_writers_order",
        "test_max_events_evicts_the_oldest_of_the_stream",
        "test_max_session_bytes_evicts_the_oldest_of_the_session",
        "test_max_total_bytes_evicts_the_oldest_of_the_store",
        "test_tiny_events_are_charged_for_more_than_their_text",
        "test_what_is_gone_takes_no_room",
    },
    PassesOverHoles: {
        "test_a_read_returns_what_follows_from_any_seq",
        "test_an_append_of_several_events_returns_the_seq_of_the_last",
        "test_an_append_of_thousands_of_events_is_one_step",
        "test_max_bytes_evicts_the_oldest_of_the_stream",
        "test_max_events_evicts_the_oldest_of_the_stream",
        "test_the_newest_event_survives_its_own_append",
        "test_wait_returns_when_an_event_is_appended",
        "test_what_one_instance_writes_another_reads",
        "test_what_was_stored_survives_a_restart",
    },
    AcceptsSupersededWriters: {
        "test_a_superseded_writer_is_refused_and_leaves_nothing",
        "test_a_writer_superseded_by_another_instance_is_refused",
        "test_a_writer_with_a_generation_never_issued_is_refused",
        "test_appends_stop_where_a_generation_is_claimed_among_them",
        "test_lost_metadata_is_never_mistaken_for_the_session_that_is_opened_next",
        "test_opening_a_live_session_supersedes_it",
        "test_sessions_never_mix",
    },
    ChecksTheWriterTooEarly: {"test_appends_stop_where_a_generation_is_claimed_among_them"},
    AppendsInTwoSteps: {
        "test_concurrent_appends_keep_each_writers_order",
        "test_of_concurrent_answers_one_is_stored",
    },
    ClaimsInTwoSteps: {"test_concurrent_claims_never_issue_the_same_number"},
    EndsWhatAnotherHasClaimed: {
        "test_a_session_claimed_while_its_writer_ends_it_is_not_ended",
        "test_a_superseded_writer_cannot_end_the_session",
    },
    EndsInTwoSteps: {"test_a_session_claimed_while_its_writer_ends_it_is_not_ended"},
    WaitsForTheNextAppend: {
        "test_wait_does_not_miss_what_was_appended_before_it_was_called",
        "test_wait_returns_when_another_instance_writes",
        "test_wait_returns_when_the_generation_advances",
        "test_wait_returns_when_the_session_ends",
        "test_wait_returns_when_the_stream_is_superseded",
        "test_wait_returns_where_nothing_more_can_come",
    },
    TakesTheStandaloneStreamForAnother: {"test_a_request_id_too_long_for_an_event_id_leads_to_no_other_stream"},
    TakesAnOrdinalForARequest: {"test_a_request_id_too_long_for_an_event_id_leads_to_no_other_stream"},
    KeepsNumbersIn64Bits: {"test_a_claim_of_any_size_gets_an_answer"},
    StoresSomeOfAnAppend: {"test_an_append_of_thousands_of_events_is_one_step"},
    CountsWhatIsGone: {"test_what_is_gone_takes_no_room"},
    ForgetsWhenItIsClosed: {"test_what_was_stored_survives_a_restart"},
    ForgetsWhatItOpened: {
        "test_a_request_id_can_be_used_again_after_its_stream_was_dropped",
        "test_completed_seconds_drops_a_completed_stream",
        "test_completed_streams_are_charged_for_more_than_their_text",
    },
}


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda broken: broken.__name__)
def test_a_broken_promise_is_caught_by_the_tests_of_that_promise(broken: type[NaiveStorage]) -> None:
    # A wait that does not return at all is known sooner; here, others return after 1 ms.
    wait_seconds = 0.3 if broken in (WaitsForTheNextAppend, PassesOverHoles) else 5.0
    assert outcomes(broken, wait_seconds=wait_seconds) == dict.fromkeys(CAUGHT_BY[broken], "failed")


def test_a_backend_that_lacks_nothing_skips_nothing() -> None:
    assert outcomes(NaiveStorage) == {}


def test_a_backend_with_one_instance_skips_only_what_needs_two() -> None:
    assert outcomes(NaiveStorage, OneInstanceHarness) == dict.fromkeys(
        [
            "test_a_writer_superseded_by_another_instance_is_refused",
            "test_wait_returns_when_another_instance_writes",
            "test_what_one_instance_writes_another_reads",
            "test_what_was_stored_survives_a_restart",
        ],
        "skipped",
    )


def test_a_backend_without_a_clock_skips_only_what_needs_one() -> None:
    assert outcomes(NaiveStorage, ClocklessHarness) == dict.fromkeys(
        [
            "test_a_request_id_can_be_used_again_after_its_stream_was_dropped",
            "test_an_execution_that_was_superseded_does_not_keep_a_session",
            "test_completed_seconds_drops_a_completed_stream",
            "test_counters_increase_over_idle_eviction",
            "test_idle_seconds_drops_an_idle_session",
            "test_idle_seconds_keeps_a_session_with_an_unanswered_request",
            "test_max_sessions_drops_the_least_recently_active",
        ],
        "skipped",
    )
