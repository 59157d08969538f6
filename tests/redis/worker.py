"""A worker process: `python -m tests.redis.worker --help`.

It serves the tools of `tests/e2e/servers.py` over one Redis, prints its port when it takes requests, and writes down
what its storage does (see `history.py`) before anybody can see it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import uvicorn

from mcp_resumable import Generation, ResumableEventStore
from mcp_resumable.cursor import StreamId
from mcp_resumable.redis import RedisStorage
from mcp_resumable.storage import AppendRefusedError
from tests.e2e.servers import TOOLS, Arguments, Call, Stage, app_of
from tests.redis.history import Append, Claim, GivenUp, digest_of, write_log


async def stamp(_stage: Stage, call: Call, arguments: Arguments) -> str:
    """Send n progress notifications that carry the time, on the machine's monotonic clock; then answer."""
    for number in range(1, arguments.n + 1):
        await call.progress(number, repr(time.monotonic()))
        await anyio.sleep(arguments.delay)
    return "stamped"


class WritingStorage(RedisStorage):
    """A `RedisStorage` that writes its own history."""

    def __init__(self, url: str, *, log: Path, prefix: str, lease_seconds: float) -> None:
        super().__init__(url, prefix=prefix, lease_seconds=lease_seconds)
        self._log = log

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        began = time.monotonic()
        generation = await super()._claim_generation(session_id, nonce, create=create)
        if generation is not None:
            claim = Claim(session=session_id, generation=str(generation), began=began, ended=time.monotonic())
            write_log(self._log, claim)
        return generation

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        append = Append(
            session=session_id,
            generation=str(generation),
            stream=str(stream),
            places=tuple(event if event is None else digest_of(event) for event in events),
            is_terminal=is_terminal,
            began=time.monotonic(),
            ended=None,
            seq=None,
        )
        write_log(self._log, append)
        try:
            seq = await super()._append(session_id, generation, stream, events, is_terminal)
        except AppendRefusedError:
            write_log(self._log, replace(append, ended=time.monotonic(), is_refused=True))
            raise
        write_log(self._log, replace(append, ended=time.monotonic(), seq=seq))
        return seq

    async def abandon_session(self, session_id: str) -> bool:
        began = time.monotonic()
        is_over = await super().abandon_session(session_id)
        if is_over:
            write_log(self._log, GivenUp(session=session_id, began=began, ended=time.monotonic()))
        return is_over


class ReportingServer(uvicorn.Server):
    """Says on its standard output that it takes requests."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        sys.stdout.write(f"{sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def main() -> None:
    """Serve until a signal says otherwise, or the process that began this one is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="of the Redis")
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--log", required=True, type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lease-seconds", type=float, default=10.0)
    parser.add_argument("--rejection", choices=("status", "stream"), default="status")
    arguments = parser.parse_args()

    def leave_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    storage = WritingStorage(
        arguments.url, log=arguments.log, prefix=arguments.prefix, lease_seconds=arguments.lease_seconds
    )
    store = ResumableEventStore(storage, rejection=arguments.rejection)
    TOOLS["stamp"] = stamp
    app, _ = app_of("starlette", Stage(store), {})
    listener = socket.create_server(("127.0.0.1", arguments.port))
    ReportingServer(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
