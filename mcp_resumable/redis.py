"""`RedisStorage`: sessions, generations and events in Redis or Valkey, shared by any number of workers.

Each operation is one Lua script, and so atomic. All keys of a storage carry one hash tag, since the ceilings and the
order of eviction are those of all its sessions: in a cluster a storage lives on one shard, and several prefixes use
several shards.

Appends, reads and snapshots that are asked for at the same time travel together, in one call. An append carries a
stamp: one that was stored while its acknowledgement was lost is recognized when it is sent again, so each event is
stored once; one that arrives after it was given up is refused. So it is with the opening of a stream; a claim is known
by its nonce.

Nobody polls. One connection listens for all readers of this process (a doorbell: what it says is only that it is worth
while to read), one task looks after the lease, after readers whose doorbell was missed, and after the server: once that
has failed, operations fail at once until it answers again, so that live delivery never waits for it twice.

Deliberate differences from `MemoryStorage`: a session's last activity is known to half a second; a session of which the
owner is dead is dropped when it is idle, also where a request is unanswered.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (redis-py is annotated in part)

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import anyio
import anyio.lowlevel

try:
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.client import PubSub
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import (
        MasterDownError,
        NoPermissionError,
        NoScriptError,
        ReadOnlyError,
        RedisError,
        ResponseError,
    )
except ImportError as exc:
    raise ImportError("mcp_resumable.redis needs redis-py: pip install 'mcp_resumable[redis]'") from exc

from mcp_resumable.cursor import STANDALONE, EventCursor, Generation, StreamId
from mcp_resumable.decision import (
    Dropped,
    NeverOpened,
    Retained,
    Snapshot,
    StreamState,
    Successor,
    Superseded,
)
from mcp_resumable.shared import Ownership, SharedStorage, Worker
from mcp_resumable.storage import (
    AppendRefusedError,
    Batch,
    Retention,
    SessionDescription,
    StreamDescription,
    new_nonce,
)

__all__ = ["RedisStorage", "RedisUnavailableError"]

_T = TypeVar("_T")

logger = logging.getLogger("mcp_resumable")

_PREFIX = re.compile(r"[0-9A-Za-z_.:-]{1,64}")

# Earlier generations of one session whose nonces are remembered, to tell "earlier" (409) from "never" (400).
_MAX_REMEMBERED_GENERATIONS = 1_000

# Of a call: bounds how long the server is busy with one script, a few milliseconds.
_MAX_CALL_ITEMS = 128
# Of a call, where there is more to ask for: a call costs as much as five appends.
_MIN_CALL_ITEMS = 8
_MAX_CALL_BYTES = 1024 * 1024

# At a time, each on a connection of its own: of all kinds, and of each kind that travels together.
_MAX_CALLS = 16
_MAX_CALLS_UNDER_WAY = 3
# Turns of the time that an operation may take.
_TURNS = 4

# The bytes of a place before its event: its number, and "=".
_PLACE_OVERHEAD = 7

_PULSE_SECONDS = 0.5
# How long the end of a process may wait for the server.
_RETIRE_SECONDS = 1.0
# How long the doorbell is quiet before channels that nobody waits for are given up.
_LISTEN_SECONDS = 5.0
# A reader reads again within so many pulses, should its doorbell have been missed: half a minute. Ten thousand idle
# readers cost a few percent of a CPU that way. A connection that breaks is noticed by itself.
_SWEEP_PULSES = 60
# Sessions whose keys are kept in one pulse, at least; and in one call, at most.
_KEPT_SESSIONS = 64
_MAX_KEPT_SESSIONS = 256


class RedisUnavailableError(RedisConnectionError):
    """Raised at once, without asking, while a server that has failed has not answered since."""


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
                too), which stays the caller's to close. A client must not decode responses.
            retention: The limits that evict, over all workers; the same for each of them.
            prefix: Begins every key and channel; up to 64 characters of `[0-9A-Za-z_.:-]`. Storages with different
                prefixes know nothing of each other.
            lease_seconds: How long after its last sign of life a worker counts as alive; at least 2.
            timeout_seconds: Longest time that an operation may take. Then the event that waits is delivered live, and
                the server counts as failed until it answers again.
            nonce: Source of generations' random parts; for tests.
            clock_shift: Seconds added to the server's clock; for tests.

        Raises:
            ValueError: When an argument is out of range; the message names it.
        """
        super().__init__(retention=retention, nonce=nonce)
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must be 1 to 64 characters of [0-9A-Za-z_.:-], not {prefix!a}")
        if not 2 <= lease_seconds < float("inf"):
            raise ValueError(f"lease_seconds must be at least 2, not {lease_seconds!r}")
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds must be positive and finite, not {timeout_seconds!r}")
        self.lease_seconds = lease_seconds
        self.worker_id = secrets.token_hex(8)
        self._timeout_seconds = timeout_seconds
        self._clock_shift = clock_shift
        self._is_own_client = isinstance(url_or_client, str)
        self._client = _client_of(url_or_client, timeout_seconds)
        self._key_prefix = f"{{{prefix}}}:"
        self._scripts = _Scripts(self._key_prefix, self.retention)
        self._appends = _Lane(self, "append")
        self._reads = _Lane(self, "read")
        self._snapshots = _Lane(self, "snapshot")
        self._workers: list[Worker] = []
        # Sessions of this worker, the one whose keys were kept longest ago first.
        self._owned: dict[str, None] = {}
        self._owners: dict[str, bool] = {}
        self._lenient_until = 0.0
        self._lease = f"{self._key_prefix}w:{self.worker_id}"
        self._notices = self._lease.encode()
        self._doorbell = _Doorbell(self._key_prefix)
        self._pubsub: PubSub | None = None
        self._failure: Exception | None = None
        # Whether the server is still the one that answered before, as far as its connections tell.
        self._is_same_server = True
        self._charged_bytes: int | None = None
        # Operations that are being waited for, and the turns that each has spent.
        self._turns: dict[anyio.CancelScope, int] = {}
        self._slots = asyncio.Semaphore(_MAX_CALLS)
        self._tasks: list[asyncio.Task[None]] = []
        self._announcements: set[asyncio.Task[None]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._is_leased = False
        self._is_closed = False
        self._stamp_prefix = secrets.token_bytes(8)
        self._stamp_number = 0

    def serve(self, worker: Worker) -> None:
        """See `SharedStorage`."""
        self._workers.append(worker)

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See `SharedStorage`."""
        task = _in_a_context_of_its_own(work())
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def aclose(self) -> None:
        """Give the lease back and stop; a client that was handed in stays open. Idempotent."""
        self._is_closed = True
        tasks, self._tasks = [*self._tasks, *self._announcements], []
        for task in tasks:
            task.cancel()
        # A call that is under way ends by itself; cancelled, it might leave its connection open.
        calls = self._appends.under_way | self._reads.under_way | self._snapshots.under_way
        await asyncio.gather(*tasks, *calls, *self._work, return_exceptions=True)
        self._doorbell.ring_all()
        await self._scripts.release(self._client)
        if self._is_own_client:
            await self._client.aclose()

    # The contract of `Storage`.

    async def _claim_generation(self, session_id: str, nonce: str, *, create: bool) -> Generation | None:
        claimed = await self.call("claim", _bytes(session_id), nonce, int(create))
        generation = _generation(claimed[0])
        if generation is None:
            self._owned.pop(session_id, None)
        self._doorbell.ring_session(session_id)
        return generation

    async def _open_stream(
        self, session_id: str, generation: Generation, request_id: str, origin: tuple[int, int] | None
    ) -> StreamId:
        ending = str(StreamId.of_request(0, request_id))[1:]
        place = origin or ("", "")
        opened = await self.call(
            "open_stream", _bytes(session_id), str(generation), _bytes(request_id), ending, self._new_stamp(), *place
        )
        if not isinstance(opened[0], int):
            raise AppendRefusedError(_generation(opened[0]))
        self._doorbell.ring_session(session_id)
        return StreamId.of_request(opened[0], request_id)

    async def _append(
        self,
        session_id: str,
        generation: Generation,
        stream: StreamId,
        events: Sequence[bytes | None],
        is_terminal: bool,
    ) -> int:
        name, spelled = _spelled(generation, stream)
        places = [b"" if event is None else b"=" + event for event in events]
        head = b"%b %d %d %b%b" % (spelled, is_terminal, len(places), self._new_stamp(), _bytes(session_id))
        seq = await self._appends.ask((head, *places), sum(map(len, places)), stream=(session_id, name))
        if not isinstance(seq, int):
            raise AppendRefusedError(_generation(seq))
        if self._doorbell.channels:
            self._doorbell.ring(session_id, name, seq)
        return seq

    async def _snapshot(self, session_id: str, cursor: EventCursor | None) -> Snapshot | None:
        if cursor is None:
            answer = await self._snapshots.ask((_bytes(session_id), "", "", "", "", 0, ""), 0)
        else:
            request_id = cursor.stream.request_id
            answer = await self._snapshots.ask(
                (
                    _bytes(session_id),
                    cursor.generation.counter,
                    cursor.generation.nonce,
                    str(cursor.stream),
                    cursor.stream.ordinal,
                    int(request_id is not None),
                    _bytes(request_id or ""),
                ),
                0,
            )
        return _snapshot_of(cast("list[Any] | bytes", answer), cursor)

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
        answer = await self._reads.ask((_bytes(session_id), str(generation), name, after_seq, limit), 0)
        if not answer:
            return None
        is_terminal, places, number = cast("tuple[int, list[bytes], int]", answer)
        if channel is not None:
            if not places:
                channel.read_dry[name] = (after_seq, changes)
            if number > channel.consumers.get(name, 0):
                # Told by the doorbell too, but not to who did not listen yet.
                channel.consumers[name] = number
                self._tell_taken_over(session_id, name, number)
        events = [place[_PLACE_OVERHEAD:] if len(place) >= _PLACE_OVERHEAD else None for place in places]
        return Batch(events, bool(is_terminal))

    async def _wait(
        self,
        session_id: str,
        generation: Generation,  # noqa: ARG002  # a change of it rings
        stream: StreamId,
        after_seq: int,
    ) -> None:
        self._start()
        name = str(stream)
        waiter = _Waiter(name, after_seq)
        channel = self._doorbell.find(session_id)
        is_new = channel is None
        if channel is None:
            channel = self._doorbell.channels[self._doorbell.name(session_id)] = _Channel()
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

    async def _end_session(self, session_id: str, generation: Generation | None) -> bool:
        ended = await self.call("end_session", _bytes(session_id), str(generation or ""))
        if ended[0]:
            self._owned.pop(session_id, None)
            self._doorbell.ring_session(session_id)
        return bool(ended[0])

    async def _describe(self, session_id: str) -> SessionDescription | None:
        answer = await self.call("describe", _bytes(session_id))
        if not answer:
            return None
        generation = _generation(answer[0])
        assert generation is not None, "a session that is known has a generation"
        streams = [_description_of(row) for row in answer[1:]]
        return SessionDescription(
            session_id=session_id,
            generation=generation,
            streams=tuple(sorted(streams, key=lambda stream: int(stream.stream.partition(".")[0]))),
        )

    # What `SharedStorage` adds.

    async def own_session(self, session_id: str, generation: Generation, credential: str) -> bool:
        """See `SharedStorage`."""
        self._is_leased = True
        lease = int(self.lease_seconds * 1000)
        is_current = await self.call("own", _bytes(session_id), str(generation), self.worker_id, lease, credential)
        if is_current[0]:
            self._owned[session_id] = None
        return bool(is_current[0])

    async def retire(self) -> None:
        """See `SharedStorage`."""
        is_leased, self._is_leased = self._is_leased, False
        self._owned.clear()
        if is_leased and self._failure is None:
            # Where it fails, the lease runs out by itself.
            with anyio.move_on_after(_RETIRE_SECONDS, shield=True), contextlib.suppress(RedisError, OSError):
                await self._client.delete(self._lease)

    async def find_owner(self, session_id: str) -> Ownership | None:
        """See `SharedStorage`."""
        answer = await self.call("find", _bytes(session_id))
        if not answer:
            return None
        generation, worker, credential, is_alive, is_forked, is_abandoned, carried_seq = answer
        is_alive = bool(is_alive or (worker and not is_abandoned and self._is_lenient()))
        if not is_abandoned:  # That says nothing of its worker's other sessions.
            self._saw_owner(worker.decode(), is_alive=is_alive)
        return Ownership(
            generation=cast(Generation, _generation(generation)),
            worker=worker.decode(),
            credential=credential.decode(),
            is_alive=is_alive,
            is_forked=bool(is_forked),
            is_abandoned=bool(is_abandoned),
            carried_seq=carried_seq,
        )

    async def note_carried(self, session_id: str, generation: Generation, seq: int) -> None:
        """See `SharedStorage`."""
        await self.call("carry", _bytes(session_id), str(generation), seq)

    def is_seen_alive(self, worker_id: str) -> bool:
        """See `SharedStorage`."""
        return worker_id == self.worker_id or self._is_lenient() or self._owners.setdefault(worker_id, True)

    async def abandon_session(self, session_id: str) -> bool:
        """See `SharedStorage`."""
        return bool((await self.call("abandon", _bytes(session_id)))[0])

    def take_over(
        self,
        session_id: str,
        stream: StreamId,
        on_ranked: Callable[[int], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """See `SharedStorage`."""

        async def announce() -> None:
            try:
                number = (await self.call("take_over", _bytes(session_id), str(stream)))[0]
            except Exception as exc:
                on_failed(exc)
            else:
                on_ranked(number)

        task = _in_a_context_of_its_own(announce())
        self._announcements.add(task)
        task.add_done_callback(self._announcements.discard)

    # Calls.

    def _new_stamp(self) -> bytes:
        """Return what tells a request of this instance from any other, and the later of two."""
        self._stamp_number += 1
        return self._stamp_prefix + self._stamp_number.to_bytes(6, "big")

    async def call(self, script: str, *arguments: bytes | str | int) -> list[Any]:
        """Run a script and return what it answers; the evicted events are counted."""
        self._start()
        async with self._slots:
            if self._failure is not None:
                raise RedisUnavailableError(f"the server has failed, and not answered since: {self._failure}")
            try:
                return await self._run(script, arguments)
            except (RedisError, OSError, TimeoutError) as exc:
                await self._note_failure(exc)
                raise

    async def _run(self, script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        answer = await self._in_time(self._attempt(script, arguments))
        self.evicted_events += answer[0]
        return answer[1:]

    async def _attempt(self, script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        if not self._scripts.is_server_known:
            await self._get_to_know_server()
        shift = int(self._clock_shift() * 1000)
        try:
            return await self._scripts.run(self._client, script, (shift, *arguments))
        except RedisConnectionError:
            # A connection that the server has closed meanwhile. Each script may be run twice: an append knows its
            # stamp, as a stream does, and a claim its nonce.
            return await self._scripts.run(self._client, script, (shift, *arguments))

    async def _in_time(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work` returns, if that takes no longer than an operation may (see `_keep_time`).

        Raises:
            TimeoutError: When it takes longer.
        """
        with anyio.CancelScope() as scope:
            self._turns[scope] = 0
            try:
                return await work
            finally:
                del self._turns[scope]
        raise TimeoutError("the server did not answer in time")

    async def _keep_time(self) -> None:
        """Give up the operations that take too long; one task, since a timer for each costs more than some of them.

        In turns, so that an event loop that was busy with something else for longer (a garbage collection, a thousand
        clients that come back at once) has spent one of them and not all: the answer may be there already.
        """
        while True:
            await asyncio.sleep(self._timeout_seconds / _TURNS)
            for scope in list(self._turns):
                self._turns[scope] += 1
                if self._turns[scope] > _TURNS:
                    scope.cancel()

    async def _get_to_know_server(self) -> None:
        try:
            await self._client.info("replication")
        except NoPermissionError:
            self._scripts.detects_forks = False
            logger.warning(
                "INFO is not permitted: a fail-over that loses the last events of this Redis is not detected, and a "
                "client may be resumed over the loss. Permit it (ACL: +info)"
            )
        # Not permitted, it fails here, before anything is stored, and at each pulse: so that is said once.
        await self._client.publish(self._lease, b"")
        self._scripts.is_server_known = True

    @property
    def charged_bytes(self) -> int | None:
        """See `Storage`; as it was when this worker last renewed its lease, of all workers."""
        return self._charged_bytes

    async def _note_failure(self, exc: Exception) -> None:
        """Let operations fail at once until the server answers again, or another one in its place."""
        self._is_same_server = False
        if self._failure is None:
            self._failure = exc
            logger.error("Redis has failed; events go out live, and resumes are answered 503: %s", _text(exc))
        if isinstance(exc, ReadOnlyError | MasterDownError) and isinstance(self._client, Redis):
            # Demoted: the name of the server may mean another one by now.
            await self._client.connection_pool.disconnect()

    # Background.

    def _start(self) -> None:
        if self._is_closed:
            raise RuntimeError("this RedisStorage is closed")
        if not self._tasks:
            self._tasks = [_in_a_context_of_its_own(run) for run in (self._pulse(), self._listen(), self._keep_time())]

    async def _pulse(self) -> None:
        """Look after the lease, readers, owners, and a server that has failed."""
        pulses, next_lease = 0, 0.0
        has_recovered = False
        try:
            while True:
                await asyncio.sleep(_PULSE_SECONDS)
                pulses += 1
                self._doorbell.ring_share(pulses % _SWEEP_PULSES, _SWEEP_PULSES)
                for worker in self._workers:
                    await worker.on_pulse()
                if has_recovered:
                    # Again: whoever failed in the last moment had not noted its loss yet.
                    has_recovered = False
                    await self._tell_recovered()
                now = asyncio.get_running_loop().time()
                if self._failure is None and self._is_same_server and now < next_lease:
                    continue
                next_lease = now + self.lease_seconds / 4
                try:
                    if self._owned or self._failure is not None:
                        await self._renew_lease()
                    await self._look_at_owners()
                except (RedisError, OSError, TimeoutError) as exc:
                    await self._note_failure(exc)
                    continue
                if self._failure is not None:
                    self._failure = None
                    self._lenient_until = now + self.lease_seconds / 2
                    logger.warning("Redis answers again")
                    self._doorbell.ring_all()
                    has_recovered = True
                    await self._tell_recovered()
        finally:
            await self.retire()

    async def _tell_recovered(self) -> None:
        for worker in self._workers:
            await worker.on_recovered()

    async def _renew_lease(self) -> None:
        """Say that this worker lives, and keep its sessions' keys from expiring."""
        # Each session's turn comes well within `idle_seconds`, half of what its keys live; on another server, at once.
        share = -(-len(self._owned) * self.lease_seconds // (2 * self.retention.idle_seconds))
        count = max(int(share), _KEPT_SESSIONS) if self._is_same_server else len(self._owned)
        self._is_same_server = self._is_leased = True
        kept = list(islice(self._owned, count))
        for session_id in kept:
            del self._owned[session_id]
            self._owned[session_id] = None
        for start in range(0, max(len(kept), 1), _MAX_KEPT_SESSIONS):
            some = map(_bytes, kept[start : start + _MAX_KEPT_SESSIONS])
            self._charged_bytes, *unknown = await self._run(
                "keep", (self.worker_id, int(self.lease_seconds * 1000), *some)
            )
            for session_id in map(_text_of, unknown):
                # Mostly known here already; a notice that was missed is made good.
                self._owned.pop(session_id, None)
                for worker in self._workers:
                    await worker.on_moved(session_id, is_ended=False)

    async def _exists(self, key: str) -> bool:
        return bool(await self._client.exists(key))

    def _is_lenient(self) -> bool:
        """Tell whether leases may have run out because the server was away: each worker renews its own when it can."""
        return asyncio.get_running_loop().time() < self._lenient_until

    async def _look_at_owners(self) -> None:
        watched = list(self._owners)
        for worker_id in watched:
            is_alive = bool(await self._in_time(self._exists(f"{self._key_prefix}w:{worker_id}")))
            if is_alive or self._is_lenient() or self._owners[worker_id]:
                self._saw_owner(worker_id, is_alive=is_alive or self._is_lenient())
            else:
                del self._owners[worker_id]  # Asked again by whoever still wants to know.

    def _saw_owner(self, worker_id: str, *, is_alive: bool) -> None:
        was_alive = self._owners.get(worker_id, False)
        self._owners[worker_id] = is_alive
        if was_alive and not is_alive:
            self._doorbell.ring_all()

    async def _listen(self) -> None:
        """Pass on what the channels say, over one connection that is made again whenever it breaks."""
        while True:
            pubsub = self._client.pubsub()
            try:
                await pubsub.subscribe(self._notices, *self._doorbell.channels)
                # From here on `_subscribe` adds what readers ask for; what they asked for meanwhile is added now.
                self._pubsub = pubsub
                self._is_same_server = False
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
            except (RedisError, OSError, TimeoutError) as exc:
                logger.debug("The doorbell's connection broke: %s", _text(exc))
            finally:
                self._pubsub = None
                self._doorbell.disconnected()
                with anyio.CancelScope(shield=True):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]  # redis-py has not annotated it
            await asyncio.sleep(_PULSE_SECONDS)

    async def _subscribe(self, channel: bytes) -> None:
        if self._pubsub is not None:
            try:
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
                self._tell_taken_over(session_id, stream.decode(), int(number))
            else:
                stream, _, seq = data.partition(b" ")
                self._doorbell.ring(session_id, stream.decode(), int(seq))

    async def _hear_notice(self, data: bytes) -> None:
        kind, number, name, session = data.split(b" ", 3)
        session_id = _text_of(session)
        if kind == b"taken":
            self._tell_taken_over(session_id, name.decode(), int(number))
        else:
            for worker in self._workers:
                await worker.on_moved(session_id, is_ended=kind == b"ended")

    def _tell_taken_over(self, session_id: str, name: str, number: int) -> None:
        for worker in self._workers:
            worker.on_taken_over(session_id, name, number)


@dataclass(eq=False, slots=True)
class _Waiter:
    """A reader that waits for what follows `after_seq` in a stream."""

    name: str
    after_seq: int
    rung: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False, slots=True)
