from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from mcp_resumable.wire import Message, Wire

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
FRAME: Message = {"type": "http.response.body", "body": b"data: 1\r\n\r\n", "more_body": True}


class Client:
    """A client that is there, and reads as long as `reads` is set."""

    def __init__(self) -> None:
        self.reads = anyio.Event()
        self.reads.set()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)


def wire_to(client: Client, on_stall: Callable[[], None]) -> Wire:
    return Wire(client.receive, client.send, 0.05, on_stall)


async def test_a_client_that_stops_reading_is_reported_gone_to_whoever_waits_for_it() -> None:
    client, stalls = Client(), list[str]()
    wire = wire_to(client, lambda: stalls.append("stall"))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def wait_as_the_sdk_does() -> None:
                assert await wire.receive() == {"type": "http.disconnect"}
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait_as_the_sdk_does)
            await anyio.wait_all_tasks_blocked()
            await wire.send(START)
            await wire.send(FRAME)
            assert not stalls
            client.reads = anyio.Event()
            await wire.send(FRAME)
            pytest.fail("a send that nobody reads came to its end")
    assert stalls == ["stall"]
    assert wire.connection.is_closed
    assert client.sent == [START, FRAME]


async def test_a_client_that_reads_is_not_given_up_at_the_looks_in_between() -> None:
    client = Client()
    wire = wire_to(client, lambda: pytest.fail("given up"))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.receive)
            await anyio.wait_all_tasks_blocked()
            first = wire._watch
            assert first is not None
            # Until it was looked at twice; each look begins another wait.
            looks = 0
            while looks < 2:
                before = wire._watch
                await wire.send(FRAME)
                await anyio.lowlevel.checkpoint()
                looks += wire._watch is not before
            tasks.cancel_scope.cancel()


async def test_a_client_that_stops_reading_is_given_up_when_nobody_waits_for_it() -> None:
    client, stalls = Client(), list[str]()
    wire = wire_to(client, lambda: stalls.append("stall"))
    client.reads = anyio.Event()
    with anyio.fail_after(10):
        await wire.send(START)
    assert stalls == ["stall"]
    assert wire.connection.is_closed


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_a_middleware_may_bound_its_own_sends(is_waited_for: bool) -> None:
    """A timer begun after the first step of such a send closed its scope out of turn, which ends the request."""
    client = Client()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        with anyio.fail_after(10):
            await anyio.lowlevel.checkpoint()
        sent.append(message)

    wire = Wire(client.receive, send, 10.0, lambda: pytest.fail("given up"))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            if is_waited_for:
                tasks.start_soon(wire.receive)
                await anyio.wait_all_tasks_blocked()
            await wire.send(START)
            await wire.send(FRAME)
            tasks.cancel_scope.cancel()
    assert sent == [START, FRAME]
