from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mcp_resumable import MemoryStorage, ResumableEventStore, Retention

NAN, INFINITY = float("nan"), float("inf")

WHOLE_NUMBERS = ["max_events", "max_bytes", "max_session_bytes", "max_total_bytes", "max_sessions"]
SECONDS = ["completed_seconds", "idle_seconds"]


# Retention.


def test_defaults_are_bounded() -> None:
    assert Retention().model_dump() == {
        "max_events": 10_000,
        "max_bytes": 8_388_608,
        "max_session_bytes": 33_554_432,
        "max_total_bytes": 268_435_456,
        "max_sessions": 10_000,
        "completed_seconds": 300.0,
        "idle_seconds": 3_600.0,
    }


@pytest.mark.parametrize("field", [*WHOLE_NUMBERS, *SECONDS])
def test_retention_is_frozen(field: str) -> None:
    retention = Retention()
    before = getattr(retention, field)
    with pytest.raises(ValidationError):
        setattr(retention, field, 5)
    assert getattr(retention, field) == before


@pytest.mark.parametrize("field", WHOLE_NUMBERS)
@pytest.mark.parametrize("nonsense", [0, -1, True, False, 1.0, 1.5, NAN, INFINITY, "5", "", None, [5]])
def test_limit_that_is_no_whole_number_from_1_is_refused_by_name(field: str, nonsense: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Retention(**{field: nonsense})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]
    assert field in str(caught.value)


@pytest.mark.parametrize("field", SECONDS)
@pytest.mark.parametrize("nonsense", [-1, -0.001, NAN, INFINITY, -INFINITY, "soon", "", None, [5]])
def test_time_that_is_no_finite_number_is_refused_by_name(field: str, nonsense: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Retention(**{field: nonsense})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]
    assert field in str(caught.value)


def test_idle_time_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ValidationError) as caught:
        Retention(idle_seconds=0)
    assert [error["loc"] for error in caught.value.errors()] == [("idle_seconds",)]


def test_completed_time_of_zero_is_refused() -> None:
    """A tail that waits is woken by the answer, and must find it when it looks."""
    with pytest.raises(ValidationError, match="completed_seconds"):
        Retention(completed_seconds=0)


@pytest.mark.parametrize("field", ["max_event", "maxEvents", "ttl", "storage", ""])
def test_unknown_field_is_refused_by_name(field: str) -> None:
    nonsense: dict[str, Any] = {field: 5}
    with pytest.raises(ValidationError) as caught:
        Retention(**nonsense)
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"max_bytes": 33_554_433}, ["max_bytes", "max_session_bytes"]),
        ({"max_bytes": 11, "max_session_bytes": 10}, ["max_bytes", "max_session_bytes"]),
        ({"max_session_bytes": 268_435_457}, ["max_session_bytes", "max_total_bytes"]),
        (
            {"max_bytes": 1, "max_session_bytes": 11, "max_total_bytes": 10},
            ["max_session_bytes", "max_total_bytes"],
        ),
    ],
)
def test_limit_larger_than_the_one_that_contains_it_is_refused_by_both_names(
    limits: dict[str, Any], fields: list[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        Retention(**limits)
    assert all(field in str(caught.value) for field in fields)


def test_smallest_limits_and_equal_ones_are_allowed() -> None:
    smallest = Retention(max_events=1, max_bytes=1, max_session_bytes=1, max_total_bytes=1, max_sessions=1)
    equal = Retention(max_bytes=10, max_session_bytes=10, max_total_bytes=10)
    assert (smallest.max_events, smallest.max_total_bytes, equal.max_bytes) == (1, 1, 10)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        Retention(max_events=0, idle_seconds=-1)
    assert [error["loc"] for error in caught.value.errors()] == [("max_events",), ("idle_seconds",)]


def test_storage_without_retention_keeps_the_defaults() -> None:
    assert MemoryStorage().retention == Retention()


def test_storage_keeps_what_its_retention_allows() -> None:
    retention = Retention(max_events=5)
    assert MemoryStorage(retention=retention).retention is retention


# ResumableEventStore.


def test_store_has_defaults() -> None:
    store = ResumableEventStore()
    assert isinstance(store.storage, MemoryStorage)
    assert store.storage.retention == Retention()
    assert (store.rejection, store.replay_completed, store.send_timeout, store.max_tail_seconds) == (
        "status",
        True,
        10.0,
        900.0,
    )


def test_two_stores_share_no_storage() -> None:
    assert ResumableEventStore().storage is not ResumableEventStore().storage


def test_store_keeps_the_storage_that_it_is_given() -> None:
    storage = MemoryStorage()
    assert ResumableEventStore(storage).storage is storage


@pytest.mark.parametrize("nonsense", ["", "STATUS", "status ", "both", None, True, 409, ["status"]])
def test_rejection_that_is_neither_is_refused_by_name(nonsense: Any) -> None:
    with pytest.raises(ValueError, match="rejection"):
        ResumableEventStore(rejection=nonsense)


@pytest.mark.parametrize("rejection", ["status", "stream"])
def test_either_rejection_is_allowed(rejection: Any) -> None:
    assert ResumableEventStore(rejection=rejection).rejection == rejection


@pytest.mark.parametrize("argument", ["send_timeout", "max_tail_seconds"])
@pytest.mark.parametrize("nonsense", [0, 0.0, -0.0, -1, NAN, INFINITY, -INFINITY])
def test_time_out_of_range_is_refused_by_name(argument: str, nonsense: float) -> None:
    arguments: dict[str, Any] = {argument: nonsense}
    with pytest.raises(ValueError, match=argument):
        ResumableEventStore(**arguments)


@pytest.mark.parametrize("argument", ["send_timeout", "max_tail_seconds"])
def test_shortest_time_is_allowed(argument: str) -> None:
    arguments: dict[str, Any] = {argument: 0.001}
    assert getattr(ResumableEventStore(**arguments), argument) == 0.001
