"""What a client sees: notifications of real calls over uvicorn, server and client each in a process of their own."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from benchmarks.client import Session, open_session
from benchmarks.measure import Figure, Options, Samples, interleave, summarize
from benchmarks.server import NO_STORE, RunningServer, running_server
from benchmarks.stores import LIMITS, OURS, STORES, SDKExample

__all__ = ["run"]

_EVENTS_OF_ONE_CALL = 1_500
_CALLS = 50
# Some 0.7 s: a garbage collection of the server's, of a tenth of a second, falls into each of them or hardly shows.
_EVENTS_OF_EACH = 120
# Between pings, so that they measure the load and are none.
_PING_PAUSE_SECONDS = 0.01
_MANY = (f"{_CALLS} calls at once", "notifications/s")
# Of each server, and rounds in each of its lives.
_LIVES, _ROUNDS = 3, 3
# The others live once: what is slower than half of `event_store=None` is so without a second look.
_REPEATED = {NO_STORE, SDKExample.name, *(kind.name for kind in (*LIMITS, *OURS))}


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the figures of one kind follow one another."""
    names = [NO_STORE, *(kind.name for kind in (*LIMITS, *STORES))]
    pings: dict[str, list[float]] = {name: [] for name in names}
    measures: dict[tuple[str, str], Callable[[_Server], Awaitable[float]]] = {
        ("one call", "notifications/s"): _one_call,
        # What other programs do to the machine shows in how long a call takes, and hardly in what it costs.
        ("one call, CPU of the server", "µs per notification"): _cpu_of_one_call,
        _MANY: lambda server: _many_calls(server, pings[server.name]),
    }
    results = {kind: {name: Samples() for name in names} for kind in measures}
    # One process may be faster than another of the same program, for as long as it lives: by a tenth here.
    for life in range(options.rounds(_LIVES)):
        async with AsyncExitStack() as resources:
            of_this_life = [name for name in names if not life or name in _REPEATED]
            servers = [_Server(name, options.valkey_url, resources) for name in of_this_life]
            for kind, measure in measures.items():
                by_server = {server.name: partial(measure, server) for server in servers}
                for name, samples in (await interleave(by_server, options.rounds(_ROUNDS))).items():
                    result = results[kind][name]
                    result.values += samples.values
                    result.failure = result.failure or samples.failure
    for (what, unit), samples_of_each in results.items():
        for figure in summarize("end to end", what, unit, samples_of_each, baseline=NO_STORE):
            yield figure
    for percent in (50, 99):
        base = _percentile(pings[NO_STORE], percent)
        for name in names:
            value = _percentile(pings[name], percent)
            yield Figure(
                part="end to end",
                what=f"ping meanwhile, p{percent}",
                unit="ms",
                store=name,
                value=value,
                ratio=value / base if value and base else None,
                note=results[_MANY][name].failure or f"{len(pings[name])} pings of all rounds, a connection each",
            )


def _percentile(samples: list[float], percent: int) -> float | None:
    return statistics.quantiles(samples, n=100)[percent - 1] if len(samples) > 1 else None


class _Server:
    """A server that is started when it is first measured."""

    def __init__(self, name: str, valkey_url: str | None, resources: AsyncExitStack) -> None:
        self.name, self._valkey_url, self._resources = name, valkey_url, resources
        self._running: RunningServer | None = None

    async def running(self) -> RunningServer:
        if self._running is None:
            self._running = await self._resources.enter_async_context(running_server(self.name, self._valkey_url))
        return self._running

    async def open_session(self) -> Session:
        return await open_session((await self.running()).port)


async def _one_call(server: _Server) -> float:
    """Return notifications per second of one call."""
    session = await server.open_session()
    began = time.perf_counter()
    await _talk(session, _EVENTS_OF_ONE_CALL)
    seconds = time.perf_counter() - began
    await session.end()
    return _EVENTS_OF_ONE_CALL / seconds


async def _cpu_of_one_call(server: _Server) -> float:
    """Return µs of CPU that the server's process takes for each notification of one call."""
    session, running = await server.open_session(), await server.running()
    before = await running.vitals()
    await _talk(session, _EVENTS_OF_ONE_CALL)
    after = await running.vitals()
    await session.end()
    return (after.cpu_seconds - before.cpu_seconds) / _EVENTS_OF_ONE_CALL * 1e6


async def _many_calls(server: _Server, pings: list[float]) -> float:
    """Return notifications per second of many sessions with a call each; `pings` gets what a ping took, in ms."""
    sessions = [await server.open_session() for _ in range(_CALLS)]
    pinged = await server.open_session()
    pinging = asyncio.create_task(_ping(pinged, pings))
    began = time.perf_counter()
    await asyncio.gather(*(_talk(session, _EVENTS_OF_EACH) for session in sessions))
    seconds = time.perf_counter() - began
    pinging.cancel()
    # Else the sessions of all rounds would pile up in the server, and what its garbage collector looks through.
    for session in (*sessions, pinged):
        await session.end()
    return _CALLS * _EVENTS_OF_EACH / seconds


async def _talk(session: Session, count: int) -> None:
    """Have one call send that many notifications, and see that they arrive."""
    exchange = await session.call(1, "talk", count=count)
    await exchange.until(count + 1)
    if len(exchange.messages) != count + 1 or not exchange.is_answered:
        raise RuntimeError(f"{len(exchange.messages)} of {count + 1} messages arrived")


async def _ping(session: Session, pings: list[float]) -> None:
    request_id = 1
    while True:
        began = time.perf_counter()
        await session.ping(request_id)
        pings.append((time.perf_counter() - began) * 1e3)
        request_id += 1
        await asyncio.sleep(_PING_PAUSE_SECONDS)
