"""How long one client that stops reading holds up a ping of its session: the SDK alone, with a plain store, with ours.

Prints a table: `python -m tests.soak.frozen_ping`. Nothing is asserted here; `tests/e2e/test_frozen_readers.py` does.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any, cast

import anyio
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore

from mcp_resumable import MemoryStorage, ResumableEventStore, Retention
from tests.e2e.raw_client import RawClient, session
from tests.e2e.servers import Call, RunningServer, serve

_MOST_SECONDS = 15.0
_FLOODED_BYTES = 12_000_000
_FREEZE_SECONDS = 1.0


class PlainStore(EventStore):
    """What the SDK's example store does: a list, and a counter."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        """Append."""
        self._events.append((stream_id, message))
        return str(len(self._events))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send what follows in the same stream."""
        stream_id = self._events[int(last_event_id) - 1][0]
        for position, (stream, message) in enumerate(self._events[int(last_event_id) :], int(last_event_id) + 1):
            if stream == stream_id and message is not None:
                await send_callback(EventMessage(message, str(position)))
        return stream_id


async def _measure(store: Any, size: int) -> str:
    """Return the longest wait of a ping while a tool floods a POST that is not read any more."""
    async with serve("fastmcp", cast(ResumableEventStore, store)) as server, session(server) as client:
        await _freeze(client)
        waited = 0.0
        async with anyio.create_task_group() as flooding:
            flooding.start_soon(_flood, server, size)
            deadline = time.monotonic() + _MOST_SECONDS
            for number in range(1_000_000):
                if time.monotonic() > deadline - 1:
                    break
                await anyio.sleep(0.02)
                start = time.monotonic()
                with anyio.move_on_after(_MOST_SECONDS) as patience:
                    await client.ping(f"ping {number}")
                waited = max(waited, time.monotonic() - start)
                if patience.cancelled_caught:
                    flooding.cancel_scope.cancel()
                    return f"more than {_MOST_SECONDS:.0f} s"
            flooding.cancel_scope.cancel()
        return f"{waited:.2f} s"


async def _freeze(client: RawClient) -> None:
    params = {"name": "hold", "arguments": {"n": 1, "tag": "7"}, "_meta": {"progressToken": 7}}
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}).encode()
    headers = {"content-type": "application/json"}
    response = await client.request("POST", body=body, headers=headers, receive_buffer=4096)
    await response.event()


async def _flood(server: RunningServer, size: int) -> None:
    hold = await server.hold("7")

    async def speak(call: Call) -> None:
        for _ in range(_FLOODED_BYTES // size):
            await call.log("x" * size)

    await hold.do(speak)


async def _main() -> None:
    roomy = Retention(max_events=200_000, max_bytes=64_000_000, max_session_bytes=128_000_000)
    for size in (100_000, 200):
        for name, store in (
            ("no store", None),
            ("plain store", PlainStore()),
            (
                f"ResumableEventStore(send_timeout={_FREEZE_SECONDS:g})",
                ResumableEventStore(MemoryStorage(retention=roomy), send_timeout=_FREEZE_SECONDS),
            ),
        ):
            line = f"events of {size:>7} bytes, {name}: a ping waits up to {await _measure(store, size)}\n"
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    anyio.run(_main)
