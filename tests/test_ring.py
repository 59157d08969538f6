from __future__ import annotations

import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mcp_resumable.ring import RingBuffer


def ring_of(*events: bytes | None, evicted: int = 0) -> RingBuffer:
    ring = RingBuffer()
    for event in events:
        ring.append(event)
    for _ in range(evicted):
        ring.evict_oldest()
    return ring


def state_of(ring: RingBuffer) -> tuple[int, int, int, int, int]:
    return len(ring), ring.replay_floor, ring.high_water_mark, ring.last_hole, ring.retained_bytes


def slots_of(ring: RingBuffer) -> list[bytes | None]:
    return ring._items


def test_new_ring_is_empty() -> None:
    ring = RingBuffer()
    assert state_of(ring) == (0, 0, 0, 0, 0)
    assert ring.after(0, 10) == []


def test_each_append_takes_the_next_seq() -> None:
    ring = RingBuffer()
    assert [ring.append(b"a"), ring.append(None), ring.append(b"bcd")] == [1, 2, 3]
    assert state_of(ring) == (3, 0, 3, 2, 4)


def test_empty_event_is_an_event_and_no_hole() -> None:
    ring = ring_of(b"")
    assert ring.after(0, 10) == [b""]
    assert state_of(ring) == (1, 0, 1, 0, 0)


def test_eviction_takes_the_oldest_and_tells_what_it_frees() -> None:
    ring = ring_of(b"a", None, b"bcd", b"ef")
    assert (ring.evict_oldest(), state_of(ring)) == (1, (3, 1, 4, 2, 5))
    assert (ring.evict_oldest(), state_of(ring)) == (0, (2, 2, 4, 2, 5))
    assert (ring.evict_oldest(), state_of(ring)) == (3, (1, 3, 4, 2, 2))
    assert (ring.evict_oldest(), state_of(ring)) == (2, (0, 4, 4, 2, 0))


def test_seqs_go_on_after_everything_is_evicted() -> None:
    ring = ring_of(b"a", b"b", evicted=2)
    assert ring.append(b"c") == 3
    assert ring.after(2, 10) == [b"c"]


def test_events_after_a_seq_are_those_that_follow_it() -> None:
    ring = ring_of(b"1", b"2", None, b"4", b"5", evicted=1)
    assert ring.after(1, 10) == [b"2", None, b"4", b"5"]
    assert ring.after(2, 10) == [None, b"4", b"5"]
    assert ring.after(4, 10) == [b"5"]
    assert ring.after(5, 10) == []


def test_limit_cuts_at_the_end_and_skips_nothing() -> None:
    ring = ring_of(b"1", b"2", None, b"4", b"5", evicted=1)
    assert ring.after(1, 1) == [b"2"]
    assert ring.after(1, 3) == [b"2", None, b"4"]
    assert ring.after(1, 4) == [b"2", None, b"4", b"5"]


@pytest.mark.parametrize("seq", [-1, 0, 1, 5, 6])
def test_reading_from_outside_of_what_is_retained_raises(seq: int) -> None:
    ring = ring_of(b"1", b"2", b"3", b"4", evicted=2)
    with pytest.raises(IndexError):
        ring.after(seq, 10)


def test_reading_from_the_floor_and_from_the_high_water_mark_does_not_raise() -> None:
    ring = ring_of(b"1", b"2", b"3", b"4", evicted=2)
    assert (ring.after(2, 10), ring.after(4, 10)) == ([b"3", b"4"], [])


@pytest.mark.parametrize("appended", [0, 1, 63, 64, 65, 200])
def test_evicting_from_an_empty_ring_raises_and_changes_nothing(appended: int) -> None:
    ring = ring_of(*[b"x"] * appended, evicted=appended)
    with pytest.raises(IndexError):
        ring.evict_oldest()
    assert state_of(ring) == (0, appended, appended, 0, 0)
    assert ring.append(b"y") == appended + 1
    assert ring.after(appended, 10) == [b"y"]


def test_hole_is_after_a_cursor_only_below_it() -> None:
    ring = ring_of(b"1", None, b"3")
    assert [ring.has_hole_after(seq) for seq in range(4)] == [True, True, False, False]


