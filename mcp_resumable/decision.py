"""The decision: may this cursor be resumed? One pure function over one snapshot.

Checked in this order; the first that applies wins.

| #  | what is true                                                            | decision | reason                    |
|----|-------------------------------------------------------------------------|----------|---------------------------|
| 1  | session unknown, ended or evicted                                       | gone     | `session_not_found`       |
| 2  | not a well-formed event id                                              | invalid  | `malformed_event_id`      |
| 3  | generation is an earlier one of this session                            | reset    | `generation_mismatch`     |
| 4  | generation was never this session's                                     | invalid  | `unrecognized_generation` |
| 5  | stream never opened, or seq above the high-water mark                   | invalid  | `future_event_id`         |
| 6  | a later execution of the same request took the stream's place           | reset    | `stream_superseded`       |
| 7  | stream terminal, and its answer was received or is no longer retained   | reset    | `stream_completed`        |
| 8  | seq below the replay floor, or the whole stream no longer retained      | reset    | `event_evicted`           |
| 9  | a hole between seq and the high-water mark                              | reset    | `replay_gap`              |
| 10 | otherwise                                                               | resume   |                           |

A superseded stream keeps its place, not its events nor its high-water mark, so row 5 asks only whether it was opened.

Nothing here is changed once it is made. `Retained`, `Snapshot` and `Resume` are not frozen all the same: each resume
makes one of each, and freezing doubles what that takes (0.7 µs against 0.3 for four fields, CPython 3.11).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from mcp_resumable.errors import (
    EventEvictedError,
    FutureEventIdError,
    GenerationMismatchError,
    InvalidEventIdError,
    MalformedEventIdError,
    ReplayGapError,
    ResetRequiredError,
    SessionNotFoundError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
)

if sys.version_info >= (3, 11):
    from typing import assert_never
else:
    from typing_extensions import assert_never

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcp_resumable.cursor import EventCursor, Generation, StreamId

__all__ = [
    "Decision",
    "Dropped",
    "Gone",
    "Invalid",
    "NeverOpened",
    "Reset",
    "Resume",
    "Retained",
    "Snapshot",
    "StreamState",
    "Successor",
    "Superseded",
    "decide",
]


@dataclass(frozen=True, slots=True)
class NeverOpened:
    """The stream was never opened in its generation."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later execution of the same request took the stream's place; its events are gone."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The stream was opened, and retention has dropped all that was known of it."""


@dataclass(slots=True, kw_only=True)
class Retained:
    """The stream is known.

    Attributes:
        high_water_mark: Highest seq ever assigned, 0 when none.
        replay_floor: Highest evicted seq, 0 when none: the lowest cursor seq that resumes.
        last_hole: Highest seq above the floor that could not be kept, 0 (or anything up to the floor) when none.
        is_terminal: Whether the event at the high-water mark is the answer; nothing follows it.
        rest: All that follows the cursor, to the answer, where the storage has read it in the same step; nothing can
            change it, and `storage.MAX_BATCH_EVENTS` is as long as it gets. None is always right: then it is read.
    """

    high_water_mark: int
    replay_floor: int = 0
    last_hole: int = 0
    is_terminal: bool = False
    rest: Sequence[bytes | None] | None = field(default=None, compare=False, repr=False)


StreamState = NeverOpened | Superseded | Dropped | Retained


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """The newest stream of a cursor's request (or the standalone stream) in the session's current generation.

    Attributes:
        stream: Its id.
        origin: (generation counter, ordinal) of the stream in which its call began. Cursors of this request id from
            that point on belong to the same call; earlier ones belong to an earlier call that used the same id.
    """

    stream: StreamId
    origin: tuple[int, int]

    def continues(self, cursor: EventCursor) -> bool:
        """Tell whether `cursor` belongs to the same call as this stream, executed again."""
        return (cursor.generation.counter, cursor.stream.ordinal) >= self.origin


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One atomic read of what a decision about one cursor needs.

    Attributes:
        generation: The session's current generation.
        claimed: Whether the cursor's generation is this one, an earlier one of this session, or neither.
        stream: State of the cursor's stream; only read when `claimed` is `"current"`.
        successor: The newest stream of the cursor's request in the current generation, if one is known.
    """

    generation: Generation
    claimed: Literal["current", "earlier", "never"]
    stream: StreamState
    successor: Successor | None = None


