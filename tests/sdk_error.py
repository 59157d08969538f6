"""What a call raises with the installed SDK's clients."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["log_params", "sdk_error"]

_mcp: Any = import_module("mcp")


def sdk_error(code: int, data: object, message: str = "refused") -> Exception:
    """Return the error that a client raises for a JSON-RPC error."""
    error: Exception
    if hasattr(_mcp, "McpError"):  # mcp 1.x
        error = _mcp.McpError(import_module("mcp.types").ErrorData(code=code, message=message, data=data))
    else:
        error = _mcp.MCPError(code, message, data)
    return error


def log_params(logger: str | None, data: object) -> object:
    """Return what a client hands to its logging callback."""
    types: Any = import_module("mcp.types" if hasattr(_mcp, "McpError") else "mcp_types")
    params: object = types.LoggingMessageNotificationParams(level="warning", logger=logger, data=data)
    return params
