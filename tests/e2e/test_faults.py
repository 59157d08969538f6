"""A storage that fails costs the events that it was to keep, never the call, and never an honest answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from mcp_resumable import ResumableEventStore, Retention

from .raw_client import RawClient, Response, session
from .servers import RunningServer, Way, serve
from .storages import ScriptedStorage

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Scene:
    server: RunningServer
    client: RawClient
    storage: ScriptedStorage


@asynccontextmanager
async def opened(
    way: Way = "fastmcp", retention: Retention | None = None, down: frozenset[str] = frozenset()
) -> AsyncIterator[Scene]:
    """Serve over a storage of which `down` fails while the session is opened."""
    storage = ScriptedStorage(retention=retention)
    storage.down = down
    with anyio.fail_after(15):
        async with serve(way, ResumableEventStore(storage)) as server, session(server) as client:
            storage.down = frozenset()
            yield Scene(server, client, storage)


async def reason_of(response: Response) -> tuple[int, str]:
    return response.status, (await response.json())["error"]["data"]["reason"]


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
async def test_an_append_that_fails_is_delivered_live_and_leaves_a_hole(way: Way, failing: int) -> None:
    """One failing write in the SDK's router hangs every call of the session for ever."""
    async with opened(way) as s:
        s.storage.fail_append(failing)
        frames = await (await s.client.call("count", 7, n=3)).rest()
        assert [frame.progress for frame in frames[1:4]] == [1, 2, 3]
        assert frames[4].answer_text == "counted 3 "
        # The event that was not stored has no id; the others have theirs.
        assert [bool(frame.id) for frame in frames] == [seq != failing for seq in range(5)]
        # Later calls of the session work.
        later = await (await s.client.call("count", 8, n=2)).rest()
        assert [frame.progress for frame in later[1:3]] == [1, 2]
        across = "stream_completed" if failing == 4 else "replay_gap"
        for seq in range(failing):
            assert await reason_of(await s.client.get(frames[seq].id)) == (409, across)
        for seq in range(failing + 1, 4):  # What begins after the hole resumes.
            replay = await (await s.client.get(frames[seq].id)).rest()
            assert [frame.id for frame in replay] == [frame.id for frame in frames[seq:]]
        assert s.server.store.stats().faults == 1


async def test_a_hole_at_the_end_of_an_open_stream_is_known_before_the_next_event(way: Way) -> None:
    async with opened(way) as s:
        call = await s.client.call("hold", 7, n=1, tag="7")
        cursor = (await call.events(2))[1].id
        s.storage.fail_append(1)
        hold = await s.server.hold("7")
        await hold.progress(2)
        assert (await call.event()).progress == 2
        assert await reason_of(await s.client.get(cursor)) == (409, "replay_gap")
        await hold.finish()
        assert (await call.rest())[-1].answer_text == "done"


async def test_what_was_lost_in_a_long_outage_is_told_in_a_small_append() -> None:
    """One append of a hole for each of millions of events blocked the server for longer than an operation may take."""
    async with opened() as s:
        call = await s.client.call("hold", 7, n=1, tag="7")
        cursor = (await call.events(2))[1].id
        s.storage.down = frozenset({"append"})
        hold = await s.server.hold("7")
        await hold.progress(*range(2, 302))
        await call.events(300)
        s.storage.down = frozenset()
        assert await reason_of(await s.client.get(cursor)) == (409, "replay_gap")
        await hold.progress(302)
        last = await call.event()
        assert last.id is not None
        assert int(last.id.rpartition(":")[2]) <= 102
        assert (await s.client.get(last.id)).status == 200
        await hold.finish()


async def test_a_tail_is_closed_at_a_lost_event_and_not_carried_over_it(way: Way) -> None:
    async with opened(way) as s:
        call = await s.client.call("hold", 7, n=1, tag="7")
        cursor = (await call.events(2))[1].id
        call.reset()
        tail = await s.client.get(cursor)
        await tail.event()
        s.storage.fail_append(1)
        hold = await s.server.hold("7")
        await hold.progress(2)
        assert await tail.rest() == []
        await hold.progress(3)
        assert await reason_of(await s.client.get(cursor)) == (409, "replay_gap")


