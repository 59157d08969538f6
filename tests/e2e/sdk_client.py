"""The SDK's own client of the installed line: one session, one tool call, as a function and as a program.

As a program (`sdk_client.py URL TOOL ARGUMENTS`) it is run by the other line's interpreter, so it imports nothing of
this package.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio

__all__ = ["Outcome", "call"]

_IS_V1 = importlib.util.find_spec("mcp.server.mcpserver") is None


@dataclass
class Outcome:
    """What the caller of a tool has seen.

    Attributes:
        progress: Numbers of the progress notifications, in order of arrival.
        text: Of the result, None where the call failed.
        error: `data` of the JSON-RPC error, None where the call succeeded.
    """

    progress: list[int] = field(default_factory=list)
    text: str | None = None
    error: dict[str, Any] | None = None


async def call(url: str, tool: str, arguments: dict[str, Any]) -> Outcome:
    """Open a session, call a tool, and return what came of it."""
    outcome = Outcome()

    async def on_progress(progress: float, _total: float | None, _message: str | None) -> None:
        outcome.progress.append(int(progress))

    error_type: Any
    if _IS_V1:
        mcp: Any = importlib.import_module("mcp")
        transport: Any = importlib.import_module("mcp.client.streamable_http")
        error_type = mcp.McpError
        async with transport.streamable_http_client(url) as (read, write, _), mcp.ClientSession(read, write) as session:
            await session.initialize()
            try:
                result = await session.call_tool(tool, arguments, progress_callback=on_progress)
                outcome.text = result.content[0].text
            except error_type as exc:
                outcome.error = exc.error.data
    else:
        client_type: Any = importlib.import_module("mcp.client.client").Client
        error_type = importlib.import_module("mcp.shared.exceptions").MCPError
        async with client_type(url, mode="legacy") as client:
            try:
                result = await client.call_tool(tool, arguments, progress_callback=on_progress)
                outcome.text = result.content[0].text
            except error_type as exc:
                outcome.error = exc.error.data
    return outcome


def main() -> None:
    """Print the outcome as JSON."""
    url, tool, arguments = sys.argv[1:4]
    outcome = anyio.run(call, url, tool, json.loads(arguments))
    print(json.dumps(asdict(outcome)))  # noqa: T201  # a program's output


if __name__ == "__main__":
    main()
