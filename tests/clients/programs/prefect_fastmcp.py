"""PrefectHQ's `fastmcp`: its `Client(mode="legacy")`."""

from __future__ import annotations

import importlib
from typing import Any

from .jobs import Job, main

_fastmcp: Any = importlib.import_module("fastmcp")


async def use(job: Job) -> None:
    """Do a job."""
    async with _fastmcp.Client(
        job.url, mode="legacy", log_handler=job.on_log, progress_handler=job.on_progress
    ) as client:

        async def call() -> str:
            result = await client.call_tool(job.tool, job.arguments)
            return str(result.content[0].text)

        await job.record(call)


if __name__ == "__main__":
    main(use, "fastmcp", "mcp")
