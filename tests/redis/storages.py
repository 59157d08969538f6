"""Storages over one server, without an HTTP server around them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from redis.exceptions import RedisError

from mcp_resumable import EventCursor, Generation
from mcp_resumable.cursor import STANDALONE, StreamId
from mcp_resumable.decision import Decision, Resume, decide
from mcp_resumable.redis import RedisStorage
from mcp_resumable.storage import Storage

__all__ = ["Log", "answering", "fresh_prefix", "opened"]

_numbers = itertools.count()


def fresh_prefix() -> str:
    return f"storage-{next(_numbers)}"


@asynccontextmanager
async def opened(url: Any, *, prefix: str | None = None, **options: Any) -> AsyncIterator[RedisStorage]:
    """Use a storage of a prefix of its own, unless one is given, and close it."""
    storage = RedisStorage(url, prefix=prefix or fresh_prefix(), **options)
    try:
        yield storage
    finally:
        await storage.aclose()


async def answering(storage: RedisStorage) -> None:
    """Wait until the server answers the storage again; to be used under `fail_after`."""
    while True:
        try:
            await storage.find_owner("nobody's")
        except (RedisError, TimeoutError):
            await anyio.sleep(0.02)
        else:
            return


@dataclass(kw_only=True)
class Log:
    """One stream as its writer knows it: what is stored at each seq, None for a hole."""

    session_id: str
    generation: Generation
    stream: StreamId
    places: list[bytes | None]

    @classmethod
    async def open(cls, storage: Storage, session_id: str, request_id: str | None = None) -> Log:
        """Open a stream in the session's current generation, or in its first."""
        snapshot = await storage.snapshot(session_id, None)
        generation = await storage.open_session(session_id) if snapshot is None else snapshot.generation
        if request_id is None:
            return cls(session_id=session_id, generation=generation, stream=STANDALONE, places=[])
        stream = await storage.open_stream(session_id, generation, request_id)
        return cls(session_id=session_id, generation=generation, stream=stream, places=[])

    async def append(self, storage: Storage, *events: bytes | None, is_terminal: bool = False) -> None:
        """Append, and remember what is acknowledged."""
        seq = await storage.append(self.session_id, self.generation, self.stream, events, is_terminal=is_terminal)
        self.places += events
        assert seq == len(self.places)

    async def read(self, storage: Storage, after_seq: int = 0) -> list[bytes | None] | None:
        """Return all that follows a seq."""
        batch = await storage.read(self.session_id, self.generation, self.stream, after_seq, 1000)
        return None if batch is None else list(batch.events)

    async def decide(self, storage: Storage, seq: int) -> Decision:
        """Decide about the cursor at `seq`; what may be resumed must be there, complete."""
        cursor = EventCursor(generation=self.generation, stream=self.stream, seq=seq)
        decision = decide(str(cursor), cursor, await storage.snapshot(self.session_id, cursor), replay_completed=True)
        if isinstance(decision, Resume):
            events = await self.read(storage, seq)
            assert events == self.places[seq:], f"resumed at {seq} of {self.places}, and read {events}"
            assert None not in events
        return decision

    async def reasons(self, storage: Storage) -> list[str]:
        """Return the outcome of each cursor, from 0 to one past the last."""
        decisions = [await self.decide(storage, seq) for seq in range(len(self.places) + 2)]
        return ["resume" if isinstance(decision, Resume) else decision.error.reason for decision in decisions]
