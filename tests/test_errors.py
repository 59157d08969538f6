from __future__ import annotations

import copy
import pickle

import pytest

from mcp_resumable import errors
from mcp_resumable.errors import (
    DuplicateRequestIdError,
    EventEvictedError,
    FutureEventIdError,
    GenerationMismatchError,
    InvalidEventIdError,
    MalformedEventIdError,
    Outcome,
    ReplayGapError,
    ResetRequiredError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
)

EVENT_ID = "2-k3v9q0m4x7ta:5.Nw:47"
GENERATION = "3-aaaaaaaaaaaa"

TABLE: list[tuple[type[ResumptionError], int, str, Outcome]] = [
    (SessionNotFoundError, 404, "session_not_found", "gone"),
    (MalformedEventIdError, 400, "malformed_event_id", "invalid"),
    (GenerationMismatchError, 409, "generation_mismatch", "reset"),
    (UnrecognizedGenerationError, 400, "unrecognized_generation", "invalid"),
    (FutureEventIdError, 400, "future_event_id", "invalid"),
    (StreamSupersededError, 409, "stream_superseded", "reset"),
    (StreamCompletedError, 409, "stream_completed", "reset"),
    (EventEvictedError, 409, "event_evicted", "reset"),
    (ReplayGapError, 409, "replay_gap", "reset"),
    (StorageUnavailableError, 503, "storage_unavailable", "retry"),
    (DuplicateRequestIdError, 200, "duplicate_request_id", "invalid"),
]
ABSTRACT: list[type[ResumptionError]] = [ResumptionError, ResetRequiredError, InvalidEventIdError]

BASE_FIELDS: dict[str, object] = {"event_id": EVENT_ID, "generation": GENERATION}
SEQ_FIELDS: dict[str, object] = {**BASE_FIELDS, "seq": 47, "replay_floor": 50, "high_water_mark": 99}

# One of each with every field set, and its fields.
EXAMPLES: list[tuple[ResumptionError, dict[str, object]]] = [
    (SessionNotFoundError(EVENT_ID, generation=GENERATION), BASE_FIELDS),
    (MalformedEventIdError(EVENT_ID, generation=GENERATION), BASE_FIELDS),
    (GenerationMismatchError(EVENT_ID, generation=GENERATION), BASE_FIELDS),
    (UnrecognizedGenerationError(EVENT_ID, generation=GENERATION), BASE_FIELDS),
    (
        FutureEventIdError(EVENT_ID, generation=GENERATION, seq=47, replay_floor=50, high_water_mark=99),
        SEQ_FIELDS,
    ),
    (StreamSupersededError(EVENT_ID, generation=GENERATION), BASE_FIELDS),
    (
        StreamCompletedError(EVENT_ID, generation=GENERATION, seq=47, replay_floor=50, high_water_mark=99),
        SEQ_FIELDS,
    ),
    (EventEvictedError(EVENT_ID, generation=GENERATION, seq=47, replay_floor=50, high_water_mark=99), SEQ_FIELDS),
    (ReplayGapError(EVENT_ID, generation=GENERATION, seq=47, replay_floor=50, high_water_mark=99), SEQ_FIELDS),
    (
        StorageUnavailableError(EVENT_ID, generation=GENERATION, retry_after_seconds=30),
        {**BASE_FIELDS, "retry_after_seconds": 30},
    ),
    (DuplicateRequestIdError("req-7"), {"event_id": None, "generation": None, "request_id": "req-7"}),
]

each_example = pytest.mark.parametrize(("error", "fields"), EXAMPLES, ids=[type(row[0]).__name__ for row in EXAMPLES])


# What each class says.


@pytest.mark.parametrize(("error_class", "status", "reason", "outcome"), TABLE)
def test_class_carries_status_reason_and_outcome(
    error_class: type[ResumptionError], status: int, reason: str, outcome: Outcome
) -> None:
    assert (error_class.status, error_class.reason, error_class.outcome) == (status, reason, outcome)


def test_every_error_of_the_module_is_in_the_table_or_abstract() -> None:
    exported = {getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}
    assert exported == {row[0] for row in TABLE} | set(ABSTRACT)


def test_every_class_has_a_reason_of_its_own() -> None:
    assert len({row[0].reason for row in TABLE}) == len(TABLE) == 11


