"""A TCP proxy in front of a Redis server: a service name that can be made to mean another one, and a bad network.

A request is known by bytes that it carries: the client sends one at a time on each connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import SocketAttribute, SocketStream

from tests.sockets import reset_when_closed, shut_down

__all__ = ["Fault", "Proxy", "proxied"]

_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


@dataclass(eq=False)
class Fault:
    """What befalls one request: it is executed, but its connection is reset instead of being answered.

    Attributes:
        mark: Bytes that the request carries.
        arrived: Set when the proxy has the request.
        released: Only once this is set it is forwarded, whether or not the client has given it up.
        executed: Set when the server has answered it.
    """

    mark: bytes
    arrived: anyio.Event = field(default_factory=anyio.Event)
    released: anyio.Event = field(default_factory=anyio.Event)
    executed: anyio.Event = field(default_factory=anyio.Event)


class Proxy:
    """Forwards to a server on the loopback address.

    Attributes:
        port: Where it listens.
        server_port: Where it forwards new connections to; None resets them.
    """

    def __init__(self, server_port: int | None) -> None:
        self.port = 0
        self.server_port = server_port
        self._faults: list[Fault] = []
        self._clients: set[SocketStream] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def point_at(self, server_port: int | None) -> None:
        """Lead new connections elsewhere, and reset the open ones."""
        self.server_port = server_port
        for client in self._clients:
            reset_when_closed(client)
            # Wakes both sides; whoever serves the connection closes it.
            shut_down(client)

    def cut(self, mark: bytes) -> Fault:
        """Reset the connection of the next request with `mark` instead of answering it."""
        fault = self.hold(mark)
        fault.released.set()
        return fault

    def hold(self, mark: bytes) -> Fault:
        """Keep the next request with `mark` on its way; it arrives when `released` is set, and is not answered."""
        fault = Fault(mark)
        self._faults.append(fault)
        return fault

    async def serve(self, client: SocketStream) -> None:
        """Forward one connection."""
        self._clients.add(client)
        try:
            async with client:
                if self.server_port is None:
                    reset_when_closed(client)
                    return
                async with await anyio.connect_tcp("127.0.0.1", self.server_port) as server:
                    await self._forward(client, server)
        except _GONE:
            pass
        finally:
            self._clients.discard(client)

    async def _forward(self, client: SocketStream, server: SocketStream) -> None:
        unanswered: list[Fault] = []
        async with anyio.create_task_group() as directions:

            async def forward_requests() -> None:
                try:
                    async for data in client:
                        for fault in [fault for fault in self._faults if fault.mark in data]:
                            self._faults.remove(fault)
                            unanswered.append(fault)
                            fault.arrived.set()
                            await fault.released.wait()
                        await server.send(data)
                except _GONE:
                    pass
                for fault in unanswered:
                    # Closed before the server has read it, the connection would take it along.
                    await fault.executed.wait()
                directions.cancel_scope.cancel()

            async def forward_answers() -> None:
                try:
                    async for data in server:
                        if unanswered:
                            reset_when_closed(client)
                            unanswered[0].executed.set()
                            break
                        await client.send(data)
                except _GONE:
                    pass
                directions.cancel_scope.cancel()

            directions.start_soon(forward_requests)
            directions.start_soon(forward_answers)


@asynccontextmanager
async def proxied(server_port: int | None) -> AsyncIterator[Proxy]:
    """Listen in front of a server; at the end every connection is cut."""
    proxy = Proxy(server_port)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        proxy.port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, proxy.serve)
            try:
                yield proxy
            finally:
                tasks.cancel_scope.cancel()
