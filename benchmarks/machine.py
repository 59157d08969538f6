"""What this machine takes for what every store does at least once, by itself.

Without it, figures of two machines cannot be compared: a store that takes half as long on one of them may be the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from uuid import uuid4

from mcp_types import jsonrpc_message_adapter

from benchmarks.events import json_text, notification
from benchmarks.measure import Figure, NotMeasuredError, Options, interleave, summarize

__all__ = ["run"]

_REPEATS = 5_000
_ROUND_TRIPS = 500

_DUMP = "JSON text of a notification of 200 bytes"


async def run(options: Options) -> AsyncIterator[Figure]:
    """Measure; the ratios are to the JSON text, which every store that keeps one makes."""
    message = notification(0)
    text = json_text(message)
    measures = {
        _DUMP: partial(_repeated, lambda: json_text(message)),
        "the same, parsed": partial(_repeated, lambda: jsonrpc_message_adapter.validate_json(text)),
        "uuid4 as text": partial(_repeated, lambda: str(uuid4())),
        "round trip to Valkey": partial(_round_trip, options.valkey_url),
    }
    results = await interleave(measures, options.rounds(15))
    for figure in summarize("machine", "by itself", "µs", results, baseline=_DUMP):
        yield figure


async def _repeated(action: Callable[[], object]) -> float:
    """Return µs per action."""
    began = time.perf_counter()
    for _ in range(_REPEATS):
        action()
    return (time.perf_counter() - began) / _REPEATS * 1e6


async def _round_trip(url: str | None) -> float:
    """Return µs of a PING, one after the other."""
    if url is None:
        raise NotMeasuredError("no Valkey server")
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        await client.ping()  # Connects.
        began = time.perf_counter()
        for _ in range(_ROUND_TRIPS):
            await client.ping()
        return (time.perf_counter() - began) / _ROUND_TRIPS * 1e6
