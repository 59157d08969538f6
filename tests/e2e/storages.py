"""What the end-to-end tests keep events in: each storage that there is, and one that fails where a test says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from examples.sqlite_storage import SqliteStorage
from mcp_resumable import EventCursor, Generation, MemoryStorage, Retention, Storage
from mcp_resumable.cursor import StreamId
from mcp_resumable.decision import Snapshot
from mcp_resumable.storage import Batch, SessionDescription

if TYPE_CHECKING:
    import pytest  # The clients' environments have none.

__all__ = ["STORAGES", "MakeStorage", "ScriptedStorage", "StorageDownError"]

MakeStorage = Callable[["pytest.FixtureRequest", Retention], Storage]
"""Makes a fresh and empty storage, of what fixtures provide; in an event loop."""


def _memory(_request: pytest.FixtureRequest, retention: Retention) -> Storage:
    return MemoryStorage(retention=retention)


def _sqlite(request: pytest.FixtureRequest, retention: Retention) -> Storage:
    folder: Path = request.getfixturevalue("tmp_path")
    return SqliteStorage(folder / "events.db", retention=retention)


def _redis(request: pytest.FixtureRequest, retention: Retention) -> Storage:
    url = request.getfixturevalue("redis_server").url
    from mcp_resumable.redis import RedisStorage  # Where there is a server, there is its client.

    return RedisStorage(url, retention=retention, prefix=f"e2e-{next(_numbers)}")


_numbers = itertools.count()

STORAGES: dict[str, MakeStorage] = {"memory": _memory, "sqlite": _sqlite, "redis": _redis}


class StorageDownError(Exception):
    """Raised instead of an answer."""


class ScriptedStorage(Storage):
    """Another storage that fails on demand, and that a test can wait for.

    Attributes:
        down: Names of the operations that fail from now on: `claim`, `open_stream`, `append`, `snapshot`, `read`.
        appends: Calls of `append` so far, the failed ones included.
        failures: Operations that have failed so far.
    """

    down: frozenset[str] = frozenset()
    appends = 0
    failures = 0
    _failing_append = -1
    _changed: anyio.Event | None = None

    def __init__(self, inner: Storage | None = None, *, retention: Retention | None = None) -> None:
        self._inner = inner if inner is not None else MemoryStorage(retention=retention)
        super().__init__(retention=self._inner.retention)

    def fail_append(self, number: int) -> None:
        """Let the `number`-th append from now on fail, 1 being the next."""
        self._failing_append = self.appends + number

    async def until_stored(self, session_id: str, request_id: str | None, seq: int) -> None:
        """Wait until the newest stream of a request (None: the standalone stream) has reached `seq`."""
        while True:
            description = await self.describe(session_id)
            streams = description.streams if description is not None else ()
            if any(stream.request_id == request_id and stream.high_water_mark >= seq for stream in streams):
                return
            await self._change()

    async def until_failed(self, failures: int) -> None:
        """Wait until that many operations have failed."""
        while self.failures < failures:
            await self._change()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _has_changed(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _check(self, operation: str) -> None:
        if operation in self.down:
            self._fail(operation)

    def _fail(self, operation: str) -> None:
        self.failures += 1
        self._has_changed()
        raise StorageDownError(operation)

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        self._check("claim")
        return await self._inner._claim_generation(session_id, nonce, create=create)

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        self._check("open_stream")
        return await self._inner._open_stream(session_id, generation, request_id, origin)

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        self.appends += 1
        if self.appends == self._failing_append:
            self._fail("append")
        self._check("append")
        seq = await self._inner._append(session_id, generation, stream, events, is_terminal)
        self._has_changed()
        return seq

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        self._check("snapshot")
        return await self._inner._snapshot(session_id, cursor)

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        self._check("read")
        return await self._inner._read(session_id, generation, stream, after_seq, limit)

    async def _wait(self, session_id: str, generation: Generation, stream: StreamId, after_seq: int) -> None:
        await self._inner._wait(session_id, generation, stream, after_seq)

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        return await self._inner._end_session(session_id, generation)

    async def _describe(self, session_id: str) -> SessionDescription | None:
        return await self._inner._describe(session_id)

    async def aclose(self) -> None:
        """Close the other storage."""
        await self._inner.aclose()
