"""One connection that listens for all readers of this process, and for what its worker is told."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (redis-py is annotated in part)

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from mcp_resumable.redis.answers import text_of
from mcp_resumable.redis.calls import Calls
from mcp_resumable.redis.doorbell import Channel, Doorbell, Waiter
from mcp_resumable.redis.scripts import writing
from mcp_resumable.shared import Worker

__all__ = ["Listener"]

logger = logging.getLogger("mcp_resumable")

# How long the doorbell is quiet before channels that nobody waits for are given up.
_LISTEN_SECONDS = 5.0
# How long after the connection broke it is made again.
_PAUSE_SECONDS = 0.5


class Listener:
    """Hears what the channels say."""

    def __init__(self, calls: Calls, doorbell: Doorbell, workers: Sequence[Worker], *, own_channel: str) -> None:
        self._calls = calls
        self._doorbell = doorbell
        self._workers = workers
        self._notices = own_channel.encode()
        self._pubsub: PubSub | None = None

    async def wait(self, session_id: str, name: str, after_seq: int) -> None:
        """Return once there may be something to read after a seq of a stream. See `Storage.wait`."""
        waiter = Waiter(name, after_seq)
        channel = self._doorbell.find(session_id)
        is_new = channel is None
        if channel is None:
            channel = self._doorbell.channels[self._doorbell.name(session_id)] = Channel()
        elif channel.is_subscribed and not channel.is_dry(name, after_seq):
            # Something came since the caller read, or this is asked without a read: let it read again.
            await anyio.lowlevel.checkpoint()
            return
        # No await between that test and this. A channel that is not subscribed to rings once it is.
        channel.waiters.add(waiter)
        try:
            if is_new:
                await self._subscribe(self._doorbell.name(session_id))
            await waiter.rung.wait()
        finally:
            channel.waiters.discard(waiter)
            if not any(other.name == name for other in channel.waiters):
                channel.marks.pop(name, None)
                channel.read_dry.pop(name, None)
                channel.consumers.pop(name, None)

    async def listen(self) -> None:
        """Pass on what the channels say, over one connection that is made again whenever it breaks."""
        while True:
            pubsub = self._calls.client.pubsub()
            try:
                with writing():
                    await self._listen_on(pubsub)
            except (RedisError, OSError, TimeoutError) as exc:
                logger.debug("The doorbell's connection broke: %s", ascii(str(exc) or type(exc).__name__))
            finally:
                self._pubsub = None
                self._doorbell.disconnected()
                with anyio.CancelScope(shield=True):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]  # redis-py has not annotated it
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _listen_on(self, pubsub: PubSub) -> None:
        await pubsub.subscribe(self._notices, *self._doorbell.channels)
        # From here on `_subscribe` adds what readers ask for; what they asked for meanwhile is added now.
        self._pubsub = pubsub
        self._calls.is_same_server = False
        missing = [channel for channel in self._doorbell.channels if channel not in pubsub.channels]
        if missing:
            await pubsub.subscribe(*missing)
        while True:
            message = await pubsub.get_message(timeout=_LISTEN_SECONDS)
            if message is not None:
                # A ValueError: no message of ours, or the one that asked whether it may be sent.
                with contextlib.suppress(ValueError):
                    await self._hear(message)
            elif unused := self._doorbell.forget_unused():
                await pubsub.unsubscribe(*unused)

    async def _subscribe(self, channel: bytes) -> None:
        if self._pubsub is not None:
            try:
                with writing():
                    await self._pubsub.subscribe(channel)
            except (RedisError, OSError):
                return  # The listener notices too, and subscribes to everything again.

    async def _hear(self, message: dict[str, Any]) -> None:
        name: bytes = message["channel"]
        channel = self._doorbell.channels.get(name)
        data: bytes = message["data"]
        if message["type"] == "message" and name == self._notices:
            await self._hear_notice(data)
        elif channel is None:
            return  # Nobody reads this session any more.
        elif message["type"] == "subscribe":
            channel.is_subscribed = True
            channel.ring()
        elif message["type"] == "message":
            session_id = self._doorbell.session_of(name)
            if data == b"*":
                channel.ring()
            elif data.startswith(b"+ "):
                _, number, stream = data.split(b" ")
                self.tell_taken_over(session_id, stream.decode(), int(number))
            else:
                stream, _, seq = data.partition(b" ")
                self._doorbell.ring(session_id, stream.decode(), int(seq))

    async def _hear_notice(self, data: bytes) -> None:
        kind, number, name, session = data.split(b" ", 3)
        session_id = text_of(session)
        if kind == b"taken":
            self.tell_taken_over(session_id, name.decode(), int(number))
        else:
            for worker in self._workers:
                await worker.on_moved(session_id, is_ended=kind == b"ended")

    def tell_taken_over(self, session_id: str, name: str, number: int) -> None:
        """Say that a stream's newest consumer has this number."""
        for worker in self._workers:
            worker.on_taken_over(session_id, name, number)
