"""A TCP proxy that is a bad network: what it does to the bytes of each direction is a `Weather`, and may change.

| fault      | what is done                                                                                     |
|------------|--------------------------------------------------------------------------------------------------|
| latency    | each piece waits before it is forwarded                                                          |
| slicing    | the first bytes are forwarded one at a time                                                      |
| reset      | both connections are ended with an RST                                                           |
| close      | both connections are closed, as by a proxy that has had enough                                   |
| half-close | the receiver is told that nothing more comes; the other direction goes on                        |
| freeze     | nothing is read or forwarded any more; nobody is told, until the weather changes or the proxy ends |

The last four befall a direction after an exact number of its bytes. A `Policy` chooses the weather of a connection from
the head of its first request, so that a plan can name its connections in a header.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import anyio
from anyio.abc import SocketAttribute, SocketStream

from tests.sockets import reset_when_closed, set_option

__all__ = ["CLEAR", "Direction", "Fate", "FaultProxy", "Forecast", "Policy", "ProxiedConnection", "Weather", "proxied"]

Direction = Literal["up", "down"]
"""`up` is from client to server."""

Fate = Literal["reset", "close", "half_close", "freeze"]

_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

# No more than this waits in the proxy's sockets, each way: a reader that stops is to be felt by the server soon.
_SOCKET_BUFFER_BYTES = 32_768

_MAX_HEAD_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to the bytes of one direction. Bytes are counted from when it was set.

    Attributes:
        latency_seconds: Before each piece.
        single_bytes: So many bytes are forwarded one at a time, the later ones as they come.
        fate: What befalls the direction, None for nothing.
        fate_after_bytes: How many bytes are forwarded before.
    """

    latency_seconds: float = 0.0
    single_bytes: int = 0
    fate: Fate | None = None
    fate_after_bytes: int = 0


CLEAR = Weather()
"""Nothing is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a policy has chosen for a connection.

    Attributes:
        up: From client to server.
        down: From server to client.
    """

    up: Weather = CLEAR
    down: Weather = CLEAR


class Policy(Protocol):
    """Chooses the weather of each connection."""

    def forecast(self, head: bytes) -> Forecast:
        """Return the weather of the connection whose first request begins with `head`."""

    def opened(self, head: bytes, connection: ProxiedConnection) -> None:
        """Take note of a connection, to change its weather later."""


class _Flow:
    """One direction of a connection."""

    def __init__(self, connection: ProxiedConnection, source: SocketStream, sink: SocketStream) -> None:
        self._connection = connection
        self._source = source
        self._sink = sink
        self._weather = CLEAR
        self._forwarded = 0
        self._changed = anyio.Event()
        self._receiving: anyio.CancelScope | None = None

    def switch(self, weather: Weather) -> None:
        self._weather = weather
        self._forwarded = 0
        self._changed.set()
        self._changed = anyio.Event()
        if self._receiving is not None:
            self._receiving.cancel()

    async def run(self, unsent: bytes) -> None:
        while True:
            weather = self._weather
            if weather.fate is not None and self._forwarded >= weather.fate_after_bytes:
                if weather.fate == "freeze":
                    await self._changed.wait()
                    continue
                if weather.fate == "half_close":
                    return await self._send_eof()
                return self._connection.end(reset=weather.fate == "reset")
            if not unsent:
                with anyio.CancelScope() as self._receiving:
                    try:
                        unsent = await self._source.receive()
                    except anyio.EndOfStream:
                        return await self._send_eof()
                self._receiving = None
                if not unsent:
                    continue  # The weather has changed.
                await anyio.sleep(weather.latency_seconds)
                continue
            size = 1 if self._forwarded < weather.single_bytes else len(unsent)
            if weather.fate is not None:
                size = min(size, weather.fate_after_bytes - self._forwarded)
            piece, unsent = unsent[:size], unsent[size:]
            self._forwarded += size
            await self._sink.send(piece)

    async def _send_eof(self) -> None:
        try:
            await self._sink.send_eof()
        except RuntimeError as exc:  # So uvloop says that it is closed; of a send, anyio knows that.
            raise anyio.BrokenResourceError from exc


class ProxiedConnection:
    """A client's connection and the server's, with the weather between them."""

    def __init__(self, client: SocketStream, server: SocketStream) -> None:
        self._streams = (client, server)
        self._flows: dict[Direction, _Flow] = {"up": _Flow(self, client, server), "down": _Flow(self, server, client)}
        self._scope = anyio.CancelScope()

    def switch(self, direction: Direction, weather: Weather) -> None:
        """Change the weather of an open connection; an immediate end also ends a send that is blocked."""
        if weather.fate in ("reset", "close") and weather.fate_after_bytes == 0:
            self.end(reset=weather.fate == "reset")
        else:
            self._flows[direction].switch(weather)

    def end(self, *, reset: bool) -> None:
        """End both connections, with an RST or cleanly."""
        if reset:
            for stream in self._streams:
                reset_when_closed(stream)
        self._scope.cancel()

    async def run(self, unsent: bytes) -> None:
        """Forward until both directions are over, or one is broken: then the other side is reset, too."""
        with self._scope:
            async with anyio.create_task_group() as flows:
                flows.start_soon(self._run_flow, "up", unsent)
                flows.start_soon(self._run_flow, "down", b"")

    async def _run_flow(self, direction: Direction, unsent: bytes) -> None:
        try:
            await self._flows[direction].run(unsent)
        except _GONE:
            self.end(reset=True)


class FaultProxy:
    """Forwards to a server on the loopback address, in the weather that a policy chooses.

    Attributes:
        port: Where it listens.
        open_connections: Now.
    """

    def __init__(self, server_port: int, policy: Policy) -> None:
        self.port = 0
        self.open_connections = 0
        self._server_port = server_port
        self._policy = policy

    async def serve(self, client: SocketStream) -> None:
        """Forward one connection."""
        self.open_connections += 1
        try:
            async with client:
                head = await self._read_head(client)
                forecast = self._policy.forecast(head)
                async with await anyio.connect_tcp("127.0.0.1", self._server_port) as server:
                    for stream in (client, server):
                        set_option(stream, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
                        set_option(stream, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
                    connection = ProxiedConnection(client, server)
                    connection.switch("up", forecast.up)
                    connection.switch("down", forecast.down)
                    self._policy.opened(head, connection)
                    await connection.run(head)
        except (*_GONE, anyio.EndOfStream):
            pass  # Gone before it was forwarded, or while it was closed.
        finally:
            self.open_connections -= 1

    async def _read_head(self, client: SocketStream) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
            head += await client.receive()
        return head


@asynccontextmanager
async def proxied(server_port: int, policy: Policy) -> AsyncIterator[FaultProxy]:
    """Listen in front of a server; at the end every connection is cut."""
    proxy = FaultProxy(server_port, policy)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        proxy.port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, proxy.serve)
            try:
                yield proxy
            finally:
                tasks.cancel_scope.cancel()
