"""What the public API's types are to those who use it: checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from mcp.server.lowlevel import Server
from mcp.server.streamable_http import EventStore
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from typing_extensions import assert_type

from mcp_resumable import (
    DuplicateRequestIdError,
    EventCursor,
    EventEvictedError,
    FutureEventIdError,
    Generation,
    GenerationMismatchError,
    InvalidEventIdError,
    MalformedEventIdError,
    MemoryStorage,
    RejectionData,
    ReplayGapError,
    ResetRequiredError,
    ResumableEventStore,
    ResumptionError,
    ResumptionLayer,
    Retention,
    SessionNotFoundError,
    Storage,
    StorageUnavailableError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
    rejection_of,
)
from mcp_resumable.testing import StorageContract, StorageHarness

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from mcp_resumable.cursor import StreamId
    from mcp_resumable.decision import Snapshot
    from mcp_resumable.ledger import StoreStats
    from mcp_resumable.storage import Batch, SessionDescription

# A store is what the SDK takes, with or without arguments.
store = ResumableEventStore()
event_store: EventStore = store
ResumableEventStore(MemoryStorage(retention=Retention(max_events=10, completed_seconds=60)), rejection="stream")
ResumableEventStore(replay_completed=False, send_timeout=5, max_tail_seconds=60.0)
ResumableEventStore(rejection="body")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
storage: Storage = store.storage

# The layer is an ASGI app around an ASGI app.
manager = StreamableHTTPSessionManager(app=Server[Any]("typed"), event_store=store)
ResumptionLayer(manager.handle_request, store)
ResumptionLayer(ResumptionLayer(manager.asgi_app, store, retry_interval=500), store)


async def operate(session_id: str) -> None:
    """What an operator calls."""
    assert_type(await store.advance_generation(session_id), Generation)
    assert_type(await store.restart_stream(7), None)
    assert_type(await store.restart_stream("7", session_id), None)
    assert_type(await store.end_session(session_id), None)
    assert_type(await store.describe(session_id), "SessionDescription | None")


def look(description: SessionDescription, stats: StoreStats) -> None:
    """What is there to see."""
    assert_type(description.generation, Generation)
    assert_type(description.streams[0].request_id, "str | None")
    assert_type(description.streams[0].replay_floor, int)
    assert_type(description.retained_bytes, int)
    assert_type(store.stats(), "StoreStats")
    assert_type(stats.decisions, dict[str, int])
    assert_type(stats.open_tails, int)
    assert_type(stats.take_overs, int)
    assert_type(store.storage.charged_bytes, int | None)


def parse(event_id: str) -> None:
    """A cursor is parsed or malformed."""
    cursor = EventCursor.parse(event_id)
    assert_type(cursor, EventCursor | None)
    if cursor is not None:
        assert_type(cursor.generation, Generation)
        assert_type(cursor.stream.request_id, str | None)
        assert_type(cursor.seq, int)
        cursor.seq = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def refuse() -> None:
    """An outcome is caught whole, and says what it is."""
    try:
        ...
    except EventEvictedError as error:
        assert_type(error.seq, int | None)
        assert_type(error.replay_floor, int | None)
        assert_type(error.high_water_mark, int | None)
    except ResetRequiredError as error:
        assert_type(error.generation, str | None)
    except InvalidEventIdError as error:
        assert_type(error.event_id, str | None)
    except StorageUnavailableError as error:
        assert_type(error.retry_after_seconds, int)
    except DuplicateRequestIdError as error:
        assert_type(error.request_id, int | str)
    except ResumptionError as error:
        assert_type(error.status, int)
        assert_type(error.reason, str)
        assert_type(error.outcome, Literal["reset", "invalid", "gone", "retry"])


def hear(error: Exception, body: dict[str, object]) -> None:
    """What a client reads out of what it was told."""
    rejection = rejection_of(error)
    assert_type(rejection, RejectionData | None)
    assert_type(rejection_of(body), RejectionData | None)
    if rejection is not None:
        assert_type(rejection.outcome, Literal["reset", "invalid", "gone", "retry"])
        assert_type(rejection.reason, str)
        assert_type(rejection.generation, str | None)
        assert_type(rejection.replay_floor, int | None)
        assert_type(rejection.retry_after_seconds, int | None)


resets: list[type[ResetRequiredError]] = [
    EventEvictedError,
    GenerationMismatchError,
    ReplayGapError,
    StreamCompletedError,
    StreamSupersededError,
]
invalid: list[type[InvalidEventIdError]] = [FutureEventIdError, MalformedEventIdError, UnrecognizedGenerationError]
others: list[type[ResumptionError]] = [DuplicateRequestIdError, SessionNotFoundError, StorageUnavailableError]


class OwnStorage(Storage):
    """What a backend writes."""

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        raise NotImplementedError

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        raise NotImplementedError

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        raise NotImplementedError

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        raise NotImplementedError

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        raise NotImplementedError

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        raise NotImplementedError

    async def _describe(self, session_id: str) -> SessionDescription | None:
        raise NotImplementedError


ResumableEventStore(OwnStorage(retention=Retention()))


class OwnHarness(StorageHarness):
    """What its tests need."""

    def __init__(self, retention: Retention) -> None:
        self._storage = OwnStorage(retention=retention)

    @property
    def storage(self) -> OwnStorage:
        """The storage under test."""
        return self._storage

    async def lose_metadata(self, session_id: str) -> None:
        """Lose a session."""


class TestOwnStorage(StorageContract):
    """Its tests."""

    @asynccontextmanager
    async def harness(self, retention: Retention) -> AsyncGenerator[OwnHarness]:
        """Open an empty backend."""
        yield OwnHarness(retention)
