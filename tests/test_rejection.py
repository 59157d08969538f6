from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mcp_resumable.errors import (
    DuplicateRequestIdError,
    EventEvictedError,
    FutureEventIdError,
    GenerationMismatchError,
    MalformedEventIdError,
    ReplayGapError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
)
from mcp_resumable.rejection import (
    REJECTION_CODE,
    RejectionData,
    answer_text,
    body_text,
    marker_text,
    rejection_of,
)

from .sdk_error import log_params, sdk_error

PRESENTED = "2-k3v9q0m4x7ta:5.Nw:47"
CURRENT = "3-aaaaaaaaaaaa"

EVICTED = EventEvictedError(PRESENTED, generation=CURRENT, seq=47, replay_floor=50, high_water_mark=99)

# Each error, and the data that tells a client of it.
DATA: list[tuple[ResumptionError, dict[str, object]]] = [
    (SessionNotFoundError(PRESENTED), {"reason": "session_not_found", "outcome": "gone"}),
    (
        MalformedEventIdError(PRESENTED, generation=CURRENT),
        {"reason": "malformed_event_id", "outcome": "invalid", "generation": "3-aaaaaaaaaaaa"},
    ),
    (
        GenerationMismatchError(PRESENTED, generation=CURRENT),
        {"reason": "generation_mismatch", "outcome": "reset", "generation": "3-aaaaaaaaaaaa"},
    ),
    (
        UnrecognizedGenerationError(PRESENTED, generation=CURRENT),
        {"reason": "unrecognized_generation", "outcome": "invalid", "generation": "3-aaaaaaaaaaaa"},
    ),
    (
        FutureEventIdError(PRESENTED, generation=CURRENT, seq=47),
        {"reason": "future_event_id", "outcome": "invalid", "generation": "3-aaaaaaaaaaaa", "seq": 47},
    ),
    (
        StreamSupersededError(PRESENTED, generation=CURRENT),
        {"reason": "stream_superseded", "outcome": "reset", "generation": "3-aaaaaaaaaaaa"},
    ),
    (
        StreamCompletedError(PRESENTED, generation=CURRENT, seq=47, replay_floor=0, high_water_mark=47),
        {
            "reason": "stream_completed",
            "outcome": "reset",
            "generation": "3-aaaaaaaaaaaa",
            "seq": 47,
            "replay_floor": 0,
            "high_water_mark": 47,
        },
    ),
    (
        EVICTED,
        {
            "reason": "event_evicted",
            "outcome": "reset",
            "generation": "3-aaaaaaaaaaaa",
            "seq": 47,
            "replay_floor": 50,
            "high_water_mark": 99,
        },
    ),
    (
        ReplayGapError(PRESENTED, generation=CURRENT, seq=0, replay_floor=0, high_water_mark=99),
        {
            "reason": "replay_gap",
            "outcome": "reset",
            "generation": "3-aaaaaaaaaaaa",
            "seq": 0,
            "replay_floor": 0,
            "high_water_mark": 99,
        },
    ),
    (
        StorageUnavailableError(PRESENTED, retry_after_seconds=5),
        {"reason": "storage_unavailable", "outcome": "retry", "retry_after_seconds": 5},
    ),
    (DuplicateRequestIdError("req-7"), {"reason": "duplicate_request_id", "outcome": "invalid"}),
]
each_error = pytest.mark.parametrize(("error", "data"), DATA, ids=[type(row[0]).__name__ for row in DATA])


# Shapes.


@each_error
def test_body_is_a_json_rpc_error_without_an_id(error: ResumptionError, data: dict[str, object]) -> None:
    assert json.loads(body_text(error)) == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -32010, "message": str(error), "data": data},
    }


@each_error
def test_answer_is_a_json_rpc_error_for_the_call_that_waits(error: ResumptionError, data: dict[str, object]) -> None:
    assert json.loads(answer_text("req-7", error)) == {
        "jsonrpc": "2.0",
        "id": "req-7",
        "error": {"code": -32010, "message": str(error), "data": data},
    }


@each_error
def test_marker_is_a_warning_with_the_data(error: ResumptionError, data: dict[str, object]) -> None:
    assert json.loads(marker_text(error)) == {
        "jsonrpc": "2.0",
        "method": "notifications/message",
        "params": {"level": "warning", "logger": "mcp_resumable", "data": {**data, "message": str(error)}},
    }


