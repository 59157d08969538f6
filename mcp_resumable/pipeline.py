"""Events on their way to a storage in another process, and the frames that are held until they have arrived.

Such a storage answers within a round trip, and the session's router has one event after the other. So the router does
not wait: it gives the SDK the event id that the event is to have, and events that come while the storage is asked
travel together in the next append. What the SDK makes of an event, its frame, is held where it would be written.

Invariant: a frame with an event id is written only once the storage has that event under that id. Where it turned out
otherwise, the frame says what is true: the event id that the event got, or none.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

import anyio

__all__ = ["Pipeline", "Unstored"]

# Of one call, not stored yet; then its session's router waits. The SDK itself keeps sixteen frames of a stream.
_MAX_EVENTS = 64
_MAX_BYTES = 256 * 1024

# How a frame begins that has an event id. The separator is the SSE library's to choose.
_ID_LINE = re.compile(rb"id: ([^\r\n]*)(\r\n|\r|\n)")


@dataclass(eq=False, slots=True, kw_only=True)
class Unstored:
    """An event that was handed over.

    Attributes:
        event: Its JSON text, as long as it is needed; None where it is to be a hole.
        promised_id: The event id that the SDK is given for it, never given before; `""` where none can be foretold.
        execution: Of its call, when it was handed over.
        is_answer: It is the call's answer.
        started: When it was handed over, by the ledger's clock.
        event_id: What it turned out to be, `""` where it was not stored; None as long as that is not known.
    """

    event: bytes | None
    promised_id: str
    execution: int
    is_answer: bool
    started: float | None
    event_id: str | None = None

    def true_frame(self, frame: bytes) -> bytes:
        """Return what its frame is to say, now that it is known what became of it."""
        line = _ID_LINE.match(frame) if self.event_id != self.promised_id else None
        if line is None:
            return frame
        rest = frame[line.end() :]
        return b"id: %b%b%b" % (self.event_id.encode(), line[2], rest) if self.event_id else rest


class Pipeline:
    """The unstored events of one call, in order. They are added by the session's router, and taken by one task.

    Attributes:
        is_running: There is a task that takes what is added.
    """

    __slots__ = ("_change", "_count", "_held", "_newest", "_size", "_waiting", "is_running")

    def __init__(self) -> None:
        self.is_running = False
        self._waiting: deque[Unstored] = deque()
        self._newest: Unstored | None = None
        self._count = 0
        self._size = 0
        # By the event id in their frames: those of which the frame has not come yet and is not known to be true.
        self._held: dict[bytes, Unstored] = {}
        self._change: anyio.Event | None = None

    def add(self, unstored: Unstored) -> None:
        """Take in an event."""
        self._waiting.append(unstored)
        self._newest = unstored
        self._count += 1
        self._size += _size_of(unstored)
        if unstored.promised_id:
            self._held[unstored.promised_id.encode()] = unstored
            if len(self._held) > 2 * _MAX_EVENTS:
                # One that was lost, and nobody was there to be sent its frame.
                del self._held[next(iter(self._held))]

    def take(self) -> list[Unstored]:
        """Return what the next append is to store: the oldest, of one execution; nothing where nothing waits."""
        batch: list[Unstored] = []
        while self._waiting and self._waiting[0].execution == (batch or self._waiting)[0].execution:
            batch.append(self._waiting.popleft())
        return batch

    def settle(self, batch: list[Unstored], event_ids: list[str]) -> None:
        """Say what became of what was taken."""
        for unstored, event_id in zip(batch, event_ids, strict=True):
            unstored.event_id = event_id
            self._count -= 1
            self._size -= _size_of(unstored)
            unstored.event = None
            if event_id == unstored.promised_id:
                self._held.pop(event_id.encode(), None)
        if self._change is not None:
            self._change.set()
            self._change = None

    async def until_room(self) -> None:
        """Wait until there are fewer events than a call may have here."""
        while self._count >= _MAX_EVENTS or self._size >= _MAX_BYTES:
            await self._until_change()

    async def until_settled(self, unstored: Unstored | None = None) -> str:
        """Wait until it is known what became of an event, by default of all that were added; return its event id."""
        awaited = unstored or self._newest
        if awaited is None:
            return ""
        while awaited.event_id is None:
            await self._until_change()
        return awaited.event_id

    def claim(self, frame: bytes) -> Unstored | None:
        """Return the event of a frame that cannot be written as it is yet, or at all; once."""
        if not self._held:
            return None
        line = _ID_LINE.match(frame)
        return self._held.pop(line[1], None) if line is not None else None

    async def _until_change(self) -> None:
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()


def _size_of(unstored: Unstored) -> int:
    return len(unstored.event) if unstored.event is not None else 0
