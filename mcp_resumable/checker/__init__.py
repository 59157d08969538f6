"""Checks any streamable-HTTP MCP server from outside for what a client that loses its connection needs.

Run it as `mcp-resumable check`; from Python, await `check_server`. Needs the extra `cli`.
"""

from mcp_resumable.checker.checks import CHECKS
from mcp_resumable.checker.client import Limits, Target
from mcp_resumable.checker.report import CheckResult, Exchange, Report
from mcp_resumable.checker.run import CouldNotCheckError
from mcp_resumable.checker.runner import check_server

__all__ = [
    "CHECKS",
    "CheckResult",
    "CouldNotCheckError",
    "Exchange",
    "Limits",
    "Report",
    "Target",
    "check_server",
]
