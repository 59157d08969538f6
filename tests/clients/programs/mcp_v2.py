"""The official Python SDK, 2.x: `Client(mode="legacy")`, which is the mode that has sessions."""

from __future__ import annotations

import importlib
from typing import Any

from .jobs import Job, main

_client: Any = importlib.import_module("mcp.client.client")


async def use(job: Job) -> None:
    """Do a job."""
    async with _client.Client(job.url, mode="legacy", logging_callback=job.on_log) as client:

        async def call() -> str:
            result = await client.call_tool(job.tool, job.arguments, progress_callback=job.on_progress)
            return str(result.content[0].text)

        await job.record(call)


if __name__ == "__main__":
    main(use, "mcp")
