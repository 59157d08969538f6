from __future__ import annotations

import math
import random
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mcp_resumable import EventCursor, Generation, MemoryStorage, Retention
from mcp_resumable.cursor import STANDALONE, StreamId
from mcp_resumable.decision import Dropped, NeverOpened, Retained, Superseded
from mcp_resumable.memory import EVENT_OVERHEAD_BYTES, STREAM_OVERHEAD_BYTES, _Stream
from mcp_resumable.storage import AppendRefusedError, Batch
from mcp_resumable.testing import StorageContract, StorageHarness

T = TypeVar("T")

# More places than any test makes.
ALL = 100_000


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class MemoryHarness(StorageHarness):
    """No second instance: what one `MemoryStorage` holds, no other can see."""

    def __init__(self, retention: Retention) -> None:
        self.clock = Clock()
        self._storage = MemoryStorage(retention=retention, clock=self.clock)

    @property
    def storage(self) -> MemoryStorage:
        return self._storage

    async def lose_metadata(self, session_id: str) -> None:
        # All of it is in one object: nothing can be left behind.
        self._storage._forget_session(self._storage._sessions[session_id])

    async def advance(self, seconds: float) -> bool:
        self.clock.now += seconds
        return True


class TestMemoryStorage(StorageContract):
    @asynccontextmanager
    async def harness(self, retention: Retention) -> AsyncIterator[MemoryHarness]:
        harness = MemoryHarness(retention)
        yield harness
        await harness.storage.aclose()
        check_accounting(harness.storage)


