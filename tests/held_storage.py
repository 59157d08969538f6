"""A storage whose every operation can be held or made to fail, before or after it takes effect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from mcp_resumable import EventCursor, Generation, MemoryStorage, Retention, Storage
from mcp_resumable.cursor import StreamId
from mcp_resumable.decision import Snapshot
from mcp_resumable.shared import Ownership, SharedStorage, Worker
from mcp_resumable.storage import Batch, SessionDescription

T = TypeVar("T")

Operation = Literal[
    "claim_generation",
    "open_stream",
    "append",
    "snapshot",
    "read",
    "wait",
    "end_session",
    "own_session",
    "find_owner",
    "take_over",
    "note_carried",
    "abandon_session",
    "notice",
]
When = Literal["before", "after"]


class Trap:
    """Catches the next call of one operation, before or after it takes effect."""

    def __init__(self, error: Exception | None, *, is_held: bool = True) -> None:
        self.reached = anyio.Event()
        self._released = anyio.Event()
        self._error = error
        if not is_held:
            self._released.set()

    async def spring(self) -> None:
        self.reached.set()
        await self._released.wait()
        if self._error is not None:
            raise self._error

    async def until_reached(self) -> None:
        with anyio.fail_after(10):
            await self.reached.wait()

    def release(self) -> None:
        self._released.set()


class HeldStorage(Storage):
    """A `MemoryStorage` behind traps; without one, each operation suspends once before and once after it."""

    def __init__(self, *, retention: Retention | None = None, inner: MemoryStorage | None = None) -> None:
        self.inner = inner if inner is not None else MemoryStorage(retention=retention)
        super().__init__(retention=self.inner.retention)
        self._traps: dict[tuple[Operation, When], list[Trap]] = {}
        self.broken: set[Operation] = set()

    def hold(self, operation: Operation, when: When = "before", *, then_fail: bool = False) -> Trap:
        """Hold the next call of `operation`."""
        return self._set(operation, when, Trap(OSError("the storage is on fire") if then_fail else None))

    def fail(self, operation: Operation, when: When = "before") -> Trap:
        """Make the next call of `operation` fail; `after`: although it took effect."""
        return self._set(operation, when, Trap(OSError("the storage is on fire"), is_held=False))

    def _set(self, operation: Operation, when: When, trap: Trap) -> Trap:
        self._traps.setdefault((operation, when), []).append(trap)
        return trap

    async def _do(self, operation: Operation, effect: Awaitable[T]) -> T:
        try:
            if operation in self.broken:
                raise OSError("the storage is down")
            await self._spring(operation, "before")
        except BaseException:
            if hasattr(effect, "close"):
                effect.close()
            raise
        result = await effect
        await self._spring(operation, "after")
        return result

    async def _spring(self, operation: Operation, when: When) -> None:
        traps = self._traps.get((operation, when))
        if traps:
            await traps.pop(0).spring()
        else:
            await anyio.lowlevel.checkpoint()

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        return await self._do("claim_generation", self.inner._claim_generation(session_id, nonce, create=create))

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        return await self._do("open_stream", self.inner._open_stream(session_id, generation, request_id, origin))

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        return await self._do("append", self.inner._append(session_id, generation, stream, events, is_terminal))

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        return await self._do("snapshot", self.inner._snapshot(session_id, cursor))

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        return await self._do("read", self.inner._read(session_id, generation, stream, after_seq, limit))

    async def _wait(self, session_id: str, generation: Generation, stream: StreamId, after_seq: int) -> None:
        await self._do("wait", self.inner._wait(session_id, generation, stream, after_seq))

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        return await self._do("end_session", self.inner._end_session(session_id, generation))

    async def _describe(self, session_id: str) -> SessionDescription | None:
        return await self.inner._describe(session_id)


class SharedHeldStorage(HeldStorage, SharedStorage):
    """The same as a storage that workers share, of which this is the only one: events are stored later."""

    worker_id = "the-only-one"
    lease_seconds = 600.0

    def __init__(self, *, retention: Retention | None = None, inner: MemoryStorage | None = None) -> None:
        super().__init__(retention=retention, inner=inner)
        self.task_group: TaskGroup | None = None
        self._credentials: dict[str, str] = {}
        self._consumers = 0

    def serve(self, worker: Worker) -> None:
        """Nobody else does anything that it would have to be told."""

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self.task_group is not None
        self.task_group.start_soon(work)

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        if create:
            self._credentials.pop(session_id, None)  # Until somebody says so, nobody serves it.
        return await super()._claim_generation(session_id, nonce, create=create)

    async def own_session(self, session_id: str, generation: Generation, credential: str) -> bool:  # noqa: ARG002
        async def own() -> bool:
            self._credentials[session_id] = credential
            return True

        return await self._do("own_session", own())

    async def retire(self) -> None:
        pass

    async def find_owner(self, session_id: str) -> Ownership | None:
        snapshot = await self._do("find_owner", self.inner.snapshot(session_id, None))
        if snapshot is None:
            return None
        return Ownership(
            generation=snapshot.generation,
            worker=self.worker_id if session_id in self._credentials else "",
            credential=self._credentials.get(session_id, ""),
            is_alive=True,
            is_forked=False,
            is_abandoned=False,
            carried_seq=0,
        )

    def is_seen_alive(self, worker_id: str) -> bool:  # noqa: ARG002
        return True

    async def abandon_session(self, session_id: str) -> bool:  # noqa: ARG002
        return False

    async def note_carried(self, session_id: str, generation: Generation, seq: int) -> None:
        pass

    def take_over(
        self,
        session_id: str,  # noqa: ARG002
        stream: StreamId,  # noqa: ARG002
        on_ranked: Callable[[int], None],
        on_failed: Callable[[Exception], None],  # noqa: ARG002
    ) -> None:
        self._consumers += 1
        on_ranked(self._consumers)
