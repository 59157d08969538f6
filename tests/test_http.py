"""The layer by itself: around small ASGI apps that do what the SDK does, in every order that it might."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from mcp_resumable import EventCursor, ResumableEventStore, ResumptionLayer
from mcp_resumable.session import Connection, current_exchange
from mcp_resumable.wire import Message, Receive, Scope, Send
from tests.sdk_host import Request

pytestmark = pytest.mark.anyio

SESSION_ID = "a-session"
INITIALIZE = json.dumps({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {}}).encode()


class Notification:
    """A message as the SDK's are: it has a method, and dumps to JSON text."""

    method = "notifications/message"

    def model_dump_json(self, **_options: object) -> str:
        return '{"method":"notifications/message"}'


async def respond(send: Send, status: int = 200, session_id: str | None = SESSION_ID) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    if session_id is not None:
        headers.append((b"mcp-session-id", session_id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def exchange(layer: Any, method: str, body: bytes = b"", /, **headers: str) -> Request:
    """Run one request through the layer to its end."""
    request = Request(method, {name.replace("_", "-"): value for name, value in headers.items()}, body)
    with anyio.fail_after(10):
        await request.run(layer)
    return request


async def opened(
    app: Callable[[Scope, Receive, Send], Any], store: ResumableEventStore | None = None
) -> tuple[ResumptionLayer, ResumableEventStore, Any]:
    """Return a layer around `app` with one session open, and what keeps that session alive."""
    store = store if store is not None else ResumableEventStore()
    kept: list[Any] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and not kept:
            kept.append(current_exchange.get())
            await respond(send)
            await end(send)
        else:
            await app(scope, receive, send)

    layer = ResumptionLayer(inner, store)
    await exchange(layer, "POST", INITIALIZE)
    assert store.find_binding(SESSION_ID) is not None
    return layer, store, kept


async def test_event_of_an_opening_request_that_never_gets_a_session_is_let_go() -> None:
    store = ResumableEventStore()
    ids: list[str] = []

    async with anyio.create_task_group() as router:

        async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
            async def route() -> None:
                ids.append(await store.store_event("0", Notification()))

            router.start_soon(route)
            await wait_all_tasks_blocked()
            assert ids == []

        await exchange(ResumptionLayer(app, store), "POST", INITIALIZE)
        with anyio.fail_after(10):
            while not ids:
                await anyio.lowlevel.checkpoint()
    assert ids == [""]
    assert store.stats().sessions == 0


async def test_opening_request_that_is_answered_with_an_error_opens_no_session() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, status=400)
        await end(send)

    store = ResumableEventStore()
    request = await exchange(ResumptionLayer(app, store), "POST", INITIALIZE)
    assert request.status == 400
    assert store.find_binding(SESSION_ID) is None


async def test_decision_may_come_before_the_sdk_begins_its_response() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        found = current_exchange.get()
        assert found is not None
        assert found.gate is not None
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(found.gate.accept, "1-abcdefghijkl:0:0")
            await wait_all_tasks_blocked()
            await respond(send)
        await end(send)

    layer, _, _kept = await opened(app)
    request = await exchange(
        layer, "GET", mcp_session_id=SESSION_ID, mcp_protocol_version="2025-11-25", last_event_id="x"
    )
    frames = await request.frames()
    assert [(frame.id, frame.data) for frame in frames] == [("1-abcdefghijkl:0:0", "")]


async def test_connection_that_is_closed_before_its_first_frame_still_gives_its_client_the_cursor() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        found = current_exchange.get()
        assert found is not None
        assert found.gate is not None
        found.gate.connection.close()
        await respond(send)
        await found.gate.accept("1-abcdefghijkl:0:0")
        await send({"type": "http.response.body", "body": b"id: 1\r\ndata: a\r\n\r\n", "more_body": True})

    layer, _, _kept = await opened(app)
    request = await exchange(
        layer, "GET", mcp_session_id=SESSION_ID, mcp_protocol_version="2025-11-25", last_event_id="x"
    )
    assert [frame.id for frame in await request.frames()] == ["1-abcdefghijkl:0:0"]
    assert request.is_complete


async def test_retry_is_sent_with_the_first_cursor() -> None:
    store = ResumableEventStore()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        found = current_exchange.get()
        assert found is not None
        if found.gate is None:
            kept.append(found)
            await respond(send)
        else:
            await respond(send)
            await found.gate.accept("1-abcdefghijkl:0:0")
        await end(send)

    kept: list[object] = []
    layer = ResumptionLayer(app, store, retry_interval=1_500)
    await exchange(layer, "POST", INITIALIZE)
    request = await exchange(layer, "GET", mcp_session_id=SESSION_ID, mcp_protocol_version="2025-11-25")
    frame = await request.frame()
    assert frame is not None
    assert frame.retry == 1_500


async def test_older_clients_get_no_frame_that_they_cannot_parse() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        found = current_exchange.get()
        assert found is not None
        assert found.gate is not None
        await respond(send)
        await found.gate.accept("1-abcdefghijkl:0:0")
        await end(send)

    layer, _, _kept = await opened(app)
    versions: list[dict[str, str]] = [{}, {"mcp_protocol_version": "2025-06-18"}]
    for headers in versions:
        request = await exchange(layer, "GET", b"", mcp_session_id=SESSION_ID, **headers)
        assert (request.status, await request.frames()) == (200, [])


async def test_stream_that_ends_without_a_decision_is_not_an_empty_200() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send)
        await send({"type": "http.response.body", "body": b": keep-alive\r\n\r\n", "more_body": True})
        await end(send)

    layer, _, _kept = await opened(app)
    request = await exchange(layer, "GET", mcp_session_id=SESSION_ID, last_event_id="x")
    assert (request.status, await request.reason()) == (503, "storage_unavailable")


