"""What the Python servers share: the steps of the tool, and how they are served."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import uvicorn

__all__ = ["RETRY_MILLISECONDS", "report_steps", "serve"]

RETRY_MILLISECONDS = 200


async def report_steps(
    report: Callable[[int, int, str], Awaitable[None]],
    close: Callable[[], Awaitable[None]],
    events: int,
    interval_seconds: float,
    padding_bytes: int,
    close_after: int,
) -> None:
    """Do what the tool of `mcp-resumable fixture` does."""
    for number in range(1, events + 1):
        await anyio.sleep(interval_seconds)
        await report(number, events, "x" * padding_bytes)
        if number == close_after:
            await close()


def serve(app: Any, path: str = "/mcp") -> None:
    """Serve an ASGI app on a free port, and print the URL of its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}{path}", flush=True)  # noqa: T201  # read by the test
        uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])
