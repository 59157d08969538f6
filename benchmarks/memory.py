"""What a retained event takes: growth of the resident memory of a fresh process, divided by the events it retains.

For stores that keep their events elsewhere: growth of `used_memory` of the Valkey server, or of the database file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

import psutil

from benchmarks.events import LARGE_BYTES, SMALL_BYTES, json_text, notification
from benchmarks.measure import Figure, NotMeasuredError, Options, interleave, summarize
from benchmarks.stores import BASELINE, STORES, store_named
from mcp_resumable import MemoryStorage, ResumableEventStore, Retention
from mcp_resumable.session import Connection, Exchange, current_exchange

__all__ = ["run"]

# Enough that a megabyte more or less, which is what the allocator rounds to, is some percent.
_SMALL_EVENTS, _LARGE_EVENTS = 50_000, 10_000
_CEILING = "ceiling"
_CEILING_BYTES = 64 * 2**20

_SKIPPED = "skipped: "


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the figures of one kind follow one another."""
    # It does not depend on what else the machine does; a second round shows that.
    rounds = options.rounds(2)
    for text_bytes, count in ((SMALL_BYTES, _SMALL_EVENTS), (LARGE_BYTES, _LARGE_EVENTS)):
        count = count // 10 if options.quick else count
        # Slow stores get fewer: those that hold all outside of the process are exact with any number.
        measures = {
            kind.name: partial(_probe, options, kind.name, text_bytes, min(count, 40 * kind.appends_per_sample))
            for kind in STORES
        }
        results = await interleave(measures, rounds, warm_up=False)
        json_bytes = len(json_text(notification(1, text_bytes)))
        what = f"a retained event of {text_bytes:,} bytes"
        note = f"its JSON text alone: {json_bytes:,}"
        for figure in summarize("memory", what, "bytes", results, baseline=BASELINE, note=note):
            yield figure
    results = await interleave({"mcp_resumable memory": partial(_probe, options, _CEILING)}, rounds, warm_up=False)
    what = "growth of the process after three times max_total_bytes"
    note = f"in parts of max_total_bytes, {_CEILING_BYTES // 2**20} MiB"
    for figure in summarize("memory", what, "x", results, baseline=None, note=note):
        yield figure


async def _probe(options: Options, *arguments: object) -> float:
    """Measure in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.memory"),
        *map(str, arguments),
        *([f"--valkey={options.valkey_url}"] if options.valkey_url else []),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    text = output.decode().strip()
    if process.returncode:
        raise RuntimeError(f"the probe ended with {process.returncode}")
    if text.startswith(_SKIPPED):
        raise NotMeasuredError(text.removeprefix(_SKIPPED))
    return float(text)


async def _bytes_per_event(store: str, valkey_url: str | None, text_bytes: int, count: int) -> float:
    async with store_named(store)(valkey_url) as subject:
        stream = await subject.open_stream("session")
        # The ids that the benchmark would keep are not the store's.
        stream.event_ids = deque(maxlen=1)
        stream.enter()
        # What is allocated once, whatever is retained.
        await subject.fill(stream, 1, text_bytes)
        outside, before = await subject.stored_bytes(), resident_bytes()
        await subject.fill(stream, count, text_bytes)
        if outside is not None:
            return ((await subject.stored_bytes() or 0) - outside) / count
        return (resident_bytes() - before) / count


async def _growth_at_the_ceiling() -> float:
    retention = Retention(
        max_events=10**7, max_bytes=_CEILING_BYTES, max_session_bytes=_CEILING_BYTES, max_total_bytes=_CEILING_BYTES
    )
    store = ResumableEventStore(MemoryStorage(retention=retention))
    binding = store.bind_session(store, None)
    await store.attach_session(binding, "session")
    await binding.begin_call(1, Connection())
    current_exchange.set(Exchange(binding))
    await store.store_event("1", notification(0))
    before = resident_bytes()
    for number in range(3 * _CEILING_BYTES // len(json_text(notification(0)))):
        await store.store_event("1", notification(number))
    return (resident_bytes() - before) / _CEILING_BYTES


def resident_bytes() -> int:
    """Return the resident memory of this process, after a garbage collection."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    """Print what was asked for: a number, or why there is none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", help="a store's name, or 'ceiling'")
    parser.add_argument("text_bytes", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("--valkey")
    arguments = parser.parse_args()
    try:
        if arguments.store == _CEILING:
            result = asyncio.run(_growth_at_the_ceiling())
        else:
            measure = _bytes_per_event(arguments.store, arguments.valkey, arguments.text_bytes, arguments.count)
            result = asyncio.run(measure)
    except NotMeasuredError as exc:
        sys.stdout.write(f"{_SKIPPED}{exc}\n")
    else:
        sys.stdout.write(f"{result}\n")


if __name__ == "__main__":
    main()
