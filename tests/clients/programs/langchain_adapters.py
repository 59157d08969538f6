"""`langchain-mcp-adapters`: a tool of `get_tools()`, which opens a session per call.

For the notifications of a standalone stream, the session is held open.
"""

from __future__ import annotations

import importlib
from typing import Any

from .jobs import Job, main

_callbacks: Any = importlib.import_module("langchain_mcp_adapters.callbacks")
_client: Any = importlib.import_module("langchain_mcp_adapters.client")
_tools: Any = importlib.import_module("langchain_mcp_adapters.tools")


async def use(job: Job) -> None:
    """Do a job."""
    callbacks = _callbacks.Callbacks(on_progress=job.on_progress, on_logging_message=job.on_log)
    connections = {"server": {"transport": "http", "url": job.url}}
    client = _client.MultiServerMCPClient(connections, callbacks=callbacks)
    if job.last_log is None:
        await _call(job, await client.get_tools())
        return
    async with client.session("server") as session:
        await _call(job, await _tools.load_mcp_tools(session, callbacks=callbacks, server_name="server"))


async def _call(job: Job, tools: list[Any]) -> None:
    (tool,) = [tool for tool in tools if tool.name == job.tool]

    async def call() -> str:
        (content,) = await tool.ainvoke(job.arguments)
        return str(content["text"])

    await job.record(call)


if __name__ == "__main__":
    main(use, "langchain-mcp-adapters", "mcp")