@pytest.mark.parametrize("down", ["claim", "open_stream"])
async def test_a_session_opened_while_the_storage_is_down_works(way: Way, down: str) -> None:
    async with opened(way, down=frozenset({down})) as s:
        call = await s.client.call("count", 7, n=3)
        frames = await call.rest()
        assert [frame.progress for frame in frames[1:4]] == [1, 2, 3]
        replay = await (await s.client.get(frames[1].id)).rest()
        assert [frame.id for frame in replay] == [frame.id for frame in frames[1:]]


@pytest.mark.parametrize("down", ["open_stream", "append", "claim"])
async def test_a_call_made_while_the_storage_is_down_is_served_live(way: Way, down: str) -> None:
    async with opened(way, down=frozenset({"claim"}) if down == "claim" else frozenset()) as s:
        s.storage.down = frozenset({down})
        frames = await (await s.client.call("count", 7, n=3)).rest()
        messages = [frame for frame in frames if frame.is_message]
        assert [frame.progress for frame in messages[:3]] == [1, 2, 3]
        assert messages[3].answer_text == "counted 3 "
        s.storage.down = frozenset()
        later = await (await s.client.call("count", 8, n=2)).rest()
        assert all(frame.id for frame in later)
        replay = await (await s.client.get(later[0].id)).rest()
        assert [frame.id for frame in replay] == [frame.id for frame in later]
        for frame in frames:
            if frame.id:  # A resume of what was lost never passes for a complete one.
                response = await s.client.get(frame.id)
                assert response.status in (400, 409)


@pytest.mark.parametrize("what", ["request", "standalone"])
async def test_a_storage_that_cannot_answer_is_503_with_retry_after(way: Way, what: str) -> None:
    async with opened(way) as s:
        if what == "request":
            call = await s.client.call("hold", 7, n=1, tag="7")
        else:
            call = await s.client.get()
        cursor = (await call.event()).id
        s.storage.down = frozenset({"snapshot"})
        response = await s.client.get(cursor)
        assert response.headers["retry-after"] == "1"
        assert await reason_of(response) == (503, "storage_unavailable")
        s.storage.down = frozenset()
        assert (await s.client.get(cursor)).status == 200  # The same cursor, later.


async def test_a_plain_get_while_the_storage_is_down_is_503(way: Way) -> None:
    async with opened(way) as s:
        s.storage.down = frozenset({"snapshot"})
        response = await s.client.get()
        assert response.headers["retry-after"] == "1"
        assert await reason_of(response) == (503, "storage_unavailable")


async def test_a_tail_whose_storage_fails_is_closed_cleanly_and_resumes(way: Way) -> None:
    async with opened(way) as s:
        call = await s.client.call("hold", 7, n=3, tag="7")
        frames = await call.events(4)
        broken = await s.client.get(frames[1].id)
        await broken.events(3)
        s.storage.down = frozenset({"read"})
        await (await s.server.hold("7")).progress(4)
        assert await broken.rest() == []
        s.storage.down = frozenset()
        again = await s.client.get(frames[1].id)
        assert [frame.id for frame in await again.events(3)] == [frame.id for frame in frames[1:]]
        assert (await again.event()).progress == 4


async def test_an_oversized_event_is_delivered_live_and_is_a_hole(way: Way) -> None:
    async with opened(way, Retention(max_bytes=2_000)) as s:
        frames = await (await s.client.call("large", 7, n=5_000)).rest()
        assert frames[1].progress == 1
        assert frames[2].message["params"]["data"] == "x" * 5_000
        assert frames[3].progress == 2
        assert frames[4].answer_text == "sent"
        for frame in frames[:2]:
            assert await reason_of(await s.client.get(frame.id)) == (409, "replay_gap")
        # It takes a seq: a client that has received it resumes after it.
        replay = await (await s.client.get(frames[2].id)).rest()
        assert [frame.id for frame in replay] == [frame.id for frame in frames[2:]]
        assert s.server.store.stats().oversized == 1
        assert s.server.store.stats().faults == 0


async def test_a_row_of_faults_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as s:
        s.storage.down = frozenset({"append"})
        with caplog.at_level(logging.ERROR, logger="mcp_resumable"):
            await (await s.client.call("count", 7, n=20)).rest()
        assert len([record for record in caplog.records if record.name == "mcp_resumable"]) == 1
        assert s.server.store.stats().faults >= 21