class _Channel:
    """What this process hears of a session.

    Attributes:
        waiters: Its readers that wait.
        is_subscribed: The server has said that it will tell.
        changes: Counts what may concern all streams.
        marks: Highest seq heard of each stream that is being read.
        consumers: Of each stream, the number of the newest consumer that was read.
        read_dry: Of each stream: after which seq a read found nothing, and how many changes were known before it.
    """

    waiters: set[_Waiter] = field(default_factory=set[_Waiter])
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


class _Doorbell:
    """The readers of this process, by session; each session has a channel."""

    def __init__(self, key_prefix: str) -> None:
        self._prefix = f"{key_prefix}d:".encode()
        self.channels: dict[bytes, _Channel] = {}

    def name(self, session_id: str) -> bytes:
        """Return the name of a session's channel."""
        return self._prefix + _bytes(session_id)

    def session_of(self, name: bytes) -> str:
        """Return the session of a channel."""
        return _text_of(name[len(self._prefix) :])

    def find(self, session_id: str) -> _Channel | None:
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


class _Scripts:
    """The Lua beside this file, made for one storage."""

    def __init__(self, key_prefix: str, retention: Retention) -> None:
        self.is_server_known = False
        self.detects_forks = True
        self._key = f"{key_prefix}totals"
        self._constants = (
            f"local P = '{key_prefix}'\n"
            f"local IDLE, COMPLETED = {_milliseconds(retention.idle_seconds)}, "
            f"{_milliseconds(retention.completed_seconds)}\n"
            f"local MAX_EVENTS, MAX_BYTES, MAX_SESSION_BYTES, MAX_TOTAL_BYTES, MAX_SESSIONS = {retention.max_events}, "
            f"{retention.max_bytes}, {retention.max_session_bytes}, {retention.max_total_bytes}, "
            f"{retention.max_sessions}\n"
            f"local MAX_REMEMBERED = {_MAX_REMEMBERED_GENERATIONS}\n"
        )
        self._sources: dict[tuple[str, bool], tuple[str, str]] = {}
        self._idle: list[Any] = []

    async def run(self, client: Redis | RedisCluster, name: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        """Run a script; the server is sent its text only where it does not know it."""
        source, digest = self._source(name)
        # The key only says which shard of a cluster is meant: all of them are there.
        try:
            return cast("list[Any]", await self._execute(client, "EVALSHA", digest, 1, self._key, *arguments))
        except NoScriptError:
            return cast("list[Any]", await self._execute(client, "EVAL", source, 1, self._key, *arguments))

    async def _execute(self, client: Redis | RedisCluster, *command: bytes | str | int) -> object:
        if isinstance(client, RedisCluster):
            return await client.execute_command(*command)
        # On connections that are kept: to take one from the pool each time, and to be told of each command's duration,
        # costs as much as the call itself (40 of 120 µs).
        connection = self._idle.pop() if self._idle else await cast("Any", client.connection_pool).get_connection()
        try:
            await connection.send_command(*command)
            answer = await connection.read_response()
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException as exc:
            self._idle.append(connection)
            # Where the server has closed one, it has closed the others.
            await self.release(client, all_but=0 if isinstance(exc, RedisConnectionError) else len(self._idle) - 1)
            raise
        self._idle.append(connection)
        return answer

    async def release(self, client: Redis | RedisCluster, *, all_but: int = 0) -> None:
        """Close the connections that are kept, the newest first, and give them back to their pool."""
        while len(self._idle) > all_but and isinstance(client, Redis):
            connection = self._idle.pop()
            await connection.disconnect(nowait=True)
            await client.connection_pool.release(connection)

    def _source(self, name: str) -> tuple[str, str]:
        key = (name, self.detects_forks)
        if key not in self._sources:
            directory = files("mcp_resumable") / "lua"
            parts = [(directory / f"{part}.lua").read_text("utf-8") for part in ("common", name)]
            forks = f"local FORKS = {str(self.detects_forks).lower()}\n"
            source = "".join([self._constants, forks, *parts])
            self._sources[key] = (source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
        return self._sources[key]


@dataclass(eq=False, slots=True)
class _Item:
    arguments: Sequence[bytes | str | int]
    size: int
    stream: tuple[str, str] | None
    answer: asyncio.Future[Any]


class _Lane:
    """Operations of one kind; those that are asked for while calls are under way travel together in the next.

    Those that write to one stream travel one after another: each is known by the stamp that the stream had last.

    Attributes:
        under_way: The calls that are under way: one is being answered while others are made.
    """

    def __init__(self, storage: RedisStorage, script: str) -> None:
        self.under_way: set[asyncio.Task[None]] = set()
        self._written: set[tuple[str, str]] = set()
        self._storage = storage
        self._script = script
        self._waiting: deque[_Item] = deque()
        self._is_scheduled = False

    async def ask(
        self, arguments: Sequence[bytes | str | int], size: int, *, stream: tuple[str, str] | None = None
    ) -> Any:
        """Return the answer for one operation; `size` is that of its events in bytes, `stream` the one it writes to."""
        item = _Item(arguments, size, stream, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._schedule()
        return await item.answer

    def _schedule(self) -> None:
        if not self._is_scheduled and len(self.under_way) < _MAX_CALLS_UNDER_WAY:
            self._is_scheduled = True
            # Not at once: the other tasks of this turn of the loop may ask for something too.
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_scheduled = False
        items: list[_Item] = []
        kept_back: list[_Item] = []
        size = 0
        # Half of them: the server is busy with one half while this process is with the other.
        half = min(max(_MIN_CALL_ITEMS, -(-len(self._waiting) // 2)), _MAX_CALL_ITEMS)
        while self._waiting and len(items) < half and size < _MAX_CALL_BYTES:
            item = self._waiting.popleft()
            if item.answer.done():
                continue  # Given up before it was sent.
            if item.stream is not None:
                if item.stream in self._written:
                    kept_back.append(item)
                    continue
                self._written.add(item.stream)
            items.append(item)
            size += item.size
        self._waiting.extendleft(reversed(kept_back))
        if items:
            # In a task of its own: whoever asked may be cancelled, the others' operations are not.
            self.under_way.add(_in_a_context_of_its_own(self._deliver(items)))
            if len(self._waiting) > len(kept_back):
                self._schedule()

    async def _deliver(self, items: list[_Item]) -> None:
        try:
            answers = await self._storage.call(self._script, *[part for item in items for part in item.arguments])
        except Exception as exc:
            for item in items:
                if not item.answer.done():
                    item.answer.set_exception(exc)
        else:
            for item, answer in zip(items, answers, strict=True):
                if not item.answer.done():
                    item.answer.set_result(answer)
        finally:
            self._written.difference_update([item.stream for item in items if item.stream is not None])
            self.under_way.discard(cast("asyncio.Task[None]", asyncio.current_task()))
            if self._waiting:
                self._schedule()


def _client_of(url_or_client: str | Redis | RedisCluster, timeout_seconds: float) -> Redis | RedisCluster:
    if isinstance(url_or_client, str):
        url = re.sub(r"^valkey(s?)://", r"redi\1s://", url_or_client)
        # An operation that is not answered is not sent again behind our back; reads are limited where they are awaited,
        # since a doorbell may be quiet.
        return Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=timeout_seconds,
            health_check_interval=10,
            socket_timeout=None,
        )
    has_options = url_or_client if isinstance(url_or_client, RedisCluster) else url_or_client.connection_pool
    if has_options.connection_kwargs.get("decode_responses"):
        raise ValueError("the client must not decode responses: events are bytes (decode_responses=False)")
    return url_or_client


def _in_a_context_of_its_own(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a task that does not keep alive the session whose request happened to start it."""
    return Context().run(asyncio.get_running_loop().create_task, coroutine)


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))


@lru_cache(maxsize=4096)
def _spelled(generation: Generation, stream: StreamId) -> tuple[str, bytes]:
    # Remembered: a stream is written to event by event, and to spell it takes as long as the rest of `_append`.
    return str(stream), f"{generation} {stream}".encode()


def _bytes(text: str) -> bytes:
    # A request id may hold lone surrogates, which have no UTF-8 form of their own.
    return text.encode("utf-8", "surrogatepass")


def _text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _text(exc: Exception) -> str:
    return ascii(str(exc) or type(exc).__name__)


def _generation(spelled: bytes) -> Generation | None:
    if not spelled:
        return None
    counter, _, nonce = spelled.decode().partition("-")
    return Generation(int(counter), nonce)


def _stream_id(name: str) -> StreamId:
    cursor = EventCursor.parse(f"1-{'0' * 12}:{name}:0")
    assert cursor is not None, "a stream's name is one that this package has made"
    return cursor.stream


def _snapshot_of(answer: list[Any] | bytes, cursor: EventCursor | None) -> Snapshot | None:
    if not answer:
        return None
    spelled, claimed, kind, mark, floor, hole, is_terminal, newest, counter, ordinal = cast("list[Any]", answer)
    generation = _generation(spelled)
    assert generation is not None, "a session that is known has a generation"
    if cursor is None:
        return Snapshot(generation=generation, claimed="never", stream=NeverOpened())
    stream: StreamState
    match kind:
        case b"retained":
            stream = Retained(high_water_mark=mark, replay_floor=floor, last_hole=hole, is_terminal=bool(is_terminal))
        case b"superseded":
            stream = Superseded()
        case b"dropped":
            stream = Dropped()
        case _:
            stream = NeverOpened()
    # A cursor of another generation that carries no request id names no call of this one.
    is_named = claimed == b"current" or cursor.stream.request_id is not None or cursor.stream == STANDALONE
    return Snapshot(
        generation=generation,
        claimed=cast("Literal['current', 'earlier', 'never']", claimed.decode()),
        stream=stream,
        successor=Successor(stream=_stream_id(newest.decode()), origin=(counter, ordinal))
        if newest and is_named
        else None,
    )


def _description_of(row: list[Any]) -> StreamDescription:
    name, request_id, floor, mark, is_terminal, events, size = row
    return StreamDescription(
        stream=name.decode(),
        request_id=None if name == b"0" else _text_of(request_id),
        replay_floor=floor,
        high_water_mark=mark,
        is_terminal=bool(is_terminal),
        retained_events=events,
        retained_bytes=size,
    )
