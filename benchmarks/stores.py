"""The stores that are compared, each behind the same few methods, and used as its own documentation says.

Limits are raised where a store would else not retain what is measured; `retained` tells how.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import MutableSequence, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import JSONRPCMessage
from typing_extensions import Self

from benchmarks.events import SMALL_BYTES, answer, json_text, notification
from benchmarks.measure import NotMeasuredError
from mcp_resumable import MemoryStorage, ResumableEventStore, ResumptionError, Retention, Storage
from mcp_resumable.session import Connection, Exchange, SessionBinding, current_exchange

__all__ = [
    "BASELINE",
    "LIMITS",
    "OURS",
    "STORES",
    "FastMCP4",
    "MCPPersistBatching",
    "MCPPersistRedis",
    "OursEvicting",
    "SDKExample",
    "Stream",
    "Subject",
    "store_named",
]

# More than any part retains: 200,000 events, some 60 MB.
_MAX_EVENTS = 300_000
_AMPLE = Retention(
    max_events=_MAX_EVENTS, max_bytes=2**30, max_session_bytes=2**31, max_total_bytes=2**32, max_sessions=100_000
)

_FILL_BATCH = 1_000
_REQUEST_ID = 1


@dataclass(eq=False)
class Stream:
    """One stream of one session.

    Attributes:
        store: What the SDK would call.
        stream_id: What it would pass.
        event_ids: Of the events that are retained, in order.
    """

    store: EventStore
    stream_id: str
    event_ids: MutableSequence[str] = field(default_factory=list[str])

    def enter(self) -> None:
        """Do, in the task that appends, what is done before the store is called."""

    def enter_resume(self) -> None:
        """Do, in the task that resumes, what is done for each resuming GET before the store is called."""

    async def finish(self) -> None:
        """Append the answer."""
        self.event_ids.append(await self.store.store_event(self.stream_id, answer(_REQUEST_ID)))


class Subject(ABC):
    """One store, open."""

    name: ClassVar[str]
    retained: ClassVar[str]
    """Which of its limits are raised."""
    appends_per_sample: ClassVar[int]
    """About a fifth of a second's, so that a millisecond of someone else does not show."""
    manager: type[StreamableHTTPSessionManager] = StreamableHTTPSessionManager
    """What serves it over HTTP."""

    store: EventStore

    def __init__(self, valkey_url: str | None) -> None:
        self.valkey_url = valkey_url
        self.prefix = uuid4().hex
        self.resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open it."""
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release what it opened."""
        await self.resources.aclose()

    @abstractmethod
    async def open(self) -> None:
        """Set `store`."""

    async def open_stream(self, session_id: str) -> Stream:
        """Open the stream of a request of a new session."""
        return Stream(self.store, f"{session_id}:{_REQUEST_ID}")

    async def fill(self, stream: Stream, count: int, text_bytes: int = SMALL_BYTES) -> None:
        """Have the stream retain `count` more events."""
        for number in range(count):
            stream.event_ids.append(await self.store.store_event(stream.stream_id, notification(number, text_bytes)))

    async def stored_bytes(self) -> int | None:
        """Return the bytes that it holds outside of this process; None where it holds all in this one."""
        return None


@dataclass
class _Entry:
    event_id: str
    stream_id: str
    message: JSONRPCMessage | None


class _ExampleEventStore(EventStore):
    """Does what the store of the SDK's example `simple-streamablehttp` does: a bounded deque for each stream."""

    def __init__(self, max_events_per_stream: int) -> None:
        self._max_events = max_events_per_stream
        self._streams: dict[str, deque[_Entry]] = {}
        self._by_id: dict[str, _Entry] = {}

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        entry = _Entry(str(uuid4()), stream_id, message)
        entries = self._streams.setdefault(stream_id, deque(maxlen=self._max_events))
        if len(entries) == self._max_events:
            self._by_id.pop(entries[0].event_id, None)
        entries.append(entry)
        self._by_id[entry.event_id] = entry
        return entry.event_id

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        last = self._by_id.get(last_event_id)
        if last is None:
            return None
        is_after = False
        for entry in self._streams.get(last.stream_id, ()):
            if is_after and entry.message is not None:
                await send_callback(EventMessage(entry.message, entry.event_id))
            elif entry.event_id == last_event_id:
                is_after = True
        return last.stream_id


class SDKExample(Subject):
    """The store of the SDK's example, rewritten."""

    name = "SDK example"
    retained = "raised from 100 events of a stream"
    appends_per_sample = 20_000

    async def open(self) -> None:
        """See `Subject`."""
        self.store = _ExampleEventStore(_MAX_EVENTS)


class _IdOnlyEventStore(EventStore):
    """Has an id for each event, as long as ours are, and keeps nothing."""

    def __init__(self, *, dumps: bool) -> None:
        self._number = 0
        self._dumps = dumps

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        if self._dumps and message is not None:
            message.model_dump_json(by_alias=True, exclude_unset=True)
        self._number += 1
        return f"1-k3v9q0m4x7ta:2.{stream_id}:{self._number}"

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        raise NotImplementedError


