"""The soak of the ceilings: `python -m benchmarks.ceilings [--seconds 10]`, or `make soak-ceilings`.

Four floods, each in a process of its own, for so many seconds each. What must hold all along and in the end:

- the resident memory has grown by no more than `max_total_bytes` and the overhead stated below;
- the oldest goes first: what is retained is the newest of what was appended, without a gap, over all streams;
- a cursor of which events were evicted is refused as such, and one at the floor is served all that follows.

The floods go to the storage directly, as a writer's appends do: what the SDK itself holds for each session and each
unanswered call is not the storage's to bound.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

from benchmarks.memory import resident_bytes
from mcp_resumable import EventCursor, Generation, MemoryStorage, Retention
from mcp_resumable.cursor import STANDALONE, StreamId
from mcp_resumable.decision import Decision, Reset, Resume, decide
from mcp_resumable.errors import EventEvictedError

__all__ = ["Flood", "ViolationError"]

_CEILING_BYTES = 64 * 2**20
# Of the ceiling, beside it: what the allocator rounds to and does not give back, and what lists and deques grow by.
# Measured on CPython 3.11, Linux: 0 to 8 % in 8 seconds of each flood.
_OVERHEAD = 0.15
_RETENTION = Retention(
    max_events=10**9,
    max_bytes=_CEILING_BYTES,
    max_session_bytes=_CEILING_BYTES,
    max_total_bytes=_CEILING_BYTES,
    max_sessions=2_000,
)
_SESSIONS = 1_000
_SMALL_BYTES, _LARGE_BYTES = 300, 100_000
# Between two looks at the memory; each of them collects garbage.
_LOOK_SECONDS = 0.5

Place = tuple[str, Generation, StreamId]
"""A stream: its session, generation and id."""


class ViolationError(AssertionError):
    """Raised when a ceiling does not hold; the message says which, and by how much."""


class Flood:
    """A storage that is flooded with numbered events."""

    def __init__(self) -> None:
        self.storage = MemoryStorage(retention=_RETENTION)
        self.sessions: list[tuple[str, Generation]] = []
        self.count = 0
        self.worst_growth_bytes = 0
        self._before = resident_bytes()

    async def open_sessions(self, count: int) -> list[Place]:
        """Open sessions and return their standalone streams."""
        for number in range(count):
            session_id = f"session-{number}"
            self.sessions.append((session_id, await self.storage.open_session(session_id)))
        return [(*session, STANDALONE) for session in self.sessions]

    async def append(self, place: Place, size: int) -> None:
        """Append the next event; its number is at its start."""
        await self.storage.append(*place, [(b"%d " % self.count).ljust(size, b"x")])
        self.count += 1

    def look(self) -> None:
        """Check the memory of the process.

        Raises:
            ViolationError: When there is too much of it.
        """
        growth = resident_bytes() - self._before
        self.worst_growth_bytes = max(self.worst_growth_bytes, growth)
        if growth > _CEILING_BYTES * (1 + _OVERHEAD):
            raise ViolationError(f"the process has grown by {growth / _CEILING_BYTES:.2f} times max_total_bytes")

    async def check(self) -> int:
        """Check what is retained, and that only what is retained is served; return the number of events.

        Raises:
            ViolationError: When something is skipped, kept too long, or served that cannot be.
        """
        numbers: list[int] = []
        for session_id, generation in self.sessions:
            description = await self.storage.describe(session_id)
            for stream in description.streams if description is not None else ():
                floor = EventCursor.parse(f"{generation}:{stream.stream}:{stream.replay_floor}")
                assert floor is not None
                if not isinstance(await self._decide(session_id, floor), Resume):
                    raise ViolationError(f"the cursor {floor} at the floor is refused")
                batch = await self.storage.read(
                    session_id, generation, floor.stream, floor.seq, stream.high_water_mark + 1
                )
                if batch is None or len(batch.events) != stream.high_water_mark - floor.seq:
                    raise ViolationError(f"not all after {floor} is served")
                numbers += [int(event.partition(b" ")[0]) for event in batch.events if event is not None]
                if floor.seq:
                    await self.check_refused(session_id, EventCursor(generation=generation, stream=floor.stream, seq=0))
        if sorted(numbers) != list(range(self.count - len(numbers), self.count)):
            raise ViolationError("what is retained is not the newest of what was appended")
        return len(numbers)

    async def check_refused(self, session_id: str, cursor: EventCursor) -> None:
        """Check that a cursor whose events were evicted is refused as that.

        Raises:
            ViolationError: When it is not.
        """
        decision = await self._decide(session_id, cursor)
        if not isinstance(decision, Reset) or not isinstance(decision.error, EventEvictedError):
            raise ViolationError(f"the cursor {cursor}, of evicted events, is answered with {decision}")

    async def _decide(self, session_id: str, cursor: EventCursor) -> Decision:
        snapshot = await self.storage.snapshot(session_id, cursor)
        return decide(str(cursor), cursor, snapshot, replay_completed=True)


async def _one_stream(flood: Flood) -> AsyncIterator[None]:
    (place,) = await flood.open_sessions(1)
    while True:
        await flood.append(place, _SMALL_BYTES)
        yield


async def _many_sessions(flood: Flood) -> AsyncIterator[None]:
    places = await flood.open_sessions(_SESSIONS)
    while True:
        for place in places:
            await flood.append(place, _SMALL_BYTES)
            yield


async def _large_events(flood: Flood) -> AsyncIterator[None]:
    places = await flood.open_sessions(16)
    while True:
        for place in places:
            await flood.append(place, _LARGE_BYTES)
            yield


async def _endless_streams(flood: Flood) -> AsyncIterator[None]:
    ((session_id, generation, _),) = await flood.open_sessions(1)
    while True:
        stream = await flood.storage.open_stream(session_id, generation, str(flood.count))
        await flood.append((session_id, generation, stream), _SMALL_BYTES)
        yield


_FLOODS: dict[str, Callable[[Flood], AsyncIterator[None]]] = {
    "one session, one stream": _one_stream,
    "1,000 sessions": _many_sessions,
    "events of 100 kB": _large_events,
    "streams that never end": _endless_streams,
}


async def _soak(name: str, seconds: float) -> str:
    """Flood for that long; return what was seen."""
    flood = Flood()
    began = looked = time.monotonic()
    async for _ in _FLOODS[name](flood):
        now = time.monotonic()
        if now - looked > _LOOK_SECONDS:
            flood.look()
            looked = time.monotonic()
        if now - began > seconds and flood.storage.evicted_events:
            break
    flood.look()
    # The first event of all: whatever became of its stream.
    session_id, generation = flood.sessions[0]
    first = STANDALONE if name != "streams that never end" else StreamId.of_request(1, "0")
    await flood.check_refused(session_id, EventCursor(generation=generation, stream=first, seq=0))
    retained = await flood.check()
    return (
        f"{flood.count:,} events appended, the newest {retained:,} retained; "
        f"the process grew by at most {flood.worst_growth_bytes / _CEILING_BYTES:.2f} times max_total_bytes"
    )


def main() -> int:
    """Run every flood; the result is 0 where all held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceilings")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each flood")
    parser.add_argument("--flood", choices=_FLOODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        try:
            seen = asyncio.run(_soak(arguments.flood, arguments.seconds))
        except ViolationError as exc:
            sys.stdout.write(f"{arguments.flood}: VIOLATION: {exc}\n")
            return 1
        sys.stdout.write(f"{arguments.flood}: {seen}\n")
        return 0
    ended = [
        subprocess.run(
            [sys.executable, "-m", "benchmarks.ceilings", f"--flood={name}", f"--seconds={arguments.seconds}"],
            check=False,
            timeout=60 + 10 * arguments.seconds,
        )
        for name in _FLOODS
    ]
    return max(process.returncode for process in ended)


if __name__ == "__main__":
    sys.exit(main())
