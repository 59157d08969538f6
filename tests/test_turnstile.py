"""What a reconnect storm brings all at once goes on a few per turn of the event loop."""

from __future__ import annotations

import json

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from mcp_resumable.http import _GETS_PER_TURN, _GONE_PER_TURN, _Turnstile
from mcp_resumable.session import current_exchange
from mcp_resumable.wire import Receive, Scope, Send
from tests.sdk_host import Request
from tests.test_http import SESSION_ID, end, opened, respond

pytestmark = pytest.mark.anyio

AT_ONCE = 400


class Crowd:
    """Counts who goes on at the same time: from one turn of the loop to the next."""

    def __init__(self) -> None:
        self.total = 0
        self.most = 0
        self._now = 0

    async def go_on(self) -> None:
        self.total += 1
        self._now += 1
        self.most = max(self.most, self._now)
        await checkpoint()
        self._now -= 1


def a_get(*, claims: str | None = None) -> Request:
    headers = {"mcp-session-id": SESSION_ID, "mcp-protocol-version": "2025-11-25"}
    return Request("GET", {**headers, **({"last-event-id": claims} if claims else {})}, b"")


def a_call(number: int) -> Request:
    body = json.dumps({"jsonrpc": "2.0", "id": number, "method": "ping"}).encode()
    return Request("POST", {"mcp-session-id": SESSION_ID}, body)


async def test_gets_that_come_at_once_go_on_a_few_per_turn() -> None:
    crowd = Crowd()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await crowd.go_on()
        await respond(send, 405)
        await end(send)

    layer, _, _kept = await opened(app)
    requests = [a_get(claims="1") for _ in range(AT_ONCE)]
    with anyio.fail_after(10):
        async with anyio.create_task_group() as task_group:
            for request in requests:
                task_group.start_soon(request.run, layer)
    assert [request.status for request in requests] == [405] * AT_ONCE
    assert crowd.total == AT_ONCE
    # Those of one turn are still there when those of the next come.
    assert crowd.most <= 2 * _GETS_PER_TURN


async def test_clients_that_go_at_once_are_told_of_a_few_per_turn() -> None:
    crowd = Crowd()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)
        while (await receive())["type"] != "http.disconnect":
            pass
        await crowd.go_on()

    layer, _, _kept = await opened(app)
    requests = [a_call(1 + number) for number in range(AT_ONCE)]
    with anyio.fail_after(10):
        async with anyio.create_task_group() as task_group:
            for request in requests:
                task_group.start_soon(request.run, layer)
            await wait_all_tasks_blocked()
            for request in requests:
                request.disconnect()
    assert crowd.total == AT_ONCE
    assert crowd.most <= 2 * _GONE_PER_TURN


async def test_standalone_stream_whose_client_goes_is_told_at_once() -> None:
    """Until the SDK knows, it sends, and what it sends counts as carried: nobody would get it again."""
    told = 0
    told_before: int | None = None

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal told, told_before
        await respond(send)
        exchange = current_exchange.get()
        assert exchange is not None
        if exchange.gate is not None:
            exchange.gate.connection.on_written = lambda _seq: None
        while (await receive())["type"] != "http.disconnect":
            pass
        if exchange.gate is not None:
            told_before = told
        told += 1

    layer, _, _kept = await opened(app)
    standalone, calls = a_get(), [a_call(1 + number) for number in range(AT_ONCE)]
    with anyio.fail_after(10):
        async with anyio.create_task_group() as task_group:
            for request in (standalone, *calls):
                task_group.start_soon(request.run, layer)
            await wait_all_tasks_blocked()
            for call in calls:
                call.disconnect()
            await checkpoint()
            standalone.disconnect()
    assert told == 1 + AT_ONCE
    assert told_before is not None
    assert told_before < AT_ONCE / 2


async def test_session_that_ends_while_its_gets_wait_refuses_them() -> None:
    asked = 0

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        nonlocal asked
        asked += 1
        await respond(send, 405)
        await end(send)

    layer, store, _kept = await opened(app)
    requests = [a_get(claims="1") for _ in range(AT_ONCE)]
    with anyio.fail_after(10):
        async with anyio.create_task_group() as task_group:
            for request in requests:
                task_group.start_soon(request.run, layer)
            await checkpoint()
            await store.end_session(SESSION_ID)
    statuses = [request.status for request in requests]
    assert asked == statuses.count(405) <= 3 * _GETS_PER_TURN
    assert statuses.count(404) == AT_ONCE - asked


async def test_who_is_cancelled_while_waiting_leaves_the_place_to_others() -> None:
    turnstile = _Turnstile(2)
    scopes = [anyio.CancelScope() for _ in range(20)]
    passed: list[int] = []

    async def visit(number: int) -> None:
        with scopes[number]:
            await turnstile.pass_through()
            passed.append(number)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as task_group:
            for number in range(20):
                task_group.start_soon(visit, number)
            await checkpoint()
            # Some have got a place by now, some have been handed one, most wait.
            for number in range(19):
                scopes[number].cancel()
        assert 19 in passed
        # And all places are free again.
        passed.clear()
        scopes[:] = [anyio.CancelScope() for _ in range(20)]
        async with anyio.create_task_group() as task_group:
            for number in range(20):
                task_group.start_soon(visit, number)
    assert sorted(passed) == list(range(20))
