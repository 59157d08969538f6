"""Frames on their way to the server: in order, none before its event is stored, and what waits is never left behind."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked
from anyio.abc import TaskGroup
from pydantic import BaseModel

from mcp_resumable import MemoryStorage, ResumableEventStore, Storage
from mcp_resumable.outbox import Outbox
from mcp_resumable.pipeline import Pipeline, Unstored
from mcp_resumable.session import Connection
from mcp_resumable.wire import Message, Wire
from tests.held_storage import SharedHeldStorage
from tests.sdk_host import hosting
from tests.test_pipeline import unstored as unstored_event

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Server:
    """What an outbox writes to."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reads = anyio.Event()
        self.reads.set()
        self.error: Exception | None = None

    async def write(self, message: Message) -> None:
        if self.error is not None:
            raise self.error
        await self.reads.wait()
        self.written.append(message["body"])


def body(text: bytes) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": True}


def frame_of(unstored: Unstored) -> Message:
    return body(b"id: %b\r\n" % unstored.promised_id.encode())


def taken(pipeline: Pipeline, count: int) -> list[Unstored]:
    """Hand events over, and take them as the one does who stores them."""
    for number in range(1, count + 1):
        pipeline.add(unstored_event(f"1-x:0:{number}"))
    return pipeline.take()


@pytest.fixture
def gaps_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_resumable.outbox._GAP_SECONDS", 1_000.0)


@asynccontextmanager
async def outbox_to(
    server: Server, pipeline: Pipeline | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[tuple[Outbox, Connection, TaskGroup]]:
    connection = Connection()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            yield Outbox(server.write, connection, tasks, pipeline, clock=clock), connection, tasks
            tasks.cancel_scope.cancel()


async def put(outbox: Outbox, *frames: bytes) -> None:
    for frame in frames:
        await outbox.put(body(frame))


# What waits, and what does not.


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_frame_that_comes_soon_after_a_write_waits_for_the_next() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, _):
        await put(outbox, b"cursor", b"a")
        assert server.written == [b"cursor", b"a"]
        await put(outbox, b"b", b"c")
        await wait_all_tasks_blocked()
        assert server.written == [b"cursor", b"a"]
        await outbox.empty()
        assert server.written == [b"cursor", b"a", b"bc"]


async def test_what_waits_is_written_when_the_gap_is_over() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, _):
        for number in range(3):
            written = len(server.written)
            await put(outbox, *(b"%d%c " % (number, letter) for letter in b"abcd"))
            while not server.written[written:] or not server.written[-1].endswith(b"d "):
                await anyio.lowlevel.checkpoint()
        assert b"".join(server.written) == b"0a 0b 0c 0d 1a 1b 1c 1d 2a 2b 2c 2d "
        assert len(server.written) < 12


async def test_frames_that_come_one_by_one_are_written_at_once() -> None:
    now = 100.0
    server = Server()
    async with outbox_to(server, clock=lambda: now) as (outbox, _, _):
        for number in range(5):
            await put(outbox, b"%d" % number)
            assert server.written[-1] == b"%d" % number
            now += 0.031
        assert outbox._lock is None  # Nor was there need for a task.


