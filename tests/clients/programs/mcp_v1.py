"""The official Python SDK, 1.x: `ClientSession` over its streamable-HTTP client."""

from __future__ import annotations

import importlib
from typing import Any

from .jobs import Job, main

# As Any, since the other line is installed where this is checked.
_mcp: Any = importlib.import_module("mcp")
_transport: Any = importlib.import_module("mcp.client.streamable_http")


async def use(job: Job) -> None:
    """Do a job."""
    async with (
        _transport.streamable_http_client(job.url) as (read, write, _),
        _mcp.ClientSession(read, write, logging_callback=job.on_log) as session,
    ):
        await session.initialize()

        async def call() -> str:
            result = await session.call_tool(job.tool, job.arguments, progress_callback=job.on_progress)
            return str(result.content[0].text)

        await job.record(call)


if __name__ == "__main__":
    main(use, "mcp")