@pytest.mark.parametrize("request_id", [7, "7", 0, "", "007"])
def test_body_for_a_request_carries_its_id_as_the_client_spelled_it(request_id: int | str) -> None:
    error = DuplicateRequestIdError(request_id)
    answered = json.loads(body_text(error, request_id))["id"]
    assert (type(answered), answered) == (type(request_id), request_id)


def test_code_is_one_that_mcp_leaves_to_implementations_and_the_sdks_do_not_use() -> None:
    assert REJECTION_CODE in range(-32019, -32001)


# Request ids, which a cursor carries as text.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("0", 0),
        ("-7", -7),
        ("10", 10),
        ("9007199254740993", 9007199254740993),
        ("999999999999999999", 999_999_999_999_999_999),
        ("-999999999999999999", -999_999_999_999_999_999),
    ],
)
def test_request_id_that_is_spelled_as_json_spells_an_integer_is_a_number(text: str, number: int) -> None:
    answered = json.loads(answer_text(text, EVICTED))["id"]
    assert (type(answered), answered) == (int, number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "req-7",
        "007",
        "00",
        "-0",
        "-07",
        "+7",
        "--7",
        "-",
        "1e3",
        "7.0",
        "0x7",
        "1_000",
        " 7",
        "7 ",
        "7\n",
        "\uff17",
        "\u0667",
        "\u00b2",
        "1" * 19,
        "-" + "1" * 19,
        "1" * 5_000,
        "true",
        "null",
        "NaN",
    ],
)
def test_any_other_request_id_stays_the_text_it_is(text: str) -> None:
    assert json.loads(answer_text(text, EVICTED))["id"] == text


# Safe to send.


@pytest.mark.parametrize("request_id", ["\r\n\r\ndata: forged", "\u2028\u2029\x85", "\0", '"},"x":{"', "€\U0001f680"])
def test_text_is_one_line_of_ascii_whatever_the_request_id(request_id: str) -> None:
    """A line break of the client's in an SSE frame would begin an event of the client's own."""
    text = answer_text(request_id, EVICTED)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["id"] == request_id


@each_error
def test_body_and_marker_are_one_line_without_spaces_to_spare(error: ResumptionError, data: dict[str, object]) -> None:
    for text in (body_text(error), marker_text(error)):
        assert len(text.splitlines()) == 1
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    assert json.dumps(data, separators=(",", ":"))[:-1] in body_text(error)


@each_error
def test_nothing_that_the_client_presented_as_text_is_echoed(error: ResumptionError, data: dict[str, object]) -> None:
    for text in (body_text(error), marker_text(error)):
        assert "k3v9q0m4x7ta" not in text
        assert "req-7" not in text
    assert set(RejectionData.of(error).model_dump(exclude_none=True)) == set(data)


def test_event_id_that_is_markup_is_not_echoed() -> None:
    error = MalformedEventIdError("<script>alert(1)</script>", generation=CURRENT)
    assert "script" not in body_text(error) + marker_text(error) + answer_text("7", error)


@pytest.mark.parametrize(
    ("seq", "told"),
    [
        (0, 0),
        (2**53 - 1, 9_007_199_254_740_991),
        (2**53, None),
        (10**238, None),
    ],
)
def test_claimed_seq_that_javascript_cannot_read_is_left_out(seq: int, told: int | None) -> None:
    error = FutureEventIdError(PRESENTED, generation=CURRENT, seq=seq, replay_floor=3, high_water_mark=9)
    data = json.loads(body_text(error))["error"]["data"]
    assert data.get("seq") == told
    assert ("seq" in data) is (told is not None)
    assert (data["replay_floor"], data["high_water_mark"]) == (3, 9)


# Read again.

RESET: dict[str, object] = {"reason": "event_evicted", "outcome": "reset", "generation": CURRENT}


@each_error
def test_what_was_told_is_read_again(error: ResumptionError, data: dict[str, object]) -> None:
    expected = RejectionData.model_validate(data)
    assert expected == RejectionData.of(error)
    assert rejection_of(sdk_error(REJECTION_CODE, data)) == expected
    for message in (body_text(error), answer_text("7", error), marker_text(error)):
        assert rejection_of(json.loads(message)) == expected
    marker = json.loads(marker_text(error))["params"]
    assert rejection_of(marker) == rejection_of(log_params(marker["logger"], marker["data"])) == expected