def test_last_hole_is_the_highest_one() -> None:
    ring = ring_of(None, b"2", None, b"4")
    assert ring.last_hole == 3


def test_evicted_event_is_not_held_any_more() -> None:
    ring = ring_of(b"first", *[b"x"] * 1_000, evicted=1)
    assert b"first" not in slots_of(ring)


@pytest.mark.no_cover
def test_a_million_appends_with_eviction_do_not_grow_the_ring() -> None:
    ring = ring_of(*[b"x"] * 10)
    most = 0
    for _ in range(1_000_000 // 10):
        for _ in range(10):
            ring.append(b"x")
            ring.evict_oldest()
        most = max(most, len(slots_of(ring)))
    assert state_of(ring) == (10, 1_000_000, 1_000_010, 0, 10)
    assert most < 10 + 1 + 64


def test_memory_is_given_back_when_a_large_ring_is_evicted() -> None:
    ring = ring_of(*[b"x"] * 100_000)
    assert sys.getsizeof(slots_of(ring)) > 800_000
    for _ in range(100_000 - 10):
        ring.evict_oldest()
    assert ring.after(99_990, 100) == [b"x"] * 10
    assert sys.getsizeof(slots_of(ring)) < 4_000


class RingAgainstAListThatForgetsNothing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ring = RingBuffer()
        self.history: list[bytes | None] = []
        self.evicted = 0

    @rule(event=st.binary(max_size=20))
    def append(self, event: bytes) -> None:
        self.history.append(event)
        assert self.ring.append(event) == len(self.history)

    @rule()
    def append_hole(self) -> None:
        self.history.append(None)
        assert self.ring.append(None) == len(self.history)

    @rule(count=st.integers(1, 150))
    def append_many(self, count: int) -> None:
        for _ in range(count):
            self.append(b"%d" % len(self.history))

    @precondition(lambda self: self.evicted < len(self.history))
    @rule()
    def evict(self) -> None:
        event = self.history[self.evicted]
        self.evicted += 1
        assert self.ring.evict_oldest() == (0 if event is None else len(event))

    @rule(count=st.integers(1, 150))
    def evict_many(self, count: int) -> None:
        for _ in range(min(count, len(self.history) - self.evicted)):
            self.evict()

    @precondition(lambda self: self.evicted == len(self.history))
    @rule()
    def evict_from_nothing(self) -> None:
        with pytest.raises(IndexError):
            self.ring.evict_oldest()

    @rule(data=st.data(), limit=st.integers(1, 300))
    def read(self, data: st.DataObject, limit: int) -> None:
        seq = data.draw(st.integers(self.evicted, len(self.history)))
        assert self.ring.after(seq, limit) == self.history[seq:][:limit]

    @rule(data=st.data(), limit=st.integers(1, 300))
    def read_from_outside(self, data: st.DataObject, limit: int) -> None:
        above = st.integers(len(self.history) + 1, len(self.history) + 100)
        below = st.integers(-100, self.evicted - 1)
        with pytest.raises(IndexError):
            self.ring.after(data.draw(st.one_of(above, below)), limit)

    @rule(data=st.data())
    def ask_for_holes(self, data: st.DataObject) -> None:
        seq = data.draw(st.integers(self.evicted, len(self.history)))
        assert self.ring.has_hole_after(seq) is (None in self.history[seq:])

    @invariant()
    def counts_are_those_of_the_list(self) -> None:
        retained = self.history[self.evicted :]
        holes = [seq for seq, event in enumerate(self.history, start=1) if event is None]
        assert state_of(self.ring) == (
            len(retained),
            self.evicted,
            len(self.history),
            max(holes, default=0),
            sum(len(event) for event in retained if event is not None),
        )

    @invariant()
    def evicted_slots_are_few_or_fewer_than_the_others(self) -> None:
        live = len(self.history) - self.evicted
        spare = len(slots_of(self.ring)) - live
        assert spare < max(64, live)


TestRingAgainstAListThatForgetsNothing = RingAgainstAListThatForgetsNothing.TestCase
TestRingAgainstAListThatForgetsNothing.settings = settings(deadline=None)
