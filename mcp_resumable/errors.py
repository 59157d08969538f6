"""The errors of a refused resume: one class for each reason.

An error never speaks HTTP. `status` is a hint for the layer that does, `reason` and `outcome` are what callers and
clients branch on, and the typed fields on the instance say what was claimed against what is true. Messages are for
people only.

| outcome   | what the client should do                                                    |
|-----------|------------------------------------------------------------------------------|
| `reset`   | discard what it has of this stream and call again                            |
| `invalid` | nothing sensible: its cursor was never issued to this session (a client bug) |
| `gone`    | initialize a new session                                                     |
| `retry`   | present the same cursor again later                                          |
"""

from __future__ import annotations

from typing import ClassVar, Literal

__all__ = [
    "DuplicateRequestIdError",
    "EventEvictedError",
    "FutureEventIdError",
    "GenerationMismatchError",
    "InvalidEventIdError",
    "MalformedEventIdError",
    "Outcome",
    "ReplayGapError",
    "ResetRequiredError",
    "ResumptionError",
    "SessionNotFoundError",
    "StorageUnavailableError",
    "StreamCompletedError",
    "StreamSupersededError",
    "UnrecognizedGenerationError",
]

Outcome = Literal["reset", "invalid", "gone", "retry"]


class ResumptionError(Exception):
    """Raised when a resume is refused; abstract: catch it to catch every refusal.

    Attributes:
        status: The HTTP status that tells this outcome apart (a hint; nothing here speaks HTTP).
        reason: A stable machine-readable name of what is wrong.
        outcome: What the client should do.
        event_id: The event id that was presented, or None. At most 256 characters of it, not yet escaped for a log.
        generation: The session's current generation in its wire spelling, or None where there is none to tell.
    """

    status: ClassVar[int]
    reason: ClassVar[str]
    outcome: ClassVar[Outcome]
    summary: ClassVar[str] = "The resume was refused."

    def __init__(self, event_id: str | None = None, *, generation: str | None = None) -> None:
        self.event_id = event_id[:256] if event_id is not None else None
        self.generation = generation
        super().__init__(self.event_id, generation)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by class and fields, since the fields are keyword-only."""
        return _rebuild, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        """Return the message for people; nothing that the client presented is in it."""
        return self.summary


def _rebuild(kind: type[ResumptionError], args: tuple[object, ...], fields: dict[str, object]) -> ResumptionError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class SessionNotFoundError(ResumptionError):
    """Raised when the session is unknown, ended or evicted."""

    status = 404
    reason = "session_not_found"
    outcome = "gone"
    summary = "The session is unknown or over; initialize a new one."


class ResetRequiredError(ResumptionError):
    """Raised when replay would splice or skip; abstract parent of every reset."""

    status = 409
    outcome = "reset"


class InvalidEventIdError(ResumptionError):
    """Raised when the event id was never issued to this session; abstract parent of every invalid claim."""

    status = 400
    outcome = "invalid"


class MalformedEventIdError(InvalidEventIdError):
    """Raised when the event id does not follow the grammar of `EventCursor`."""

    reason = "malformed_event_id"
    summary = "Last-Event-ID is not an event id of this server."


class UnrecognizedGenerationError(InvalidEventIdError):
    """Raised when the event id names a generation that was never this session's."""

    reason = "unrecognized_generation"
    summary = "Last-Event-ID names a generation that this session never had."


class _SeqError(ResumptionError):
    """What the errors about a place in a stream carry.

    Attributes:
        seq: The claimed seq.
        replay_floor: The lowest seq that resumes, or None where the stream is not known.
        high_water_mark: The highest seq ever assigned in the stream, or None where the stream is not known.
    """

    def __init__(
        self,
        event_id: str | None = None,
        *,
        generation: str | None = None,
        seq: int | None = None,
        replay_floor: int | None = None,
        high_water_mark: int | None = None,
    ) -> None:
        super().__init__(event_id, generation=generation)
        self.seq = seq
        self.replay_floor = replay_floor
        self.high_water_mark = high_water_mark


class FutureEventIdError(InvalidEventIdError, _SeqError):
    """Raised when the event id names a stream that was never opened, or a seq above its high-water mark."""

    reason = "future_event_id"
    summary = "Last-Event-ID names an event that was never sent."


class GenerationMismatchError(ResetRequiredError):
    """Raised when the event id names an earlier generation of this session."""

    reason = "generation_mismatch"
    summary = "The session's state was reset after this event; discard what you have and call again."


class StreamSupersededError(GenerationMismatchError):
    """Raised when a later execution of the same request took the stream's place."""

    reason = "stream_superseded"
    summary = "The request was executed again after this event; discard what you have of the earlier execution."


class StreamCompletedError(ResetRequiredError, _SeqError):
    """Raised when the stream is terminal and its answer was received already, or is no longer retained."""

    reason = "stream_completed"
    summary = "The stream is complete and there is nothing left of it to replay; call again."


class EventEvictedError(ResetRequiredError, _SeqError):
    """Raised when events after the cursor are no longer retained."""

    reason = "event_evicted"
    summary = "Events after this one are no longer retained; discard what you have and call again."


class ReplayGapError(ResetRequiredError, _SeqError):
    """Raised when an event between the cursor and the high-water mark could not be stored."""

    reason = "replay_gap"
    summary = "An event after this one could not be kept; discard what you have and call again."


class StorageUnavailableError(ResumptionError):
    """Raised when the storage cannot answer; never stands for another verdict.

    Attributes:
        retry_after_seconds: Whole seconds after which to try again.
    """

    status = 503
    reason = "storage_unavailable"
    outcome = "retry"
    summary = "The event storage cannot answer now; try again with the same Last-Event-ID."

    def __init__(
        self, event_id: str | None = None, *, generation: str | None = None, retry_after_seconds: int = 1
    ) -> None:
        super().__init__(event_id, generation=generation)
        self.retry_after_seconds = retry_after_seconds


class DuplicateRequestIdError(ResumptionError):
    """Raised when a request id arrives while an earlier request with that id is unanswered in its session.

    It answers a POST, not a resume, as a JSON-RPC error with HTTP status 200.

    Attributes:
        request_id: The id as the client spelled it.
    """

    status = 200
    reason = "duplicate_request_id"
    outcome = "invalid"
    summary = "A request with this id is still unanswered in this session."

    def __init__(self, request_id: int | str) -> None:
        super().__init__()
        self.request_id = request_id
