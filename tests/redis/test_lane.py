"""How operations travel together, without a server: calls are answered when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from mcp_resumable.redis.calls import Lane

pytestmark = pytest.mark.anyio

NEVER = 3_600.0


class Server:
    """Answers each operation with its own argument, once `answer` is set."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.answer = asyncio.Event()
        self.answer.set()

    async def call(self, script: str, *arguments: bytes | str | int) -> list[Any]:
        assert script == "append"
        self.calls.append(list(arguments))
        await self.answer.wait()
        return list(arguments)


@asynccontextmanager
async def lane_to(server: Server, gap_seconds: float = 0.0, calls_at_once: int = 3) -> AsyncGenerator[tuple[Lane, Any]]:
    """Yield a lane, and what asks it for something in a task of its own."""
    lane = Lane(server.call, "append", calls_at_once=calls_at_once, gap_seconds=gap_seconds)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            def ask(*numbers: int, stream: tuple[str, str] | None = None, at_once: bool = False) -> None:
                async def one(number: int) -> None:
                    assert await lane.put((number,), 1, stream=stream, at_once=at_once) == number

                for number in numbers:
                    tasks.start_soon(one, number)

            yield lane, ask
            server.answer.set()
            tasks.cancel_scope.cancel()


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_what_is_asked_in_one_turn_travels_together() -> None:
    server = Server()
    async with lane_to(server) as (_, ask):
        ask(1, 2, 3)
        await turns()
        assert server.calls == [[1, 2, 3]]


async def test_operations_on_one_stream_travel_one_after_another() -> None:
    server = Server()
    server.answer.clear()
    async with lane_to(server) as (_, ask):
        ask(1, 2, stream=("session", "stream"))
        ask(3)
        await turns()
        assert server.calls == [[1, 3]]
        server.answer.set()
        await turns()
        assert server.calls == [[1, 3], [2]]


async def test_where_calls_are_made_one_at_a_time_each_takes_all_that_waits() -> None:
    server = Server()
    server.answer.clear()
    async with lane_to(server, calls_at_once=1) as (_, ask):
        ask(0)
        await turns()
        ask(*range(1, 201))
        await turns()
        assert server.calls == [[0]]
        server.answer.set()
        await turns()
        assert server.calls == [[0], [*range(1, 129)], [*range(129, 201)]]


async def test_where_calls_are_made_several_at_a_time_each_takes_half() -> None:
    server = Server()
    server.answer.clear()
    async with lane_to(server) as (_, ask):
        ask(*range(40))
        await turns()
        assert server.calls == [[*range(20)], [*range(20, 30)], [*range(30, 38)]]


async def test_a_gap_lets_what_comes_within_it_travel_together() -> None:
    server = Server()
    async with lane_to(server, NEVER) as (lane, ask):
        ask(1)
        await turns()
        ask(2)
        await turns()
        ask(3, 4)
        await turns()
        assert server.calls == [[1]]
        lane._next_call = 0.0  # The gap is over.
        ask(5)
        await turns()
        assert server.calls == [[1], [2, 3, 4, 5]]


async def test_many_operations_do_not_wait_for_the_gap() -> None:
    server = Server()
    async with lane_to(server, NEVER) as (_, ask):
        ask(1)
        await turns()
        ask(*range(2, 17))
        await turns()
        assert server.calls == [[1]]
        ask(17)
        await turns()
        assert [number for call in server.calls for number in call] == list(range(1, 18))


async def test_an_operation_that_is_urgent_takes_along_what_waits_for_the_gap() -> None:
    server = Server()
    async with lane_to(server, NEVER) as (lane, ask):
        ask(1)
        await turns()
        ask(2, 3)
        await turns()
        assert server.calls == [[1]]
        assert await lane.put((4,), at_once=True) == 4
        assert server.calls == [[1], [2, 3, 4]]


async def test_an_urgent_operation_that_comes_while_the_lane_is_busy_does_not_wait_for_the_gap() -> None:
    server = Server()
    server.answer.clear()
    async with lane_to(server, NEVER) as (lane, ask):
        for number in (1, 2, 3):
            lane._next_call = 0.0
            ask(number)
            await turns()
        ask(4, at_once=True)
        await turns()
        assert server.calls == [[1], [2], [3]]
        server.answer.set()
        await turns()
        assert server.calls == [[1], [2], [3], [4]]


async def test_the_gap_ends_by_itself() -> None:
    server = Server()
    async with lane_to(server, 0.001) as (lane, ask):
        ask(1)
        await turns()
        await lane.put((2,), 1)
        assert server.calls == [[1], [2]]
