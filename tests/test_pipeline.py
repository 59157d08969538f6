"""Events that are stored later: no frame says more than the storage has, whatever happens to the append."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from mcp_resumable import EventCursor, ResumableEventStore
from mcp_resumable.pipeline import Pipeline, Unstored
from mcp_resumable.session import Exchange, current_exchange
from tests.held_storage import SharedHeldStorage
from tests.sdk_host import Client, Frame, Host, Request, Tool, hosting, store_as_the_router
from tests.test_interleavings import read_steps, steps_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("writes_at_once")]


@asynccontextmanager
async def held(**options: Any) -> AsyncGenerator[tuple[SharedHeldStorage, ResumableEventStore, Host, Client]]:
    storage = SharedHeldStorage()
    store = ResumableEventStore(storage, **options)
    async with hosting(store) as host:
        yield storage, store, host, await host.open()


async def begun(client: Client) -> tuple[Request, Tool, Frame]:
    """Call the tool, and have it emit `a`, which is stored."""
    request = await client.call()
    tool = client.tool()
    await tool.emit("a")
    return request, tool, (await read_steps(request, 1))[0]


async def nothing_arrives(request: Request) -> None:
    await wait_all_tasks_blocked()
    assert request._rest == b""


async def retained(storage: SharedHeldStorage, client: Client, cursor: str | None) -> list[str | None]:
    """Return the steps that follow a cursor in the storage, None for a hole."""
    parsed = EventCursor.parse(cursor or "")
    assert parsed is not None
    batch = await storage.inner.read(client.session_id, parsed.generation, parsed.stream, parsed.seq, 1_000)
    assert batch is not None
    return [None if event is None else Frame(None, event.decode()).step for event in batch.events]


async def beginning_of_newest(store: ResumableEventStore, client: Client) -> str:
    """Return the cursor before the first event of the stream that was opened last."""
    description = await store.describe(client.session_id)
    assert description is not None
    return f"{description.generation}:{description.streams[-1].stream}:0"


# A frame is held until its event is stored.


@pytest.mark.parametrize("when", ["before", "after"])
async def test_frames_are_held_until_their_events_are_stored(when: Any) -> None:
    async with held() as (storage, _, _, client):
        request, tool, _ = await begun(client)
        trap = storage.hold("append", when)
        await tool.emit("b", "c", "d")
        await trap.until_reached()
        await nothing_arrives(request)
        trap.release()
        assert steps_of(await read_steps(request, 3)) == ["b", "c", "d"]


async def test_events_that_come_while_the_storage_is_asked_travel_in_one_append() -> None:
    async with held() as (storage, _, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        await tool.emit("c", "d", "e")
        second, third = storage.hold("append"), storage.hold("append")
        trap.release()
        await second.until_reached()
        assert steps_of(await read_steps(request, 1)) == ["b"]
        await nothing_arrives(request)
        second.release()
        assert steps_of(await read_steps(request, 3)) == ["c", "d", "e"]
        assert not third.reached.is_set()
        third.release()
        assert await retained(storage, client, first.id) == ["b", "c", "d", "e"]


async def test_other_calls_of_the_session_go_on_while_an_event_is_stored() -> None:
    async with held() as (storage, _, _, client):
        request, tool, _ = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        assert (await client.ping())["result"] == {}
        await nothing_arrives(request)
        trap.release()
        assert steps_of(await read_steps(request, 1)) == ["b"]


async def test_answer_comes_after_all_that_was_sent_before_it() -> None:
    async with held() as (storage, _, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        await tool.emit("c")
        tool.finish()
        await nothing_arrives(request)
        trap.release()
        assert steps_of(await request.frames()) == ["b", "c", "answer"]
        assert steps_of(await client.get(first.id).frames()) == ["b", "c", "answer"]


async def test_client_that_goes_while_a_frame_is_held_gets_the_event_when_it_resumes() -> None:
    async with held() as (storage, _, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b", "c")
        await trap.until_reached()
        request.disconnect()
        await request.until_done()
        resumed = client.get(first.id)
        await resumed.until_started()
        trap.release()
        assert steps_of(await read_steps(resumed, 2)) == ["b", "c"]
        tool.finish()
        assert steps_of(await resumed.frames()) == ["answer"]


async def test_session_may_end_while_frames_are_held() -> None:
    async with held() as (storage, store, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b", "c")
        await trap.until_reached()
        await client.request("DELETE").until_done()
        trap.release()
        await request.until_done()
        assert [frame.id for frame in await request.frames()] in ([], [None, None])
        assert await client.get(first.id).reason() == "session_not_found"
        assert await store.describe(client.session_id) is None


# What could not be stored has no event id, and is a hole.


async def test_event_that_is_not_stored_goes_out_without_an_id_and_is_a_hole() -> None:
    async with held() as (storage, _, _, client):
        request, tool, first = await begun(client)
        storage.fail("append")
        await tool.emit("lost")
        assert [(frame.step, frame.id) for frame in await read_steps(request, 1)] == [("lost", None)]
        await tool.emit("b")
        frame = (await read_steps(request, 1))[0]
        assert (frame.step, frame.seq) == ("b", 3)
        assert await retained(storage, client, first.id) == [None, "b"]
        assert await client.get(first.id).reason() == "replay_gap"
        tool.finish()
        assert steps_of(await client.get(frame.id).frames()) == ["answer"]


@pytest.mark.parametrize(
    ("when", "seqs", "stored"), [("before", [3, 4], [None, "b", "c"]), ("after", [4, 5], ["lost", None, "b", "c"])]
)
async def test_events_behind_one_that_is_lost_get_the_ids_that_they_turn_out_to_have(
    when: Any, seqs: list[int], stored: list[str | None]
) -> None:
    """They were promised those after the lost one, which may have been stored all the same and is told as a hole."""
    async with held() as (storage, _, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append", when, then_fail=True)
        await tool.emit("lost")
        await trap.until_reached()
        await tool.emit("b", "c")
        trap.release()
        frames = await read_steps(request, 3)
        assert [(frame.step, frame.id is not None) for frame in frames] == [("lost", False), ("b", True), ("c", True)]
        assert [frame.seq for frame in frames[1:]] == seqs
        assert await retained(storage, client, first.id) == stored
        assert await client.get(first.id).reason() == "replay_gap"


async def test_event_that_has_no_json_text_is_a_hole_behind_what_was_sent_before_it() -> None:
    """Told before, its hole took the place of an event that its receiver then resumed after."""

    class Unspeakable:
        method = "notifications/progress"

        def model_dump_json(self, **_options: object) -> str:
            raise ValueError("no text")

    async with held() as (storage, store, _, client):
        request, tool, first = await begun(client)
        binding = store.find_binding(client.session_id)
        assert binding is not None
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        await tool.emit("c")
        async with anyio.create_task_group() as router:
            router.start_soon(store_as_the_router, store, binding, "1", Unspeakable())
            await wait_all_tasks_blocked()
            trap.release()
        assert steps_of(await read_steps(request, 2)) == ["b", "c"]
        await wait_all_tasks_blocked()
        assert await retained(storage, client, first.id) == ["b", "c", None]
        await tool.emit("d")
        assert (await read_steps(request, 1))[0].seq == 5
        assert await retained(storage, client, first.id) == ["b", "c", None, "d"]


# What moves waits for what was handed over, or drops it.


async def test_advance_waits_for_what_was_sent_before_it() -> None:
    async with held() as (storage, store, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        await tool.emit("c")
        generations: list[str] = []
        async with anyio.create_task_group() as operator:

            async def advance() -> None:
                generations.append(str(await store.advance_generation(client.session_id)))

            operator.start_soon(advance)
            await wait_all_tasks_blocked()
            assert not generations
            trap.release()
        await tool.emit("d")
        tool.finish()
        assert steps_of(await client.get(f"{generations[0]}:1.MQ:0").frames()) == ["d", "answer"]
        assert await client.get(first.id).reason() == "generation_mismatch"
        assert all(frame.id is None or frame.id.startswith("1-") for frame in await request.frames())


async def test_restart_drops_what_the_earlier_execution_has_sent_and_is_not_stored() -> None:
    async with held() as (storage, store, _, client):
        request, tool, first = await begun(client)
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        await tool.emit("c", "d")
        await store.restart_stream(1, client.session_id)
        await tool.emit("again")
        trap.release()
        await request.until_done()
        assert await request.frames() == []
        tool.finish()
        assert await client.get(first.id).reason() == "stream_superseded"
        assert steps_of(await client.get(await beginning_of_newest(store, client)).frames()) == ["again", "answer"]


async def test_event_of_an_earlier_execution_that_is_not_stored_is_no_hole_in_the_next() -> None:
    async with held() as (storage, store, _, client):
        _, tool, _ = await begun(client)
        trap = storage.hold("append", then_fail=True)
        await tool.emit("b")
        await trap.until_reached()
        await store.restart_stream(1, client.session_id)
        trap.release()
        await wait_all_tasks_blocked()
        await tool.emit("again")
        tool.finish()
        assert steps_of(await client.get(await beginning_of_newest(store, client)).frames()) == ["again", "answer"]


async def test_router_waits_when_too_much_is_not_stored() -> None:
    async with held() as (storage, store, _, client):
        await client.call("notifier")
        binding = store.find_binding(client.session_id)
        assert binding is not None
        trap = storage.hold("append")
        count = 0

        async def flood() -> None:
            nonlocal count
            reset = current_exchange.set(Exchange(binding))
            for _ in range(200):
                await store.store_event("_GET_stream", Message())
                count += 1
            current_exchange.reset(reset)

        async with anyio.create_task_group() as router:
            router.start_soon(flood)
            await wait_all_tasks_blocked()
            assert count == 64
            trap.release()
        assert count == 200
        assert binding.standalone.pipeline is not None
        await binding.standalone.pipeline.until_settled()
        description = await store.describe(client.session_id)
        assert description is not None
        assert [stream.retained_events for stream in description.streams if stream.request_id is None] == [200]


async def test_event_ids_that_are_promised_are_mostly_kept() -> None:
    """Else each frame would have to be written anew."""
    async with held() as (storage, store, _, client):
        binding = store.find_binding(client.session_id)
        assert binding is not None
        request = await client.call("notifier")
        storage.fail("append", "after")
        for promised in (1, 2, 4):
            event_id = await store_as_the_router(store, binding, "_GET_stream", Message())
            assert event_id.endswith(f":0:{promised}")
            await wait_all_tasks_blocked()
        description = await store.describe(client.session_id)
        assert description is not None
        assert [each.high_water_mark for each in description.streams if each.request_id is None] == [4]
        request.disconnect()


class Message:
    """A message as the SDK's are: it has a method, and dumps to JSON text."""

    method = "notifications/message"

    def model_dump_json(self, **_options: object) -> str:
        return '{"method":"notifications/message"}'


