"""What is done when nobody asks: this worker's lease, the lives of others, and a server that has failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from itertools import islice

import anyio
from redis.exceptions import RedisError

from mcp_resumable.redis.answers import bytes_of, text_of
from mcp_resumable.redis.calls import Calls
from mcp_resumable.redis.doorbell import Doorbell
from mcp_resumable.redis.scripts import writing
from mcp_resumable.shared import Worker

__all__ = ["Pulse"]

logger = logging.getLogger("mcp_resumable")

_PULSE_SECONDS = 0.5
# How long the end of a process may wait for the server.
_RETIRE_SECONDS = 1.0
# A reader reads again within so many pulses, should its doorbell have been missed: half a minute. Ten thousand idle
# readers cost a few percent of a CPU that way. A connection that breaks is noticed by itself.
_SWEEP_PULSES = 60
# Sessions whose keys are kept in one pulse, at least; and in one call, at most.
_KEPT_SESSIONS = 64
_MAX_KEPT_SESSIONS = 256


class Pulse:
    """Looks after what must not wait for an operation.

    Attributes:
        owned: Sessions of this worker, the one whose keys were kept longest ago first.
        is_leased: Whether this worker has said that it lives, and not since that it serves no session any more.
        charged_bytes: Of all workers' sessions, as it was when the lease was last renewed.
    """

    def __init__(
        self,
        calls: Calls,
        doorbell: Doorbell,
        workers: Sequence[Worker],
        *,
        key_prefix: str,
        worker_id: str,
        lease_seconds: float,
        idle_seconds: float,
    ) -> None:
        self.owned: dict[str, None] = {}
        self.is_leased = False
        self.charged_bytes: int | None = None
        self._calls = calls
        self._doorbell = doorbell
        self._workers = workers
        self._lease_prefix = f"{key_prefix}w:"
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._idle_seconds = idle_seconds
        # Workers that are watched, and whether they lived at the last look.
        self._owners: dict[str, bool] = {}
        self._lenient_until = 0.0

    async def run(self) -> None:
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
                if self._calls.failure is None and self._calls.is_same_server and now < next_lease:
                    continue
                next_lease = now + self._lease_seconds / 4
                try:
                    if self.owned or self._calls.failure is not None:
                        await self._renew_lease()
                    await self._look_at_owners()
                except (RedisError, OSError, TimeoutError) as exc:
                    await self._calls.note_failure(exc)
                    continue
                if self._calls.failure is not None:
                    self._calls.failure = None
                    self._lenient_until = now + self._lease_seconds / 2
                    logger.warning("Redis answers again")
                    self._doorbell.ring_all()
                    has_recovered = True
                    await self._tell_recovered()
        finally:
            await self.retire()

    async def retire(self) -> None:
        """Give the lease back. See `SharedStorage.retire`."""
        is_leased, self.is_leased = self.is_leased, False
        self.owned.clear()
        if is_leased and self._calls.failure is None:
            # Where it fails, the lease runs out by itself.
            with anyio.move_on_after(_RETIRE_SECONDS, shield=True), contextlib.suppress(RedisError, OSError), writing():
                await self._calls.client.delete(self._lease_prefix + self._worker_id)

    async def _tell_recovered(self) -> None:
        for worker in self._workers:
            await worker.on_recovered()

    async def _renew_lease(self) -> None:
        """Say that this worker lives, and keep its sessions' keys from expiring."""
        # Each session's turn comes well within `idle_seconds`, half of what its keys live; on another server, at once.
        share = -(-len(self.owned) * self._lease_seconds // (2 * self._idle_seconds))
        count = max(int(share), _KEPT_SESSIONS) if self._calls.is_same_server else len(self.owned)
        self._calls.is_same_server = self.is_leased = True
        kept = list(islice(self.owned, count))
        for session_id in kept:
            del self.owned[session_id]
            self.owned[session_id] = None
        for start in range(0, max(len(kept), 1), _MAX_KEPT_SESSIONS):
            some = map(bytes_of, kept[start : start + _MAX_KEPT_SESSIONS])
            self.charged_bytes, *over = await self._calls.run(
                "keep", (self._worker_id, int(self._lease_seconds * 1000), *some)
            )
            for session, is_ended in zip(over[::2], over[1::2], strict=True):
                # Mostly known here already; a notice that was missed is made good.
                session_id = text_of(session)
                self.owned.pop(session_id, None)
                for worker in self._workers:
                    await worker.on_moved(session_id, is_ended=bool(is_ended))

    async def _exists(self, key: str) -> bool:
        with writing():
            return bool(await self._calls.client.exists(key))

    def is_lenient(self) -> bool:
        """Tell whether leases may have run out because the server was away: each worker renews its own when it can."""
        return asyncio.get_running_loop().time() < self._lenient_until

    async def _look_at_owners(self) -> None:
        watched = list(self._owners)
        for worker_id in watched:
            is_alive = bool(await self._calls.in_time(self._exists(self._lease_prefix + worker_id)))
            if is_alive or self.is_lenient() or self._owners[worker_id]:
                self.saw_owner(worker_id, is_alive=is_alive or self.is_lenient())
            else:
                del self._owners[worker_id]  # Asked again by whoever still wants to know.

    def saw_owner(self, worker_id: str, *, is_alive: bool) -> None:
        """Note whether a worker lives; who waits for its sessions is woken when it has died."""
        was_alive = self._owners.get(worker_id, False)
        self._owners[worker_id] = is_alive
        if was_alive and not is_alive:
            self._doorbell.ring_all()

    def is_seen_alive(self, worker_id: str) -> bool:
        """See `SharedStorage.is_seen_alive`."""
        return worker_id == self._worker_id or self.is_lenient() or self._owners.setdefault(worker_id, True)
