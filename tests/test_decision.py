from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_resumable.cursor import STANDALONE, EventCursor, Generation, StreamId
from mcp_resumable.decision import (
    Decision,
    Dropped,
    Gone,
    Invalid,
    NeverOpened,
    Reset,
    Resume,
    Retained,
    Snapshot,
    StreamState,
    Successor,
    Superseded,
    decide,
)
from mcp_resumable.errors import (
    EventEvictedError,
    FutureEventIdError,
    GenerationMismatchError,
    MalformedEventIdError,
    ReplayGapError,
    ResumptionError,
    SessionNotFoundError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
)

Claimed = Literal["current", "earlier", "never"]

CURRENT = Generation(3, "k3v9q0m4x7ta")
STREAM = StreamId(5, "7")

# seq 1 to 4 evicted, 5 to 10 retained, no answer yet.
OPEN = Retained(high_water_mark=10, replay_floor=4)
# The same with seq 7 a hole.
HOLED = Retained(high_water_mark=10, replay_floor=4, last_hole=7)
# The same with seq 10 the answer.
COMPLETED = Retained(high_water_mark=10, replay_floor=4, is_terminal=True)


def cursor_at(seq: int) -> EventCursor:
    return EventCursor(generation=CURRENT, stream=STREAM, seq=seq)


def decide_at(
    seq: int, stream: StreamState, *, claimed: Claimed = "current", replay_completed: bool = True
) -> Decision:
    snapshot = Snapshot(generation=CURRENT, claimed=claimed, stream=stream)
    return decide("the id", cursor_at(seq), snapshot, replay_completed=replay_completed)


def assert_refused(
    decision: Decision,
    kind: type[Reset | Invalid | Gone],
    error_class: type[ResumptionError],
    **fields: int | str | None,
) -> None:
    """Check the whole of a refusal: what it is, and every field of its error."""
    assert type(decision) is kind
    assert not isinstance(decision, Resume)
    assert type(decision.error) is error_class
    assert vars(decision.error) == {"event_id": "the id", "generation": "3-k3v9q0m4x7ta", **fields}


# Row 1.


def test_unknown_session_is_gone() -> None:
    decision = decide("the id", cursor_at(7), None, replay_completed=True)
    assert_refused(decision, Gone, SessionNotFoundError, generation=None)


# Row 2.


def test_malformed_event_id_is_invalid() -> None:
    snapshot = Snapshot(generation=CURRENT, claimed="never", stream=NeverOpened())
    decision = decide("the id", None, snapshot, replay_completed=True)
    assert_refused(decision, Invalid, MalformedEventIdError)


# Row 3.


def test_earlier_generation_resets_and_names_the_current_one() -> None:
    assert_refused(decide_at(7, NeverOpened(), claimed="earlier"), Reset, GenerationMismatchError)


# Row 4.


def test_generation_that_was_never_issued_is_invalid() -> None:
    assert_refused(decide_at(7, NeverOpened(), claimed="never"), Invalid, UnrecognizedGenerationError)


# Row 5.


def test_stream_that_was_never_opened_is_invalid() -> None:
    decision = decide_at(0, NeverOpened())
    assert_refused(decision, Invalid, FutureEventIdError, seq=0, replay_floor=None, high_water_mark=None)


def test_seq_one_above_the_high_water_mark_is_invalid() -> None:
    decision = decide_at(11, OPEN)
    assert_refused(decision, Invalid, FutureEventIdError, seq=11, replay_floor=4, high_water_mark=10)


def test_seq_1_of_an_empty_stream_is_invalid() -> None:
    decision = decide_at(1, Retained(high_water_mark=0))
    assert_refused(decision, Invalid, FutureEventIdError, seq=1, replay_floor=0, high_water_mark=0)


# Row 6.


def test_superseded_stream_resets() -> None:
    assert_refused(decide_at(7, Superseded()), Reset, StreamSupersededError)


# Row 7.


def test_cursor_at_the_answer_of_a_completed_stream_resets() -> None:
    decision = decide_at(10, COMPLETED)
    assert_refused(decision, Reset, StreamCompletedError, seq=10, replay_floor=4, high_water_mark=10)


def test_cursor_right_before_a_retained_answer_resumes() -> None:
    assert decide_at(9, COMPLETED) == Resume(cursor_at(9), 10)


