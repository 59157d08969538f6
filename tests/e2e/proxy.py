"""A TCP proxy that breaks connections: it cuts what carries a tool's stream, and holds back who comes again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import SocketAttribute, SocketStream

from tests.sockets import reset_when_closed

__all__ = ["Proxy", "proxied"]


class Proxy:
    """Forwards to a server on the loopback address.

    A connection carries a tool's stream once the client has sent a `tools/call` or a `Last-Event-ID` on it. The
    messages of SSE that the server sends on such a connection are counted, and it is reset after its share of them.

    Attributes:
        port: Where it listens.
        cuts: Connections that it has reset.
        passing: Set while connections are taken; others wait.
    """

    def __init__(self, server_port: int, messages: Iterable[int]) -> None:
        self.port = 0
        self.cuts = 0
        self.passing = anyio.Event()
        self.passing.set()
        self._server_port = server_port
        # How many messages each stream's connection may carry, in order; those that come later carry any number.
        self._shares = iter(messages)
        self._carried = 0
        self._progress = anyio.Event()
        self._streams: list[tuple[SocketStream, SocketStream]] = []

    def stop_taking(self) -> None:
        """Let new connections wait until `passing` is set again."""
        self.passing = anyio.Event()

    async def until_carried(self, messages: int) -> None:
        """Wait until tool streams' connections have carried that many messages."""
        while self._carried < messages:
            await self._progress.wait()

    async def cut(self) -> None:
        """Reset every connection that carries a tool's stream."""
        for pair in self._streams:
            await self._reset(*pair)
        self._streams.clear()

    async def serve(self, client: SocketStream) -> None:
        """Forward one connection."""
        async with client:
            await self.passing.wait()
            async with await anyio.connect_tcp("127.0.0.1", self._server_port) as server:
                share: list[int | None] = [None]
                async with anyio.create_task_group() as directions:
                    directions.start_soon(self._forward_requests, client, server, share, directions.cancel_scope)
                    directions.start_soon(self._forward_responses, client, server, share, directions.cancel_scope)

    async def _forward_requests(
        self, client: SocketStream, server: SocketStream, share: list[int | None], scope: anyio.CancelScope
    ) -> None:
        try:
            async for data in client:
                if share[0] is None and (b"tools/call" in data or b"last-event-id:" in data.lower()):
                    share[0] = next(self._shares, 1_000_000)
                    self._streams.append((client, server))
                await server.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()

    async def _forward_responses(
        self, client: SocketStream, server: SocketStream, share: list[int | None], scope: anyio.CancelScope
    ) -> None:
        try:
            async for data in server:
                await client.send(data)
                if share[0] is not None:
                    messages = data.count(b"data: {")
                    self._carried += messages
                    self._progress.set()
                    self._progress = anyio.Event()
                    share[0] -= messages
                    if share[0] <= 0:
                        await self._reset(client, server)
                        break
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()

    async def _reset(self, *streams: SocketStream) -> None:
        self.cuts += 1
        for stream in streams:
            reset_when_closed(stream)
            await stream.aclose()


@asynccontextmanager
async def proxied(server_port: int, messages: Iterable[int] = ()) -> AsyncIterator[Proxy]:
    """Listen in front of a server; `messages` is how many the first tool streams' connections carry before the cut."""
    proxy = Proxy(server_port, messages)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        proxy.port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, proxy.serve)
            yield proxy
            tasks.cancel_scope.cancel()
