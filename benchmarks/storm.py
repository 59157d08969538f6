"""A reconnect storm: a thousand sessions with an open call each, all cut at once and resumed within a second.

While they are away each tool goes on: five more events in half a second, from a random moment of the first second on,
then the answer. A session has caught up when it has its answer; it has failed when it then has not each event once, in
order. A client reconnects for as long as its connections end without an answer, as the SDKs' clients do.

Ours, and no store, are measured twice: with Python's garbage collector as it is, and tuned as the operator of a server
with many sessions may tune it (`gc.freeze()` after the start, then `gc.set_threshold(200, 30, 1_000)`). As it is, it
stops the process again and again to look through all that the SDK holds for a thousand sessions, whatever the store.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from benchmarks.client import Exchange, Session, open_session
from benchmarks.measure import Figure, NotMeasuredError, Options, Samples, summarize
from benchmarks.server import NO_STORE, RunningServer, Vitals, raise_file_limit, running_server
from benchmarks.stores import OURS, FastMCP4, MCPPersistRedis, Subject

__all__ = ["run"]

# The SDK's example is not among them: it names a stream by its request id alone, so a thousand sessions share one.
_STORMED: Sequence[type[Subject]] = (FastMCP4, MCPPersistRedis, *OURS)
# The others once, and with the collector as it is: sessions that never catch up take their time.
_REPEATED = (NO_STORE, *(kind.name for kind in OURS))

_NOTE = f"{NO_STORE}: the same load, not cut, since nothing could be resumed"

_SESSIONS = 1_000
_EVENTS_BEFORE, _EVENTS_AFTER = 5, 5
_RECONNECT_WITHIN_SECONDS = 1.0
# Then a session has failed too. Long, since all of them finish late together where the machine has other work.
_GIVE_UP_SECONDS = 30.0
# Sessions that are opened at a time, so that the opening is no storm.
_OPENED_AT_ONCE = 20


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; a server of its own for each storm."""
    names = (NO_STORE, *(kind.name for kind in _STORMED))
    results = {
        (name, tune_gc): _Results() for name in names for tune_gc in ((False, True) if name in _REPEATED else (False,))
    }
    for number in range(options.rounds(3)):
        for (name, tune_gc), result in results.items():
            if result.failure or (number and name not in _REPEATED):
                continue
            try:
                async with running_server(name, options.valkey_url, measure_lag=True, tune_gc=tune_gc) as server:
                    result.outcomes.append(await _storm(server, 100 if options.quick else _SESSIONS))
            except NotMeasuredError as exc:
                result.failure = f"skipped: {exc}"
            except Exception as exc:
                result.failure = f"failed: {exc!a}"[:200]
    for tune_gc in (False, True):
        for what, unit, of in _MEASURED:
            samples = {
                name: Samples([of(outcome) for outcome in result.outcomes], result.failure)
                for (name, is_tuned), result in results.items()
                if is_tuned == tune_gc
            }
            named = f"{what}, gc tuned" if tune_gc else what
            for figure in summarize("storm", named, unit, samples, baseline=NO_STORE, note=_NOTE):
                yield figure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """One storm.

    Attributes:
        caught_up: Seconds from the cut until a session had its answer, for each that got it.
        failures: Sessions that did not get each event once, in order, and the answer.
        vitals: What the server measured meanwhile.
    """

    caught_up: list[float]
    failures: int
    vitals: Vitals


@dataclass(slots=True)
class _Results:
    """The storms of one store, and what went wrong, if anything did."""

    outcomes: list[_Outcome] = field(default_factory=list["_Outcome"])
    failure: str = ""


def _p99(outcome: _Outcome) -> float:
    return statistics.quantiles(outcome.caught_up, n=100)[98] if len(outcome.caught_up) > 1 else 0.0


_MEASURED: Sequence[tuple[str, str, Callable[[_Outcome], float]]] = (
    ("all that caught up", "s", lambda outcome: max(outcome.caught_up, default=0.0)),
    ("p99 of those", "s", _p99),
    ("failures", "sessions", lambda outcome: outcome.failures),
    ("longest stall of the loop", "ms", lambda outcome: outcome.vitals.worst_stall_seconds * 1e3),
    ("the same, CPU time alone", "ms", lambda outcome: outcome.vitals.worst_stall_cpu_seconds * 1e3),
    ("the same, beside garbage collection", "ms", lambda outcome: outcome.vitals.worst_stall_seconds_beside_gc * 1e3),
    ("longest garbage collection", "ms", lambda outcome: outcome.vitals.worst_gc_seconds * 1e3),
    ("stalls above 100 ms", "stalls", lambda outcome: outcome.vitals.stalls),
)


async def _storm(server: RunningServer, count: int) -> _Outcome:
    raise_file_limit()
    await server.hold()
    is_cut = server.name != NO_STORE
    limit = asyncio.Semaphore(_OPENED_AT_ONCE)

    async def begin() -> tuple[Session, Exchange]:
        async with limit:
            session = await open_session(server.port)
            exchange = await session.call(1, "storm", before=_EVENTS_BEFORE, after=_EVENTS_AFTER)
            await exchange.until(_EVENTS_BEFORE)
            return session, exchange

    calls = await asyncio.gather(*(begin() for _ in range(count)))
    caught_up: list[float] = []
    if is_cut:
        for _, exchange in calls:
            exchange.cut()
    cut_at = time.perf_counter()
    await server.release()

    async def catch_up(session: Session, exchange: Exchange) -> None:
        received = list(exchange.messages)
        try:
            with anyio.fail_after(_GIVE_UP_SECONDS):
                if is_cut:
                    await _resume(session, exchange.last_event_id, received)
                else:
                    await exchange.until(_EVENTS_BEFORE + _EVENTS_AFTER + 1)
                    received = exchange.messages
        except (OSError, TimeoutError):
            pass
        if _is_complete(received):
            caught_up.append(time.perf_counter() - cut_at)

    await asyncio.gather(*(catch_up(session, exchange) for session, exchange in calls))
    return _Outcome(caught_up=caught_up, failures=count - len(caught_up), vitals=await server.vitals())


async def _resume(session: Session, last_event_id: str, received: list[bytes]) -> None:
    await asyncio.sleep(random.random() * _RECONNECT_WITHIN_SECONDS)
    while True:
        resumed = await session.get(last_event_id)
        seen = 0
        while not resumed.ended.is_set() and not resumed.is_answered:
            await resumed.until(seen + 1)
            seen = len(resumed.messages)
        received += resumed.messages
        last_event_id = resumed.last_event_id or last_event_id
        if resumed.is_answered:
            resumed.cut()
            return
        await asyncio.sleep(_RECONNECT_WITHIN_SECONDS)


def _is_complete(received: list[bytes]) -> bool:
    """Tell whether these are the call's events, each once and in order, and its answer."""
    *events, last = [json.loads(message) for message in received] or [{}]
    numbers = [event.get("params", {}).get("progress") for event in events]
    return numbers == list(range(_EVENTS_BEFORE + _EVENTS_AFTER)) and "result" in last