@pytest.mark.parametrize("error_class", [row[0] for row in TABLE if row[3] == "reset"])
def test_every_reset_is_caught_as_a_reset_and_as_nothing_else(error_class: type[ResumptionError]) -> None:
    assert issubclass(error_class, ResetRequiredError)
    assert not issubclass(error_class, InvalidEventIdError)


@pytest.mark.parametrize("error_class", [MalformedEventIdError, UnrecognizedGenerationError, FutureEventIdError])
def test_every_invalid_event_id_is_caught_as_one_and_as_nothing_else(error_class: type[ResumptionError]) -> None:
    assert issubclass(error_class, InvalidEventIdError)
    assert not issubclass(error_class, ResetRequiredError)


@pytest.mark.parametrize("error_class", [SessionNotFoundError, StorageUnavailableError, DuplicateRequestIdError])
def test_other_refusals_are_neither_resets_nor_invalid_event_ids(error_class: type[ResumptionError]) -> None:
    assert issubclass(error_class, ResumptionError)
    assert not issubclass(error_class, ResetRequiredError | InvalidEventIdError)


def test_superseded_stream_is_caught_as_a_generation_mismatch_and_told_apart_by_its_reason() -> None:
    assert issubclass(StreamSupersededError, GenerationMismatchError)
    assert StreamSupersededError.reason != GenerationMismatchError.reason


def test_abstract_parents_have_the_outcome_they_stand_for_and_no_reason() -> None:
    assert [hasattr(parent, "reason") for parent in ABSTRACT] == [False, False, False]
    assert not hasattr(ResumptionError, "status")
    assert not hasattr(ResumptionError, "outcome")
    assert (ResetRequiredError.status, ResetRequiredError.outcome) == (409, "reset")
    assert (InvalidEventIdError.status, InvalidEventIdError.outcome) == (400, "invalid")


@pytest.mark.parametrize("error_class", [*(row[0] for row in TABLE), *ABSTRACT])
def test_docstring_says_when_it_is_raised(error_class: type[ResumptionError]) -> None:
    assert (error_class.__doc__ or "").startswith("Raised when ")


# What each instance carries.


@each_example
def test_instance_carries_its_fields(error: ResumptionError, fields: dict[str, object]) -> None:
    assert vars(error) == fields


@each_example
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_class_and_fields(error: ResumptionError, fields: dict[str, object], protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert vars(again) == fields
    assert str(again) == str(error)


@each_example
def test_copies_keep_class_and_fields_and_share_none(error: ResumptionError, fields: dict[str, object]) -> None:
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert vars(again) == fields
        again.event_id = "changed"
        assert vars(error) == fields


@each_example
def test_message_is_one_line_for_people_and_holds_nothing_that_was_presented(
    error: ResumptionError, fields: dict[str, object]
) -> None:
    message = str(error)
    assert message.endswith(".")
    assert len(message.splitlines()) == 1
    for name in ("event_id", "request_id"):
        assert str(fields.get(name)) not in message


def test_message_holds_no_event_id_that_carries_line_breaks() -> None:
    """Whoever logs the message would log a line of the client's own making."""
    assert "forged" not in str(MalformedEventIdError("x\r\n2030-01-01 INFO forged"))


@pytest.mark.parametrize("error_class", [row[0] for row in TABLE if row[0] is not DuplicateRequestIdError])
def test_every_field_may_be_unknown(error_class: type[ResumptionError]) -> None:
    error = error_class()
    assert (error.event_id, error.generation) == (None, None)
    assert {value for name, value in vars(error).items() if name != "retry_after_seconds"} == {None}


@pytest.mark.parametrize(("length", "kept"), [(255, 255), (256, 256), (257, 256), (100_000, 256)])
def test_event_id_is_cut_to_256_characters(length: int, kept: int) -> None:
    assert MalformedEventIdError("a" * length).event_id == "a" * kept


def test_storage_is_to_be_asked_again_after_a_second_by_default() -> None:
    assert StorageUnavailableError().retry_after_seconds == 1


@pytest.mark.parametrize("request_id", [7, "7", 0, ""])
def test_duplicate_request_id_is_kept_as_the_client_spelled_it(request_id: int | str) -> None:
    kept = DuplicateRequestIdError(request_id).request_id
    assert (type(kept), kept) == (type(request_id), request_id)