class IdOnly(Subject):
    """No store at all: what an id in each event costs the SDK."""

    name = "an id, nothing stored"
    retained = "nothing"
    appends_per_sample = 20_000

    async def open(self) -> None:
        """See `Subject`."""
        self.store = _IdOnlyEventStore(dumps=False)


class IdAndDump(IdOnly):
    """No store at all: an id in each event, and one JSON dump of it, which a store that keeps bytes needs."""

    name = "an id and a JSON dump, nothing stored"

    async def open(self) -> None:
        """See `Subject`."""
        self.store = _IdOnlyEventStore(dumps=True)


class FastMCP4(Subject):
    """PrefectHQ FastMCP's own store, in memory, scoped to a session as its session manager does."""

    name = "fastmcp 4"
    retained = "100 events of a stream, its default, to append; raised to fill, which goes around its append"
    appends_per_sample = 500

    async def open(self) -> None:
        """See `Subject`."""
        from fastmcp.server.event_store import EventStore as FastMCPEventStore
        from fastmcp.server.http import FastMCPStreamableHTTPSessionManager

        self.manager = FastMCPStreamableHTTPSessionManager
        self.store = self._inner = FastMCPEventStore()

    async def open_stream(self, session_id: str) -> Stream:
        """See `Subject`."""
        from fastmcp.server.event_store import SessionScopedEventStore

        return Stream(SessionScopedEventStore(self.store, session_id), str(_REQUEST_ID))

    async def fill(self, stream: Stream, count: int, text_bytes: int = SMALL_BYTES) -> None:
        """See `Subject`. Its own append reads and writes the ids of the whole stream: 200,000 would take hours."""
        from fastmcp.server.event_store import EventEntry, StreamEventList

        inner: Any = self._inner
        scoped: Any = stream.store
        stream_id = scoped._scope_stream_id(stream.stream_id)
        event_ids = [str(uuid4()) for _ in range(count)]
        for number, event_id in enumerate(event_ids):
            message = notification(number, text_bytes).model_dump(mode="json", by_alias=True)
            entry = EventEntry(event_id=event_id, stream_id=stream_id, message=message)
            await inner._event_store.put(key=event_id, value=entry, ttl=3_600)
        inner._max_events_per_stream = _MAX_EVENTS
        await inner._stream_store.put(key=stream_id, value=StreamEventList(event_ids=event_ids), ttl=3_600)
        stream.event_ids += event_ids


class _MCPPersist(Subject):
    retained = "for an hour; no other limit"

    async def open_stream(self, session_id: str) -> Stream:
        from mcp_persist import SessionScopedEventStore

        return Stream(SessionScopedEventStore(self.store, session_id), str(_REQUEST_ID))

    def _use_manager(self) -> None:
        from mcp_persist import SessionScopedSessionManager

        self.manager = SessionScopedSessionManager


class MCPPersistSQLite(_MCPPersist):
    """mcp-persist over SQLite, committed for each event."""

    name = "mcp-persist SQLite"
    appends_per_sample = 250

    async def open(self) -> None:
        """See `Subject`."""
        from mcp_persist import SQLiteEventStore

        self._use_manager()
        directory = self.resources.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        self._path = Path(directory) / "events.db"
        self.store = await self.resources.enter_async_context(SQLiteEventStore.create(str(self._path), ttl=3_600))

    async def fill(self, stream: Stream, count: int, text_bytes: int = SMALL_BYTES) -> None:
        """See `Subject`. Into its table in one transaction: 200,000 of its own commits would take minutes."""
        scoped: Any = stream.store
        stream_id, now = f"{scoped._prefix}{stream.stream_id}", time.time()
        connection = sqlite3.connect(self._path)
        with connection:
            for number in range(count):
                row = (stream_id, json_text(notification(number, text_bytes)), now)
                cursor = connection.execute(
                    "INSERT INTO mcp_events (stream_id, payload, created_at) VALUES (?, ?, ?)", row
                )
                stream.event_ids.append(str(cursor.lastrowid))
        connection.close()

    async def stored_bytes(self) -> int:
        """See `Subject`: of the database file and its log."""
        connection = sqlite3.connect(self._path)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        return sum(path.stat().st_size for path in self._path.parent.iterdir())


class _OverValkey(Subject):
    async def open_client(self) -> Any:
        if self.valkey_url is None:
            raise NotMeasuredError("no Valkey server")
        from redis.asyncio import Redis

        client: Any = Redis.from_url(self.valkey_url)
        self.resources.push_async_callback(client.aclose)
        self._client = client
        return client

    async def stored_bytes(self) -> int:
        return int((await self._client.info("memory"))["used_memory"])


