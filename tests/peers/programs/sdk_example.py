"""The Python SDK, either line, with an event store like the one among its examples: uuid4 ids, 100 events a stream."""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from mcp.server.streamable_http import EventCallback, EventMessage, EventStore

from .serving import RETRY_MILLISECONDS, report_steps, serve

_MAX_EVENTS = 100

_IS_1 = importlib.util.find_spec("mcp.server.mcpserver") is None
_line: Any = importlib.import_module("mcp.server.fastmcp" if _IS_1 else "mcp.server.mcpserver")


@dataclass(frozen=True)
class Entry:
    """A stored event; `message` is None for a priming event."""

    event_id: str
    stream_id: str
    message: Any


class ExampleEventStore(EventStore):
    """What the SDK's example does: by stream id alone, an unknown id replays nothing."""

    def __init__(self) -> None:
        self._streams: dict[str, deque[Entry]] = {}
        self._entries: dict[str, Entry] = {}

    async def store_event(self, stream_id: str, message: Any) -> str:
        entry = Entry(str(uuid4()), stream_id, message)
        stream = self._streams.setdefault(stream_id, deque(maxlen=_MAX_EVENTS))
        if len(stream) == _MAX_EVENTS:
            del self._entries[stream[0].event_id]
        stream.append(entry)
        self._entries[entry.event_id] = entry
        return entry.event_id

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        last = self._entries.get(last_event_id)
        if last is None:
            return None
        is_after = False
        for entry in list(self._streams[last.stream_id]):
            if is_after and entry.message is not None:
                await send_callback(EventMessage(entry.message, entry.event_id))
            is_after = is_after or entry is last
        return last.stream_id


async def count(
    ctx: Any, events: int = 8, interval_seconds: float = 0.1, padding_bytes: int = 0, close_after: int = 0
) -> str:
    """The tool."""
    close = ctx.request_context.close_sse_stream
    await report_steps(ctx.report_progress, close, events, interval_seconds, padding_bytes, close_after)
    await ctx.session.send_tool_list_changed()
    return f"counted to {events}"


def main() -> None:
    """Serve."""
    count.__annotations__["ctx"] = _line.Context
    store = ExampleEventStore()
    if _IS_1:
        server = _line.FastMCP("example", event_store=store, retry_interval=RETRY_MILLISECONDS, log_level="CRITICAL")
        server.add_tool(count)
        serve(server.streamable_http_app())
    else:
        server = _line.MCPServer("example")
        server.add_tool(count)
        serve(server.streamable_http_app(event_store=store, retry_interval=RETRY_MILLISECONDS))


if __name__ == "__main__":
    main()
