"""What a backend owes: subclass `Storage` to keep sessions, generations and events in your own database.

A storage holds, for each session that is not over, its current generation, and for each stream of that generation its
events by seq. It decides nothing: it answers `snapshot`, and `mcp_resumable.decision` decides. Six promises carry all
the safety, and `mcp_resumable.testing.StorageContract` checks each:

1. `append` assigns the next seq and stores the event in one atomic step.
2. A writer whose generation is not the session's current one is refused, atomically with the append.
3. A snapshot is one atomic read.
4. A generation number is never issued twice for a session id, also after the session ended or was evicted.
5. Lost metadata makes the session unknown; it never makes it new.
6. Bytes in, the same bytes out, in order, and what was evicted or could not be kept is never passed over in silence.

The public methods are concrete and check their arguments; a subclass writes the ones with a leading underscore. Every
method may raise whatever its backend raises where it cannot answer: the store turns that into a hole (an append) or a
503 (a resume), never into another verdict.
"""

from __future__ import annotations

import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated

import anyio
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mcp_resumable.cursor import STANDALONE, EventCursor, Generation, StreamId
from mcp_resumable.decision import Snapshot

if sys.version_info >= (3, 11):
    from typing import Self
else:
    from typing_extensions import Self

__all__ = [
    "MAX_BATCH_EVENTS",
    "AppendRefusedError",
    "Batch",
    "Retention",
    "SessionDescription",
    "Storage",
    "StreamDescription",
    "new_nonce",
]

MAX_BATCH_EVENTS = 128
"""Events that a reader asks for at a time, and as many as a snapshot brings along at most: what a slow client's
connection holds in memory beside the storage."""

_NONCE_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_NONCE_LENGTH = 12  # log2(36) * 12 = 62 bits; design floor: 60


def new_nonce() -> str:
    """Return the random part of a generation: 12 characters of `[0-9a-z]`, 62 bits, unguessable."""
    return "".join(secrets.choice(_NONCE_ALPHABET) for _ in range(_NONCE_LENGTH))


