"""What it costs to store an event: `store_event`, called as the SDK calls it, in the session it belongs to.

The last event is the answer: when a store of ours returns, it and all before it are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

from mcp_types import JSONRPCNotification

from benchmarks.events import notification
from benchmarks.measure import Figure, LoopLag, Options, Samples, growth, interleave, summarize
from benchmarks.stores import BASELINE, OURS, STORES, OursEvicting, SDKExample, Stream, Subject

__all__ = ["run"]

_IN_ONE_STREAM: Sequence[type[Subject]] = (*STORES, OursEvicting)
_GROWN: Sequence[type[Subject]] = (SDKExample, *OURS)

_SESSIONS = 16
_RETAINED = (100, 10_000, 200_000)
# Few, so that a hundred retained are about a hundred.
_APPENDS_TO_RETAINED = 50
_PAUSE_SECONDS = 0.05


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the figures of one kind follow one another."""
    rounds = options.rounds(7)
    url = options.valkey_url

    one = {kind.name: partial(_one_stream, kind, url) for kind in _IN_ONE_STREAM}
    for figure in _figures("one stream", "µs per event", await interleave(one, rounds)):
        yield figure

    many = {kind.name: partial(_many_streams, kind, url) for kind in STORES}
    for figure in _figures(f"{_SESSIONS} sessions at once", "events/s", await interleave(many, rounds)):
        yield figure

    stalls = {kind.name: partial(_longest_stall, kind, url) for kind in STORES}
    results = await interleave(stalls, rounds)
    note = "each session yields to the loop after each event, as the SDK's router does"
    for figure in _figures(f"longest stall of the loop, {_SESSIONS} sessions at once", "ms", results, note):
        yield figure

    sizes = _RETAINED[: 2 if options.quick else None]
    # A fresh store for each sample, and 200,000 take a second or two to fill.
    grown = {(kind.name, size): partial(_beside_retained, kind, url, size) for kind in _GROWN for size in sizes}
    samples = await interleave(grown, rounds, warm_up=False)
    by_size = [{kind.name: samples[kind.name, size] for kind in _GROWN} for size in sizes]
    for size, results in zip(sizes, by_size, strict=True):
        for figure in _figures(f"one stream, {size:,} retained", "µs per event", results):
            yield figure
    for figure in growth("append", f"{sizes[-1]:,} retained against {sizes[0]:,}", by_size[0], by_size[-1]):
        yield figure


def _figures(what: str, unit: str, results: dict[str, Samples], note: str = "") -> Iterator[Figure]:
    return summarize("append", what, unit, results, baseline=BASELINE, note=note)


async def _one_stream(kind: type[Subject], url: str | None) -> float:
    """Return µs per event of one stream, one event after the other."""
    async with kind(url) as subject:
        return await _append_to(await subject.open_stream("session"), kind.appends_per_sample)


async def _beside_retained(kind: type[Subject], url: str | None, retained: int) -> float:
    """Return µs per event of a stream that retains others."""
    async with kind(url) as subject:
        stream = await subject.open_stream("session")
        stream.enter()
        await subject.fill(stream, retained)
        # The first after a fill meets a server that has just done something else.
        await stream.store.store_event(stream.stream_id, notification(0))
        await asyncio.sleep(_PAUSE_SECONDS)
        return await _append_to(stream, _APPENDS_TO_RETAINED)


async def _append_to(stream: Stream, count: int) -> float:
    messages = [notification(number) for number in range(count - 1)]
    stream.enter()
    store_event, stream_id = stream.store.store_event, stream.stream_id
    began = time.perf_counter()
    for message in messages:
        await store_event(stream_id, message)
    await stream.finish()
    return (time.perf_counter() - began) / count * 1e6


async def _longest_stall(kind: type[Subject], url: str | None) -> float:
    """Return the longest stall of the loop, in milliseconds, while sessions append at once."""
    lag = LoopLag()

    async def append_all(stream: Stream, count: int) -> None:
        stream.enter()
        for number in range(count - 1):
            # Made here: a list of them would have the garbage collector stall every store alike.
            await stream.store.store_event(stream.stream_id, notification(number))
            await asyncio.sleep(0)
        await stream.finish()

    async with kind(url) as subject:
        streams = [await subject.open_stream(f"session-{number}") for number in range(_SESSIONS)]
        async with lag.measuring():
            await asyncio.gather(*(append_all(stream, kind.appends_per_sample // _SESSIONS) for stream in streams))
    return lag.worst_seconds * 1e3


async def _many_streams(kind: type[Subject], url: str | None) -> float:
    """Return events per second of sessions that append at once, a task each."""

    async def append_all(stream: Stream, messages: list[JSONRPCNotification]) -> None:
        stream.enter()
        store_event, stream_id = stream.store.store_event, stream.stream_id
        for message in messages:
            await store_event(stream_id, message)
        await stream.finish()

    async with kind(url) as subject:
        streams = [await subject.open_stream(f"session-{number}") for number in range(_SESSIONS)]
        share = kind.appends_per_sample // _SESSIONS
        # Each its own: some stores retain the message itself.
        messages = [[notification(number) for number in range(share - 1)] for _ in streams]
        began = time.perf_counter()
        await asyncio.gather(*map(append_all, streams, messages))
        return share * _SESSIONS / (time.perf_counter() - began)
