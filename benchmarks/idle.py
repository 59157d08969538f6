"""What an idle session costs: thousands of sessions, each with its standalone stream open and nothing to say.

The SDK itself wakes every connection once in 15 seconds, to keep it alive: with `event_store=None` too.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator

from benchmarks.client import open_session
from benchmarks.measure import Figure, NotMeasuredError, Options
from benchmarks.server import NO_STORE, raise_file_limit, running_server
from benchmarks.stores import OURS

__all__ = ["run"]

_SESSIONS = 10_000
# File descriptors that a process needs beside those of its connections.
_OTHER_FILES = 200
_OPENED_AT_ONCE = 50
# Three times: a garbage collection over ten thousand sessions takes seconds, and falls into one of them or none.
_MEASURED_SECONDS = 6.0


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the figures of one store follow one another."""
    permitted = raise_file_limit() - _OTHER_FILES
    count = min(500 if options.quick else _SESSIONS, permitted)
    names = [NO_STORE, *(kind.name for kind in OURS)]
    bytes_of_none = cpu_of_none = None
    for name in names:
        try:
            bytes_each, cpu_percent = await _idle(name, options, count)
        except NotMeasuredError as exc:
            yield _figure(name, count, "memory", "bytes per session", None, None, f"skipped: {exc}")
            continue
        except Exception as exc:
            note = f"failed: {exc!a}"[:200]
            yield _figure(name, count, "memory", "bytes per session", None, None, note)
            continue
        if name == NO_STORE:
            bytes_of_none, cpu_of_none = bytes_each, cpu_percent
        note = "" if count >= _SESSIONS or options.quick else f"as many as the limit of open files permits: {count:,}"
        yield _figure(name, count, "memory", "bytes per session", bytes_each, bytes_of_none, note)
        yield _figure(name, count, "CPU of one core", "%", cpu_percent, cpu_of_none, note)


def _figure(store: str, count: int, what: str, unit: str, value: float | None, base: float | None, note: str) -> Figure:
    return Figure(
        part="idle",
        what=f"{count:,} idle sessions: {what}",
        unit=unit,
        store=store,
        value=value,
        ratio=value / base if value is not None and base else None,
        samples=[] if value is None else [value],
        note=note,
    )


async def _idle(name: str, options: Options, count: int) -> tuple[float, float]:
    """Return bytes per session and percent of one core."""
    async with running_server(name, options.valkey_url) as server:
        limit = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def open_tail() -> None:
            async with limit:
                session = await open_session(server.port, is_told=False)
                tail = await session.get()
                await tail.began.wait()
                if tail.status != 200:
                    raise RuntimeError(f"a standalone stream was answered with status {tail.status}")
                tails.append(tail)

        # The first session pays for what is made once.
        tails: list[object] = []
        await open_tail()
        before = await server.vitals()
        await asyncio.gather(*(open_tail() for _ in range(count - 1)))
        opened = await server.vitals()
        bytes_each = (opened.resident_bytes - before.resident_bytes) / (count - 1)
        seconds = 1.0 if options.quick else _MEASURED_SECONDS
        percents: list[float] = []
        for _ in range(3):
            earlier = await server.vitals()
            await asyncio.sleep(seconds)
            percents.append(((await server.vitals()).cpu_seconds - earlier.cpu_seconds) / seconds * 100)
        return bytes_each, statistics.median(percents)
