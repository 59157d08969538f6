"""How long an event of one worker takes to a client that has resumed on another: two servers over one Valkey.

Only of ours: with the other stores a client that comes to another worker is answered that its session is unknown.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator
from uuid import uuid4

from benchmarks.client import Exchange, Session, open_session
from benchmarks.measure import Figure, Options, Samples, interleave, summarize
from benchmarks.server import RunningServer, running_server
from benchmarks.stores import OursRedis

__all__ = ["run"]

_SESSIONS = 20
# Ten a second of each session.
_EVENTS = 50
_PAUSE_MILLISECONDS = 100

_SENT_AT = re.compile(rb'"message":"([0-9]+) ')


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the figures of one kind follow one another."""
    sessions = 5 if options.quick else _SESSIONS
    percentiles: dict[int, list[float]] = {50: [], 99: []}

    async def measure() -> float:
        prefix = uuid4().hex
        async with (
            running_server(OursRedis.name, options.valkey_url, prefix=prefix) as owner,
            running_server(OursRedis.name, options.valkey_url, prefix=prefix) as other,
        ):
            opened = [await open_session(owner.port) for _ in range(sessions)]
            taken = await asyncio.gather(
                *(
                    _follow_elsewhere(session, other, _PAUSE_MILLISECONDS / 1_000 * number / sessions)
                    for number, session in enumerate(opened)
                )
            )
        cut_points = statistics.quantiles([each for of_session in taken for each in of_session], n=100)
        for percent, values in percentiles.items():
            values.append(cut_points[percent - 1])
        return percentiles[50][-1]

    results = await interleave({OursRedis.name: measure}, options.rounds(3), warm_up=False)
    note = f"{sessions} sessions, each with an event in {_PAUSE_MILLISECONDS} ms"
    for percent, values in percentiles.items():
        samples = {OursRedis.name: Samples(values, results[OursRedis.name].failure)}
        what = f"an event of one worker at a client of another, p{percent}"
        for figure in summarize("workers", what, "ms", samples, baseline=OursRedis.name, note=note):
            yield figure


async def _follow_elsewhere(session: Session, other: RunningServer, later: float) -> list[float]:
    """Return how long each event took, in milliseconds, from the tool that sent it.

    Each session begins so many seconds `later`: they do not all speak at the same moment.
    """
    await asyncio.sleep(later)
    began = await session.call(1, "pace", count=_EVENTS, pause=_PAUSE_MILLISECONDS)
    await began.until(1)
    began.cut()
    session.port = other.port
    resumed = await session.get(began.last_event_id)
    # What was sent while the client was away is older than its way.
    await resumed.until(1)
    return await _ages(resumed)


async def _ages(exchange: Exchange) -> list[float]:
    ages: list[float] = []
    count = len(exchange.messages)
    while not exchange.is_answered:
        await exchange.until(count + 1)
        now = time.monotonic_ns()
        if len(exchange.messages) == count:
            raise RuntimeError(f"the connection ended after {count} messages, with status {exchange.status}")
        for message in exchange.messages[count:]:
            sent_at = _SENT_AT.search(message)
            if sent_at is not None:
                ages.append((now - int(sent_at[1])) / 1e6)
        count = len(exchange.messages)
    return ages
