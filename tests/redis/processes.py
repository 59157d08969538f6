"""Worker processes, as the tests start, stop, continue and kill them: each by its process id."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio

from tests.redis.history import History, read_log
from tests.redis.server import Server

__all__ = ["START_SECONDS", "WorkerProcess", "WorkerProcesses", "worker_processes"]

START_SECONDS = 60.0
"""Longest wait for a worker that starts; five of them may share one core."""

_numbers = itertools.count()

_WARNINGS = ["-W", "always::ResourceWarning"]
if version("mcp").startswith("1.29."):  # See tests/conftest.py.
    _WARNINGS += ["-W", "ignore:Unclosed <MemoryObjectReceiveStream:ResourceWarning"]


@dataclass(eq=False)
class WorkerProcess:
    """One worker of `worker.py`; it keeps its port when it is started again.

    Attributes:
        options: Its command line.
        folder: Where its logs are.
        port: On the loopback address; 0 before its first start.
    """

    options: tuple[str, ...]
    folder: Path
    port: int = 0
    path: str = "/mcp/"
    _process: subprocess.Popen[str] | None = None
    _printed: list[Path] = field(default_factory=list)

    async def start(self) -> None:
        """Start it, and wait until it takes requests."""
        number = next(_numbers)
        self._printed.append(self.folder / f"worker-{number}.printed")
        log = self.folder / f"worker-{number}.history"
        log.touch()
        command = [sys.executable, *_WARNINGS, "-m", "tests.redis.worker"]
        with self._printed[-1].open("wb") as printed:
            # Not anyio's: the process must be killed and waited for also where the event loop is gone.
            self._process = process = subprocess.Popen(  # noqa: ASYNC220
                [*command, *self.options, "--log", str(log), "--port", str(self.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
            )
        assert process.stdout is not None
        with anyio.fail_after(START_SECONDS):
            await anyio.wait_readable(process.stdout)
        line = process.stdout.readline()
        assert line, f"the worker did not start: {self.printed}"
        self.port = int(line)

    @property
    def printed(self) -> str:
        """What it has said, in all its lives."""
        return "\n".join(path.read_text() for path in self._printed)

    def pause(self) -> None:
        """Stop it in the middle of whatever it does."""
        self._running.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on where it was paused."""
        self._running.send_signal(signal.SIGCONT)

    async def terminate(self) -> float:
        """Tell it to stop, wait until it has, and return the seconds that this took."""
        begin = anyio.current_time()
        self._running.terminate()
        await anyio.to_thread.run_sync(self._running.wait, START_SECONDS)
        self.kill()
        return anyio.current_time() - begin

    def kill(self) -> None:
        """End it at once; idempotent."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the worker does not run"
        return self._process


@dataclass(frozen=True)
class WorkerProcesses:
    """Workers over one Redis, and what they have written down.

    Attributes:
        workers: The processes.
        prefix: Of their keys.
    """

    workers: list[WorkerProcess]
    prefix: str
    folder: Path

    def leases(self, redis: Server) -> list[Any]:
        """Return the leases that run."""
        with redis.client() as client:
            return list(client.scan_iter(f"{{{self.prefix}}}:w:*", count=1000))

    def history(self) -> History:
        """What all their storages did so far."""
        history = History()
        for path in sorted(self.folder.glob("*.history")):
            read_log(path, history)
        return history


@asynccontextmanager
async def worker_processes(
    redis: Server, folder: Path, size: int, *, rejection: str = "status", lease_seconds: float = 10.0
) -> AsyncIterator[WorkerProcesses]:
    """Start workers; whatever happens, none is left behind."""
    prefix = f"processes-{next(_numbers)}"
    options = ("--url", redis.url, "--prefix", prefix, "--rejection", rejection, "--lease-seconds", str(lease_seconds))
    workers = [WorkerProcess(options, folder) for _ in range(size)]
    try:
        async with anyio.create_task_group() as starting:
            for worker in workers:
                starting.start_soon(worker.start)
        yield WorkerProcesses(workers, prefix, folder)
    finally:
        for worker in workers:
            worker.kill()
