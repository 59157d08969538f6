"""Places the layer on the SDK's session manager: the only place that touches the SDK beyond its public interface.

Once for the process, two methods of the SDK are wrapped.

`StreamableHTTPSessionManager.__init__`: a manager that is given a `ResumableEventStore` gets a `ResumptionLayer` around
its `asgi_app`, its innermost entry, and hands the store itself to its sessions. A probe through the manager's own
`handle_request` shows that requests do pass the layer; if they do not, building the manager fails. When its `run` has
ended, the store is told. Managers with other stores, or none, are left alone.

`StreamableHTTPServerTransport.close_sse_stream`, which a tool calls to make its client poll: it closes the connection
of the SDK's own live path; here it also closes one that is served from the store.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from mcp_resumable.http import ResumptionLayer
from mcp_resumable.session import SDK_STANDALONE, current_exchange
from mcp_resumable.store import ResumableEventStore
from mcp_resumable.wire import ASGIApp, Message, Receive, Scope, Send

__all__ = ["UnsupportedSDKError", "install", "place"]

logger = logging.getLogger("mcp_resumable")

_MARK = "__mcp_resumable__"


class UnsupportedSDKError(RuntimeError):
    """Raised when a session manager does not lead its requests through the layer; nothing runs unprotected."""


def install() -> None:
    """See to it that every session manager built from now on gets the layer where it needs it; idempotent."""
    if not hasattr(StreamableHTTPSessionManager.__init__, _MARK):
        _wrap_manager()
        _wrap_transport()


def _wrap_manager() -> None:
    original = StreamableHTTPSessionManager.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: StreamableHTTPSessionManager, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        store = signature.bind(self, *args, **kwargs).arguments.get("event_store")
        if isinstance(store, ResumableEventStore):
            place(self, store)

    setattr(init, _MARK, True)
    # mypy and pyright rightly object to an assignment to a method.
    setattr(StreamableHTTPSessionManager, "__init__", init)  # noqa: B010


def _wrap_transport() -> None:
    original = StreamableHTTPServerTransport.close_sse_stream

    @functools.wraps(original)
    def close_sse_stream(self: StreamableHTTPServerTransport, request_id: int | str) -> None:
        original(self, request_id)
        exchange = current_exchange.get()
        if exchange is not None and exchange.binding.session_id == self.mcp_session_id:
            exchange.binding.close_stream(None if request_id == SDK_STANDALONE else str(request_id))

    setattr(StreamableHTTPServerTransport, "close_sse_stream", close_sse_stream)  # noqa: B010


def place(manager: StreamableHTTPSessionManager, store: ResumableEventStore) -> None:
    """Put the layer around `manager`, or switch the store off where the manager's mode makes resumption impossible.

    Raises:
        UnsupportedSDKError: When requests would not pass the layer.
    """
    if manager.stateless or manager.json_response:
        mode = "stateless mode" if manager.stateless else "json_response=True"
        logger.warning(
            "Resumption is off: %s sends no event ids that a client could resume from. Nothing is stored.", mode
        )
        manager.event_store = None
        return
    inner: Any = getattr(manager, "asgi_app", None)
    if inner is None:
        raise UnsupportedSDKError(_UNSUPPORTED)
    _check_entry(manager)
    _hand_over(manager, store)
    layer = ResumptionLayer(
        inner,
        store,
        retry_interval=manager.retry_interval,
        max_request_body_size=manager.max_request_body_size,
        transport_for=functools.partial(_transport_for, manager, store),
    )
    _set_entry(manager, layer)
    _announce_end(manager, store, layer)


def _announce_end(manager: StreamableHTTPSessionManager, store: ResumableEventStore, layer: ResumptionLayer) -> None:
    """Let the store know when `manager` ends, and when it has: uvicorn then ends the process, by the signal itself."""
    run = manager.run

    @asynccontextmanager
    async def run_and_announce_end() -> AsyncGenerator[None]:
        try:
            async with run():
                try:
                    yield
                finally:
                    store.server_ends(layer)
        finally:
            await store.server_is_over()

    # mypy and pyright rightly object to an assignment to a method.
    setattr(manager, "run", run_and_announce_end)  # noqa: B010


def _transport_for(
    manager: StreamableHTTPSessionManager, store: ResumableEventStore, session_id: str
) -> StreamableHTTPServerTransport | None:
    """Return a transport as `manager` would make it for a session of this id; None where no session has such an id."""
    try:
        return StreamableHTTPServerTransport(
            session_id,
            event_store=store,
            security_settings=manager.security_settings,
            retry_interval=manager.retry_interval,
        )
    except ValueError:
        return None


def _hand_over(manager: StreamableHTTPSessionManager, store: ResumableEventStore) -> None:
    """Make the store that `manager` gives to its sessions the store itself.

    A framework's manager may give each session an adapter around it: PrefectHQ's FastMCP prefixes the stream ids, to
    tell sessions apart, and holds a replay back until it is over. The store tells sessions apart by itself, and a live
    tail is over only with its stream.
    """
    if manager.event_store is store:
        return
    kind: Any = type(manager)
    manager.__class__ = type(kind.__name__, (kind,), {"event_store": property(lambda _: store)})
    if manager.event_store is not store:
        raise UnsupportedSDKError(_UNSUPPORTED)


def _check_entry(manager: StreamableHTTPSessionManager) -> None:
    """Send a scope through `manager` and see it arrive at its entry."""
    arrived: list[Scope] = []

    async def entry(scope: Scope, _receive: Receive, _send: Send) -> None:
        arrived.append(scope)

    async def receive() -> Message:
        raise UnsupportedSDKError(_UNSUPPORTED)

    async def send(_message: Message) -> None:
        raise UnsupportedSDKError(_UNSUPPORTED)

    _set_entry(manager, entry)
    probe: Scope = {"type": "mcp_resumable.probe"}
    coroutine: Any = manager.handle_request(probe, receive, send)
    try:
        # What arrives ends before its first wait, so no event loop is needed.
        coroutine.send(None)
    except StopIteration:
        pass
    except Exception as exc:
        raise UnsupportedSDKError(_UNSUPPORTED) from exc
    coroutine.close()
    if arrived != [probe]:
        raise UnsupportedSDKError(_UNSUPPORTED)


def _set_entry(manager: StreamableHTTPSessionManager, entry: ASGIApp) -> None:
    # By name, since it is declared as the middleware that it holds; any ASGI app will do.
    setattr(manager, "asgi_app", entry)  # noqa: B010


_UNSUPPORTED = (
    "the installed MCP SDK does not lead its HTTP requests through StreamableHTTPSessionManager.asgi_app, where "
    "mcp_resumable puts its layer; without it, resuming is not safe, so nothing is started. "
    "Supported: mcp>=1.29.1,<3 with its own StreamableHTTPSessionManager"
)