# A pipeline by itself.


def unstored(promised_id: str, event: bytes | None = b"{}", *, execution: int = 0) -> Unstored:
    return Unstored(event=event, promised_id=promised_id, execution=execution, is_answer=False, started=None)


@pytest.mark.parametrize("separator", [b"\r\n", b"\n", b"\r"])
@pytest.mark.parametrize(
    ("event_id", "line"), [("1-x:0:1", b"id: 1-x:0:1%b"), ("1-x:0:2", b"id: 1-x:0:2%b"), ("", b"")]
)
async def test_a_frame_says_what_its_event_turned_out_to_be(separator: bytes, event_id: str, line: bytes) -> None:
    pipeline = Pipeline()
    pipeline.add(unstored("1-x:0:1"))
    frame = b"id: 1-x:0:1%bevent: message%bdata: {}%b%b" % ((separator,) * 4)
    found = pipeline.claim(frame)
    assert found is not None
    batch = pipeline.take()
    pipeline.settle(batch, [event_id])
    first_line = line % separator if line else b""
    assert found.true_frame(frame) == first_line + b"event: message%bdata: {}%b%b" % ((separator,) * 3)
    assert pipeline.claim(frame) is None


async def test_frames_of_other_events_are_not_held() -> None:
    pipeline = Pipeline()
    pipeline.add(unstored("1-x:0:1"))
    for frame in (b"", b": ping\r\n\r\n", b"data: {}\r\n\r\n", b"id: 1-x:0:11\r\ndata: {}\r\n\r\n", b"id: 1-x:0:1"):
        assert pipeline.claim(frame) is None