def run(call: Coroutine[Any, Any, T]) -> T:
    """Return what `call` returns. Invariant: no operation of a `MemoryStorage` but `wait` ever yields to the loop."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the operation yielded to the event loop, so it is not one step")


def run_or_refuse(write: Coroutine[Any, Any, T]) -> T | AppendRefusedError:
    try:
        return run(write)
    except AppendRefusedError as refusal:
        return refusal


def check_accounting(storage: MemoryStorage) -> None:
    """Check that what is charged is what is retained, and that what is kept beside it is bounded by it."""
    total, places = 0, 0
    empty = dict[_Stream, int]()
    for session_id, session in storage._sessions.items():
        assert session.session_id == session_id
        charged = 0
        for stream in session.streams.values():
            ring = stream.ring
            events = ring.after(ring.replay_floor, ALL)
            charged += STREAM_OVERHEAD_BYTES + len(stream.request_id or "")
            charged += sum(EVENT_OVERHEAD_BYTES + len(event or b"") for event in events)
        assert session.charged_bytes == charged
        assert session.unanswered == sum(
            stream.request_id is not None and not stream.is_terminal for stream in session.streams.values()
        )
        silent = {
            stream: stream.own_charge
            for stream in session.streams.values()
            if stream.request_id is not None and not len(stream.ring)
        }
        assert session.empty == silent
        assert session.empty.charged_bytes == sum(silent.values())
        empty |= silent
        held = sum(len(stream.ring) for stream in session.streams.values())
        # The newest event, which is never evicted by its own append, may be more than fits.
        assert charged <= storage.retention.max_session_bytes or held <= 1
        assert len(session.order) <= 2 * held + 128
        total += charged
        places += held
    assert storage._charged_bytes == total
    assert dict(storage._empty) == empty
    assert storage._empty.charged_bytes == sum(empty.values())
    assert total <= storage.retention.max_total_bytes or places <= 1
    assert len(storage._order) <= 2 * places + 128
    completed = [
        stream for session in storage._sessions.values() for stream in session.streams.values() if stream.is_terminal
    ]
    assert len(storage._completed) == len(completed)


@dataclass
class Log:
    """All that was ever appended to one stream, and what became of the stream."""

    session_id: str
    generation: Generation
    stream: StreamId
    request_id: str | None
    events: list[bytes | None] = field(default_factory=list)
    is_terminal: bool = False
    is_superseded: bool = False

    def cursor(self, seq: int) -> EventCursor:
        return EventCursor(generation=self.generation, stream=self.stream, seq=seq)


class Model:
    """Random operations on a `MemoryStorage`, each compared with lists that forget nothing."""

    def __init__(self, retention: Retention) -> None:
        self.retention = retention
        self.clock = Clock()
        self.storage = MemoryStorage(retention=retention, clock=self.clock)
        self.issued: dict[str, list[Generation]] = {}
        self.logs: list[Log] = []

    def is_known(self, session_id: str) -> bool:
        return run(self.storage.snapshot(session_id, None)) is not None

    def open_session(self, session_id: str) -> None:
        self._issued(session_id, run(self.storage.open_session(session_id)))

    def advance_generation(self, session_id: str) -> None:
        is_known = self.is_known(session_id)
        generation = run(self.storage.advance_generation(session_id))
        assert (generation is not None) == is_known
        if generation is not None:
            self._issued(session_id, generation)

    def end_session(self, session_id: str) -> None:
        is_known = self.is_known(session_id)
        assert run(self.storage.end_session(session_id)) == is_known
        assert not self.is_known(session_id)

    def open_stream(self, session_id: str, request_id: str) -> None:
        generations = self.issued.get(session_id)
        if not generations:
            return
        stream = run_or_refuse(self.storage.open_stream(session_id, generations[-1], request_id))
        if isinstance(stream, AppendRefusedError):
            assert stream.current is None
            assert not self.is_known(session_id)
            return
        for log in self.logs:
            if (log.session_id, log.generation, log.request_id) == (session_id, generations[-1], request_id):
                log.is_superseded = True
        self.logs.append(Log(session_id, generations[-1], stream, request_id))

    def append(self, log: Log, events: list[bytes | None], *, is_terminal: bool) -> None:
        place = log.session_id, log.generation, log.stream
        seq = run_or_refuse(self.storage.append(*place, events, is_terminal=is_terminal))
        if isinstance(seq, AppendRefusedError):
            snapshot = run(self.storage.snapshot(log.session_id, log.cursor(0)))
            assert seq.current == (None if snapshot is None else snapshot.generation)
            if snapshot is not None and snapshot.claimed == "current" and isinstance(snapshot.stream, Retained):
                assert log.is_terminal
            return
        assert not log.is_terminal
        assert not log.is_superseded
        log.events += events
        log.is_terminal = is_terminal
        assert seq == len(log.events)
        # Invariant: the newest event is never evicted by its own append.
        assert run(self.storage.read(*place, seq - 1, 1)) == Batch(events[-1:], is_terminal)

    def check(self, log: Log) -> None:
        """Check that what the storage tells of a stream is true, and that nothing of it is skipped."""
        snapshot = run(self.storage.snapshot(log.session_id, log.cursor(0)))
        place = log.session_id, log.generation, log.stream
        generations = self.issued[log.session_id]
        if snapshot is None or snapshot.claimed != "current":
            if snapshot is not None:
                assert snapshot.generation == generations[-1]
                # The numbers of a session that was over for long begin anew; the nonce keeps them apart.
                later = generations[generations.index(log.generation) + 1 :]
                is_forgotten = any(generation.counter <= log.generation.counter for generation in later)
                assert snapshot.claimed == ("never" if is_forgotten else "earlier")
            assert run(self.storage.read(*place, 0, ALL)) is None
            return
        assert snapshot.generation == generations[-1] == log.generation
        match snapshot.stream:
            case Retained() as state:
                assert not log.is_superseded
                floor, mark = state.replay_floor, state.high_water_mark
                assert (mark, state.is_terminal) == (len(log.events), log.is_terminal)
                assert mark - floor <= self.retention.max_events
                holes = [seq for seq in range(floor + 1, mark + 1) if log.events[seq - 1] is None]
                assert max(state.last_hole, floor) == max(holes, default=floor)
                for after_seq in {floor, (floor + mark) // 2, mark}:
                    batch = run(self.storage.read(*place, after_seq, ALL))
                    assert batch == Batch(log.events[after_seq:], log.is_terminal)
                if floor:
                    assert run(self.storage.read(*place, floor - 1, ALL)) is None
            case Superseded():
                assert log.is_superseded
            case Dropped():
                # Unfinished streams without an event go too, once they take half of a ceiling.
                opened = [other for other in self.logs if other.request_id is not None]
                beside = [other for other in opened if other.generation == log.generation]
                charge = STREAM_OVERHEAD_BYTES + 200
                is_tight = (
                    len(beside) * charge > self.retention.max_session_bytes / 2
                    or len(opened) * charge > self.retention.max_total_bytes / 2
                )
                assert log.is_superseded or log.is_terminal or is_tight
            case NeverOpened():
                pytest.fail("a stream that was opened is told as never opened")

    def check_all(self) -> None:
        check_accounting(self.storage)
        for log in self.logs:
            self.check(log)

    def _issued(self, session_id: str, generation: Generation) -> None:
        issued = self.issued.setdefault(session_id, [])
        assert generation not in issued
        issued.append(generation)
        self.logs.append(Log(session_id, generation, STANDALONE, None))


TIGHT = Retention(
    max_events=5,
    max_bytes=300,
    max_session_bytes=6_000,
    max_total_bytes=12_000,
    max_sessions=3,
    completed_seconds=10,
    idle_seconds=100,
)

SESSIONS = st.sampled_from(["a", "b", "c", "d"])
EVENTS = st.lists(st.none() | st.integers(0, 300).map(bytes), min_size=1, max_size=7)


class MemoryMachine(RuleBasedStateMachine):
    @initialize(max_events=st.sampled_from([1, 2, 5, 100]), max_total_bytes=st.sampled_from([6_000, 12_000, 10**6]))
    def begin(self, max_events: int, max_total_bytes: int) -> None:
        limits = {"max_events": max_events, "max_total_bytes": max_total_bytes}
        self.model = Model(TIGHT.model_copy(update=limits))

    @rule(session_id=SESSIONS)
    def open_session(self, session_id: str) -> None:
        self.model.open_session(session_id)

    @rule(session_id=SESSIONS)
    def advance_generation(self, session_id: str) -> None:
        self.model.advance_generation(session_id)

    @rule(session_id=SESSIONS)
    def end_session(self, session_id: str) -> None:
        self.model.end_session(session_id)

    @rule(session_id=SESSIONS, request_id=st.sampled_from(["1", "2", "x" * 200]))
    def open_stream(self, session_id: str, request_id: str) -> None:
        self.model.open_stream(session_id, request_id)

    @precondition(lambda self: self.model.logs)
    @rule(data=st.data(), events=EVENTS, is_answer=st.booleans())
    def append(self, data: st.DataObject, events: list[bytes | None], is_answer: bool) -> None:
        log = data.draw(st.sampled_from(self.model.logs[-8:]))
        self.model.append(log, events, is_terminal=is_answer and log.request_id is not None)

    @rule(seconds=st.sampled_from([1, 9, 10, 11, 50, 99, 100, 101]))
    def pass_time(self, seconds: int) -> None:
        self.model.clock.now += seconds

    @invariant()
    def nothing_is_skipped_and_all_is_accounted_for(self) -> None:
        if hasattr(self, "model"):
            self.model.check_all()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("seed", range(3))
def test_accounting_is_exact_after_thousands_of_operations(seed: int) -> None:
    chance = random.Random(seed)
    # Several thousand events and some dozen streams fit.
    model = Model(
        Retention(
            max_events=200,
            max_bytes=20_000,
            max_session_bytes=60_000,
            max_total_bytes=150_000,
            max_sessions=5,
            completed_seconds=60,
            idle_seconds=200,
        )
    )
    sessions = [f"session {number}" for number in range(8)]
    for step in range(4_000):
        session_id = chance.choice(sessions)
        model.clock.now += chance.expovariate(2)
        pick = chance.random()
        if pick < 0.02 or session_id not in model.issued:
            model.open_session(session_id)
        elif pick < 0.03:
            model.advance_generation(session_id)
        elif pick < 0.04:
            model.end_session(session_id)
        elif pick < 0.05:
            model.clock.now += chance.choice([30, 100, 201])
        elif pick < 0.2:
            model.open_stream(session_id, str(chance.randrange(6)))
        else:
            log = chance.choice(model.logs[-20:])
            events = [
                None if chance.random() < 0.1 else bytes(int(chance.expovariate(1 / 300)))
                for _ in range(chance.choice([1, 1, 1, 1, 2, 5, 40]))
            ]
            is_answer = log.request_id is not None and chance.random() < 0.2
            model.append(log, events, is_terminal=is_answer)
            model.check(log)
        if step % 50 == 0:
            check_accounting(model.storage)
    model.check_all()
    assert model.storage.evicted_events > 1_000


@pytest.mark.no_cover
@given(
    seed=st.integers(0, 2**32),
    max_events=st.sampled_from([1, 10, 1_000]),
    max_total_bytes=st.integers(20_000, 500_000),
)
@settings(max_examples=3, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
def test_accounting_is_exact_after_a_hundred_thousand_random_operations(
    seed: int, max_events: int, max_total_bytes: int
) -> None:
    # A seed and no more is drawn: a draw costs more than an operation.
    chance = random.Random(seed)
    clock = Clock()
    storage = MemoryStorage(
        retention=Retention(
            max_events=max_events,
            max_bytes=2_000,
            max_session_bytes=max_total_bytes // 2,
            max_total_bytes=max_total_bytes,
            max_sessions=6,
            completed_seconds=60,
            idle_seconds=200,
        ),
        clock=clock,
    )
    generations = dict[str, Generation]()
    streams = list[tuple[str, Generation, StreamId]]()
    stored = 0
    for step in range(100_000):
        session_id = f"session {chance.randrange(9)}"
        clock.now += chance.expovariate(4)
        pick = chance.random()
        if pick < 0.004 or session_id not in generations:
            generations[session_id] = run(storage.open_session(session_id))
            streams.append((session_id, generations[session_id], STANDALONE))
        elif pick < 0.006:
            generations[session_id] = run(storage.advance_generation(session_id)) or generations[session_id]
        elif pick < 0.008:
            run(storage.end_session(session_id))
        elif pick < 0.01:
            clock.now += chance.choice([30, 61, 201])
        elif pick < 0.2:
            opened = run_or_refuse(
                storage.open_stream(session_id, generations[session_id], str(chance.randrange(10_000)))
            )
            if not isinstance(opened, AppendRefusedError):
                streams.append((session_id, generations[session_id], opened))
        else:
            place = chance.choice(streams[-30:])
            events = [
                None if chance.random() < 0.1 else bytes(chance.randrange(1_000))
                for _ in range(chance.choice([1, 1, 1, 10]))
            ]
            is_answer = place[2] != STANDALONE and chance.random() < 0.2
            appended = run_or_refuse(storage.append(*place, events, is_terminal=is_answer))
            stored += not isinstance(appended, AppendRefusedError)
        if step % 5_000 == 0:
            check_accounting(storage)
    check_accounting(storage)
    assert stored > 5_000
    assert storage.evicted_events > 5_000


def count_calls(operation: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, are called; a measure of work that no other load changes."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        operation()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("limit", ["max_events", "max_bytes", "max_session_bytes", "max_total_bytes"])
def test_evicting_takes_no_more_work_the_more_is_retained(limit: str) -> None:
    work = list[float]()
    for retained in (50, 2_000):
        size = 1 if limit == "max_events" else 10 if limit == "max_bytes" else 10 + EVENT_OVERHEAD_BYTES
        large = {"max_bytes": 10**9, "max_session_bytes": 10**9, "max_total_bytes": 10**9, "max_events": 10**9}
        limits = {**large, limit: retained * size}
        limits["max_session_bytes"] = min(limits["max_session_bytes"], limits["max_total_bytes"])
        limits["max_bytes"] = min(limits["max_bytes"], limits["max_session_bytes"])
        storage = MemoryStorage(retention=Retention(**limits))
        generation = run(storage.open_session("s"))

        def flood(storage: MemoryStorage = storage, generation: Generation = generation) -> None:
            for _ in range(4_000):
                run(storage.append("s", generation, STANDALONE, [bytes(10)]))

        while storage.evicted_events < retained:
            flood()
        evicted = storage.evicted_events
        work.append(count_calls(flood))
        assert storage.evicted_events == evicted + 4_000
    # An order is tidied each time that half of it is stale, so the work comes in lumps.
    assert work[1] < 1.5 * work[0]


def test_a_flood_of_calls_that_never_end_stays_under_the_ceilings() -> None:
    """What such a call retains could be evicted, its stream could not: they added up above every limit."""
    limit = 50_000
    storage = MemoryStorage(retention=Retention(max_bytes=limit, max_session_bytes=limit, max_total_bytes=limit))
    for session_id in ("a", "b"):
        generation = run(storage.open_session(session_id))
        streams = []
        for number in range(200):
            streams.append(run(storage.open_stream(session_id, generation, str(number))))
            if number % 3:
                run(storage.append(session_id, generation, streams[-1], [bytes(100)]))
            check_accounting(storage)
            assert storage._charged_bytes <= limit
        first, last = (
            run(storage.snapshot(session_id, EventCursor(generation=generation, stream=stream, seq=0)))
            for stream in (streams[0], streams[-1])
        )
        assert first is not None
        assert first.stream == Dropped()
        assert last is not None
        assert isinstance(last.stream, Retained)
        refusal = run_or_refuse(storage.append(session_id, generation, streams[0], [b"late"]))
        assert isinstance(refusal, AppendRefusedError)
        assert refusal.current == generation


def test_a_silent_call_outlives_a_flood_of_events() -> None:
    storage = MemoryStorage(retention=Retention(max_bytes=50_000, max_session_bytes=50_000, max_total_bytes=50_000))
    generation = run(storage.open_session("s"))
    silent = run(storage.open_stream("s", generation, "silent"))
    emptied = run(storage.open_stream("s", generation, "emptied"))
    run(storage.append("s", generation, emptied, [b"evicted"]))
    for _ in range(1_000):
        run(storage.append("s", generation, STANDALONE, [bytes(1_000)]))
    assert run(storage.append("s", generation, silent, [b"answer"], is_terminal=True)) == 1
    assert run(storage.append("s", generation, emptied, [b"answer"], is_terminal=True)) == 2
    assert run(storage.read("s", generation, emptied, 0, 1)) is None
    assert run(storage.read("s", generation, emptied, 1, 1)) == Batch([b"answer"], is_terminal=True)
    check_accounting(storage)


def test_eviction_is_oldest_first_over_all_streams_and_sessions() -> None:
    chance = random.Random(1)
    limit = 40_000
    storage = MemoryStorage(retention=Retention(max_bytes=limit, max_session_bytes=limit, max_total_bytes=limit))
    streams = []
    for session_id in ("a", "b", "c"):
        generation = run(storage.open_session(session_id))
        streams.append((session_id, generation, STANDALONE))
        streams += [
            (session_id, generation, run(storage.open_stream(session_id, generation, request_id)))
            for request_id in ("1", "2")
        ]
    appended: list[tuple[int, int]] = []
    for _ in range(1_000):
        number = chance.randrange(len(streams))
        for seq in [run(storage.append(*streams[number], [bytes(chance.randrange(400))])) for _ in range(2)]:
            appended.append((number, seq))
        retained = set[tuple[int, int]]()
        for number, (session_id, generation, stream) in enumerate(streams):
            cursor = EventCursor(generation=generation, stream=stream, seq=0)
            snapshot = run(storage.snapshot(session_id, cursor))
            assert snapshot is not None
            assert isinstance(snapshot.stream, Retained)
            floor, mark = snapshot.stream.replay_floor, snapshot.stream.high_water_mark
            retained |= {(number, seq) for seq in range(floor + 1, mark + 1)}
        assert retained == set(appended[-len(retained) :])
    assert storage.evicted_events == len(appended) - len(retained) > 1_000
    # No more than needed: the next oldest event would not have fitted.
    assert limit - 500 - EVENT_OVERHEAD_BYTES < storage._charged_bytes <= limit


def test_opening_a_stream_makes_room_for_it() -> None:
    storage = MemoryStorage(retention=Retention(max_bytes=10_000, max_session_bytes=10_000))
    generation = run(storage.open_session("s"))
    # 1,024 for the stream and 1,072 for each event: 8,528.
    run(storage.append("s", generation, STANDALONE, [bytes(1_000)] * 7))
    for request_id, retained in (("1", 7), ("2", 6), ("3", 5), ("4", 4)):
        run(storage.open_stream("s", generation, request_id))
        check_accounting(storage)
        description = run(storage.describe("s"))
        assert description is not None
        assert description.retained_events == retained


def test_only_events_are_counted_as_evicted_not_holes_nor_what_has_ended() -> None:
    clock = Clock()
    storage = MemoryStorage(retention=Retention(max_events=2, completed_seconds=10, idle_seconds=100), clock=clock)
    generation = run(storage.open_session("s"))
    run(storage.append("s", generation, STANDALONE, [b"a", None, b"c", b"d"]))
    assert storage.evicted_events == 1
    stream = run(storage.open_stream("s", generation, "1"))
    run(storage.append("s", generation, stream, [None, b"answer"], is_terminal=True))
    clock.now += 10
    assert run(storage.read("s", generation, stream, 0, 1)) is None
    assert storage.evicted_events == 2
    run(storage.advance_generation("s"))
    assert storage.evicted_events == 2
    generation = run(storage.open_session("s"))
    run(storage.append("s", generation, STANDALONE, [None, b"b"]))
    clock.now += 100
    assert run(storage.describe("s")) is None
    assert storage.evicted_events == 3


def test_what_names_evicted_events_does_not_grow() -> None:
    storage = MemoryStorage(retention=Retention(max_events=10))
    generation = run(storage.open_session("s"))
    quiet = run(storage.open_stream("s", generation, "quiet"))
    # The oldest entry of each order stays: what follows it cannot simply be cut off.
    run(storage.append("s", generation, quiet, [b"a"]))
    for _ in range(5_000):
        run(storage.append("s", generation, STANDALONE, [b"a"]))
    check_accounting(storage)
    assert len(storage._order) < 200
    assert len(storage._sessions["s"].order) < 200
    for _ in range(1_000):
        stream = run(storage.open_stream("s", generation, "again"))
        run(storage.append("s", generation, stream, [b"a", b"answer"], is_terminal=True))
    check_accounting(storage)
    assert len(storage._order) < 200
    assert len(storage._sessions["s"].order) < 200
    for number in range(1_000):
        other = run(storage.open_session(f"session {number}"))
        run(storage.append(f"session {number}", other, STANDALONE, [b"a"]))
        run(storage.end_session(f"session {number}"))
    check_accounting(storage)
    assert len(storage._order) < 200


def test_what_names_completed_streams_does_not_outlive_them() -> None:
    """Of a flood of short calls, evicted by the ceiling, each stayed queued until its time: memory no limit counted."""
    storage = MemoryStorage(retention=Retention(max_bytes=20_000, max_session_bytes=20_000))
    generation = run(storage.open_session("s"))
    for number in range(500):
        stream = run(storage.open_stream("s", generation, str(number)))
        run(storage.append("s", generation, stream, [b"answer"], is_terminal=True))
    assert len(storage._completed) == len(storage._sessions["s"].streams) - 1 < 20
    run(storage.end_session("s"))
    assert len(storage._completed) == 0


def test_a_snapshot_tells_the_rest_of_a_complete_stream() -> None:
    """A resume of it reads nothing more; where that is for nothing, none is told."""
    storage = MemoryStorage(retention=Retention(max_events=3))
    generation = run(storage.open_session("s"))
    stream = run(storage.open_stream("s", generation, "call"))
    run(storage.append("s", generation, stream, [b"a", b"b", b"c", b"answer"], is_terminal=True))

    def rest(seq: int) -> object:
        snapshot = run(storage.snapshot("s", EventCursor(generation, stream, seq)))
        assert snapshot is not None
        assert isinstance(snapshot.stream, Retained)
        return snapshot.stream.rest

    assert [rest(seq) for seq in (1, 2, 3)] == [[b"b", b"c", b"answer"], [b"c", b"answer"], [b"answer"]]
    assert [rest(seq) for seq in (0, 4, 5)] == [None] * 3


@pytest.mark.parametrize("ending", ["end", "advance", "reopen", "idle", "evict", "supersede", "complete"])
def test_memory_is_given_back(ending: str) -> None:
    clock = Clock()
    storage = MemoryStorage(retention=Retention(max_sessions=1), clock=clock)
    generation = run(storage.open_session("s"))
    stream = run(storage.open_stream("s", generation, "1"))
    tracemalloc.start()
    try:
        # So few that the orders of eviction are not tidied, and still name the stream.
        for number in range(50):
            run(storage.append("s", generation, stream, [bytes(40_000)], is_terminal=number == 49))
        assert len(storage._order) == 50
        assert tracemalloc.get_traced_memory()[0] > 2_000_000
        match ending:
            case "end":
                run(storage.end_session("s"))
            case "advance":
                run(storage.advance_generation("s"))
            case "reopen":
                run(storage.open_session("s"))
            case "idle":
                clock.now += 3_600
                run(storage.describe("s"))
            case "evict":
                run(storage.open_session("t"))
            case "supersede":
                run(storage.open_stream("s", generation, "1"))
            case "complete":
                clock.now += 300
                run(storage.describe("s"))
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_remembered_generations_are_bounded_and_the_counter_goes_on() -> None:
    storage = MemoryStorage()
    generations = [run(storage.open_session("s"))]
    for _ in range(1_499):
        generation = run(storage.advance_generation("s"))
        assert generation is not None
        generations.append(generation)
    assert [generation.counter for generation in generations] == list(range(1, 1_501))
    assert len(storage._sessions["s"].nonces) == 1_000

    def claimed(generation: Generation) -> str:
        snapshot = run(storage.snapshot("s", EventCursor(generation=generation, stream=STANDALONE, seq=0)))
        assert snapshot is not None
        return snapshot.claimed

    assert [claimed(generations[counter - 1]) for counter in (1, 500, 501, 1_499, 1_500)] == [
        "never",
        "never",
        "earlier",
        "earlier",
        "current",
    ]
    run(storage.end_session("s"))
    assert run(storage.open_session("s")).counter == 1_501


def test_remembered_sessions_are_bounded_by_number_and_age() -> None:
    clock = Clock()
    storage = MemoryStorage(retention=Retention(max_sessions=10, idle_seconds=100), clock=clock)
    for number in range(50):
        run(storage.open_session(f"session {number}"))
    assert len(storage._sessions) == 10
    assert len(storage._past) == 10
    assert run(storage.open_session("session 39")).counter == 2
    clock.now += 100
    assert run(storage.describe("session 49")) is None
    assert (len(storage._sessions), len(storage._past)) == (0, 10)
    assert run(storage.open_session("session 49")).counter == 2
    run(storage.end_session("session 49"))
    clock.now += 100
    assert run(storage.describe("session 49")) is None
    assert (len(storage._sessions), len(storage._past)) == (0, 0)
    assert storage._next_expiry == math.inf
