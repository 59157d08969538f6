"""PrefectHQ's fastmcp with its own event store, in memory."""

from __future__ import annotations

import importlib
from typing import Any

from .serving import RETRY_MILLISECONDS, report_steps, serve

_fastmcp: Any = importlib.import_module("fastmcp")
_event_store: Any = importlib.import_module("fastmcp.server.event_store")


async def count(
    ctx: Any, events: int = 8, interval_seconds: float = 0.1, padding_bytes: int = 0, close_after: int = 0
) -> str:
    """The tool."""
    await report_steps(ctx.report_progress, ctx.close_sse_stream, events, interval_seconds, padding_bytes, close_after)
    await ctx.session.send_tool_list_changed()
    return f"counted to {events}"


def main() -> None:
    """Serve."""
    count.__annotations__["ctx"] = _fastmcp.Context
    server = _fastmcp.FastMCP("fastmcp")
    server.tool(count)
    serve(server.http_app(event_store=_event_store.EventStore(), retry_interval=RETRY_MILLISECONDS))


if __name__ == "__main__":
    main()
