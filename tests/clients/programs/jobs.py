"""What the Python programs share: a job comes in, what was received goes out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import anyio

__all__ = ["Job", "main"]

# Seconds that a client may take to close its session; what it received is printed before.
_CLOSE_SECONDS = 5.0


@dataclass
class Received:
    """What the caller of a tool has seen.

    Attributes:
        cell: Name of the job.
        progress: Numbers of the progress notifications, in order of arrival.
        logs: Texts of the log notifications, in order of arrival.
        markers: Reasons of the warnings that tell a client to drop what it has.
        outcome: `result`, `error`, or `waiting` where nothing came.
        text: Of the result.
        error: `type`, `message` and `data` of the error.
        elapsed: Seconds from the call to its outcome.
    """

    cell: str
    progress: list[int] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    markers: list[str] = field(default_factory=list)
    outcome: str = "waiting"
    text: str | None = None
    error: dict[str, Any] | None = None
    elapsed: float = 0.0


class Job:
    """One session with one tool call.

    Attributes:
        url: Of the server.
        tool: Name of the tool.
        arguments: For the tool.
        last_log: The log notification after which nothing more is awaited; None where the result is the end.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.url: str = spec["url"]
        self.tool: str = spec["tool"]
        self.arguments: dict[str, Any] = spec["arguments"]
        self.last_log: str | None = spec["last_log"]
        self._patience: float = spec["patience"]
        self._received = Received(spec["cell"])
        self._is_over = False
        self._last_log_came = anyio.Event()

    async def on_progress(self, progress: float, *_more: object) -> None:
        """Note a progress notification."""
        self._received.progress.append(int(progress))

    async def on_log(self, params: Any, *_more: object) -> None:
        """Note a log notification."""
        if isinstance(params.data, dict):
            self._received.markers.append(params.data["reason"])
            return
        self._received.logs.append(params.data)
        if params.data == self.last_log:
            self._last_log_came.set()

    async def record(self, call: Callable[[], Awaitable[str]]) -> None:
        """Make the call, wait for what is to come, for as long as the job's patience lasts, and print all of it."""
        begin = time.monotonic()
        with anyio.move_on_after(self._patience):
            try:
                self._received.text = await call()
                self._received.outcome = "result"
            except Exception as exc:
                self._fail(exc)
            self._received.elapsed = round(time.monotonic() - begin, 3)
            if self.last_log is not None:
                await self._last_log_came.wait()
        self.report()

    def report(self, exc: Exception | None = None) -> None:
        """Print what was received, once; `exc` where the session itself has failed before there was an outcome."""
        if self._is_over:
            return
        self._is_over = True
        if exc is not None:
            self._fail(exc)
        print(json.dumps(asdict(self._received)), flush=True)  # noqa: T201  # a program's output

    def _fail(self, exc: Exception) -> None:
        data = getattr(getattr(exc, "error", None), "data", None)
        self._received.outcome = "error"
        self._received.error = {"type": type(exc).__name__, "message": str(exc), "data": data}


def main(use: Callable[[Job], Awaitable[None]], *distributions: str) -> None:
    """Do all jobs of the standard input.

    Args:
        use: Opens a session and makes the call through `Job.record`.
        distributions: Whose versions are printed first.
    """

    async def do(spec: dict[str, Any]) -> None:
        job = Job(spec)
        with anyio.move_on_after(spec["patience"] + _CLOSE_SECONDS):
            try:
                await use(job)
            except Exception as exc:
                job.report(exc)
        job.report()

    async def do_all() -> None:
        async with anyio.create_task_group() as tasks:
            for spec in json.load(sys.stdin):
                tasks.start_soon(do, spec)

    print(json.dumps({"versions": {name: version(name) for name in distributions}}), flush=True)  # noqa: T201
    anyio.run(do_all)
    os._exit(0)  # Without waiting for what a client has left running.
