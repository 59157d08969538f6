"""uvicorn in a test's own event loop, of which nothing is left when the test goes on: asyncio only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import anyio.lowlevel
import uvicorn

__all__ = ["serving", "stop_listening", "until"]


@asynccontextmanager
async def serving(
    app: Any,
    *,
    lifespan: Literal["on", "off"] = "on",
    send_buffer: int | None = None,
    patience: float = 2.0,
    log_level: Literal["warning", "critical"] = "warning",
) -> AsyncIterator[int]:
    """Serve an ASGI app; give its port on the loopback address.

    Args:
        app: The app.
        lifespan: Whether the app has one.
        send_buffer: Of the kernel, for each connection; None: the kernel's own.
        patience: Seconds for which requests may go on at the end; then their connections are cut, and after so many
            more they are cancelled.
        log_level: Of uvicorn.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    config = uvicorn.Config(app, log_level=log_level, lifespan=lifespan)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # `Server.serve` without its main loop: that one polls for signals, which belong to the test run here.
    await server.startup(sockets=[listener])
    try:
        yield listener.getsockname()[1]
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2 * patience + 3):
            await _stop(server, patience)


async def _stop(server: uvicorn.Server, patience: float) -> None:
    """Do what `Server.shutdown` does, without its sleeps: the clients are gone, so requests end by themselves."""
    await stop_listening(server.servers)
    for connection in list(server.server_state.connections):
        connection.shutdown()
    tasks = server.server_state.tasks
    if tasks:
        await asyncio.wait(tasks, timeout=patience)
    await server.lifespan.shutdown()
    # Before the loop ends, so that no transport is left to the garbage collector.
    for connection in list(server.server_state.connections):
        if (transport := getattr(connection, "transport", None)) is not None:
            transport.abort()
    if tasks:
        await asyncio.wait(tasks, timeout=patience)
    for task in list(tasks):
        task.cancel()
    await until(lambda: not server.server_state.connections and not tasks)


async def stop_listening(servers: Iterable[asyncio.Server]) -> None:
    """Close listening sockets, and leave no connection half made.

    What asyncio accepts in the very turn in which `Server.close` is called belongs to nobody: it is left open.
    """
    loop = asyncio.get_running_loop()
    for server in servers:
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
    # What was accepted last is made a connection in the loop's next turns.
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    for server in servers:
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of; to be used under `fail_after`."""
    while not condition():  # noqa: ASYNC110  # there is no event
        await anyio.sleep(0.005)
