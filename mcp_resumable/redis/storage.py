"""`RedisStorage`: what `Storage` and `SharedStorage` owe, asked of the server."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster

from mcp_resumable.cursor import EventCursor, Generation, StreamId
from mcp_resumable.decision import Snapshot
from mcp_resumable.redis.answers import bytes_of, description_of, events_of, generation_of, snapshot_of, spelling_of
from mcp_resumable.redis.calls import APPEND_GAP_SECONDS, Calls, Lane, client_of, in_a_context_of_its_own
from mcp_resumable.redis.doorbell import Doorbell
from mcp_resumable.redis.listener import Listener
from mcp_resumable.redis.pulse import Pulse
from mcp_resumable.redis.scripts import Scripts
from mcp_resumable.shared import Ownership, SharedStorage, Worker
from mcp_resumable.storage import AppendRefusedError, Batch, Retention, SessionDescription, new_nonce

__all__ = ["RedisStorage"]

_PREFIX = re.compile(r"[0-9A-Za-z_.:-]{1,64}")


class RedisStorage(SharedStorage):
    """Keeps everything in Redis (7.0 or newer) or Valkey (8 or newer). For asyncio, as redis-py is.

    One instance serves one event loop of one process. It needs the extra `redis`. What it stores survives the process;
    a session does not, since the SDK keeps its state in the process: see README, "More than one worker".
    """

    def __init__(
        self,
        url_or_client: str | Redis | RedisCluster,
        *,
        retention: Retention | None = None,
        prefix: str = "mcp_resumable",
        lease_seconds: float = 10.0,
        timeout_seconds: float = 2.0,
        nonce: Callable[[], str] = new_nonce,
        clock_shift: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Use a server; nothing is sent before the first operation.

        Args:
            url_or_client: `redis://`, `rediss://`, `unix://`, `valkey://` or `valkeys://`; or a client (of a cluster
                too, with redis-py 8), which stays the caller's to close. A client must not decode responses.
            retention: The limits that evict, over all workers; the same for each of them.
            prefix: Begins every key and channel; up to 64 characters of `[0-9A-Za-z_.:-]`. Storages with different
                prefixes know nothing of each other.
            lease_seconds: How long after its last sign of life a worker counts as alive; at least 2.
            timeout_seconds: Longest time that an operation may take. Then the event that waits is delivered live, and
                the server counts as failed until it answers again.
            nonce: Source of generations' random parts; for tests.
            clock_shift: Seconds added to the server's clock; for tests.

        Raises:
            ValueError: When an argument is out of range, or a client one that will not do; the message names it.
        """
        super().__init__(retention=retention, nonce=nonce)
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must be 1 to 64 characters of [0-9A-Za-z_.:-], not {prefix!a}")
        if not 2 <= lease_seconds < float("inf"):
            raise ValueError(f"lease_seconds must be at least 2, not {lease_seconds!r}")
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds must be positive and finite, not {timeout_seconds!r}")
        self.lease_seconds = lease_seconds
        self._timeout_seconds = timeout_seconds
        self.worker_id = secrets.token_hex(8)
        self._is_own_client = isinstance(url_or_client, str)
        self._workers: list[Worker] = []
        key_prefix = f"{{{prefix}}}:"
        own_channel = f"{key_prefix}w:{self.worker_id}"
        self._calls = Calls(
            client_of(url_or_client, timeout_seconds),
            Scripts(key_prefix, self.retention),
            own_channel=own_channel,
            timeout_seconds=timeout_seconds,
            clock_shift=clock_shift,
            on_evicted=self._count_evicted,
        )
        self._openings = Lane(self._call, "open_stream", calls_at_once=1)
        self._appends = Lane(self._call, "append", calls_at_once=1, gap_seconds=APPEND_GAP_SECONDS)
        self._reads = Lane(self._call, "read")
        self._snapshots = Lane(self._call, "snapshot")
        self._doorbell = Doorbell(key_prefix)
        self._listener = Listener(self._calls, self._doorbell, self._workers, own_channel=own_channel)
        self._pulse = Pulse(
            self._calls,
            self._doorbell,
            self._workers,
            key_prefix=key_prefix,
            worker_id=self.worker_id,
            lease_seconds=lease_seconds,
            idle_seconds=self.retention.idle_seconds,
        )
        self._background: list[asyncio.Task[None]] = []
        self._time_keeper: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._stamp_prefix = secrets.token_bytes(8)
        self._stamp_number = 0

    def serve(self, worker: Worker) -> None:
        """See `SharedStorage`."""
        self._workers.append(worker)

    @property
    def charged_bytes(self) -> int | None:
        """See `Storage`; as it was when this worker last renewed its lease, of all workers."""
        return self._pulse.charged_bytes

    async def aclose(self) -> None:
        """Give the lease back and stop; a client that was handed in stays open. Idempotent.

        What was begun comes to its end first, as far as `timeout_seconds` allow.
        """
        if self._work:
            await asyncio.wait(self._work, timeout=self._timeout_seconds)
        self._is_closed = True
        for task in self._background:
            task.cancel()
        # A call that is under way ends by itself, in time; cancelled, it might leave its connection open.
        lanes = (self._openings, self._appends, self._reads, self._snapshots)
        calls = [call for lane in lanes for call in lane.under_way]
        await asyncio.gather(*self._background, *calls, *self._work, return_exceptions=True)
        if self._time_keeper is not None:
            self._time_keeper.cancel()
        self._doorbell.ring_all()
        await self._calls.release()
        if self._is_own_client:
            await self._calls.client.aclose()

    # The contract of `Storage`.

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        claim = (bytes_of(session_id), nonce, int(create))
        claimed, is_ended = await self._call("claim", *claim, self.worker_id)
        if is_ended and not await self._tell_ended(session_id):
            # None of this worker's stores served it by now: its id is used again.
            claimed, _ = await self._call("claim", *claim, "")
        generation = generation_of(claimed)
        if generation is None:
            self._pulse.owned.pop(session_id, None)
            if create:
                raise AppendRefusedError(None)
        self._doorbell.ring_session(session_id)
        return generation

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        ending = str(StreamId.of_request(0, request_id))[1:]
        place = origin or ("", "")
        call = (bytes_of(session_id), str(generation), bytes_of(request_id), ending)
        ordinal = await self._openings.put((*call, self._new_stamp(), *place))
        if not isinstance(ordinal, int):
            raise AppendRefusedError(generation_of(ordinal))
        self._doorbell.ring_session(session_id)
        return StreamId.of_request(ordinal, request_id)

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        name, spelled = spelling_of(generation, stream)
        places = [b"" if event is None else b"=" + event for event in events]
        head = b"%b %d %d %b%b" % (spelled, is_terminal, len(places), self._new_stamp(), bytes_of(session_id))
        size = sum(map(len, places))
        # An answer is what a client waits for.
        seq = await self._appends.put((head, *places), size, stream=(session_id, name), at_once=is_terminal)
        if not isinstance(seq, int):
            raise AppendRefusedError(generation_of(seq))
        if self._doorbell.channels:
            self._doorbell.ring(session_id, name, seq)
        return seq

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        if cursor is None:
            answer = await self._snapshots.put((bytes_of(session_id), "", "", "", "", 0, "", 0))
        else:
            request_id = cursor.stream.request_id
            answer = await self._snapshots.put(
                (
                    bytes_of(session_id),
                    cursor.generation.counter,
                    cursor.generation.nonce,
                    str(cursor.stream),
                    cursor.stream.ordinal,
                    int(request_id is not None),
                    bytes_of(request_id or ""),
                    cursor.seq,
                )
            )
        return snapshot_of(cast("list[Any] | bytes", answer), cursor)

    async def _read(
        self, session_id: str, generation: Generation, stream: StreamId, after_seq: int, limit: int
    ) -> Batch | None:
        name = str(stream)
        channel = self._doorbell.find(session_id)
        changes = 0
        if channel is not None:
            # Before it is asked for: what is appended from here on is read, or heard.
            changes = channel.changes
            channel.marks.setdefault(name, 0)
        answer = await self._reads.put((bytes_of(session_id), name, str(generation), after_seq, limit))
        if not answer:
            return None
        is_terminal, places, number = cast("tuple[int, list[bytes], int]", answer)
        if channel is not None:
            if not places:
                channel.read_dry[name] = (after_seq, changes)
            if number > channel.consumers.get(name, 0):
                # Told by the doorbell too, but not to who did not listen yet.
                channel.consumers[name] = number
                self._listener.tell_taken_over(session_id, name, number)
        return Batch(events_of(places), bool(is_terminal))

    async def _wait(
        self,
        session_id: str,
        generation: Generation,  # noqa: ARG002  # a change of it rings
        stream: StreamId,
        after_seq: int,
    ) -> None:
        self._start()
        await self._listener.wait(session_id, str(stream), after_seq)

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        ended = await self._call("end_session", bytes_of(session_id), str(generation or ""))
        if ended[0]:
            self._pulse.owned.pop(session_id, None)
            self._doorbell.ring_session(session_id)
        return bool(ended[0])

    async def _describe(self, session_id: str) -> SessionDescription | None:
        answer = await self._call("describe", bytes_of(session_id))
        if not answer:
            return None
        generation = generation_of(answer[0])
        assert generation is not None, "a session that is known has a generation"
        streams = [description_of(row) for row in answer[1:]]
        return SessionDescription(
            session_id=session_id,
            generation=generation,
            streams=tuple(sorted(streams, key=lambda stream: int(stream.stream.partition(".")[0]))),
        )

    # What `SharedStorage` adds.

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See `SharedStorage`."""
        task = in_a_context_of_its_own(work())
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def own_session(self, session_id: str, generation: Generation, credential: str) -> bool:
        """See `SharedStorage`."""
        self._pulse.is_leased = True
        lease = int(self.lease_seconds * 1000)
        is_current = await self._call("own", bytes_of(session_id), str(generation), self.worker_id, lease, credential)
        if is_current[0]:
            self._pulse.owned[session_id] = None
        return bool(is_current[0])

    async def retire(self) -> None:
        """See `SharedStorage`."""
        await self._pulse.retire()

    async def find_owner(self, session_id: str) -> Ownership | None:
        """See `SharedStorage`."""
        answer = await self._call("find", bytes_of(session_id))
        if not answer:
            return None
        generation, worker, credential, is_alive, is_forked, is_abandoned, carried_seq = answer
        is_alive = bool(is_alive or (worker and not is_abandoned and self._pulse.is_lenient()))
        if not is_abandoned:  # That says nothing of its worker's other sessions.
            self._pulse.saw_owner(worker.decode(), is_alive=is_alive)
        return Ownership(
            generation=cast(Generation, generation_of(generation)),
            worker=worker.decode(),
            credential=credential.decode(),
            is_alive=is_alive,
            is_forked=bool(is_forked),
            is_abandoned=bool(is_abandoned),
            carried_seq=carried_seq,
        )

    async def note_carried(self, session_id: str, generation: Generation, seq: int) -> None:
        """See `SharedStorage`."""
        await self._call("carry", bytes_of(session_id), str(generation), seq)

    def is_seen_alive(self, worker_id: str) -> bool:
        """See `SharedStorage`."""
        return self._pulse.is_seen_alive(worker_id)

    async def abandon_session(self, session_id: str) -> bool:
        """See `SharedStorage`."""
        return bool((await self._call("abandon", bytes_of(session_id)))[0])

    def take_over(
        self,
        session_id: str,
        stream: StreamId,
        on_ranked: Callable[[int], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """See `SharedStorage`."""

        def tell(answer: asyncio.Future[int]) -> None:
            if (exc := answer.exception()) is None:
                on_ranked(answer.result())
                self._listener.tell_taken_over(session_id, str(stream), answer.result())
            else:
                on_failed(cast(Exception, exc))

        # With the read that follows at once, in one call.
        self._reads.put((bytes_of(session_id), str(stream), "", self.worker_id, "")).add_done_callback(tell)

    async def _tell_ended(self, session_id: str) -> bool:
        """Make good for a notice that was missed; tell whether it was for anybody here."""
        return any([await worker.on_moved(session_id, is_ended=True) for worker in self._workers])

    # Calls.

    def _new_stamp(self) -> bytes:
        """Return what tells a request of this instance from any other, and the later of two."""
        self._stamp_number += 1
        return self._stamp_prefix + self._stamp_number.to_bytes(6, "big")

    async def _call(self, script: str, *arguments: bytes | str | int) -> list[Any]:
        self._start()
        return await self._calls.ask(script, arguments)

    def _start(self) -> None:
        if self._is_closed:
            raise RuntimeError("this RedisStorage is closed")
        if self._time_keeper is None:
            self._time_keeper = in_a_context_of_its_own(self._calls.keep_time())
            self._background = [in_a_context_of_its_own(run) for run in (self._pulse.run(), self._listener.listen())]

    def _count_evicted(self, events: int) -> None:
        self.evicted_events += events
