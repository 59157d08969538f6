"""`MemoryStorage` and `RedisStorage`, asked for the same, answer the same.

The clock of both is the test's, and moves half a second before each operation, so that both know each activity exactly.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from mcp_resumable import EventCursor, Generation, MemoryStorage, Retention
from mcp_resumable.cursor import STANDALONE, StreamId
from mcp_resumable.redis import RedisStorage
from mcp_resumable.redis.scripts import Scripts
from mcp_resumable.storage import AppendRefusedError, Storage
from tests.redis.server import Server
from tests.redis.storages import fresh_prefix, opened

pytestmark = pytest.mark.anyio

TIMEOUT = 60
OPERATIONS = 1_000
SEEDS = int(os.environ.get("DIFFERENTIAL_SEEDS", "2"))

TIGHT = Retention(
    max_events=5,
    max_bytes=500,
    max_session_bytes=8_000,
    max_total_bytes=20_000,
    max_sessions=4,
    completed_seconds=12.25,
    idle_seconds=40.25,
)
WIDE = Retention(max_events=50, completed_seconds=30.25, idle_seconds=200.25)


class StoppedScripts(Scripts):
    """The scripts, on a server whose own clock stands still."""

    def _source(self, name: str) -> tuple[str, str]:
        source, _ = super()._source(name)
        stopped = source.replace("call('TIME')", "{1800000000, 0}")
        assert stopped != source
        return stopped, hashlib.sha1(stopped.encode(), usedforsecurity=False).hexdigest()


@dataclass
class Plan:
    """Chooses operations, from what earlier ones have answered."""

    random: random.Random
    request_ids: tuple[str, ...]
    streams: list[tuple[str, Generation, StreamId]] = field(default_factory=list)
    nonces: int = 0

    def choose(self) -> tuple[str, Callable[[Storage], Awaitable[Any]]]:
        r = self.random
        session_id = f"s{r.randrange(6)}"
        known = r.choice(self.streams[-25:]) if self.streams else (session_id, Generation(1, "0" * 12), STANDALONE)
        known_id, generation, stream = known
        kind = r.choices(range(8), (3, 1, 8, 30, 20, 20, 1, 1))[0]
        if kind == 0:
            self.nonces += 1
            nonce = f"{self.nonces:012}"
            return f"open_session {session_id}", lambda storage: storage.open_session(session_id, nonce=nonce)
        if kind == 1:
            return f"advance {session_id}", lambda storage: storage.advance_generation(session_id)
        if kind == 2:
            request_id = r.choice(self.request_ids)
            origin = r.choice((None, (1, 1), (generation.counter, stream.ordinal)))

            async def open_stream(storage: Storage) -> tuple[Generation, StreamId]:
                return generation, await storage.open_stream(known_id, generation, request_id, origin=origin)

            return f"open_stream {known_id} {generation} {request_id!a}", open_stream
        if kind == 3:
            events = [None if r.random() < 0.1 else b"e" * r.randrange(1, 150) for _ in range(r.randrange(1, 4))]
            is_terminal = stream != STANDALONE and r.random() < 0.2
            return (
                f"append {known} {events} {is_terminal}",
                lambda storage: storage.append(known_id, generation, stream, events, is_terminal=is_terminal),
            )
        if kind == 4:
            cursor = self.cursor(known)
            return f"snapshot {known_id} {cursor}", lambda storage: storage.snapshot(known_id, cursor)
        if kind == 5:
            after, limit = r.randrange(8), r.choice((1, 2, 100))

            async def read(storage: Storage) -> Any:
                batch = await storage.read(known_id, generation, stream, after, limit)
                # What is read here is no activity there.
                snapshot = await storage.snapshot(known_id, None)
                return [batch and (list(batch.events), batch.is_terminal), snapshot]

            return f"read {known} after {after}, {limit}", read
        if kind == 6:
            claimed = r.choice((None, generation))
            return f"end {known_id} {claimed}", lambda storage: storage.end_session(known_id, generation=claimed)
        return f"describe {session_id}", lambda storage: storage.describe(session_id)

    def cursor(self, known: tuple[str, Generation, StreamId]) -> EventCursor | None:
        r = self.random
        _, generation, stream = known
        if r.random() < 0.3:
            generation = r.choice(self.streams)[1] if self.streams else generation
        if r.random() < 0.1:
            generation = Generation(generation.counter + 1, generation.nonce)
        if r.random() < 0.2:
            stream = StreamId(r.randrange(1, 12), stream.request_id)
        if r.random() < 0.1:
            # As if its request id had been too long for an event id.
            stream = StreamId(stream.ordinal, None)
        return r.choice((None, *[EventCursor(generation=generation, stream=stream, seq=r.randrange(8))] * 9))

    def learn(self, session_id: str, answer: Any) -> None:
        """Remember what an operation has opened."""
        if isinstance(answer, Generation):
            self.streams.append((session_id, answer, STANDALONE))
        elif isinstance(answer, tuple):
            self.streams.append((session_id, *answer))


async def outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except AppendRefusedError as exc:
        return f"refused: {exc.current}"


@pytest.mark.parametrize("retention", [TIGHT, WIDE], ids=["tight", "wide"])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_the_same_operations_have_the_same_answers(redis_server: Server, seed: int, retention: Retention) -> None:
    plan = Plan(
        random.Random(seed),
        # In memory a request id is charged by its characters, in Redis by its bytes.
        request_ids=("1", "2", "3") if retention is TIGHT else ("1", "ä", "\ud800", "x" * 300, "a b\n\0"),
    )
    prefix, now = fresh_prefix(), 0.0

    def advanced(number: int) -> Callable[[], str]:
        nonces = iter(range(1_000_000))
        return lambda: f"a{number}{next(nonces):010}"

    with anyio.fail_after(TIMEOUT):
        async with AsyncExitStack() as stack:
            memory = MemoryStorage(retention=retention, nonce=advanced(0), clock=lambda: now)
            nonce = advanced(0)
            shared: list[RedisStorage] = []
            for _ in range(2):
                instance = opened(
                    redis_server.url, prefix=prefix, retention=retention, nonce=nonce, clock_shift=lambda: now
                )
                storage = await stack.enter_async_context(instance)
                storage._calls.scripts = StoppedScripts(f"{{{prefix}}}:", retention)
                shared.append(storage)
            history: list[str] = []
            for _ in range(OPERATIONS):
                now += plan.random.choice((0.5, 0.5, 0.5, 0.5, 1, 2, 8))
                if plan.random.random() < 0.01:
                    now += 30
                storage = plan.random.choice(shared)
                # In memory every operation drops what is too old; on the server, these.
                await storage.describe("nobody")
                operation, work = plan.choose()
                history.append(f"{now} {operation}")
                expected, actual = await outcome(work(memory)), await outcome(work(storage))
                history.append(f"    {expected}")
                assert actual == expected, "\n".join([f"seed {seed}", *history[-60:]])
                plan.learn(operation.split(" ")[1], expected)
            for number in range(6):
                assert await shared[0].describe(f"s{number}") == await memory.describe(f"s{number}")
            assert sum(storage.evicted_events for storage in shared) == memory.evicted_events > 0