async def test_answers_of_the_sdk_come_first_and_unchanged() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 406, "headers": [(b"x-sdk", b"yes")]})
        await send({"type": "http.response.body", "body": b"no", "more_body": False})

    layer, _, _kept = await opened(app)
    request = await exchange(layer, "GET", mcp_session_id=SESSION_ID, last_event_id="x")
    assert (request.status, request.headers, request.is_complete) == (406, {"x-sdk": "yes"}, True)


async def test_session_that_the_sdk_no_longer_knows_is_ended() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, status=404)
        await end(send)

    requests: list[tuple[str, dict[str, str]]] = [
        ("GET", {}),
        ("POST", {}),
        ("DELETE", {}),
        ("GET", {"last_event_id": "x"}),
    ]
    for method, headers in requests:
        layer, store, _kept = await opened(app)
        request = await exchange(layer, method, b"{}", mcp_session_id=SESSION_ID, **headers)
        assert request.status == 404
        assert await store.describe(SESSION_ID) is None


async def test_closed_connection_passes_nothing_on_and_ends_cleanly() -> None:
    sent: list[Message] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        found = current_exchange.get()
        assert found is not None
        call = found.binding.calls["7"]
        assert call.connection is not None
        await respond(send)
        await send({"type": "http.response.body", "body": b"id: 1\r\ndata: a\r\n\r\n", "more_body": True})
        await receive()
        call.connection.close()
        await send({"type": "http.response.body", "body": b"id: 2\r\ndata: b\r\n\r\n", "more_body": True})
        sent.append(await receive())

    layer, _, _kept = await opened(app)
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}).encode()
    request = await exchange(layer, "POST", body, mcp_session_id=SESSION_ID)
    assert [frame.data for frame in await request.frames()] == ["a"]
    assert request.is_complete
    assert sent == [{"type": "http.disconnect"}]


async def test_close_wakes_who_waits_for_the_client_and_is_idempotent() -> None:
    connection = Connection()
    async with anyio.create_task_group() as task_group:

        async def wait() -> None:
            with connection.receiving():
                await anyio.sleep_forever()

        task_group.start_soon(wait)
        await wait_all_tasks_blocked()
        connection.close()
        connection.close()
    with connection.receiving():
        await anyio.sleep_forever()
    assert connection.is_closed


async def test_reader_that_stops_reading_costs_its_own_connection() -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)
        await receive()
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"data: x\r\n\r\n", "more_body": True})
        gone.append(await receive())

    gone: list[Message] = []
    layer, store, _kept = await opened(app, ResumableEventStore())
    store.send_timeout = 0.2  # Of the requests from now on.
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}).encode()
    request = Request("POST", {"mcp-session-id": SESSION_ID}, body)
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(request.run, layer)
        await request.until_started()
        request.freeze()
        await request.until_done()
    assert gone == [{"type": "http.disconnect"}]
    assert store.stats().stalled_readers == 1


async def test_two_layers_for_one_store_act_once() -> None:
    kept: list[object] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        kept.append(current_exchange.get())
        await respond(send)
        await end(send)

    store = ResumableEventStore()
    inner = ResumptionLayer(app, store)
    outer = ResumptionLayer(inner, store)
    await exchange(outer, "POST", INITIALIZE)
    binding = store.find_binding(SESSION_ID)
    assert binding is not None
    assert binding.layer is outer
    assert list(binding.calls) == ["0"]
    assert store.stats().sessions == 1


