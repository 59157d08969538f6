"""Who waits for which events, in this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import anyio

from mcp_resumable.redis.answers import bytes_of, text_of

__all__ = ["Channel", "Doorbell", "Waiter"]


@dataclass(eq=False, slots=True)
class Waiter:
    """A reader that waits for what follows `after_seq` in a stream."""

    name: str
    after_seq: int
    rung: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False, slots=True)
class Channel:
    """What this process hears of a session.

    Attributes:
        waiters: Its readers that wait.
        is_subscribed: The server has said that it will tell.
        changes: Counts what may concern all streams.
        marks: Highest seq heard of each stream that is being read.
        consumers: Of each stream, the number of the newest consumer that was read.
        read_dry: Of each stream: after which seq a read found nothing, and how many changes were known before it.
    """

    waiters: set[Waiter] = field(default_factory=set[Waiter])
    is_subscribed: bool = False
    changes: int = 0
    marks: dict[str, int] = field(default_factory=dict[str, int])
    consumers: dict[str, int] = field(default_factory=dict[str, int])
    read_dry: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def is_dry(self, name: str, after_seq: int) -> bool:
        """Tell whether all that followed `after_seq` is still to come, and will be heard."""
        return (
            self.is_subscribed
            and self.read_dry.get(name) == (after_seq, self.changes)
            and self.marks.get(name, 0) <= after_seq
        )

    def ring(self) -> None:
        """Wake all who wait."""
        self.changes += 1
        for waiter in self.waiters:
            waiter.rung.set()


class Doorbell:
    """The readers of this process, by session; each session has a channel."""

    def __init__(self, key_prefix: str) -> None:
        self._prefix = f"{key_prefix}d:".encode()
        self.channels: dict[bytes, Channel] = {}

    def name(self, session_id: str) -> bytes:
        """Return the name of a session's channel."""
        return self._prefix + bytes_of(session_id)

    def session_of(self, name: bytes) -> str:
        """Return the session of a channel."""
        return text_of(name[len(self._prefix) :])

    def find(self, session_id: str) -> Channel | None:
        """Return a session's channel, if anybody reads it."""
        return self.channels.get(self.name(session_id))

    def forget_unused(self) -> list[bytes]:
        """Forget the channels that nobody waits for, and return their names."""
        unused = [name for name, channel in self.channels.items() if not channel.waiters]
        for name in unused:
            del self.channels[name]
        return unused

    def ring(self, session_id: str, stream: str, seq: int) -> None:
        """Wake those who wait for an event of a stream up to `seq`."""
        channel = self.find(session_id)
        if channel is not None:
            if stream in channel.marks:
                channel.marks[stream] = max(seq, channel.marks[stream])
            for waiter in channel.waiters:
                if waiter.name == stream and waiter.after_seq < seq:
                    waiter.rung.set()

    def ring_session(self, session_id: str) -> None:
        """Wake all who read a session."""
        channel = self.find(session_id)
        if channel is not None:
            channel.ring()

    def ring_share(self, number: int, of: int) -> None:
        """Wake one share of all."""
        for channel in islice(self.channels.values(), number, None, of):
            channel.ring()

    def ring_all(self) -> None:
        """Wake all."""
        self.ring_share(0, 1)

    def disconnected(self) -> None:
        """Note that nothing will be heard until each channel is subscribed to again."""
        for channel in self.channels.values():
            channel.is_subscribed = False