@pytest.mark.parametrize(("late", "gap"), [(0.0, 0.03), (0.002, 0.062), (60.0, 0.1)])
async def test_gap_is_longer_where_the_loop_is_late_and_bounded(
    late: float, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busier a server is, the more events of a call are to share a write."""
    now, gaps = 100.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        gaps.append(seconds)
        await anyio.lowlevel.checkpoint()
        now += seconds + late + 1e-9

    monkeypatch.setattr("mcp_resumable.outbox.anyio.sleep", sleep)
    server = Server()
    async with outbox_to(server, clock=lambda: now) as (outbox, _, _):
        await put(outbox, b"cursor", b"a", b"b")
        await wait_all_tasks_blocked()
        assert gaps[:2] == pytest.approx([0.03, gap], abs=1e-6)
        now += 1.0
        await put(outbox, b"c")
        now += gap + 0.001
        await put(outbox, b"d")
        assert server.written[3:] == [b"c", b"d"]
        now += gap - 0.001
        await put(outbox, b"waits")
        assert server.written[5:] == []


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_nothing_waits_once_the_client_is_asked_something() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, connection, _):
        await put(outbox, b"a", b"b", b"c")
        connection.is_interactive = True
        await put(outbox, b"question")
        assert server.written == [b"a", b"b", b"cquestion"]
        await put(outbox, b"another")
        assert server.written[3:] == [b"another"]


@pytest.mark.usefixtures("gaps_do_not_end")
@pytest.mark.parametrize(("frame", "limit"), [(b"x", 64), (b"x" * 10_000, 7)])
async def test_what_waits_is_bounded(frame: bytes, limit: int) -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, _):
        await put(outbox, b"a", b"b", *[frame] * (limit - 1))
        assert server.written == [b"a", b"b"]
        await put(outbox, frame)
        assert server.written == [b"a", b"b", frame * limit]


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_what_was_written_takes_no_room() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, _):
        await put(outbox, b"a", b"b")
        for _ in range(10):
            await put(outbox, b"x" * 10_000)
            await outbox.empty()
        await put(outbox, b"waits")
        assert server.written == [b"a", b"b", *[b"x" * 10_000] * 10]


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_whoever_fills_it_waits_for_room_and_not_for_all_to_be_stored() -> None:
    server, pipeline = Server(), Pipeline()
    unstored = taken(pipeline, 64)
    pipeline.settle(unstored[:1], ["1-x:0:1"])
    async with outbox_to(server, pipeline) as (outbox, _, _):
        await put(outbox, b"a", b"b")
        for each in unstored:
            await outbox.put(frame_of(each))
        assert server.written == [b"a", b"b", b"id: 1-x:0:1\r\n"]


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_whoever_puts_in_more_waits_for_a_client_that_does_not_read() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, tasks):
        await put(outbox, b"a", b"b")
        server.reads = anyio.Event()
        count = 0

        async def flood() -> None:
            nonlocal count
            for _ in range(1_000):
                await put(outbox, b"x")
                count += 1

        tasks.start_soon(flood)
        await wait_all_tasks_blocked()
        assert count == 63
        server.reads.set()
        await wait_all_tasks_blocked()
        assert count == 1_000
        await outbox.empty()
        assert b"".join(server.written) == b"ab" + b"x" * 1_000


# Order.


async def test_frames_keep_their_order_while_a_write_is_under_way() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, tasks):
        await put(outbox, b"a", b"b")
        server.reads = anyio.Event()
        await put(outbox, b"c")
        while outbox._frames:  # Until the outbox has taken it out, to write it.
            await anyio.lowlevel.checkpoint()
        await put(outbox, b"d")
        tasks.start_soon(outbox.empty)
        await wait_all_tasks_blocked()
        assert server.written == [b"a", b"b"]
        server.reads.set()
        await wait_all_tasks_blocked()
        assert server.written == [b"a", b"b", b"c", b"d"]


@pytest.mark.usefixtures("writes_at_once")
async def test_no_frame_is_written_before_its_event_is_stored_nor_before_those_that_came_first() -> None:
    server, pipeline = Server(), Pipeline()
    unstored = taken(pipeline, 3)
    async with outbox_to(server, pipeline) as (outbox, _, _):
        await put(outbox, b"cursor")
        await outbox.put(frame_of(unstored[0]))
        await outbox.put(frame_of(unstored[1]))
        await put(outbox, b": ping\r\n\r\n")
        await wait_all_tasks_blocked()
        assert server.written == [b"cursor"]
        pipeline.settle(unstored[1:2], ["1-x:0:2"])
        await wait_all_tasks_blocked()
        assert server.written == [b"cursor"]
        pipeline.settle(unstored[:1], ["1-x:0:7"])
        await wait_all_tasks_blocked()
        assert server.written[1:] == [b"id: 1-x:0:7\r\nid: 1-x:0:2\r\n: ping\r\n\r\n"]
        # One that is stored before its frame comes.
        pipeline.settle(unstored[2:], ["1-x:0:3"])
        await outbox.put(frame_of(unstored[2]))
        assert server.written[2:] == [b"id: 1-x:0:3\r\n"]


@pytest.mark.usefixtures("writes_at_once")
async def test_what_is_stored_does_not_wait_for_what_came_later() -> None:
    server, pipeline = Server(), Pipeline()
    unstored = taken(pipeline, 2)
    async with outbox_to(server, pipeline) as (outbox, _, _):
        for each in unstored:
            await outbox.put(frame_of(each))
        await wait_all_tasks_blocked()
        pipeline.settle(unstored[:1], ["1-x:0:1"])
        await wait_all_tasks_blocked()
        assert server.written == [b"id: 1-x:0:1\r\n"]


# What goes wrong.


async def test_what_a_write_has_raised_is_raised_by_the_next_and_nothing_follows_it() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, _, _):
        await put(outbox, b"a", b"b", b"lost", b"lost too")
        server.error = OSError("the client has gone")
        while outbox._failure is None:
            await anyio.lowlevel.checkpoint()
        server.error = None
        with pytest.raises(OSError, match="gone"):
            await put(outbox, b"c")
        with pytest.raises(OSError, match="gone"):
            await outbox.empty()
        assert server.written == [b"a", b"b"]


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_nothing_follows_a_write_that_was_cancelled() -> None:
    """It may be missing on the wire: what came after it would pass over it in silence."""
    server = Server()
    async with outbox_to(server) as (outbox, _, _):
        await put(outbox, b"a", b"b", *[b"x"] * 63)
        server.reads = anyio.Event()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as sdk:
                sdk.start_soon(put, outbox, b"last")
                await wait_all_tasks_blocked()
                await put(outbox, b"later")
                scope.cancel()
        server.reads.set()
        await outbox.empty()
        assert server.written == [b"a", b"b"]


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_what_waits_when_the_connection_is_closed_is_dropped() -> None:
    server = Server()
    async with outbox_to(server) as (outbox, connection, _):
        await put(outbox, b"a", b"b", b"c")
        connection.close()
        await outbox.empty()
        assert server.written == [b"a", b"b"]


# The response around it.


class Client:
    """The server's side of a response: everything is sent at once."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.has_gone = anyio.Event()

    async def receive(self) -> Message:
        await self.has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [(message["body"], message["more_body"]) for message in self.sent[1:]]


@asynccontextmanager
async def response_to(client: Client, pipeline: Pipeline | None = None) -> AsyncGenerator[Wire]:
    wire = Wire(client.receive, client.send, 10.0, lambda: pytest.fail("given up"))
    async with anyio.create_task_group() as tasks:
        wire.outbox = Outbox(wire.write, wire.connection, tasks, pipeline)
        await wire.send(START)
        yield wire
        wire.outbox.close()


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_the_end_of_a_response_takes_along_what_waits() -> None:
    client = Client()
    async with response_to(client) as wire:
        for text in (b"a", b"b", b"c", b"answer"):
            await wire.send(body(text))
        await wire.send(END)
    await wire.finish()
    assert client.bodies == [(b"a", True), (b"b", True), (b"canswer", True), (b"", False)]


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_what_waits_is_written_also_where_the_sdk_does_not_end_the_response() -> None:
    client = Client()
    async with response_to(client) as wire:
        for text in (b"a", b"b", b"c"):
            await wire.send(body(text))
        await wire.flush()
    await wire.finish()
    assert client.bodies == [(b"a", True), (b"b", True), (b"c", True), (b"", False)]


async def test_a_storage_that_does_not_answer_does_not_keep_a_server_from_shutting_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mcp_resumable.wire._FLUSH_SECONDS", 0.01)
    client, pipeline = Client(), Pipeline()
    taken(pipeline, 1)
    async with response_to(client, pipeline) as wire:
        for text in (b"a", b"id: 1-x:0:1\r\n", b"b"):
            await wire.send(body(text))
        with anyio.fail_after(5):
            await wire.flush()
    await wire.finish()
    assert client.bodies == [(b"a", True), (b"", False)]


async def test_nothing_is_flushed_to_a_client_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_resumable.wire._FLUSH_SECONDS", 1_000.0)
    client, pipeline = Client(), Pipeline()
    client.has_gone.set()
    taken(pipeline, 1)
    async with response_to(client, pipeline) as wire:
        await wire.send(body(b"id: 1-x:0:1\r\n"))
        assert await wire.receive() == {"type": "http.disconnect"}
        with anyio.fail_after(5):
            await wire.flush()


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_response_that_is_closed_ends_without_what_waits() -> None:
    client = Client()
    async with response_to(client) as wire:
        for text in (b"a", b"b", b"c"):
            await wire.send(body(text))
        wire.connection.close()
        await wire.flush()
    await wire.finish()
    assert client.bodies == [(b"a", True), (b"b", True), (b"", False)]


@pytest.mark.usefixtures("gaps_do_not_end")
@pytest.mark.parametrize(
    ("lots", "last"),
    [([], b"cursor"), ([b": ping\r\n\r\n"], b"cursor"), ([b": ping\r\n\r\n", b"data: {}\r\n\r\n"], b"")],
)
async def test_keep_alives_are_no_frames(lots: list[bytes], last: bytes) -> None:
    client = Client()
    async with response_to(client) as wire:
        wire.last_resort = lambda: b"cursor"
        await wire.write(body(b"".join(lots)))
        await wire.send(END)
    assert client.bodies[-1] == (last, False)


# With the SDK.


class Confirmation(BaseModel):
    """What the client is asked."""

    sure: bool


@pytest.mark.usefixtures("gaps_do_not_end")
@pytest.mark.parametrize("storage", [MemoryStorage, SharedHeldStorage])
async def test_what_a_tool_asks_its_client_waits_for_nothing(storage: Callable[[], Storage]) -> None:
    async with hosting(ResumableEventStore(storage())) as host:
        client = await host.open()
        request = await client.call()
        tool = client.tool()
        await tool.emit("a", "b")
        answers: list[str] = []

        async def ask() -> None:
            answers.append((await tool.context.elicit("Sure?", Confirmation)).action)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tool.do, ask)
            frames = [await request.frame() for _ in range(4)]  # The cursor first.
            assert [frame.step if frame else None for frame in frames[1:3]] == ["a", "b"]
            assert frames[3] is not None
            question = frames[3].message
            assert question["method"] == "elicitation/create"
            reply = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}}
            await client.request("POST", body=reply).until_done()
        assert answers == ["decline"]
        await tool.emit("c", "d")
        last = [await request.frame() for _ in range(2)]
        assert [frame.step if frame else None for frame in last] == ["c", "d"]
        tool.finish()


@pytest.mark.usefixtures("gaps_do_not_end")
async def test_an_answer_takes_along_what_waits() -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        request = await client.call()
        tool = client.tool()
        await tool.emit("a", "b", "c")
        tool.finish()
        assert [frame.step for frame in (await request.frames())[1:]] == ["a", "b", "c", "answer"]