async def test_what_is_taken_belongs_to_one_execution() -> None:
    pipeline = Pipeline()
    for number, execution in enumerate([0, 0, 1, 1, 2]):
        pipeline.add(unstored(f"1-x:0:{number}", execution=execution))
    assert [[each.execution for each in pipeline.take()] for _ in range(4)] == [[0, 0], [1, 1], [2], []]


async def test_room_is_bounded_in_bytes_too() -> None:
    pipeline = Pipeline()
    pipeline.add(unstored("1-x:0:1", b"x" * 300_000))
    async with anyio.create_task_group() as router:
        has_room = anyio.Event()

        async def wait() -> None:
            await pipeline.until_room()
            has_room.set()

        router.start_soon(wait)
        await wait_all_tasks_blocked()
        assert not has_room.is_set()
        pipeline.settle(pipeline.take(), ["1-x:0:1"])
    assert has_room.is_set()


async def test_lost_events_whose_frames_nobody_was_sent_do_not_add_up() -> None:
    pipeline = Pipeline()
    for number in range(1_000):
        pipeline.add(unstored(f"1-x:0:{number}"))
        pipeline.settle(pipeline.take(), [""])
    assert pipeline.claim(b"id: 1-x:0:999\r\n") is not None
    assert sum(pipeline.claim(b"id: 1-x:0:%d\r\n" % number) is not None for number in range(1_000)) <= 128


async def test_nothing_is_to_be_awaited_of_a_pipeline_without_events() -> None:
    with anyio.fail_after(10):
        assert await Pipeline().until_settled() == ""