class Retention(BaseModel):
    """The limits that evict, oldest first. Frozen; nonsense is refused with a message that names the field.

    Bytes are those of the JSON text of the messages. `max_session_bytes` and `max_total_bytes` also charge 72 bytes for
    each event and 1,024 for each stream (what they take in memory beside their text), so that a flood of tiny
    events or streams cannot pass them.

    Attributes:
        max_events: Events of one stream. 10,000: a call that reports progress at 10 Hz for a quarter of an hour.
        max_bytes: Bytes of one stream, and of one event: a larger one is delivered live and becomes a hole.
            8 MiB: twice the SDK's default limit for a request body.
        max_session_bytes: Bytes of one session. 32 MiB: several full streams, and one session cannot take the store.
        max_total_bytes: Bytes of all sessions. 256 MiB: what a small container can spare.
        max_sessions: Sessions; the least recently active goes first. 10,000: the SDK's own default limit.
        completed_seconds: How long a stream is kept after its answer. 300: clients give up reconnecting long before.
        idle_seconds: How long a session is kept without any activity or unanswered request. 3,600: twice the SDK's
            default idle time-out, so that the SDK is first to end a session.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_events: Annotated[int, Field(ge=1, strict=True)] = 10_000
    max_bytes: Annotated[int, Field(ge=1, strict=True)] = 8 * 1024 * 1024
    max_session_bytes: Annotated[int, Field(ge=1, strict=True)] = 32 * 1024 * 1024
    max_total_bytes: Annotated[int, Field(ge=1, strict=True)] = 256 * 1024 * 1024
    max_sessions: Annotated[int, Field(ge=1, strict=True)] = 10_000
    completed_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 300.0
    idle_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 3_600.0

    @model_validator(mode="after")
    def _limits_contain_one_another(self) -> Retention:
        if self.max_bytes > self.max_session_bytes:
            raise ValueError("max_bytes is larger than max_session_bytes: no stream could ever hold it")
        if self.max_session_bytes > self.max_total_bytes:
            raise ValueError("max_session_bytes is larger than max_total_bytes: no session could ever hold it")
        return self


class AppendRefusedError(Exception):
    """Raised when a storage refuses a write: the writer, its session or its stream is no longer current.

    Attributes:
        current: The session's current generation, or None where the session is unknown or over.
    """

    def __init__(self, current: Generation | None) -> None:
        super().__init__(current)
        self.current = current

    def __str__(self) -> str:
        """Return the message for people."""
        if self.current is None:
            return "the session is unknown or over"
        return f"the stream takes no more events (current generation {self.current})"


@dataclass(slots=True)  # Not frozen, for the reason that `mcp_resumable.decision` gives.
class Batch:
    """What follows a place in a stream.

    Attributes:
        events: In ascending seq, without a break, beginning right after the place asked for; None is a hole.
        is_terminal: Whether nothing can follow `events`: the last of them is the answer, or, where it is empty, the
            place asked for was.
    """

    events: Sequence[bytes | None]
    is_terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """What is known of one stream, for people.

    Attributes:
        stream: Its id in wire spelling, e.g. `5.Nw`; `0` is the standalone stream.
        request_id: The JSON-RPC request id as text, None for the standalone stream.
        replay_floor: Lowest cursor seq that resumes.
        high_water_mark: Highest seq ever assigned.
        is_terminal: Whether it has its answer.
        retained_events: Events that can be replayed.
        retained_bytes: Bytes of their JSON text.
    """

    stream: str
    request_id: str | None
    replay_floor: int
    high_water_mark: int
    is_terminal: bool
    retained_events: int
    retained_bytes: int

    def __str__(self) -> str:
        """Return one line."""
        name = "standalone" if self.stream == "0" else f"request {self.request_id!a}"
        state = "completed" if self.is_terminal else "open"
        return (
            f"stream {self.stream} ({name}): seq {self.replay_floor}..{self.high_water_mark}, {state}, "
            f"{self.retained_events} events, {self.retained_bytes} bytes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDescription:
    """What is known of one session, for people.

    Attributes:
        session_id: What `Mcp-Session-Id` names.
        generation: Its current generation.
        streams: Its streams in order of opening.
    """

    session_id: str
    generation: Generation
    streams: tuple[StreamDescription, ...]

    @property
    def retained_events(self) -> int:
        """Events that can be replayed, over all streams."""
        return sum(stream.retained_events for stream in self.streams)

    @property
    def retained_bytes(self) -> int:
        """Bytes of their JSON text."""
        return sum(stream.retained_bytes for stream in self.streams)

    def __str__(self) -> str:
        """Return a line for the session and one for each stream."""
        head = (
            f"session {self.session_id!a}: generation {self.generation}, "
            f"{self.retained_events} events, {self.retained_bytes} bytes"
        )
        return "\n".join([head, *(f"  {stream}" for stream in self.streams)])


class Storage(ABC):
    """Sessions, generations and events. Subclass it and write the methods with a leading underscore.

    One instance serves many tasks of one event loop. Every method must be atomic against every other call for the same
    session, from this process or another; calls for different sessions may interleave freely.
    """

    poll_seconds = 0.25
    """How often `wait` looks again where the backend cannot wake it. A backend that can overrides `_wait`."""

    def __init__(self, *, retention: Retention | None = None, nonce: Callable[[], str] = new_nonce) -> None:
        """Keep what `retention` allows.

        Args:
            retention: The limits that evict; bounded defaults.
            nonce: Source of generations' random parts; for tests.
        """
        self.retention = retention if retention is not None else Retention()
        self.new_nonce = nonce
        self.evicted_events = 0
        """Events that retention has evicted since this instance was made, as far as the backend can tell."""

    @property
    def charged_bytes(self) -> int | None:
        """Bytes that count against `retention.max_total_bytes`; None where only a scan could tell. From any thread."""
        return None

    async def open_session(self, session_id: str, *, nonce: str | None = None) -> Generation:
        """Begin a session, or a session id's next life: claim its next generation and make it current.

        All streams and events of earlier generations are gone when this returns, and their writers are refused.

        Args:
            session_id: What `Mcp-Session-Id` names.
            nonce: The random part, where one was promised to a client before the session id was known.

        Returns:
            A generation whose counter is higher than any issued for this session id before; 1 for a new one.
        """
        generation = await self._claim_generation(session_id, nonce or self.new_nonce(), create=True)
        assert generation is not None, "create=True always claims"
        return generation

    async def advance_generation(self, session_id: str, *, nonce: str | None = None) -> Generation | None:
        """Claim the next generation of a session that is not over and make it current, as `open_session` does.

        Args:
            session_id: What `Mcp-Session-Id` names.
            nonce: The random part, for who wants to know the generation again should this fail and yet take effect.

        Returns:
            The new generation, or None (and nothing changed) where the session is unknown or over.
        """
        return await self._claim_generation(session_id, nonce or self.new_nonce(), create=False)

    async def open_stream(
        self, session_id: str, generation: Generation, request_id: str, *, origin: tuple[int, int] | None = None
    ) -> StreamId:
        """Open a stream for an execution of a request; an earlier one of the same request id is superseded.

        A superseded stream takes no more events and keeps none. The standalone stream is open from the beginning of
        each generation and is never superseded.

        Args:
            session_id: What `Mcp-Session-Id` names.
            generation: The writer's.
            request_id: The JSON-RPC request id as text; any text.
            origin: Where the same call began: (generation counter, ordinal) of its first stream. None: here.

        Returns:
            The stream's id; ordinals count from 1 within the generation.

        Raises:
            AppendRefusedError: When `generation` is not the session's current one.
        """
        return await self._open_stream(session_id, generation, request_id, origin)

    async def append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        *,
        is_terminal: bool = False,
    ) -> int:
        """Assign the next seqs of the stream to `events` and store them, as one atomic step.

        Where this raises anything but `AppendRefusedError`, the caller takes the events as lost and says so with holes
        in a later append.

        Args:
            session_id: What `Mcp-Session-Id` names.
            generation: The writer's.
            stream: As `open_stream` returned it, or the standalone stream.
            events: At least one; each at most `retention.max_bytes` long. None takes a seq and is a hole.
            is_terminal: Whether the last of `events` is the answer; nothing follows it.

        Returns:
            The seq of the last of `events`.

        Raises:
            AppendRefusedError: When `generation` is not the session's current one, or the stream is terminal,
                superseded or unknown. Nothing was stored.
            ValueError: When `events` is empty or one of them is too long, or for an answer on the standalone stream.
        """
        max_bytes = self.retention.max_bytes
        for event in events:
            if event is not None and len(event) > max_bytes:
                raise ValueError(f"an event of {len(event)} bytes is larger than retention.max_bytes ({max_bytes})")
        if not events:
            raise ValueError("events is empty")
        if is_terminal and stream == STANDALONE:
            raise ValueError("the standalone stream has no answer")
        return await self._append(session_id, generation, stream, events, is_terminal)

    async def snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        """Read, in one atomic step, all that a decision about `cursor` needs.

        Args:
            session_id: What `Mcp-Session-Id` names.
            cursor: The claim. None (a malformed one) asks only whether the session is known; `claimed` and `stream`
                of the answer then mean nothing.

        Returns:
            The snapshot, or None where the session is unknown, over, evicted, or its metadata is lost.
        """
        return await self._snapshot(session_id, cursor)

    async def read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        """Return up to `limit` places that follow `after_seq`.

        Args:
            session_id: What `Mcp-Session-Id` names.
            generation: The reader's.
            stream: The stream to read.
            after_seq: The last seq that the reader has; 0 for none.
            limit: At least 1.

        Returns:
            The places, perhaps none yet; or None where what follows can no longer be told without a break: the
            generation is not current, the stream is superseded or no longer retained, or `after_seq` is below the
            replay floor or above the high-water mark.
        """
        return await self._read(session_id, generation, stream, after_seq, limit)

    async def wait(self, session_id: str, generation: Generation, stream: StreamId, after_seq: int) -> None:
        """Return as soon as `read` would answer something new: an event after `after_seq`, the end, or None.

        May return early for no reason. Must not miss an append that happens between a `read` and this call.
        """
        await self._wait(session_id, generation, stream, after_seq)

    async def end_session(self, session_id: str, *, generation: Generation | None = None) -> bool:
        """End a session: its events are gone, its writers are refused and its readers are woken.

        Its generation numbers stay used for `retention.idle_seconds`, for the last `retention.max_sessions` sessions at
        least; after that the random part still tells its generations from new ones.

        Args:
            session_id: What `Mcp-Session-Id` names.
            generation: The writer's, where it is the writer that ends: nothing happens if another has claimed the
                session since. None ends it whoever writes it.

        Returns:
            Whether a session was ended.
        """
        return await self._end_session(session_id, generation)

    async def describe(self, session_id: str) -> SessionDescription | None:
        """Return what is known of a session, for people, or None where it is unknown or over."""
        return await self._describe(session_id)

    async def aclose(self) -> None:  # noqa: B027  # most storages have nothing to release
        """Release what this instance opened itself; what was handed to it stays open. Idempotent."""

    async def __aenter__(self) -> Self:
        """Return the storage; leaving the context closes it."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the storage."""
        await self.aclose()

    @abstractmethod
    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        """Claim the next generation atomically, as `open_session` and `advance_generation` say.

        Returns:
            The generation; None where the session is unknown or over and `create` is false.
        """

    @abstractmethod
    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        """See `open_stream`; build the id with `StreamId.of_request`."""

    @abstractmethod
    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        """See `append`; the arguments are checked."""

    @abstractmethod
    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        """See `snapshot`."""

    @abstractmethod
    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        """See `read`."""

    async def _wait(  # the default needs no argument
        self,
        session_id: str,  # noqa: ARG002
        generation: Generation,  # noqa: ARG002
        stream: StreamId,  # noqa: ARG002
        after_seq: int,  # noqa: ARG002
    ) -> None:
        """See `wait`; the default polls once every `poll_seconds`."""
        await anyio.sleep(self.poll_seconds)

    @abstractmethod
    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        """See `end_session`; comparing and ending are one atomic step."""

    @abstractmethod
    async def _describe(self, session_id: str) -> SessionDescription | None:
        """See `describe`."""