def test_cursor_at_the_floor_of_a_completed_stream_resumes() -> None:
    assert decide_at(4, COMPLETED) == Resume(cursor_at(4), 10)


def test_answer_that_is_all_that_is_left_is_replayed() -> None:
    only_the_answer = Retained(high_water_mark=10, replay_floor=9, is_terminal=True)
    assert decide_at(9, only_the_answer) == Resume(cursor_at(9), 10)


def test_stream_that_is_nothing_but_its_answer_is_replayed_from_before_it() -> None:
    assert decide_at(0, Retained(high_water_mark=1, is_terminal=True)) == Resume(cursor_at(0), 1)


@pytest.mark.parametrize("seq", [0, 9, 10])
def test_evicted_answer_resets_as_completed_wherever_the_cursor_is(seq: int) -> None:
    decision = decide_at(seq, Retained(high_water_mark=10, replay_floor=10, is_terminal=True))
    assert_refused(decision, Reset, StreamCompletedError, seq=seq, replay_floor=10, high_water_mark=10)


def test_answer_that_could_not_be_kept_resets_as_completed() -> None:
    decision = decide_at(9, Retained(high_water_mark=10, replay_floor=4, last_hole=10, is_terminal=True))
    assert_refused(decision, Reset, StreamCompletedError, seq=9, replay_floor=4, high_water_mark=10)


@pytest.mark.parametrize("seq", [4, 9, 10])
def test_completed_stream_always_resets_where_completed_streams_are_not_replayed(seq: int) -> None:
    decision = decide_at(seq, COMPLETED, replay_completed=False)
    assert_refused(decision, Reset, StreamCompletedError, seq=seq, replay_floor=4, high_water_mark=10)


@pytest.mark.parametrize("seq", [4, 9, 10])
def test_open_stream_resumes_also_where_completed_streams_are_not_replayed(seq: int) -> None:
    assert decide_at(seq, OPEN, replay_completed=False) == Resume(cursor_at(seq), 10)


# Row 8.


def test_cursor_one_below_the_floor_resets() -> None:
    decision = decide_at(3, OPEN)
    assert_refused(decision, Reset, EventEvictedError, seq=3, replay_floor=4, high_water_mark=10)


def test_cursor_before_the_first_event_resets_once_the_first_event_is_evicted() -> None:
    decision = decide_at(0, Retained(high_water_mark=10, replay_floor=1))
    assert_refused(decision, Reset, EventEvictedError, seq=0, replay_floor=1, high_water_mark=10)


def test_cursor_one_below_the_floor_of_a_completed_stream_resets() -> None:
    decision = decide_at(3, COMPLETED)
    assert_refused(decision, Reset, EventEvictedError, seq=3, replay_floor=4, high_water_mark=10)


def test_cursor_below_a_wholly_evicted_stream_resets() -> None:
    decision = decide_at(9, Retained(high_water_mark=10, replay_floor=10))
    assert_refused(decision, Reset, EventEvictedError, seq=9, replay_floor=10, high_water_mark=10)


def test_stream_of_which_nothing_is_retained_resets() -> None:
    decision = decide_at(7, Dropped())
    assert_refused(decision, Reset, EventEvictedError, seq=7, replay_floor=None, high_water_mark=None)


# Row 9.


def test_cursor_right_before_a_hole_resets() -> None:
    decision = decide_at(6, HOLED)
    assert_refused(decision, Reset, ReplayGapError, seq=6, replay_floor=4, high_water_mark=10)


def test_cursor_at_the_floor_before_a_hole_resets() -> None:
    decision = decide_at(4, HOLED)
    assert_refused(decision, Reset, ReplayGapError, seq=4, replay_floor=4, high_water_mark=10)


def test_cursor_before_a_hole_at_the_high_water_mark_resets() -> None:
    decision = decide_at(9, Retained(high_water_mark=10, replay_floor=4, last_hole=10))
    assert_refused(decision, Reset, ReplayGapError, seq=9, replay_floor=4, high_water_mark=10)


def test_cursor_before_a_hole_in_a_completed_stream_resets() -> None:
    decision = decide_at(6, Retained(high_water_mark=10, replay_floor=4, last_hole=7, is_terminal=True))
    assert_refused(decision, Reset, ReplayGapError, seq=6, replay_floor=4, high_water_mark=10)


# Row 10.


