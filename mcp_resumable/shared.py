"""What a storage owes beyond the contract when several workers share it: who serves a session, and who reads it now.

A session belongs to the worker that opened it: the SDK keeps its state there, and that worker alone writes. What others
can do is read. So they need to know whether the owner still lives (a lease, which only says who lives: what keeps a
superseded owner from writing is the fence of `append`), for whom the session was opened, and when another worker's
connection takes a stream over.

A store that is given a `SharedStorage` resumes a session from any worker. Without one it does so in the session's own
process only.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from mcp_resumable.cursor import Generation, StreamId
from mcp_resumable.storage import Storage

__all__ = ["Ownership", "SharedStorage", "Worker", "digest_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Who serves a session, and for whom.

    Attributes:
        generation: The session's current generation.
        worker: Who opened the session; `""` where nobody has said so yet.
        credential: Digest of the credential that it was opened with; `""` without authentication.
        is_alive: Whether the worker's lease runs.
        is_forked: The generation was begun by the storage itself, because it may have lost some of the one before.
        is_abandoned: The session is given up; see `abandon_session`.
        carried_seq: Highest seq of the standalone stream that another worker has sent to the client.
    """

    generation: Generation
    worker: str
    credential: str
    is_alive: bool
    is_forked: bool
    is_abandoned: bool
    carried_seq: int


class Worker(Protocol):
    """What a shared storage tells the worker that uses it, from a task of its own. None of it may raise."""

    async def on_recovered(self) -> None:
        """The storage answers again after it failed."""

    async def on_pulse(self) -> None:
        """Time to do what was left for later; every second or so."""

    async def on_moved(self, session_id: str, *, is_ended: bool) -> bool:
        """Another worker has moved, given up or ended a session that this one owns.

        Returns:
            Whether this one serves it, or did until now.
        """
        ...

    def on_taken_over(self, session_id: str, stream: str, number: int) -> None:
        """A stream's newest consumer has this number; every one with a lower number is to be closed."""


class SharedStorage(Storage):
    """A storage that tells workers of each other.

    Where a session was ended by another worker, and its owner not told so yet, the owner's next claim of it
    (`open_session`) tells it, and raises `AppendRefusedError` of no generation: the end must not be undone.

    Attributes:
        worker_id: This instance, among all that share the data; never used again.
        lease_seconds: How long after its last sign of life a worker counts as alive.
    """

    worker_id: str
    lease_seconds: float

    @abstractmethod
    def serve(self, worker: Worker) -> None:
        """Tell `worker` from now on what it must know; any number of them."""

    @abstractmethod
    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work`, which does not raise, in a task of the storage's own; before it is closed, `work` has ended."""

    @abstractmethod
    async def own_session(self, session_id: str, generation: Generation, credential: str) -> bool:
        """Note that this worker serves a session.

        Returns:
            Whether `generation` is its current one; nothing is noted otherwise.
        """

    @abstractmethod
    async def retire(self) -> None:
        """Say that this worker serves no session any more, unless it is said to serve one again; never raises."""

    @abstractmethod
    async def find_owner(self, session_id: str) -> Ownership | None:
        """Return who serves a session; None where it is unknown or over."""

    @abstractmethod
    def is_seen_alive(self, worker_id: str) -> bool:
        """Tell, without asking, whether a worker was alive at the last look; looks at it from now on.

        A worker that dies is seen dead within `lease_seconds` and a little. `wait` returns to those who wait for its
        sessions then.
        """

    @abstractmethod
    async def abandon_session(self, session_id: str) -> bool:
        """Give up a session whose owner is dead, in one atomic step with looking at its lease.

        From then on its owner is refused, should it live after all. Streams that are complete stay readable.

        Returns:
            Whether it is given up, or over; False where the owner lives, or may: after the storage itself has failed.
        """

    @abstractmethod
    async def note_carried(self, session_id: str, generation: Generation, seq: int) -> None:
        """Note what this worker, which does not serve the session, has sent of its standalone stream.

        Where the client then opens that stream anew at the owner, it is not sent again.
        """

    @abstractmethod
    def take_over(
        self,
        session_id: str,
        stream: StreamId,
        on_ranked: Callable[[int], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """Number a stream's newest consumer, and tell every worker (`on_taken_over`). Returns at once.

        Args:
            session_id: What `Mcp-Session-Id` names.
            stream: As the cursor has it.
            on_ranked: Called with the number, which is higher than all before.
            on_failed: Called where the others could not be told.
        """


def digest_of(credential: object) -> str:
    """Return what tells credentials apart for every worker; `""` without one. Their own text is not kept."""
    return "" if credential is None else hashlib.sha256(repr(credential).encode()).hexdigest()
