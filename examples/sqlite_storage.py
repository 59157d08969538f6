"""`SqliteStorage`: everything in one SQLite file, for any number of processes on one machine. The example to copy.

Each method is one transaction; one that writes takes the write lock first, so what it reads stays true until it
commits. That blocks the event loop for 0.1 ms, and a hop to a thread takes half as long. A lock that is not free within
a second is a fault of the storage. Who can read the file can read what tools have answered.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mcp_resumable import EventCursor, Generation, Retention, Storage
from mcp_resumable.cursor import StreamId
from mcp_resumable.decision import Dropped, NeverOpened, Retained, Snapshot, StreamState, Successor, Superseded
from mcp_resumable.storage import AppendRefusedError, Batch, SessionDescription, StreamDescription

Events = Sequence[bytes | None]


class SqliteStorage(Storage):
    """Keeps everything in the file at `path`; all processes go by one `clock`, and by the last `retention` given."""

    poll_seconds = 0.05  # One process cannot wake another.

    def __init__(
        self, path: str | Path, *, retention: Retention | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(retention=retention)
        self._clock = clock
        self._database = sqlite3.connect(path, timeout=1, isolation_level=None, check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._database.executescript(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
        for name, limit in self.retention.model_dump().items():
            self._run(f"UPDATE store SET {name} = ?", limit)

    async def aclose(self) -> None:
        """Close the file; idempotent."""
        self._database.close()

    @contextmanager
    def _transaction(self, session_id: str, *, writes: bool = True) -> Iterator[Generation | None]:
        """Begin, yield the session's generation (None: unknown or over), commit; roll back what raises."""
        with self._database:
            self._run("BEGIN IMMEDIATE" if writes else "BEGIN")
            if writes:  # What is too old goes with the time: a trigger.
                self._run("UPDATE store SET now = ?", self._clock())
                self._run("UPDATE sessions SET active_at = (SELECT now FROM store) WHERE session_id = ?", session_id)
            yield self._current(session_id)

    def _run(self, sql: str, *values: object) -> sqlite3.Cursor:
        return self._database.execute(sql, values)

    def _current(self, session_id: str) -> Generation | None:
        sql = "SELECT counter, nonce FROM sessions WHERE session_id = ? AND over_at IS NULL"
        return next((Generation(*row) for row in self._run(sql, session_id)), None)

    def _stream(self, session_id: str, stream: StreamId) -> Any:
        return self._run("SELECT * FROM streams WHERE session_id = ? AND name = ?", session_id, str(stream)).fetchone()

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        with self._transaction(session_id) as current:
            if current is None and not create:
                return None
            self._run("INSERT OR IGNORE INTO sessions (session_id) VALUES (?)", session_id)
            self._run("UPDATE sessions SET counter = counter + 1, nonce = ? WHERE session_id = ?", nonce, session_id)
            return self._current(session_id)

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        with self._transaction(session_id) as current:
            if current != generation:
                raise AppendRefusedError(current)
            (ordinal,) = self._run("SELECT opened_streams FROM sessions WHERE session_id = ?", session_id).fetchone()
            stream = StreamId.of_request(ordinal, request_id)
            values = session_id, ordinal, str(stream), json.dumps(request_id), *(origin or (current.counter, ordinal))
            columns = "session_id, ordinal, name, request_id, origin_counter, origin_ordinal"
            self._run(f"INSERT INTO streams ({columns}) VALUES (?, ?, ?, ?, ?, ?)", *values)
            return stream

    async def _append(
        self, session_id: str, generation: Generation, stream: StreamId, events: Events, is_terminal: bool
    ) -> int:
        with self._transaction(session_id) as current:
            kept = self._stream(session_id, stream)
            if current != generation or kept is None or kept["answered_at"] is not None:
                raise AppendRefusedError(current)
            for seq, event in enumerate(events, kept["high_water_mark"] + 1):
                self._run("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", session_id, kept["stream"], seq, event)
            if is_terminal:
                self._run("UPDATE streams SET answered_at = (SELECT now FROM store) WHERE stream = ?", kept["stream"])
            while self._run("DELETE FROM events WHERE place = (SELECT place FROM surplus)").rowcount:
                self.evicted_events += 1
            return seq

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        with self._transaction(session_id) as current:
            if current is None:
                return None
            if cursor is None:
                return Snapshot(generation=current, claimed="never", stream=NeverOpened())
            sql = "SELECT opened_streams, instr(issued, ?) FROM sessions WHERE session_id = ?"
            opened_streams, is_issued = self._run(sql, f" {cursor.generation} ", session_id).fetchone()
            claimed: Literal["current", "earlier", "never"] = "earlier" if is_issued else "never"
            if cursor.generation == current:
                claimed = "current"
            stream, request_id = cursor.stream, cursor.stream.request_id
            sql = "SELECT ordinal, origin_counter, origin_ordinal FROM streams WHERE session_id = ? AND request_id = ?"
            newest = None if request_id is None else self._run(sql, session_id, json.dumps(request_id)).fetchone()
            successor = newest and Successor(stream=StreamId(newest[0], request_id), origin=newest[1:])
            state: StreamState = Superseded() if newest and newest["ordinal"] > stream.ordinal else Dropped()
            sql = "SELECT * FROM streams WHERE session_id = ? AND ordinal = ?"
            if (kept := self._stream(session_id, stream)) is not None:
                marks = {name: kept[name] for name in ("high_water_mark", "replay_floor", "last_hole")}
                state = Retained(**marks, is_terminal=kept["answered_at"] is not None)
            elif stream.ordinal >= opened_streams or self._run(sql, session_id, stream.ordinal).fetchone():
                state = NeverOpened()  # Or it is another request that has this ordinal.
            return Snapshot(generation=current, claimed=claimed, stream=state, successor=successor)

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        with self._transaction(session_id, writes=False) as current:
            kept = self._stream(session_id, stream)
            if current != generation or not kept or not kept["replay_floor"] <= after_seq <= kept["high_water_mark"]:
                return None
            sql = "SELECT event FROM events WHERE stream = ? AND seq > ? ORDER BY seq LIMIT ?"
            events = [event for (event,) in self._run(sql, kept["stream"], after_seq, limit)]
            return Batch(events, kept["answered_at"] is not None and after_seq + len(events) == kept["high_water_mark"])

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        with self._transaction(session_id) as current:
            if current is None or generation not in (None, current):
                return False
            self._run("UPDATE sessions SET over_at = (SELECT now FROM store) WHERE session_id = ?", session_id)
            return True

    async def _describe(self, session_id: str) -> SessionDescription | None:
        with self._transaction(session_id, writes=False) as current:
            if current is None:
                return None
            sql = "SELECT description FROM descriptions WHERE session_id = ? ORDER BY ordinal"
            streams = tuple(StreamDescription(**json.loads(text)) for (text,) in self._run(sql, session_id))
            return SessionDescription(session_id=session_id, generation=current, streams=streams)
