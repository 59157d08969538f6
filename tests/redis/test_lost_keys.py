"""Keys that the memory policy of the server evicts, or somebody deletes: a reset, or no session; no wrong resume."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from mcp_resumable import Retention
from mcp_resumable.decision import Resume
from mcp_resumable.redis import RedisStorage
from mcp_resumable.storage import AppendRefusedError
from tests.redis.recount import recount
from tests.redis.server import Server, serving
from tests.redis.storages import Log, fresh_prefix, opened

pytestmark = pytest.mark.anyio

TIMEOUT = 60

RETENTION = Retention(max_events=50, max_bytes=20_000, max_session_bytes=40_000, max_total_bytes=80_000, max_sessions=5)

KINDS = ["s:", "e:", "o:", "oldest", "sessions", "completed", "past", "charges", "totals", "w:"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose keys may all be flushed."""
    with serving() as server:
        yield server


class Scene:
    """Sessions with streams of all kinds, and two instances."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.clock = 0.0
        self.logs: list[Log] = []
        self.writer, self.other = (
            RedisStorage(server.url, prefix=prefix, retention=RETENTION, clock_shift=lambda: self.clock)
            for _ in range(2)
        )

    async def fill(self) -> None:
        for number in range(3):
            session_id = f"s{number}"
            for request_id in (None, "open", "complete"):
                log = await Log.open(self.writer, session_id, request_id)
                await log.append(self.writer, *(b"%d" % seq for seq in range(1, 5)))
                self.logs.append(log)
            await log.append(self.writer, b"answer", is_terminal=True)
            await self.writer.own_session(session_id, log.generation, "")
        await self.writer.open_session("over")
        await self.writer.end_session("over")

    def delete(self, pattern: str) -> None:
        with self.server.client() as client:
            keys = client.keys(f"{{{self.prefix}}}:{pattern}")
            assert keys
            client.delete(*keys)

    async def reasons(self) -> set[str]:
        """Present every cursor; `Log` checks that what is resumed is there, complete."""
        return {reason for log in self.logs for reason in await log.reasons(self.other)}

    def problems(self) -> list[str]:
        return recount(self.server, self.prefix).problems

    async def is_whole_again(self) -> None:
        """What is new works, and once what was there is over all is counted right."""
        fresh = await Log.open(self.writer, "s0", "fresh")
        await fresh.append(self.writer, b"1", b"2")
        await fresh.append(self.writer, b"answer", is_terminal=True)
        assert await fresh.reasons(self.other) == ["resume"] * 3 + ["stream_completed", "future_event_id"]
        for number in range(3):
            await self.writer.end_session(f"s{number}")
        self.clock += RETENTION.completed_seconds
        await self.writer.open_session("s")
        await Log.open(self.writer, "s", "1")
        counted = recount(self.server, self.prefix)
        assert counted.problems == []
        assert list(counted.charges) == ["s"]

    async def write(self) -> None:
        """Go on as the store would, a refused writer with the session's next life."""
        for log in list(self.logs):
            try:
                await log.append(self.writer, b"more", b"and more")
            except AppendRefusedError as refusal:
                if refusal.current is None:
                    self.logs.append(await Log.open(self.writer, log.session_id, "new"))
                    await self.logs[-1].append(self.writer, b"1", b"2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_written_first", [True, False])
async def test_a_lost_key_is_never_a_wrong_resume(server: Server, kind: str, is_written_first: bool) -> None:
    async with opened_scene(server) as s:
        await s.fill()
        whole = {"resume", "stream_completed", "future_event_id"}
        assert await s.reasons() == whole
        s.delete(f"{kind}*")
        if not is_written_first:
            expected = {
                "s:": {"session_not_found"},
                # A complete stream without its answer is dropped.
                "e:": {"resume", "event_evicted", "future_event_id"},
            }
            assert await s.reasons() == expected.get(kind, whole)
        await s.write()
        await s.reasons()
        await s.is_whole_again()


@pytest.mark.parametrize("command", ["FLUSHALL", "SCRIPT FLUSH", "SCRIPT FLUSH ASYNC"])
async def test_a_server_that_is_flushed_knows_no_session_and_one_without_scripts_all(
    server: Server, command: str
) -> None:
    async with opened_scene(server) as s:
        await s.fill()
        with server.client() as client:
            client.execute_command(*command.split())
        expected = {"resume", "stream_completed", "future_event_id"}
        assert await s.reasons() == ({"session_not_found"} if command == "FLUSHALL" else expected)
        await s.write()
        # Its numbers begin again; the nonce tells its cursors from the ones before.
        unknown = {"unrecognized_generation"} if command == "FLUSHALL" else set[str]()
        assert await s.reasons() == expected - ({"stream_completed"} if unknown else set()) | unknown
        await s.is_whole_again()


async def test_numbers_that_are_lost_begin_above_those_before(server: Server) -> None:
    """They began at 1 again: what was appended from then on counted as the oldest, and was evicted first."""
    async with opened_scene(server) as s:
        log = await Log.open(s.writer, "s", "old")
        await log.append(s.writer, *[b"x" * 450] * 40)
        s.delete("totals")
        newer = await Log.open(s.writer, "s", "new")
        for _ in range(5):
            await newer.append(s.writer, *[b"x" * 900] * 4)
        assert (await newer.reasons(s.other))[0] == "resume"
        assert (await log.reasons(s.other))[0] == "event_evicted"


async def test_what_all_are_charged_is_counted_anew_when_it_is_lost(server: Server) -> None:
    """The ceiling of all sessions was raised by what they held, for ever."""
    async with opened_scene(server) as s:
        await s.fill()
        s.delete("totals")
        await s.write()
        assert s.problems() == []


@asynccontextmanager
async def opened_scene(server: Server) -> AsyncIterator[Scene]:
    scene = Scene(server, fresh_prefix())
    try:
        with anyio.fail_after(TIMEOUT):
            yield scene
    finally:
        await scene.writer.aclose()
        await scene.other.aclose()


@pytest.mark.parametrize("seed", range(2))
async def test_where_the_memory_policy_evicts_at_random_no_resume_is_wrong(seed: int) -> None:
    choose = random.Random(seed)
    with serving("--maxmemory-policy", "allkeys-random") as server, server.client() as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", used + 1_500_000)
        prefix = fresh_prefix()
        with anyio.fail_after(TIMEOUT):
            async with opened(server.url, prefix=prefix) as writer, opened(server.url, prefix=prefix) as other:
                logs: list[Log] = []
                reasons: Counter[str] = Counter()
                for turn in range(3_000):
                    if not logs or choose.random() < 0.05:
                        session_id = f"s{choose.randrange(10)}"
                        with suppress(AppendRefusedError):
                            logs.append(await Log.open(writer, session_id, str(turn)))
                    log = choose.choice(logs[-30:])
                    try:
                        events = [choose.randbytes(choose.randrange(2_000)) for _ in range(choose.randrange(1, 4))]
                        await log.append(writer, *events, is_terminal=choose.random() < 0.03)
                    except AppendRefusedError:
                        pass
                    log = choose.choice(logs[-60:])
                    decision = await log.decide(other, choose.randrange(len(log.places) + 1))
                    reasons["resume" if isinstance(decision, Resume) else decision.error.reason] += 1
                assert int(client.info("stats")["evicted_keys"]) > 100
                assert reasons["resume"] > 100
                assert reasons["event_evicted"] > 100
                assert "future_event_id" not in reasons
