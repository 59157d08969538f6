"""The frames of one response on their way to the ASGI server: in order, held until stored, and several in one write.

To write a frame costs the server more than to make its event and to store it. So frames that come soon after a write
share the next one. What is not to wait does not: a frame that comes alone, what the client has to answer, and the end
of a response, which takes along what waits for it.

Invariant: frames are written in the order in which they came, and one with an event id only once the storage has that
event under that id (see `pipeline`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
from anyio.abc import TaskGroup

from mcp_resumable.pipeline import Pipeline, Unstored
from mcp_resumable.session import Connection

__all__ = ["Outbox"]

# Between two writes: a picture of a film lasts longer. Less saves less where many calls are busy, whose events are then
# several milliseconds apart each.
_GAP_SECONDS = 0.03
# The busier the loop, the further apart are the events of each call: an event is made in about four of its turns, and
# four events share a write in a gap that is longer by this many times what the loop was late. No longer than what a
# person takes for at once.
_LATENESS = 16
_MAX_GAP_SECONDS = 0.1

# What may wait; then it is written, and whoever puts more in waits for that.
_MAX_FRAMES = 64
_MAX_BYTES = 64 * 1024


class Outbox:
    """The frames of one response. The SDK's tasks put them in; they are written there, or in a task of the outbox."""

    def __init__(
        self,
        write: Callable[[MutableMapping[str, Any]], Awaitable[None]],
        connection: Connection,
        tasks: TaskGroup,
        pipeline: Pipeline | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an outbox.

        Args:
            write: Writes a part of the body.
            connection: The response; what waits when it is closed is dropped.
            tasks: Those of the response; the outbox ends with them.
            pipeline: Of the call whose response this is, where its events are stored later.
            clock: Seconds, monotonic.
        """
        self._write = write
        self._connection = connection
        self._tasks = tasks
        self._pipeline = pipeline
        self._clock = clock
        self._frames: deque[tuple[bytes, Unstored | None]] = deque()
        self._size = 0
        self._has_begun = False
        self._written_at = -math.inf
        self._gap = _GAP_SECONDS
        # Held while frames are taken out and written. There is none, and no task, before a frame has to wait.
        self._lock: anyio.Lock | None = None
        # Set by the next frame that has to wait.
        self._filled: anyio.Event | None = None
        # What a write has raised in the task of the outbox. Nothing is written after it.
        self._failure: Exception | None = None

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Write the frame that is the body of `message`, now or soon.

        Raises:
            Exception: What a write has raised, this one or an earlier one.
        """
        if self._failure is not None:
            raise self._failure
        frame: bytes = message["body"]
        unstored = self._pipeline.claim(frame) if self._pipeline is not None else None
        now = self._clock()
        is_due = now - self._written_at >= self._gap
        if is_due and unstored is None and not self._frames and (self._lock is None or not self._lock.locked()):
            await self._write(message)
            # The first one begins no gap: it may be a mere cursor, and the next one the first that says anything.
            self._written_at = now if self._has_begun else -math.inf
            self._has_begun = True
            return
        self._frames.append((frame, unstored))
        self._size += len(frame)
        if self._lock is None:
            self._lock = anyio.Lock(fast_acquire=True)
            self._tasks.start_soon(self._run, self._lock)
        elif self._filled is not None:
            self._filled.set()
            self._filled = None
        if self._connection.is_interactive:
            await self.empty()
        elif self._is_full():
            # Not all: the last of them may not be stored yet.
            await self._write_while(self._is_full)

    async def empty(self) -> None:
        """Write what waits, without a gap.

        Raises:
            Exception: What a write has raised.
        """
        await self._write_while(lambda: bool(self._frames))

    def close(self) -> None:
        """End the outbox; what waits is dropped."""
        if self._lock is not None:
            self._tasks.cancel_scope.cancel()

    def _is_full(self) -> bool:
        return len(self._frames) >= _MAX_FRAMES or self._size >= _MAX_BYTES

    async def _write_while(self, condition: Callable[[], bool]) -> None:
        if self._lock is None:
            return
        async with self._lock:
            while condition():
                await self._write_lot(await self._take())
        if self._failure is not None:
            raise self._failure

    async def _run(self, lock: anyio.Lock) -> None:
        while self._failure is None:
            # Also where nothing waits yet: mostly something does by then, and this costs less than to be told.
            due = self._written_at + self._gap
            if (seconds := due - self._clock()) > 0:
                await anyio.sleep(seconds)
                self._gap = min(_GAP_SECONDS + _LATENESS * (self._clock() - due), _MAX_GAP_SECONDS)
            elif not self._frames:
                self._filled = anyio.Event()
                await self._filled.wait()
            async with lock:
                if self._frames:
                    try:
                        await self._write_lot(await self._take())
                    except Exception as exc:
                        self._failure = exc

    async def _take(self) -> bytes:
        """Take out the first frame, once it can be written, and those after it that can be by then. Under the lock."""
        lot: list[bytes] = []
        while self._frames:
            frame, unstored = self._frames[0]
            if unstored is not None and unstored.event_id is None:
                if lot or self._pipeline is None:
                    break
                await self._pipeline.until_settled(unstored)
            self._frames.popleft()
            self._size -= len(frame)
            lot.append(frame if unstored is None else unstored.true_frame(frame))
        return b"".join(lot)

    async def _write_lot(self, lot: bytes) -> None:
        if self._connection.is_closed:
            return
        try:
            await self._write({"type": "http.response.body", "body": lot, "more_body": True})
        except BaseException:
            # What did not come to its end may be missing on the wire, so nothing may follow it.
            self._frames.clear()
            self._size = 0
            raise
        self._written_at = self._clock()