@dataclass(slots=True)
class Resume:
    """Replay what follows the cursor, then go on live.

    Attributes:
        cursor: The place after which to go on.
        high_water_mark: The stream's high-water mark in the snapshot.
        rest: See `Retained`.
    """

    cursor: EventCursor
    high_water_mark: int
    rest: Sequence[bytes | None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Reset:
    """The claim was true once; the client must discard what it has."""

    error: ResetRequiredError


@dataclass(frozen=True, slots=True)
class Invalid:
    """The claim was never true."""

    error: InvalidEventIdError


@dataclass(frozen=True, slots=True)
class Gone:
    """The session is over."""

    error: SessionNotFoundError


Decision = Resume | Reset | Invalid | Gone


def decide(event_id: str, cursor: EventCursor | None, snapshot: Snapshot | None, *, replay_completed: bool) -> Decision:
    """Return what to do with a claim.

    Pure and total: no clock, no randomness, no I/O, and an answer for every input.

    Args:
        event_id: What the client presented; only carried into the errors.
        cursor: `EventCursor.parse(event_id)`; None where it is malformed.
        snapshot: What the storage knew for that cursor in one atomic read; None where the session is unknown.
        replay_completed: Whether the rest of a terminal stream may be replayed while its answer is retained. False
            resets every completed stream.
    """
    if snapshot is None:
        return Gone(SessionNotFoundError(event_id))
    if cursor is None:
        return Invalid(MalformedEventIdError(event_id, generation=str(snapshot.generation)))
    match snapshot.claimed:
        case "current":
            pass
        case "earlier":
            return Reset(GenerationMismatchError(event_id, generation=str(snapshot.generation)))
        case "never":
            return Invalid(UnrecognizedGenerationError(event_id, generation=str(snapshot.generation)))
        case _:
            assert_never(snapshot.claimed)
    match snapshot.stream:
        case Retained() as state:
            return _decide_in_stream(event_id, cursor, state, replay_completed=replay_completed)
        case NeverOpened():
            return Invalid(FutureEventIdError(event_id, generation=str(snapshot.generation), seq=cursor.seq))
        case Superseded():
            return Reset(StreamSupersededError(event_id, generation=str(snapshot.generation)))
        case Dropped():
            return Reset(EventEvictedError(event_id, generation=str(snapshot.generation), seq=cursor.seq))
        case _:
            assert_never(snapshot.stream)


def _decide_in_stream(event_id: str, cursor: EventCursor, state: Retained, *, replay_completed: bool) -> Decision:
    seq, floor, mark = cursor.seq, state.replay_floor, state.high_water_mark
    if seq > mark:
        return Invalid(_error(FutureEventIdError, event_id, cursor, state))
    is_answer_retained = floor < mark and state.last_hole != mark
    if state.is_terminal and (seq == mark or not is_answer_retained or not replay_completed):
        return Reset(_error(StreamCompletedError, event_id, cursor, state))
    if seq < floor:
        return Reset(_error(EventEvictedError, event_id, cursor, state))
    if state.last_hole > seq:
        return Reset(_error(ReplayGapError, event_id, cursor, state))
    return Resume(cursor, mark, state.rest)


_ErrorInStream = TypeVar("_ErrorInStream", FutureEventIdError, StreamCompletedError, EventEvictedError, ReplayGapError)


def _error(kind: type[_ErrorInStream], event_id: str, cursor: EventCursor, state: Retained) -> _ErrorInStream:
    return kind(
        event_id,
        generation=str(cursor.generation),
        seq=cursor.seq,
        replay_floor=state.replay_floor,
        high_water_mark=state.high_water_mark,
    )
