"""The newest reader of a stream is the one that is served; the others are closed, not cut, and miss nothing by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from mcp_resumable import MemoryStorage, ResumableEventStore, Retention
from tests.in_loop import until

from .raw_client import RawClient, session
from .servers import RunningServer, Way, serve

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(
    way: Way = "fastmcp", store: ResumableEventStore | None = None, **options: Any
) -> AsyncIterator[tuple[RunningServer, RawClient]]:
    with anyio.fail_after(20):
        async with serve(way, store or ResumableEventStore(), **options) as server, session(server) as client:
            yield server, client


async def test_a_resume_takes_over_from_a_post_that_is_half_open(way: Way) -> None:
    """The SDK replays, closes at once, and goes on sending to the dead socket."""
    async with opened(way) as (server, client):
        old = await client.call("hold", 7, n=3, tag="7")
        frames = await old.events(4)  # The cursor before the first event, and three; to the server it looks alive.
        new = await client.get(frames[1].id)
        assert [frame.id for frame in await new.events(3)] == [frame.id for frame in frames[1:]]
        hold = await server.hold("7")
        await hold.progress(4, 5)
        await hold.finish("held")
        live = await new.rest()
        assert [frame.progress for frame in live[:-1]] == [4, 5]
        assert live[-1].answer_text == "held"
        # A clean end.
        assert await old.rest() == []


async def test_the_newest_of_two_resumes_lives(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("hold", 7, n=2, tag="7")
        cursor = (await call.events(3))[0].id
        older = await client.get(cursor)
        await older.events(3)
        newer = await client.get(cursor)
        await newer.events(3)
        assert await older.rest() == []
        hold = await server.hold("7")
        await hold.progress(3)
        await hold.finish()
        frames = await newer.rest()
        assert frames[0].progress == 3
        assert frames[1].answer_text == "done"


async def test_a_crowd_of_resumes_at_once_leaves_one_that_gets_everything(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("hold", 7, n=5, tag="7")
        cursor = (await call.events(6))[0].id
        received: list[list[int]] = []
        answered: list[str] = []

        only_one_left = anyio.Event()

        async def resume() -> None:
            frames = await (await client.get(cursor)).rest()
            if len(received) == 18:
                only_one_left.set()
            received.append([frame.progress for frame in frames if frame.is_message and not frame.is_answer])
            answered.extend(frame.answer_text for frame in frames if frame.is_answer)

        async with anyio.create_task_group() as crowd:
            for _ in range(20):
                crowd.start_soon(resume)
            await only_one_left.wait()  # All others are closed by one that came later.
            hold = await server.hold("7")
            await hold.progress(6)
            await hold.finish("once")
        assert answered == ["once"]
        assert [1, 2, 3, 4, 5, 6] in received
        # Whoever was closed early has a beginning without a hole.
        assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in received)


async def test_a_half_closed_client_may_resume(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("hold", 7, n=2, tag="7")
        cursor = (await call.events(3))[2].id
        call.half_close()
        resuming = await client.get(cursor)
        hold = await server.hold("7")
        await hold.progress(3)
        await hold.finish()
        frames = await resuming.rest()
        assert [frame.progress for frame in frames[1:-1]] == [3]


async def test_a_plain_get_begins_with_a_cursor_that_resumes(way: Way) -> None:
    """The SDK never primes the standalone stream: a client that lost it before its first event could not come back."""
    async with opened(way, retry_interval=25) as (server, client):
        first = await client.get()
        primed = await first.event()
        assert (primed.data, primed.retry) == ("", "25")
        assert str(primed.id).endswith(":0:0")
        first.reset()
        await client.call("hold", 7, n=0, tag="7")
        speaker = await server.hold("7")
        await speaker.announce("one", "two")
        resumed = await client.get(primed.id)
        frames = await resumed.events(3)
        assert [frame.message["params"]["data"] for frame in frames[1:]] == ["one", "two"]


async def test_a_second_plain_get_replaces_the_first_and_nothing_is_skipped_or_repeated(way: Way) -> None:
    """The SDK answers the second with 409 while the first, perhaps dead, is held."""
    async with opened(way) as (server, client):
        await client.call("hold", 7, n=0, tag="7")
        speaker = await server.hold("7")
        await speaker.announce("before any reader")
        heard: list[str] = []
        for turn in range(6):
            reader = await client.get()
            assert reader.status == 200
            await reader.event()
            if turn == 0:
                heard.append((await reader.event()).message["params"]["data"])
            await speaker.announce(f"{turn} a", f"{turn} b")
            heard += [frame.message["params"]["data"] for frame in await reader.events(2)]
            successor = await client.get()
            await successor.event()
            assert await reader.rest() == []
            successor.reset()
        told = [f"{turn} {letter}" for turn in range(6) for letter in "ab"]
        assert heard == ["before any reader", *told]


async def test_what_no_reader_was_sent_waits_for_the_next(way: Way) -> None:
    async with opened(way) as (server, client):
        await client.call("hold", 7, n=0, tag="7")
        speaker = await server.hold("7")
        reader = await client.get()
        await reader.event()
        await speaker.announce("heard")
        await reader.event()
        reader.reset()
        # The server is to see the reset before the next event: a socket takes one write after it.
        await until(lambda: server.store.stats().open_tails == 0)
        await speaker.announce("away 1", "away 2")
        back = await client.get()
        frames = await back.events(3)
        assert [frame.message["params"]["data"] for frame in frames[1:]] == ["away 1", "away 2"]


@pytest.mark.parametrize("kind", ["post", "resumed"])
async def test_a_frozen_reader_is_disconnected_and_its_session_answers_meanwhile(way: Way, kind: str) -> None:
    """A client that stops reading blocks its whole session, ping too, after 2 to 5 MB."""
    size, number = 60_000, 150
    storage = MemoryStorage(retention=Retention(max_bytes=2 * size * number, max_session_bytes=2 * size * number))
    async with opened(way, ResumableEventStore(storage, send_timeout=0.3)) as (server, client):
        frozen = await client.call("hold", 7, n=1, tag="7")
        cursor = (await frozen.events(2))[1].id
        if kind == "resumed":
            frozen.reset()
            frozen = await client.get(cursor, receive_buffer=4096)
            await frozen.event()
        hold = await server.hold("7")

        async def flood() -> None:
            for i in range(number):
                await hold.do(lambda call, i=i: call.log(f"{i} " + "x" * size))  # type: ignore[misc]

        async with anyio.create_task_group() as flooding:
            flooding.start_soon(flood)
            for i in range(5):
                assert (await client.ping(f"ping {i}")).is_answer
        # It can come back for what it did not read.
        resumed = await client.get(cursor)
        frames = await resumed.events(number + 1)
        texts = [frame.message["params"]["data"].split(" ")[0] for frame in frames[1:]]
        assert texts == [str(i) for i in range(number)]
        await hold.finish()
        assert (await resumed.rest())[-1].answer_text == "done"


async def test_a_tail_ends_cleanly_after_its_longest_life_and_resumes(way: Way) -> None:
    async with opened(way, ResumableEventStore(max_tail_seconds=0.1)) as (server, client):
        call = await client.call("hold", 7, n=1, tag="7")
        cursor = (await call.events(2))[1].id
        assert [frame.id for frame in await (await client.get(cursor)).rest()] == [cursor]
        hold = await server.hold("7")
        await hold.finish()
        frames = await (await client.get(cursor)).rest()
        assert frames[-1].answer_text == "done"


async def test_every_connection_tells_its_client_when_to_come_back(way: Way) -> None:
    async with opened(way, retry_interval=700) as (_, client):
        call = await client.call("hold", 7, n=1, tag="7")
        first = await call.event()
        resumed = await (await client.get(first.id)).event()
        plain = await (await client.get()).event()
        assert [frame.retry for frame in (first, resumed, plain)] == ["700", "700", "700"]


async def test_polling_adds_nothing_to_the_store(way: Way) -> None:
    async with opened(way) as (server, client):
        call = await client.call("hold", 7, n=1, tag="7")
        cursor = (await call.events(2))[1].id
        before = server.store.stats().appends
        for _ in range(10):
            polling = await client.get(cursor)
            await polling.event()
            polling.reset()
        assert server.store.stats().appends == before


async def test_a_tool_that_closes_its_connection_is_resumed(way: Way) -> None:
    async with opened(way, retry_interval=10) as (_, client):
        call = await client.call("poll", 7, n=3)
        frames = await call.rest()
        assert frames[0].retry == "10"
        received = [frame.progress for frame in frames[1:]]
        rest = await (await client.get(frames[-1].id)).rest()
        received += [frame.progress for frame in rest[1:-1]]
        assert received == [1, 2, 3, 4, 5, 6]
        assert rest[-1].answer_text == "polled"
