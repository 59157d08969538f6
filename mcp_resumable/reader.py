"""The reading side: decides about a claim, and serves what may be served, replay and live tail, from the storage alone.

Between the snapshot of a decision and the registration of the connection there is no await, so whatever supersedes the
stream afterwards finds the connection and closes it. The rest of a complete stream, which nothing can change, may come
with the snapshot. Otherwise each batch is read after that, from where the last one ended:
an event is sent when all before it were, and a place that cannot be told ends the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal

import anyio

from mcp_resumable.cursor import STANDALONE, EventCursor
from mcp_resumable.decision import Decision, Gone, Invalid, Reset, Resume, Retained, Snapshot, decide
from mcp_resumable.errors import (
    GenerationMismatchError,
    InvalidEventIdError,
    ResetRequiredError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
)
from mcp_resumable.ledger import Ledger
from mcp_resumable.rejection import answer_text, marker_text
from mcp_resumable.session import Connection, ResumeGate, SessionBinding
from mcp_resumable.shared import digest_of
from mcp_resumable.storage import MAX_BATCH_EVENTS, AppendRefusedError, Batch, Storage
from mcp_resumable.writer import Writer, known

__all__ = ["Reader", "SendEvent"]

SendEvent = Callable[[str, str | None], Awaitable[None]]
"""Sends one event: its JSON text, and its event id or None."""

# How long the end of a connection may wait for a storage.
_LAST_NOTE_SECONDS = 1.0

# How often a snapshot is read because an append failed, or the generation moved, while it was read. Where retention
# evicts sessions all the time, three times in a row happens; ten times is a session that does nothing else.
_MAX_SNAPSHOT_ATTEMPTS = 10


class _Tail:
    """A connection, and how far it has come in its stream.

    Attributes:
        seq: Of the last event that was handed to the SDK.
        prefix: The event ids of the stream without the seq.
        is_complete: The answer was handed to the SDK.
        batch: What was read last.
    """

    __slots__ = ("batch", "connection", "generation", "is_complete", "prefix", "send", "seq", "stream")

    def __init__(self, event_id: str, cursor: EventCursor, connection: Connection, send: SendEvent) -> None:
        self.generation = cursor.generation
        self.stream = cursor.stream
        self.seq = cursor.seq
        self.prefix = event_id[: event_id.rindex(":") + 1]
        self.connection = connection
        self.send = send
        self.is_complete = False
        self.batch: Batch | None = None


class _Announcement:
    """A new consumer, of which other workers are being told."""

    __slots__ = ("_connection", "_exc", "_is_over")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._exc: Exception | None = None
        self._is_over = anyio.Event()

    def on_ranked(self, rank: int) -> None:
        self._connection.ranked(rank)
        self._is_over.set()

    def on_failed(self, exc: Exception) -> None:
        self._exc = exc
        self._is_over.set()

    async def until_made(self) -> None:
        """Wait until they are told; raise why they cannot be."""
        if not self._is_over.is_set():  # Waiting for what is set costs a turn of the event loop.
            await self._is_over.wait()
        if self._exc is not None:
            raise self._exc


class Reader:
    """Serves sessions from a storage."""

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        ledger: Ledger,
        *,
        rejection: Literal["status", "stream"],
        replay_completed: bool,
        max_tail_seconds: float,
    ) -> None:
        self.storage = storage
        self._shared = writer.shared
        self.writer = writer
        self.ledger = ledger
        self._rejection = rejection
        self._replay_completed = replay_completed
        self._max_tail_seconds = max_tail_seconds

    async def serve_claim(self, binding: SessionBinding, gate: ResumeGate, event_id: str, send: SendEvent) -> None:
        """Serve a GET with a cursor.

        Raises:
            ResumptionError: When the claim is refused, before anything was sent.
        """
        started = self.ledger.clock() if self.ledger.clock is not None else None
        cursor = EventCursor.parse(event_id)
        try:
            if binding.status == "visiting":
                await self._visit(binding, event_id)
            decision, snapshot = await self._decide(binding, event_id, cursor)
            tail = None
            if isinstance(decision, Resume):
                tail = await self._begin(binding, event_id, decision.cursor, gate, send, decision.rest)
            if tail is not None and self._shared is not None and (tail.batch is None or tail.connection.is_closed):
                # Another worker may have given the session up, which a snapshot does not tell.
                binding.release(tail.connection)
                await self.writer.catch_up(binding)
                decision, snapshot = await self._decide(binding, event_id, cursor)
                if not isinstance(decision, Resume):
                    tail.connection.reopen()
        except (StorageUnavailableError, SessionNotFoundError) as error:
            self.ledger.refused(binding, error, started)
            raise
        match decision:
            case Resume():
                self.ledger.resumed(decision, started)
                await gate.accept(event_id)
                await self._follow(binding, known(tail))
            case Reset() | Invalid() | Gone():
                refusal = decision.error
                self.ledger.refused(binding, refusal, started)
                if cursor is None or snapshot is None or self._rejection == "status":
                    raise refusal
                await self._refuse_in_stream(binding, gate, cursor, snapshot, refusal, send)

    async def serve_plain(self, binding: SessionBinding, gate: ResumeGate, send: SendEvent) -> None:
        """Serve a GET without a cursor: after the last event of the standalone stream that was ever written."""
        cursor = await self._standalone_place(binding)
        event_id = str(cursor)
        tail = await self._begin(binding, event_id, cursor, gate, send)
        await gate.accept(event_id)
        await self._follow(binding, tail)

    async def _standalone_place(self, binding: SessionBinding) -> EventCursor:
        """Return the cursor after the last written event of the standalone stream, past what can no longer be sent."""
        for _ in range(_MAX_SNAPSHOT_ATTEMPTS):
            try:
                await self.writer.revive(binding)
                await self._catch_up_with_visitors(binding)
            except AppendRefusedError as exc:
                raise SessionNotFoundError from exc  # Its claim was told that it has been ended.
            except Exception as exc:
                self.ledger.fault(binding, exc)
                raise StorageUnavailableError from exc
            cursor = EventCursor(generation=known(binding.generation), stream=STANDALONE, seq=0)
            snapshot = await self._snapshot(binding, str(cursor), cursor)
            if snapshot is None:
                if binding.status in ("ended", "visiting"):
                    raise SessionNotFoundError
                # This GET makes no claim: the session goes on in its next generation.
                self.writer.note_evicted(binding)
                continue
            if binding.status == "visiting":
                binding.follow(snapshot.generation)
            if snapshot.claimed == "current" and isinstance(snapshot.stream, Retained):
                seq = max(binding.carried_seq, snapshot.stream.replay_floor, snapshot.stream.last_hole)
                if seq > binding.carried_seq:
                    self.ledger.sent_to_nobody(binding, binding.carried_seq + 1, seq)
                    binding.carried_seq = seq
                return cursor._replace(seq=seq)
        raise GenerationMismatchError

    async def _catch_up_with_visitors(self, binding: SessionBinding) -> None:
        """Learn what other workers have sent of this session's standalone stream."""
        if self._shared is not None and binding.status == "live":
            found = await self._shared.find_owner(known(binding.session_id))
            if found is not None and found.generation == binding.generation:
                binding.written(found.generation, found.carried_seq)

    async def _refuse_in_stream(
        self,
        binding: SessionBinding,
        gate: ResumeGate,
        cursor: EventCursor,
        snapshot: Snapshot,
        error: ResetRequiredError | InvalidEventIdError | SessionNotFoundError,
        send: SendEvent,
    ) -> None:
        """Refuse to splice, not to serve: tell the client in a fresh stream, and serve what it can still have."""
        if cursor.stream == STANDALONE:
            if not isinstance(error, ResetRequiredError):
                raise error
            fresh = await self._standalone_place(binding)
        else:
            current = await self._current_execution(binding, cursor, snapshot, error)
            if current is None:
                if cursor.stream.request_id is None:
                    raise error
                await gate.accept(None)
                await send(answer_text(cursor.stream.request_id, error), None)
                return
            fresh = current
        event_id = str(fresh)
        tail = await self._begin(binding, event_id, fresh, gate, send)
        await gate.accept(event_id)
        await send(marker_text(error), event_id)
        await self._follow(binding, tail)

    async def _current_execution(
        self, binding: SessionBinding, cursor: EventCursor, snapshot: Snapshot, error: ResumptionError
    ) -> EventCursor | None:
        """Return the beginning of the same call's current execution, if it was executed again and is all retained."""
        successor = snapshot.successor
        if not isinstance(error, GenerationMismatchError) or successor is None or not successor.continues(cursor):
            return None
        start = EventCursor(generation=snapshot.generation, stream=successor.stream, seq=0)
        decision, _ = await self._decide(binding, str(start), start)
        return start if isinstance(decision, Resume) else None

    async def _begin(
        self,
        binding: SessionBinding,
        event_id: str,
        cursor: EventCursor,
        gate: ResumeGate,
        send: SendEvent,
        rest: Sequence[bytes | None] | None = None,
    ) -> _Tail:
        """Make a connection the one consumer of a stream, and read what it is to send first, where that is not known.

        Other workers are told before it sends anything, unless it sends the rest of a stream that is complete: where
        one of them sends the same, that ends by itself.

        Raises:
            StorageUnavailableError: When that cannot be read, or other workers cannot be told of the consumer.
        """
        tail = _Tail(event_id, cursor, gate.connection, send)
        if cursor.stream == STANDALONE:
            tail.connection.on_written = partial(binding.written, tail.generation)
        # No await between the snapshot and this: what supersedes the stream from now on finds the connection.
        self.ledger.take_overs += binding.take_over(cursor.stream, tail.connection)
        announcement = None
        if self._shared is not None:
            tail.connection.rank = None
            announcement = _Announcement(tail.connection)
            self._shared.take_over(
                known(binding.session_id), cursor.stream, announcement.on_ranked, announcement.on_failed
            )
        if rest is not None:
            tail.batch = Batch(rest, is_terminal=True)
            return tail
        try:
            tail.batch = await self._read(binding, tail)
            if announcement is not None:
                await announcement.until_made()
        except Exception as exc:
            self.ledger.fault(binding, exc)
            raise StorageUnavailableError(event_id) from exc
        return tail

    def _read(self, binding: SessionBinding, tail: _Tail) -> Awaitable[Batch | None]:
        session_id = known(binding.session_id)
        return self.storage.read(session_id, tail.generation, tail.stream, tail.seq, MAX_BATCH_EVENTS)

    async def _follow(self, binding: SessionBinding, tail: _Tail) -> None:
        """Send what follows, each event once and in order, until the answer or until it would skip one."""
        self.ledger.open_tails += 1
        try:
            # The first batch without a timer, which costs more than the replay of an event: most resumes end with it.
            is_open = await self._send(tail)
            if is_open:
                with anyio.move_on_after(self._max_tail_seconds):
                    while is_open:
                        is_open = await self._wait(binding, tail) and await self._send(tail)
            if not is_open and not tail.is_complete and not tail.connection.is_closed:
                if binding.status == "visiting":
                    await self._end_visit(binding, tail)
                elif self._shared is not None:
                    await self.writer.catch_up(binding)
        finally:
            self.ledger.open_tails -= 1
            if binding.status == "visiting":
                with anyio.move_on_after(_LAST_NOTE_SECONDS, shield=True):
                    await self._note_carried(binding, tail)

    async def _wait(self, binding: SessionBinding, tail: _Tail) -> bool:
        """Wait for the next batch; False where nothing will come, or the storage fails."""
        try:
            while True:
                tail.batch = batch = await self._read(binding, tail)
                if batch is None or batch.events or batch.is_terminal:
                    return batch is not None
                if await self._is_orphaned(binding):
                    return False
                await self._note_carried(binding, tail)
                await self.storage.wait(known(binding.session_id), tail.generation, tail.stream, tail.seq)
        except Exception as exc:
            self.ledger.fault(binding, exc)
            return False

    async def _send(self, tail: _Tail) -> bool:
        """Send the batch that was read; False where nothing more can be sent."""
        batch, prefix, connection, send, seq = tail.batch, tail.prefix, tail.connection, tail.send, tail.seq
        if batch is None:
            return False
        for event in batch.events:
            # Invariant: seq + 1 is the place of `event`. A hole ends the connection; it is never skipped.
            if event is None or connection.is_closed:
                return False
            tail.seq = seq = seq + 1
            if connection.on_written is not None:
                connection.in_transit.append(seq)
            await send(event.decode(), f"{prefix}{seq}")
        tail.is_complete = batch.is_terminal
        return not batch.is_terminal

    async def _decide(
        self, binding: SessionBinding, event_id: str, cursor: EventCursor | None
    ) -> tuple[Decision, Snapshot | None]:
        """Decide about one claim, from one snapshot that nothing in this process has outdated."""
        snapshot = await self._snapshot(binding, event_id, cursor)
        decision = decide(event_id, cursor, snapshot, replay_completed=self._replay_completed)
        if self._shared is not None and isinstance(decision, Resume) and snapshot is not None:
            is_terminal = isinstance(snapshot.stream, Retained) and snapshot.stream.is_terminal
            if not is_terminal and await self._is_orphaned_or_unknown(binding, event_id):
                # What is complete can be had as long as it is retained; this will never be.
                return Gone(SessionNotFoundError(event_id)), snapshot
        return decision, snapshot

    async def _is_orphaned_or_unknown(self, binding: SessionBinding, event_id: str) -> bool:
        try:
            return await self._is_orphaned(binding)
        except Exception as exc:
            self.ledger.fault(binding, exc)
            raise StorageUnavailableError(event_id) from exc

    async def _visit(self, binding: SessionBinding, event_id: str) -> None:
        """Find out whose session is visited.

        Raises:
            SessionNotFoundError: When there is no such session, or the credential is not the one it was opened with.
            StorageUnavailableError: When the storage cannot answer.
        """
        try:
            found = await known(self._shared).find_owner(known(binding.session_id))
        except Exception as exc:
            self.ledger.fault(binding, exc)
            raise StorageUnavailableError(event_id) from exc
        # A session that nobody has said to serve is being opened, or is not one of a store at all.
        if found is None or not found.worker or found.credential != digest_of(binding.credential):
            raise SessionNotFoundError(event_id)
        binding.follow(found.generation)
        binding.owner, binding.is_orphaned = found.worker, not found.is_alive

    async def _is_orphaned(self, binding: SessionBinding) -> bool:
        """Tell whether nobody will answer a session's open calls.

        A visited session whose worker is dead is given up by this; one of this worker may have been by another.
        """
        if self._shared is None:
            return False
        if binding.status != "visiting":
            return binding.status == "evicted"
        if binding.is_orphaned or not self._shared.is_seen_alive(binding.owner):
            # Looked at again, in one step with keeping the owner from writing, should it live after all.
            binding.is_orphaned = await self._shared.abandon_session(known(binding.session_id))
        return binding.is_orphaned

    async def _note_carried(self, binding: SessionBinding, tail: _Tail) -> None:
        """Let the owner of a visited session know what was written of its standalone stream."""
        seq, is_current = binding.carried_seq, tail.generation == binding.generation
        if binding.status == "visiting" and tail.stream == STANDALONE and is_current and seq > binding.noted_seq:
            try:
                await known(self._shared).note_carried(known(binding.session_id), tail.generation, seq)
                binding.noted_seq = seq
            except Exception as exc:
                self.ledger.fault(binding, exc)

    async def _end_visit(self, binding: SessionBinding, tail: _Tail) -> None:
        """End a tail that can go no further; a call that nobody will answer is answered here."""
        request_id = tail.stream.request_id
        if self._rejection == "stream" and request_id is not None and binding.is_orphaned:
            error = SessionNotFoundError(f"{tail.prefix}{tail.seq}")
            self.ledger.refused(binding, error)
            await tail.send(answer_text(request_id, error), None)

    async def _snapshot(self, binding: SessionBinding, event_id: str, cursor: EventCursor | None) -> Snapshot | None:
        if binding.session_id is None or binding.status == "ended":
            return None
        for _ in range(_MAX_SNAPSHOT_ATTEMPTS):
            try:
                if self.writer.has_to_settle(binding):
                    await self.writer.settle(binding)
                changes = binding.changes
                snapshot = await self.storage.snapshot(binding.session_id, cursor)
            except Exception as exc:
                self.ledger.fault(binding, exc)
                raise StorageUnavailableError(event_id) from exc
            if binding.changes == changes:
                return snapshot
        raise StorageUnavailableError(event_id)