def test_it_is_typed_and_frozen() -> None:
    rejection = rejection_of(sdk_error(REJECTION_CODE, {**RESET, "seq": 2, "replay_floor": 5, "high_water_mark": 9}))
    assert rejection is not None
    assert (rejection.outcome, rejection.reason, rejection.generation) == ("reset", "event_evicted", CURRENT)
    assert (rejection.seq, rejection.replay_floor, rejection.high_water_mark) == (2, 5, 9)
    assert rejection.retry_after_seconds is None
    with pytest.raises(ValidationError):
        rejection.outcome = "gone"
    assert hash(rejection) == hash(rejection.model_copy())


def test_what_a_later_server_says_beside_it_is_passed_over() -> None:
    rejection = rejection_of(sdk_error(REJECTION_CODE, {**RESET, "reason": "another_one", "new": [1]}))
    assert rejection is not None
    assert rejection.reason == "another_one"


@pytest.mark.parametrize(
    "error",
    [
        sdk_error(-32602, RESET),
        sdk_error(-32000, RESET),
        {"error": {"code": "-32010", "data": RESET}},
        {"error": {"data": RESET}},
        {"error": RESET},
        {"error": [REJECTION_CODE, RESET]},
        {"data": RESET},
        {"result": RESET},
        log_params(None, RESET),
        log_params("another", RESET),
        {"params": {"logger": ["mcp_resumable"], "data": RESET}},
        RESET,
        TimeoutError("no answer"),
        ValueError(RESET),
        None,
        "",
        b"{}",
        -32010,
        [],
        {},
    ],
)
def test_what_is_not_a_refusal_is_none(error: object) -> None:
    assert rejection_of(error) is None


@pytest.mark.parametrize(
    "data",
    [
        None,
        "reset",
        [RESET],
        {},
        {"reason": "event_evicted"},
        {"outcome": "reset"},
        {**RESET, "outcome": "RESET"},
        {**RESET, "outcome": "resume"},
        {**RESET, "outcome": ["reset"]},
        {**RESET, "outcome": None},
        {**RESET, "reason": 7},
        {**RESET, "reason": ""},
        {**RESET, "reason": "x" * 65},
        {**RESET, "reason": "event evicted"},
        {**RESET, "reason": "event_evicted\n"},
        {**RESET, "reason": "\x1b[2J"},
        {**RESET, "reason": "évicted"},
        {**RESET, "generation": 3},
        {**RESET, "generation": ""},
        {**RESET, "generation": "3-aaaaaaaaaaa\x1b"},
        {**RESET, "generation": "3-aaaaaaaaaaaa\n"},
        {**RESET, "generation": f"{'3' * 201}-aaaaaaaaaaaa"},
        {**RESET, "seq": "2"},
        {**RESET, "seq": 2.5},
        {**RESET, "seq": True},
        {**RESET, "seq": -1},
        {**RESET, "seq": 2**53},
        {**RESET, "seq": 10**5_000},
        {**RESET, "seq": float("nan")},
        {**RESET, "replay_floor": [5]},
        {**RESET, "high_water_mark": {"9": 9}},
        {**RESET, "retry_after_seconds": -1},
        {**RESET, "retry_after_seconds": float("inf")},
    ],
)
def test_data_that_is_not_ours_is_none(data: object) -> None:
    assert rejection_of({"error": {"code": REJECTION_CODE, "data": data}}) is None
    assert rejection_of({"params": {"logger": "mcp_resumable", "data": data}}) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(
    fields=st.dictionaries(
        st.sampled_from([*RejectionData.model_fields, "message"]),
        JSON_VALUES | st.sampled_from(["reset", "gone", "event_evicted", CURRENT]),
    ),
    around=JSON_VALUES,
)
def test_no_data_makes_it_raise(fields: dict[str, object], around: object) -> None:
    for data in (fields, around):
        rejection = rejection_of({"error": {"code": REJECTION_CODE, "data": data}})
        if rejection is not None:
            assert rejection.model_dump(exclude_unset=True).items() <= fields.items()
            assert ascii(str(rejection)) == repr(str(rejection))
    assert rejection_of({"error": around}) is None
    assert rejection_of(around) is None
