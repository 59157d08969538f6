"""How the benchmark measures: interleaved rounds, medians, ratios, and the longest stall of an event loop."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

__all__ = ["Figure", "LoopLag", "NotMeasuredError", "Options", "Samples", "growth", "interleave", "summarize"]

# Longest that one sample of one store may take; a store that needs longer is reported as failed.
_SAMPLE_SECONDS = 120.0

_LAG_INTERVAL_SECONDS = 0.001
_STALL_SECONDS = 0.1


class NotMeasuredError(Exception):
    """Raised when something cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        quick: Fewer rounds and smaller numbers: to see that it runs, not to quote.
        valkey_url: Of a server that is the benchmark's own and may be emptied; None where none could be started.
    """

    quick: bool = False
    valkey_url: str | None = None

    def rounds(self, full: int) -> int:
        """Return how many rounds to measure."""
        return min(full, 2) if self.quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the result.

    Attributes:
        part: The part of the benchmark that measured it.
        what: What was measured.
        unit: Of `value`.
        store: Whose it is.
        value: Median of the rounds; None where it could not be measured.
        ratio: Median of the rounds' ratios to the baseline in the same round; None where there is no baseline.
        samples: The rounds, in order.
        note: Why there is no value, or what must be known to read it.
    """

    part: str
    what: str
    unit: str
    store: str
    value: float | None = None
    ratio: float | None = None
    samples: Sequence[float] = ()
    note: str = ""


@dataclass(slots=True)
class Samples:
    """The samples of one store: one for each round, and what went wrong, if anything did."""

    values: list[float] = field(default_factory=list[float])
    failure: str = ""


_Key = TypeVar("_Key")


async def interleave(
    measures: Mapping[_Key, Callable[[], Awaitable[float]]], rounds: int, *, warm_up: bool = True
) -> dict[_Key, Samples]:
    """Measure everything once in each round, A B C A B C, so that whatever disturbs the machine disturbs all alike.

    Args:
        measures: By what is compared, a store or a store and a size; each returns one sample. One that raises or takes
            too long is not asked again.
        rounds: At least 1.
        warm_up: Whether a first round is thrown away.

    Returns:
        By the same, in the order of `measures`.
    """
    results = {name: Samples() for name in measures}
    for number in range(-1 if warm_up else 0, rounds):
        for name, measure in measures.items():
            result = results[name]
            if result.failure:
                continue
            gc.collect()
            try:
                with anyio.fail_after(_SAMPLE_SECONDS):
                    sample = await measure()
            except NotMeasuredError as exc:
                result.failure = f"skipped: {exc}"
            except Exception as exc:
                result.failure = f"failed: {exc!a}"[:200]
            else:
                if number >= 0:
                    result.values.append(sample)
    return results


def summarize(
    part: str, what: str, unit: str, results: Mapping[str, Samples], *, baseline: str | None, note: str = ""
) -> Iterator[Figure]:
    """Turn samples into figures; the ratio of a round is to what the baseline measured in the same round."""
    base = results[baseline].values if baseline is not None else []
    for store, result in results.items():
        if result.failure or not result.values:
            yield Figure(part=part, what=what, unit=unit, store=store, note=result.failure or "not measured")
            continue
        ratios = [sample / of for sample, of in zip(result.values, base, strict=False) if of]
        yield Figure(
            part=part,
            what=what,
            unit=unit,
            store=store,
            value=statistics.median(result.values),
            ratio=statistics.median(ratios) if ratios else None,
            samples=result.values,
            note=note,
        )


def growth(part: str, what: str, small: Mapping[str, Samples], large: Mapping[str, Samples]) -> Iterator[Figure]:
    """Turn samples of two sizes, taken in the same rounds, into how much more the larger costs."""
    for store in small:
        ratios = [more / of for more, of in zip(large[store].values, small[store].values, strict=False)]
        if ratios:
            yield Figure(part=part, what=what, unit="x", store=store, value=statistics.median(ratios), samples=ratios)


class LoopLag:
    """Measures how late the event loop is: a task that sleeps for a millisecond, again and again.

    What Python's garbage collector took in that time is told apart: its pauses grow with all that a process holds,
    whoever holds it. So is what the loop's own thread worked: the rest of a stall is that of a machine with other work.

    Attributes:
        worst_seconds: The latest it ever woke.
        worst_cpu_seconds: The most that the thread worked while it slept.
        worst_seconds_beside_gc: The latest it ever woke, not counting the garbage collector.
        stalls: How often it woke more than 100 ms late.
        worst_gc_seconds: The longest that the garbage collector took at once.
    """

    def __init__(self) -> None:
        self._gc_began = 0.0
        self._gc_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.worst_seconds = self.worst_cpu_seconds = self.worst_seconds_beside_gc = self.worst_gc_seconds = 0.0
        self.stalls = 0

    async def run(self) -> None:
        """Measure until cancelled."""
        gc.callbacks.append(self._on_gc)
        try:
            while True:
                due, gc_seconds = time.perf_counter() + _LAG_INTERVAL_SECONDS, self._gc_seconds
                cpu_seconds = time.thread_time()
                await asyncio.sleep(_LAG_INTERVAL_SECONDS)
                late = time.perf_counter() - due
                beside_gc = late - (self._gc_seconds - gc_seconds)
                self.worst_seconds = max(self.worst_seconds, late)
                self.worst_cpu_seconds = max(self.worst_cpu_seconds, time.thread_time() - cpu_seconds)
                self.worst_seconds_beside_gc = max(self.worst_seconds_beside_gc, beside_gc)
                self.stalls += late > _STALL_SECONDS
        finally:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            seconds = time.perf_counter() - self._gc_began
            self._gc_seconds += seconds
            self.worst_gc_seconds = max(self.worst_gc_seconds, seconds)

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        """Measure as long as the block runs."""
        task = asyncio.create_task(self.run())
        # A task has to run once before it sleeps.
        await asyncio.sleep(0)
        try:
            yield
        finally:
            # Let it see a stall that ends with the block.
            await asyncio.sleep(2 * _LAG_INTERVAL_SECONDS)
            task.cancel()