def test_cursor_at_a_hole_resumes_because_the_client_got_that_event_live() -> None:
    assert decide_at(7, HOLED) == Resume(cursor_at(7), 10)


def test_cursor_at_the_floor_resumes() -> None:
    assert decide_at(4, OPEN) == Resume(cursor_at(4), 10)


def test_cursor_inside_the_stream_resumes() -> None:
    assert decide_at(7, OPEN) == Resume(cursor_at(7), 10)


def test_cursor_at_the_high_water_mark_resumes_with_nothing_missed() -> None:
    assert decide_at(10, OPEN) == Resume(cursor_at(10), 10)


def test_cursor_before_the_first_event_resumes_while_that_event_is_retained() -> None:
    assert decide_at(0, Retained(high_water_mark=10)) == Resume(cursor_at(0), 10)


def test_cursor_before_the_first_event_of_an_empty_stream_resumes() -> None:
    assert decide_at(0, Retained(high_water_mark=0)) == Resume(cursor_at(0), 0)


def test_cursor_at_the_end_of_a_wholly_evicted_open_stream_resumes() -> None:
    assert decide_at(10, Retained(high_water_mark=10, replay_floor=10)) == Resume(cursor_at(10), 10)


def test_hole_that_was_evicted_is_no_hole() -> None:
    assert decide_at(4, Retained(high_water_mark=10, replay_floor=4, last_hole=4)) == Resume(cursor_at(4), 10)


# Which row wins where several apply.


def test_unknown_session_comes_before_a_malformed_event_id() -> None:
    assert_refused(decide("the id", None, None, replay_completed=True), Gone, SessionNotFoundError, generation=None)


@pytest.mark.parametrize("claimed", ["current", "earlier", "never"])
def test_malformed_event_id_comes_before_anything_that_is_claimed(claimed: Claimed) -> None:
    snapshot = Snapshot(generation=CURRENT, claimed=claimed, stream=Superseded())
    decision = decide("the id", None, snapshot, replay_completed=True)
    assert_refused(decision, Invalid, MalformedEventIdError)


@pytest.mark.parametrize("stream", [NeverOpened(), Superseded(), Dropped(), OPEN, HOLED, COMPLETED])
def test_earlier_generation_comes_before_the_state_of_the_stream(stream: StreamState) -> None:
    assert_refused(decide_at(11, stream, claimed="earlier"), Reset, GenerationMismatchError)


@pytest.mark.parametrize("stream", [NeverOpened(), Superseded(), Dropped(), OPEN, HOLED, COMPLETED])
def test_generation_that_was_never_issued_comes_before_the_state_of_the_stream(stream: StreamState) -> None:
    assert_refused(decide_at(4, stream, claimed="never"), Invalid, UnrecognizedGenerationError)


@pytest.mark.parametrize("replay_completed", [True, False])
def test_seq_above_the_high_water_mark_comes_before_the_completion_of_the_stream(replay_completed: bool) -> None:
    decision = decide_at(11, COMPLETED, replay_completed=replay_completed)
    assert_refused(decision, Invalid, FutureEventIdError, seq=11, replay_floor=4, high_water_mark=10)


def test_completion_with_an_evicted_answer_comes_before_eviction() -> None:
    decision = decide_at(3, Retained(high_water_mark=10, replay_floor=10, is_terminal=True))
    assert_refused(decision, Reset, StreamCompletedError, seq=3, replay_floor=10, high_water_mark=10)


def test_completion_with_an_answer_that_could_not_be_kept_comes_before_eviction() -> None:
    decision = decide_at(3, Retained(high_water_mark=10, replay_floor=4, last_hole=10, is_terminal=True))
    assert_refused(decision, Reset, StreamCompletedError, seq=3, replay_floor=4, high_water_mark=10)


def test_completion_comes_before_eviction_where_completed_streams_are_not_replayed() -> None:
    decision = decide_at(3, COMPLETED, replay_completed=False)
    assert_refused(decision, Reset, StreamCompletedError, seq=3, replay_floor=4, high_water_mark=10)


def test_completion_comes_before_a_hole_where_completed_streams_are_not_replayed() -> None:
    holed = Retained(high_water_mark=10, replay_floor=4, last_hole=7, is_terminal=True)
    decision = decide_at(6, holed, replay_completed=False)
    assert_refused(decision, Reset, StreamCompletedError, seq=6, replay_floor=4, high_water_mark=10)


