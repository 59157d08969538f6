"""The Python SDK 2.x with mcp-persist, on SQLite, as its README shows it; it redirects `/mcp` to `/mcp/`."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

from .sdk_example import count
from .serving import serve

_mcpserver: Any = importlib.import_module("mcp.server.mcpserver")
_persist: Any = importlib.import_module("mcp_persist")


def main() -> None:
    """Serve."""
    count.__annotations__["ctx"] = _mcpserver.Context
    server = _mcpserver.MCPServer("persist")
    server.add_tool(count)
    with tempfile.TemporaryDirectory() as directory:
        database = str(Path(directory) / "events.db")
        serve(_persist.with_persistence(server, backend="sqlite", url=database, ttl=3600), "/mcp/")


if __name__ == "__main__":
    main()