class MCPPersistRedis(_MCPPersist, _OverValkey):
    """mcp-persist over Redis, one round trip for each event."""

    name = "mcp-persist Redis"
    appends_per_sample = 4_000

    async def open(self) -> None:
        """See `Subject`."""
        from mcp_persist import RedisEventStore

        self._use_manager()
        self._inner = RedisEventStore(await self.open_client(), key_prefix=f"peer:{self.prefix}:", ttl=3_600)
        self.store = self._inner

    async def fill(self, stream: Stream, count: int, text_bytes: int = SMALL_BYTES) -> None:
        """See `Subject`. Through its own batching, which writes the same rows."""
        from mcp_persist import BatchingEventStore

        scoped: Any = stream.store
        batching = BatchingEventStore(self._inner, flush_max_events=_FILL_BATCH)
        for number in range(count):
            message = notification(number, text_bytes)
            stream.event_ids.append(await batching.store_event(f"{scoped._prefix}{stream.stream_id}", message))
        await batching.flush()


class MCPPersistBatching(MCPPersistRedis):
    """mcp-persist over Redis with its batching: an event may be up to 50 ms late, and is lost with the process."""

    name = "mcp-persist batching"
    appends_per_sample = 2_000

    async def open(self) -> None:
        """See `Subject`."""
        from mcp_persist import BatchingEventStore

        await super().open()
        batching = BatchingEventStore(self._inner)
        # Not its aclose: that would close the client, which has an owner.
        self.resources.push_async_callback(batching.flush)
        self.store = batching


class _Gate:
    """The response of a resuming GET: accepts all that the store accepts."""

    is_claim = True

    def __init__(self) -> None:
        self.connection = Connection()

    async def accept(self, event_id: str | None) -> None:
        """See `ResumeGate`."""

    def refuse(self, error: ResumptionError) -> None:
        """See `ResumeGate`."""
        raise error


@dataclass(eq=False)
class OurStream(Stream):
    """A stream of ours: the session is bound as the layer binds it."""

    binding: SessionBinding = field(kw_only=True)

    def enter(self) -> None:
        """See `Stream`."""
        current_exchange.set(Exchange(self.binding))

    def enter_resume(self) -> None:
        """See `Stream`."""
        current_exchange.set(Exchange(self.binding, _Gate()))


class _Ours(Subject):
    retained = "all limits raised"
    store: ResumableEventStore

    async def open_stream(self, session_id: str) -> OurStream:
        binding = self.store.bind_session(self, None)
        await self.store.attach_session(binding, session_id)
        call = await binding.begin_call(_REQUEST_ID, Connection())
        call.pipeline = self.store.new_pipeline()
        return OurStream(self.store, str(_REQUEST_ID), binding=binding)


class OursMemory(_Ours):
    """`MemoryStorage`."""

    name = "mcp_resumable memory"
    appends_per_sample = 20_000
    retention = _AMPLE

    async def open(self) -> None:
        """See `Subject`."""
        self.store = ResumableEventStore(MemoryStorage(retention=self.retention))


class OursEvicting(OursMemory):
    """`MemoryStorage` at its limit: from the first thousand on, each append evicts one event."""

    name = "mcp_resumable memory, evicting"
    retention = Retention(max_events=1_000)


class OursRedis(_Ours, _OverValkey):
    """`RedisStorage`."""

    name = "mcp_resumable Redis"
    appends_per_sample = 4_000

    async def open(self) -> None:
        """See `Subject`."""
        try:
            # By name: a version without it can be measured too.
            module: Any = import_module("mcp_resumable.redis")
        except ImportError as exc:
            raise NotMeasuredError("mcp_resumable.redis cannot be imported") from exc
        await self.open_client()  # For `stored_bytes`.
        storage: Storage = module.RedisStorage(self.valkey_url, retention=_AMPLE, prefix=f"ours:{self.prefix}:")
        self.resources.push_async_callback(storage.aclose)
        self.store = ResumableEventStore(storage)

    async def fill(self, stream: Stream, count: int, text_bytes: int = SMALL_BYTES) -> None:
        """See `Subject`. Many events to an append."""
        first = await self.store.store_event(stream.stream_id, notification(0, text_bytes))
        assert isinstance(stream, OurStream)
        binding = stream.binding
        call = binding.calls[stream.stream_id]
        assert binding.session_id is not None
        assert binding.generation is not None
        assert call.stream is not None
        seq = int(first.removeprefix(call.prefix))
        events = [json_text(notification(number, text_bytes)).encode() for number in range(1, count)]
        for start in range(0, len(events), _FILL_BATCH):
            batch = events[start : start + _FILL_BATCH]
            await self.store.storage.append(binding.session_id, binding.generation, call.stream, batch)
        stream.event_ids += [f"{call.prefix}{seq + number}" for number in range(count)]


STORES: Sequence[type[Subject]] = (
    SDKExample,
    FastMCP4,
    MCPPersistSQLite,
    MCPPersistRedis,
    MCPPersistBatching,
    OursMemory,
    OursRedis,
)
BASELINE = SDKExample.name
LIMITS: Sequence[type[Subject]] = (IdOnly, IdAndDump)
"""What no store can be cheaper than."""
OURS: Sequence[type[Subject]] = (OursMemory, OursRedis)


def store_named(name: str) -> type[Subject]:
    """Return the store of that name.

    Raises:
        LookupError: When there is none of that name.
    """
    for kind in (*LIMITS, *STORES):
        if kind.name == name:
            return kind
    raise LookupError(name)
