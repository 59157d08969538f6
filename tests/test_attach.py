"""Passing the store is all a user does; where that cannot be made safe, building the server fails."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import RequestBodyLimitMiddleware, StreamableHTTPSessionManager

from mcp_resumable import ResumableEventStore, ResumptionLayer
from mcp_resumable.attach import UnsupportedSDKError, install


def build(**options: Any) -> StreamableHTTPSessionManager:
    server: Any = Server("a server")
    return StreamableHTTPSessionManager(app=server, **options)


def test_manager_with_our_store_gets_the_layer_once() -> None:
    store = ResumableEventStore()
    ResumableEventStore()
    install()
    manager = build(event_store=store, retry_interval=700)
    layer: Any = manager.asgi_app
    assert isinstance(layer, ResumptionLayer)
    assert not isinstance(layer.app, ResumptionLayer)
    assert (layer.store, layer.retry_interval) == (store, 700)
    assert layer.max_request_body_size == manager.max_request_body_size


def test_store_passed_by_position_is_found() -> None:
    server: Any = Server("a server")
    manager = StreamableHTTPSessionManager(server, ResumableEventStore())
    assert isinstance(manager.asgi_app, ResumptionLayer)


def test_managers_without_our_store_are_left_alone() -> None:
    ResumableEventStore()
    assert type(build().asgi_app) is RequestBodyLimitMiddleware


def test_managers_that_share_a_store_have_layers_of_their_own() -> None:
    store = ResumableEventStore()
    assert build(event_store=store).asgi_app is not build(event_store=store).asgi_app


@pytest.mark.parametrize("option", ["stateless", "json_response"])
def test_mode_without_resumption_is_said_once_and_nothing_is_stored(
    option: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = build(event_store=ResumableEventStore(), **{option: True})
    assert manager.event_store is None
    assert type(manager.asgi_app) is RequestBodyLimitMiddleware
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["mcp_resumable"]
    assert option.split("_")[0] in warnings[0].getMessage()


def test_manager_that_does_not_lead_requests_through_its_entry_is_refused() -> None:
    class Detour(StreamableHTTPSessionManager):
        async def handle_request(self, scope: Any, receive: Any, send: Any) -> None:
            await super()._handle_request(scope, receive, send)

    server: Any = Server("a server")
    with pytest.raises(UnsupportedSDKError):
        Detour(app=server, event_store=ResumableEventStore())


def test_manager_whose_entry_is_reached_only_later_is_refused() -> None:
    class Detour(StreamableHTTPSessionManager):
        async def handle_request(self, *_: Any) -> None:
            await anyio.Event().wait()

    class Silence(StreamableHTTPSessionManager):
        async def handle_request(self, *_: Any) -> None:
            return

    class Nosy(StreamableHTTPSessionManager):
        async def handle_request(self, _scope: Any, receive: Any, _send: Any) -> None:
            await receive()

    class Hasty(StreamableHTTPSessionManager):
        async def handle_request(self, _scope: Any, _receive: Any, send: Any) -> None:
            await send({})

    server: Any = Server("a server")
    for kind in (Silence, Nosy, Hasty):
        with pytest.raises(UnsupportedSDKError):
            kind(app=server, event_store=ResumableEventStore())

    async def build_in_a_loop() -> None:
        with pytest.raises(UnsupportedSDKError):
            Detour(app=server, event_store=ResumableEventStore())

    anyio.run(build_in_a_loop)


def test_manager_without_the_entry_is_refused() -> None:
    class Renamed(StreamableHTTPSessionManager):
        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, "app_entry" if name == "asgi_app" else name, value)

    server: Any = Server("a server")
    with pytest.raises(UnsupportedSDKError):
        Renamed(app=server, event_store=ResumableEventStore())


def test_manager_that_gives_its_sessions_an_adapter_is_made_to_give_them_the_store() -> None:
    """PrefectHQ's FastMCP wraps the store for each session, in an adapter that never serves a live tail."""

    class Wrapping(StreamableHTTPSessionManager):
        given: object = None

        @property
        def event_store(self) -> Any:
            return object()

        @event_store.setter
        def event_store(self, store: object) -> None:
            self.given = store

    server: Any = Server("a server")
    store = ResumableEventStore()
    manager = Wrapping(app=server, event_store=store)
    assert manager.event_store is store
    assert isinstance(manager, Wrapping)
    assert isinstance(manager.asgi_app, ResumptionLayer)
    off = Wrapping(app=server, event_store=store, stateless=True)
    assert off.given is None


def test_manager_that_insists_on_another_store_is_refused() -> None:
    class Insisting(StreamableHTTPSessionManager):
        def __getattribute__(self, name: str) -> Any:
            return object() if name == "event_store" else object.__getattribute__(self, name)

    server: Any = Server("a server")
    with pytest.raises(UnsupportedSDKError):
        Insisting(app=server, event_store=ResumableEventStore())
