from __future__ import annotations

import anyio
import pytest

from benchmarks.measure import Figure, NotMeasuredError, Samples, growth, interleave, summarize


@pytest.mark.anyio
async def test_every_store_is_measured_once_in_each_round_and_the_warm_up_is_thrown_away() -> None:
    asked: list[str] = []

    async def measure(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    with anyio.fail_after(10):
        results = await interleave({"a": lambda: measure("a"), "b": lambda: measure("b")}, rounds=2)
    assert asked == ["a", "b", "a", "b", "a", "b"]
    assert results == {"a": Samples([3.0, 5.0]), "b": Samples([4.0, 6.0])}


@pytest.mark.anyio
async def test_a_store_that_fails_is_reported_and_not_asked_again() -> None:
    asked: list[str] = []

    async def fails(name: str, error: Exception) -> float:
        asked.append(name)
        raise error

    async def works() -> float:
        return 1.0

    with anyio.fail_after(10):
        results = await interleave(
            {
                "broken": lambda: fails("broken", OSError("\x1b[2J")),
                "absent": lambda: fails("absent", NotMeasuredError("not installed")),
                "works": works,
            },
            rounds=3,
        )
    assert asked == ["broken", "absent"]
    assert results["works"] == Samples([1.0, 1.0, 1.0])
    assert {name: result.failure for name, result in results.items()} == {
        "broken": "failed: OSError('\\x1b[2J')",
        "absent": "skipped: not installed",
        "works": "",
    }


def test_a_ratio_is_to_the_same_round_of_the_baseline() -> None:
    results = {"base": Samples([1.0, 100.0, 10.0]), "other": Samples([2.0, 300.0, 10.0]), "broken": Samples([], "why")}
    base, other, broken = summarize("part", "what", "µs", results, baseline="base", note="note")
    assert base == Figure(
        part="part",
        what="what",
        unit="µs",
        store="base",
        value=10.0,
        ratio=1.0,
        samples=[1.0, 100.0, 10.0],
        note="note",
    )
    assert (other.store, other.value, other.ratio, other.note) == ("other", 10.0, 2.0, "note")
    assert (broken.store, broken.value, broken.ratio, broken.note) == ("broken", None, None, "why")


def test_growth_is_between_two_sizes_in_the_same_round() -> None:
    small = {"steady": Samples([1.0, 100.0, 10.0]), "broken": Samples([], "why"), "one round": Samples([1.0])}
    large = {"steady": Samples([2.0, 150.0, 10.0]), "broken": Samples([], "why"), "one round": Samples([3.0, 4.0])}
    steady, one_round = growth("part", "what", small, large)
    assert steady == Figure(part="part", what="what", unit="x", store="steady", value=1.5, samples=[2.0, 1.5, 1.0])
    assert (one_round.store, one_round.value) == ("one round", 3.0)
