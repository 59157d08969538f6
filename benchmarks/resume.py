"""What it costs to serve what was missed: `replay_events_after` with a callback that only collects.

The stream is complete, and its answer the last that was missed, so that every store returns by itself. For ours this
holds the parsing of the event id, the decision, the take-over and the replay; for the others whatever they do. What the
SDK and the HTTP layer add is in the end-to-end part.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial

from mcp.server.streamable_http import EventMessage

from benchmarks.measure import Figure, NotMeasuredError, Options, Samples, growth, interleave, summarize
from benchmarks.stores import BASELINE, STORES, MCPPersistBatching, Stream, Subject

__all__ = ["run"]

# Not the batching one: it flushes, and then it is its backend that replays.
_RESUMED = [kind for kind in STORES if kind is not MCPPersistBatching]
_RETAINED = (100, 10_000, 200_000)
_MANY_MISSED, _RETAINED_OF_MANY = 1_000, 10_000
# A sample is the median of as many resumes as fit in this time, one at least.
_SAMPLE_SECONDS = 0.05
_MAX_RESUMES_PER_SAMPLE = 500


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the figures of one kind follow one another."""
    rounds = options.rounds(7)
    sizes = _RETAINED[: 2 if options.quick else None]
    async with AsyncExitStack() as resources:
        # All sizes are in each round: what more events cost is told from what the machine does meanwhile.
        opened = {
            (kind.name, size): _Opened(kind, options.valkey_url, size, resources) for kind in _RESUMED for size in sizes
        }
        samples = await interleave({key: partial(_resume, one, 1) for key, one in opened.items()}, rounds)
        by_size = [{kind.name: samples[kind.name, size] for kind in _RESUMED} for size in sizes]
        many = {kind.name: partial(_resume, opened[kind.name, _RETAINED_OF_MANY], _MANY_MISSED) for kind in _RESUMED}
        of_many = await interleave(many, rounds)
    for size, results in zip(sizes, by_size, strict=True):
        for figure in _figures(f"one missed event, {size:,} retained", "µs", results):
            yield figure
    what = f"{_MANY_MISSED:,} missed events, {_RETAINED_OF_MANY:,} retained"
    for figure in _figures(what, "µs per event", of_many):
        yield figure
    for figure in growth("resume", f"{sizes[-1]:,} retained against {sizes[0]:,}", by_size[0], by_size[-1]):
        yield figure


def _figures(what: str, unit: str, results: dict[str, Samples]) -> Iterator[Figure]:
    return summarize("resume", what, unit, results, baseline=BASELINE)


class _Opened:
    """A store with one complete stream; opened and filled when it is first measured, outside of the measurement."""

    def __init__(self, kind: type[Subject], url: str | None, retained: int, resources: AsyncExitStack) -> None:
        self._kind, self._url, self._retained, self._resources = kind, url, retained, resources
        self._stream: Stream | None = None

    async def stream(self) -> Stream:
        if self._stream is None:
            subject = await self._resources.enter_async_context(self._kind(self._url))
            stream = await subject.open_stream("session")
            stream.enter()
            await subject.fill(stream, self._retained - 1)
            await stream.finish()
            self._stream = stream
            # A garbage collection during one store's measurement shall not walk what another retains.
            gc.collect()
            gc.freeze()
        return self._stream


async def _resume(opened: _Opened, missed: int) -> float:
    """Return µs per missed event of a resume."""
    stream = await opened.stream()
    cursor = stream.event_ids[-1 - missed]
    samples: list[float] = []
    until = time.perf_counter() + _SAMPLE_SECONDS
    while not samples or (time.perf_counter() < until and len(samples) < _MAX_RESUMES_PER_SAMPLE):
        collected: list[EventMessage] = []

        async def collect(event: EventMessage) -> None:
            collected.append(event)  # noqa: B023  # called before the next one is made

        stream.enter_resume()
        began = time.perf_counter()
        await stream.store.replay_events_after(cursor, collect)
        samples.append((time.perf_counter() - began) / missed * 1e6)
        if len(collected) != missed:
            raise NotMeasuredError(f"{len(collected)} of {missed} missed events were replayed")
    return statistics.median(samples)