def test_eviction_comes_before_a_hole() -> None:
    decision = decide_at(3, HOLED)
    assert_refused(decision, Reset, EventEvictedError, seq=3, replay_floor=4, high_water_mark=10)


def test_successor_of_a_stream_changes_no_decision() -> None:
    successor = Successor(stream=StreamId(9, "7"), origin=(3, 5))
    streams: list[StreamState] = [NeverOpened(), Superseded(), Dropped(), OPEN, HOLED, COMPLETED]
    for stream in streams:
        snapshot = Snapshot(generation=CURRENT, claimed="current", stream=stream, successor=successor)
        assert reason_of(decide("the id", cursor_at(6), snapshot, replay_completed=True)) == reason_of(
            decide_at(6, stream)
        )


# All of it, against a history that forgets nothing.


def reason_of(decision: Decision) -> str:
    return "resume" if isinstance(decision, Resume) else decision.error.reason


Place = Literal["evicted", "hole", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A cursor, and all that is true of what it names; `places` holds what became of seq 1, 2, 3 and so on."""

    is_session_known: bool
    is_well_formed: bool
    claimed: Claimed
    stream: Literal["never opened", "superseded", "dropped", "known"]
    places: tuple[Place, ...]
    is_terminal: bool
    evicted_hole: int
    seq: int
    replay_completed: bool

    def decide(self) -> Decision:
        return decide(
            "the id",
            cursor_at(self.seq) if self.is_well_formed else None,
            Snapshot(generation=CURRENT, claimed=self.claimed, stream=self.state()) if self.is_session_known else None,
            replay_completed=self.replay_completed,
        )

    def state(self) -> StreamState:
        if self.stream == "never opened":
            return NeverOpened()
        if self.stream == "superseded":
            return Superseded()
        if self.stream == "dropped":
            return Dropped()
        holes = [seq for seq, place in enumerate(self.places, start=1) if place == "hole"]
        return Retained(
            high_water_mark=len(self.places),
            replay_floor=self.places.count("evicted"),
            last_hole=max(holes, default=self.evicted_hole),
            is_terminal=self.is_terminal,
        )

    def expected_reason(self) -> str:
        is_known = self.stream == "known"
        missed = self.places[self.seq :] if is_known else ()
        table = [
            ("session_not_found", not self.is_session_known),
            ("malformed_event_id", not self.is_well_formed),
            ("generation_mismatch", self.claimed == "earlier"),
            ("unrecognized_generation", self.claimed == "never"),
            ("future_event_id", self.stream == "never opened" or (is_known and self.seq > len(self.places))),
            ("stream_superseded", self.stream == "superseded"),
            (
                "stream_completed",
                is_known and self.is_terminal and (missed[-1:] != ("kept",) or not self.replay_completed),
            ),
            ("event_evicted", self.stream == "dropped" or "evicted" in missed),
            ("replay_gap", "hole" in missed),
            ("resume", True),
        ]
        return next(reason for reason, is_true in table if is_true)


@st.composite
def claims_in_a_stream(draw: st.DrawFn) -> Claim:
    evicted = draw(st.integers(0, 6))
    rest = draw(st.lists(st.sampled_from(["kept", "kept", "kept", "hole"]), max_size=8))
    places: list[Place] = ["evicted"] * evicted
    places += ["hole" if place == "hole" else "kept" for place in rest]
    return Claim(
        is_session_known=True,
        is_well_formed=True,
        claimed="current",
        stream="known",
        places=tuple(places),
        is_terminal=bool(places) and draw(st.booleans()),
        evicted_hole=draw(st.integers(0, evicted)),
        seq=draw(st.integers(0, len(places) + 2)),
        replay_completed=draw(st.booleans()),
    )


@st.composite
def claims_of_any_kind(draw: st.DrawFn) -> Claim:
    inside = draw(claims_in_a_stream())
    streams: list[Literal["never opened", "superseded", "dropped", "known"]]
    streams = ["never opened", "superseded", "dropped", "known"]
    claims: list[Claimed] = ["current", "current", "earlier", "never"]
    return Claim(
        is_session_known=draw(st.sampled_from([True, True, True, False])),
        is_well_formed=draw(st.sampled_from([True, True, True, False])),
        claimed=draw(st.sampled_from(claims)),
        stream=draw(st.sampled_from(streams)),
        places=inside.places,
        is_terminal=inside.is_terminal,
        evicted_hole=inside.evicted_hole,
        seq=inside.seq,
        replay_completed=inside.replay_completed,
    )


@given(claims_in_a_stream())
@settings(deadline=None)
def test_every_claim_in_a_stream_is_decided_by_the_first_row_that_is_true(claim: Claim) -> None:
    assert reason_of(claim.decide()) == claim.expected_reason()


@given(claims_of_any_kind())
@settings(deadline=None)
def test_every_claim_is_decided_by_the_first_row_that_is_true(claim: Claim) -> None:
    assert reason_of(claim.decide()) == claim.expected_reason()


@given(claims_in_a_stream())
@settings(deadline=None)
def test_resume_replays_every_event_that_the_client_has_missed(claim: Claim) -> None:
    decision = claim.decide()
    if isinstance(decision, Resume):
        assert decision == Resume(cursor_at(claim.seq), len(claim.places))
        assert set(claim.places[claim.seq :]) <= {"kept"}


@given(claims_in_a_stream())
@settings(deadline=None)
def test_resume_of_a_completed_stream_carries_its_answer(claim: Claim) -> None:
    decision = claim.decide()
    if isinstance(decision, Resume) and claim.is_terminal:
        assert claim.seq < len(claim.places)
        assert claim.places[-1] == "kept"


numbers = st.integers(0, 6)
states: st.SearchStrategy[StreamState] = st.one_of(
    st.just(NeverOpened()),
    st.just(Superseded()),
    st.just(Dropped()),
    st.builds(Retained, high_water_mark=numbers, replay_floor=numbers, last_hole=numbers, is_terminal=st.booleans()),
)
snapshots = st.builds(
    Snapshot,
    generation=st.just(CURRENT),
    claimed=st.sampled_from(["current", "earlier", "never"]),
    stream=states,
    successor=st.one_of(st.none(), st.builds(Successor, stream=st.just(STREAM), origin=st.tuples(numbers, numbers))),
)


@given(st.one_of(st.none(), numbers), st.one_of(st.none(), snapshots), st.booleans())
@settings(deadline=None)
def test_every_claim_is_answered_safely_even_from_a_snapshot_that_contradicts_itself(
    seq: int | None, snapshot: Snapshot | None, replay_completed: bool
) -> None:
    cursor = None if seq is None else cursor_at(seq)
    decision = decide("the id", cursor, snapshot, replay_completed=replay_completed)
    assert isinstance(decision, Resume | Reset | Invalid | Gone)
    if isinstance(decision, Resume):
        assert cursor is not None
        assert snapshot is not None
        assert snapshot.claimed == "current"
        assert isinstance(snapshot.stream, Retained)
        assert snapshot.stream.replay_floor <= cursor.seq <= snapshot.stream.high_water_mark
        assert snapshot.stream.last_hole <= cursor.seq
        assert not (snapshot.stream.is_terminal and cursor.seq == snapshot.stream.high_water_mark)
    else:
        assert decision.error.outcome == {Reset: "reset", Invalid: "invalid", Gone: "gone"}[type(decision)]


# Successor.


@pytest.mark.parametrize(
    ("counter", "ordinal", "continues"),
    [
        (2, 4, False),  # The stream opened right before the call began.
        (2, 5, True),  # Its first stream.
        (2, 6, True),
        (3, 1, True),  # Restarted in a later generation, where ordinals begin again.
        (3, 5, True),
        (1, 5, False),
        (1, 9, False),  # An earlier call that used the same id, with a higher ordinal.
    ],
)
def test_successor_continues_cursors_from_where_its_call_began(counter: int, ordinal: int, continues: bool) -> None:
    successor = Successor(stream=StreamId(8, "7"), origin=(2, 5))
    cursor = EventCursor(generation=Generation(counter, "k3v9q0m4x7ta"), stream=StreamId(ordinal, "7"), seq=3)
    assert successor.continues(cursor) is continues


def test_standalone_stream_of_a_generation_continues_itself_and_not_that_of_the_one_before() -> None:
    successor = Successor(stream=STANDALONE, origin=(3, 0))
    earlier = Generation(2, "aaaaaaaaaaaa")
    assert successor.continues(EventCursor(generation=CURRENT, stream=STANDALONE, seq=1)) is True
    assert successor.continues(EventCursor(generation=earlier, stream=STANDALONE, seq=1)) is False
