"""A server to try the checker on: one tool, and this package's event store. It runs on either line of the SDK."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any, cast

import anyio
from pydantic import Field

from mcp_resumable.memory import MemoryStorage
from mcp_resumable.storage import Retention
from mcp_resumable.store import ResumableEventStore
from mcp_resumable.wire import ASGIApp

__all__ = ["LOAD_ARGUMENTS", "POLL_ARGUMENTS", "TOOL", "fixture_app"]

TOOL = "count"
LOAD_ARGUMENTS = '{"events": 3000, "interval_seconds": 0.001, "padding_bytes": 2000}'
POLL_ARGUMENTS = '{"close_after": 3}'

_RETRY_MILLISECONDS = 200
# The call of LOAD_ARGUMENTS is to be retained as a whole, for each session of the checks.
_RETENTION = Retention(max_bytes=16 * 2**20, completed_seconds=60)
# Seconds; instead of 10, so that the check of a frozen reader does not take that long.
_SEND_TIMEOUT = 2.0


def fixture_app(store: ResumableEventStore | None = None) -> ASGIApp:
    """Return the server's ASGI app; its endpoint is `/mcp`.

    Args:
        store: None: one with room for the call of `LOAD_ARGUMENTS`.
    """
    if store is None:
        store = ResumableEventStore(MemoryStorage(retention=_RETENTION), send_timeout=_SEND_TIMEOUT)
    # Whatever differs between the two lines is reached as Any.
    if importlib.util.find_spec("mcp.server.mcpserver") is None:
        line: Any = importlib.import_module("mcp.server.fastmcp")
        options: dict[str, Any] = {}
        server = line.FastMCP(
            "mcp-resumable fixture", event_store=store, retry_interval=_RETRY_MILLISECONDS, log_level="WARNING"
        )

    else:
        line = importlib.import_module("mcp.server.mcpserver")
        server = line.MCPServer("mcp-resumable fixture", log_level="WARNING")
        options = {"event_store": store, "retry_interval": _RETRY_MILLISECONDS}

    async def count(
        ctx: Any,
        events: Annotated[int, Field(ge=0, le=10_000)] = 8,
        interval_seconds: Annotated[float, Field(ge=0, le=10)] = 0.1,
        padding_bytes: Annotated[int, Field(ge=0, le=10_000)] = 0,
        close_after: Annotated[int, Field(ge=0)] = 0,
    ) -> str:
        """Report progress slowly, send some of it in the standalone stream too, then answer.

        Args:
            ctx: Of the call.
            events: How often progress is reported.
            interval_seconds: Between two of them.
            padding_bytes: Of text in each.
            close_after: The report after which the server closes the connection, so that the client polls; 0: none.
        """
        for number in range(1, events + 1):
            await anyio.sleep(interval_seconds)
            await ctx.report_progress(number, events, "x" * padding_bytes)
            if number == close_after:
                await ctx.request_context.close_sse_stream()
        await ctx.session.send_tool_list_changed()
        return f"counted to {events}"

    # By value: the name of the context's type differs between the lines.
    count.__annotations__["ctx"] = line.Context
    server.add_tool(count, name=TOOL)
    return cast(ASGIApp, server.streamable_http_app(**options))
