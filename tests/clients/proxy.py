"""A TCP proxy that knows a call's connections from a session's standalone ones, and resets either kind on demand.

It resets with RST, at an exact SSE event where it is told so beforehand; and it holds back the requests of a client
that comes again, until it is told to let them in.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from tests.in_loop import stop_listening

__all__ = ["CuttingProxy", "Kind", "cutting_proxy"]

Kind = Literal["call", "standalone"]
"""What a connection carries: a tool call's stream (its POST, or a resume of it), or the standalone stream."""

_METHOD = re.compile(rb"(GET|POST|DELETE) ")
_LAST_EVENT_ID = re.compile(rb"^last-event-id: *(\S+)", re.IGNORECASE | re.MULTILINE)
_SEQ = re.compile(rb"^id: \S+:(\d+)\r$", re.MULTILINE)
_END_OF_FRAME = b"\r\n\r\n"
_CHUNK = 65_536


@dataclass(eq=False)
class _Link:
    """One connection of a client, and the one to the server that stands for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    kind: Kind | None = None  # Of the request that it carries now.
    share: int | None = None  # SSE messages that it may still carry; None for any number.
    unread: bytes = b""  # Of the response: what follows the last complete frame.

    def reset(self) -> None:
        for writer in (self.client, self.server):
            sock: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class CuttingProxy:
    """Forwards to a server on the loopback address.

    Attributes:
        port: Where it listens.
        cuts: Connections that it has reset.
    """

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.cuts = 0
        self._server_port = server_port
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[Kind, asyncio.Event] = {}
        self._shares: dict[Kind, int] = {}
        self._carried: dict[Kind, int] = {"call": 0, "standalone": 0}
        self._changed = asyncio.Event()

    def hold_back(self, kind: Kind) -> None:
        """Let requests that open a stream of this kind wait until `let_in`."""
        self._held[kind] = asyncio.Event()

    def let_in(self, kind: Kind) -> None:
        """Forward requests that were held back, and those to come."""
        self._held.pop(kind).set()

    def cut(self, kind: Kind) -> None:
        """Reset the connections that carry a stream of this kind, and hold back who comes again."""
        self.hold_back(kind)
        for link in [link for link in self._links if link.kind == kind]:
            self._reset(link)

    def cut_next(self, kind: Kind, *, after: int) -> None:
        """Reset the next connection of this kind after so many SSE messages; 0: instead of its response."""
        self._shares[kind] = after

    async def until_carried(self, kind: Kind, seq: int) -> None:
        """Wait until the event with this seq has been carried."""
        await self._until(lambda: self._carried[kind] >= seq)

    async def until_cuts(self, cuts: int) -> None:
        """Wait until that many connections have been reset."""
        await self._until(lambda: self.cuts >= cuts)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _has_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _reset(self, link: _Link) -> None:
        self._links.discard(link)
        link.reset()
        self.cuts += 1
        self._has_changed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            link = _Link(writer, server_writer)
            self._links.add(link)
            try:
                ways = [
                    asyncio.ensure_future(self._forward_requests(reader, link)),
                    asyncio.ensure_future(self._forward_responses(server_reader, link)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                self._links.discard(link)
                server_writer.close()
        except asyncio.CancelledError:
            pass  # The proxy is being closed; the stream protocol of asyncio has no use for the news.
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _forward_requests(self, reader: asyncio.StreamReader, link: _Link) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                if _METHOD.match(data):
                    link.kind, link.share, link.unread = None, None, b""
                if link.kind is None:
                    link.kind = _kind_of(data)
                    if link.kind is not None:
                        if link.kind in self._held:
                            await self._held[link.kind].wait()
                        link.share = self._shares.pop(link.kind, None)
                link.server.write(data)
                await link.server.drain()

    async def _forward_responses(self, reader: asyncio.StreamReader, link: _Link) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                if link.kind is None:
                    link.client.write(data)
                elif not self._forward_frames(data, link, link.kind):
                    return
                await link.client.drain()

    def _forward_frames(self, data: bytes, link: _Link, kind: Kind) -> bool:
        """Forward what may be forwarded; return whether the connection lives."""
        if link.share == 0:
            self._reset(link)
            return False
        if link.share is None:
            link.client.write(data)
        *frames, link.unread = (link.unread + data).split(_END_OF_FRAME)
        for frame in frames:
            if link.share is not None:
                link.client.write(frame + _END_OF_FRAME)
            if b"data: {" not in frame:
                continue
            if (seq := _SEQ.search(frame)) is not None:
                self._carried[kind] = max(self._carried[kind], int(seq[1]))
                self._has_changed()
            if link.share is not None:
                link.share -= 1
                if link.share == 0:
                    self._reset(link)
                    return False
        return True

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _kind_of(request: bytes) -> Kind | None:
    if request.startswith(b"GET "):
        claim = _LAST_EVENT_ID.search(request)
        return "standalone" if claim is None or b":0:" in claim[1] else "call"
    return "call" if b'"tools/call"' in request else None


@asynccontextmanager
async def cutting_proxy(server_port: int) -> AsyncIterator[CuttingProxy]:
    """Listen in front of a server."""
    proxy = CuttingProxy(server_port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        await stop_listening([listener])
        await proxy.close()