async def test_session_of_another_layer_is_left_alone() -> None:
    _, store, _kept = await opened(lambda *_: None)
    seen: list[bytes | None] = []

    async def other_app(scope: Scope, _receive: Receive, send: Send) -> None:
        assert current_exchange.get() is None
        seen.append(dict(scope["headers"]).get(b"last-event-id"))
        await respond(send, status=404)
        await end(send)

    other = ResumptionLayer(other_app, store)
    for method in ("GET", "DELETE", "POST"):
        request = await exchange(other, method, b"{}", mcp_session_id=SESSION_ID)
        assert request.status == 404
    assert seen == [None, None, None]
    assert await store.describe(SESSION_ID) is not None


async def test_protocol_without_sessions_and_other_scopes_pass_untouched() -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        assert current_exchange.get() is None
        seen.append(scope["type"])
        if scope["type"] == "http":
            await respond(send, session_id=None)
            await end(send)

    layer = ResumptionLayer(app, ResumableEventStore())
    request = await exchange(layer, "GET")
    if version("mcp").startswith("2."):  # The 1.x line has sessions whatever the header says.
        request = await exchange(layer, "POST", INITIALIZE, mcp_protocol_version="2026-07-28")
        assert request.status == 200
        assert seen.pop() == "http"
    for kind in ("lifespan", "websocket"):
        scope: Scope = {"type": kind}
        await layer(scope, request.receive, request.send)
        assert scope == {"type": kind}
    assert seen == ["http", "lifespan", "websocket"]


async def test_get_without_a_session_and_unknown_methods_pass_untouched() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        assert current_exchange.get() is None
        await respond(send, status=405)
        await end(send)

    layer, _, _kept = await opened(app)
    assert (await exchange(layer, "GET")).status == 405
    assert (await exchange(layer, "PATCH", mcp_session_id=SESSION_ID)).status == 405


async def test_store_outside_of_the_layer_refuses_to_guess(caplog: pytest.LogCaptureFixture) -> None:
    store = ResumableEventStore()
    with pytest.raises(RuntimeError, match="ResumptionLayer"):
        await store.store_event("1", None)
    assert await store.store_event("1", Notification()) == ""
    assert "ResumptionLayer" in caplog.text
    with pytest.raises(RuntimeError, match="ResumptionLayer"):
        await store.replay_events_after("x", lambda _: anyio.lowlevel.checkpoint())
    with pytest.raises(LookupError):
        await store.restart_stream(1)


async def test_store_of_another_server_in_the_same_context_refuses_to_guess() -> None:
    other = ResumableEventStore()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        with pytest.raises(RuntimeError, match="ResumptionLayer"):
            await other.store_event("7", None)
        event_id = await store.store_event("7", None)
        cursor = EventCursor.parse(event_id)
        assert cursor is not None
        assert (cursor.stream.request_id, cursor.seq) == ("7", 0)
        await respond(send)
        await end(send)

    layer, store, _kept = await opened(app)
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}).encode()
    assert (await exchange(layer, "POST", body, mcp_session_id=SESSION_ID)).status == 200


async def test_what_the_app_raises_comes_out_as_it_is() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send)
        raise LookupError("of the app")

    layer, store, _kept = await opened(app)
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}).encode()
    with pytest.raises(LookupError, match="of the app"):
        await exchange(layer, "POST", body, mcp_session_id=SESSION_ID)
    binding = store.find_binding(SESSION_ID)
    assert binding is not None
    assert all(call.connection is None for call in binding.calls.values())


async def test_what_waits_is_written_where_the_app_returns_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the SDK does when the server shuts down."""
    monkeypatch.setattr("mcp_resumable.outbox._GAP_SECONDS", 1_000.0)

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send)
        for letter in b"abcd":
            await send({"type": "http.response.body", "body": b"data: %c\r\n\r\n" % letter, "more_body": True})

    layer, _, _kept = await opened(app)
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}).encode()
    request = await exchange(layer, "POST", body, mcp_session_id=SESSION_ID)
    assert [frame.data for frame in await request.frames()] == ["a", "b", "c", "d"]
    assert request.is_complete


@pytest.mark.parametrize("is_complete", [True, False])
async def test_only_a_client_that_goes_before_the_end_waits_for_its_turn(is_complete: bool) -> None:
    """After the end it is the server that says so, and the SDK has nothing left to end."""

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await respond(send)
        if is_complete:
            await end(send)
        assert (await receive())["type"] == "http.disconnect"

    layer, _, _kept = await opened(app)
    turns: list[str] = []

    class Turnstile:
        async def pass_through(self) -> None:
            turns.append("a turn")

    layer._for_gone = Turnstile()  # type: ignore[assignment]
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}).encode()
    request = Request("POST", {"mcp-session-id": SESSION_ID}, body)
    request.disconnect()
    with anyio.fail_after(10):
        await request.run(layer)
    assert turns == ([] if is_complete else ["a turn"])
