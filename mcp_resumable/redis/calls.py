"""How calls travel to the server: together, in time, and none while it has failed."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (redis-py is annotated in part)

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import anyio
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, NoPermissionError, ReadOnlyError, RedisError

from mcp_resumable.redis.scripts import Scripts, writing

__all__ = ["APPEND_GAP_SECONDS", "Calls", "Lane", "RedisUnavailableError", "client_of", "in_a_context_of_its_own"]

_T = TypeVar("_T")

logger = logging.getLogger("mcp_resumable")

# Of a call: bounds how long the server is busy with one script, a few milliseconds.
_MAX_CALL_ITEMS = 128
# Of a call, where there is more to ask for: a call costs as much as five appends.
_MIN_CALL_ITEMS = 8
_MAX_CALL_BYTES = 1024 * 1024

# At a time, each on a connection of its own: of all kinds, and of each kind that travels together.
_MAX_CALLS = 16
_CALLS_AT_ONCE = 3
# Between calls that write: a call costs a worker as much as five appends. The event loop tells no shorter times apart.
APPEND_GAP_SECONDS = 0.001
# Operations that do not wait for the gap to be over.
_MIN_ITEMS_AT_ONCE = 16
# Turns of the time that an operation may take.
_TURNS = 4


class RedisUnavailableError(RedisConnectionError):
    """Raised at once, without asking, while a server that has failed has not answered since."""


class Calls:
    """Asks one server.

    Attributes:
        client: What reaches it.
        scripts: What it is asked to run.
        failure: What it has failed with, where it has not answered since.
        is_same_server: Whether it is still the one that answered before, as far as its connections tell.
    """

    def __init__(
        self,
        client: Redis | RedisCluster,
        scripts: Scripts,
        *,
        own_channel: str,
        timeout_seconds: float,
        clock_shift: Callable[[], float],
        on_evicted: Callable[[int], None],
    ) -> None:
        self.client = client
        self.scripts = scripts
        self.failure: Exception | None = None
        self.is_same_server = True
        self._own_channel = own_channel
        self._timeout_seconds = timeout_seconds
        self._clock_shift = clock_shift
        self._on_evicted = on_evicted
        # Operations that are being waited for, and the turns that each has spent.
        self._turns: dict[anyio.CancelScope, int] = {}
        self._slots = asyncio.Semaphore(_MAX_CALLS)

    async def ask(self, script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        """Run a script and return what it answers; the evicted events are counted.

        Raises:
            RedisUnavailableError: While the server has failed.
        """
        async with self._slots:
            if self.failure is not None:
                raise RedisUnavailableError(f"the server has failed, and not answered since: {self.failure}")
            try:
                return await self.run(script, arguments)
            except (RedisError, OSError, TimeoutError) as exc:
                await self.note_failure(exc)
                raise

    async def run(self, script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        """Do as `ask` does, also where the server has failed; and note nothing."""
        answer = await self.in_time(self._attempt(script, arguments))
        self._on_evicted(answer[0])
        return answer[1:]

    async def _attempt(self, script: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        if not self.scripts.is_server_known:
            with writing():
                await self._get_to_know_server()
        shift = int(self._clock_shift() * 1000)
        try:
            return await self.scripts.run(self.client, script, (shift, *arguments))
        except RedisConnectionError:
            # A connection that the server has closed meanwhile. Each script may be run twice: an append knows its
            # stamp, as a stream does, and a claim its nonce.
            return await self.scripts.run(self.client, script, (shift, *arguments))

    async def in_time(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work` returns, if that takes no longer than an operation may (see `keep_time`).

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

    async def keep_time(self) -> None:
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
            await self.client.info("replication")
        except NoPermissionError:
            self.scripts.detects_forks = False
            logger.warning(
                "INFO is not permitted: a fail-over that loses the last events of this Redis is not detected, and a "
                "client may be resumed over the loss. Permit it (ACL: +info)"
            )
        # Not permitted, it fails here, before anything is stored, and at each pulse: so that is said once.
        await self.client.publish(self._own_channel, b"")
        self.scripts.is_server_known = True

    async def note_failure(self, exc: Exception) -> None:
        """Let operations fail at once until the server answers again, or another one in its place."""
        self.is_same_server = False
        if self.failure is None:
            self.failure = exc
            logger.error(
                "Redis has failed; events go out live, and resumes are answered 503: %s",
                ascii(str(exc) or type(exc).__name__),
            )
        if isinstance(exc, ReadOnlyError | MasterDownError) and isinstance(self.client, Redis):
            # Demoted: the name of the server may mean another one by now.
            await self.client.connection_pool.disconnect()

    async def release(self) -> None:
        """Close the connections that are kept."""
        await self.scripts.release(self.client)


class _Call(Protocol):
    def __call__(self, script: str, *arguments: bytes | str | int) -> Awaitable[list[Any]]: ...


@dataclass(eq=False, slots=True)
class _Item:
    arguments: Sequence[bytes | str | int]
    size: int
    stream: tuple[str, str] | None
    answer: asyncio.Future[Any]


class Lane:
    """Operations of one kind; those that are asked for while calls are under way travel together in the next.

    Those that write to one stream travel one after another: each is known by the stamp that the stream had last.

    Attributes:
        under_way: The calls that are under way.
    """

    def __init__(
        self, call: _Call, script: str, *, calls_at_once: int = _CALLS_AT_ONCE, gap_seconds: float = 0.0
    ) -> None:
        """Make a lane.

        Args:
            call: Runs a script.
            script: Which.
            calls_at_once: How many calls may be under way. One: each takes all that waits, so they are few. Several:
                each takes half, and the server is busy with one while this process is with another.
            gap_seconds: What calls are apart at least while few operations wait: what comes meanwhile travels together.
        """
        self.under_way: set[asyncio.Task[None]] = set()
        self._calls_at_once = calls_at_once
        self._gap_seconds = gap_seconds
        self._next_call = 0.0
        self._is_urgent = False
        self._written: set[tuple[str, str]] = set()
        self._call = call
        self._script = script
        self._waiting: deque[_Item] = deque()
        # What will make the next call: a timer, or a task that has not run yet.
        self._next: asyncio.TimerHandle | asyncio.Task[None] | None = None

    def put(
        self,
        arguments: Sequence[bytes | str | int],
        size: int = 0,
        *,
        stream: tuple[str, str] | None = None,
        at_once: bool = False,
    ) -> asyncio.Future[Any]:
        """Return the answer to come for one operation.

        Args:
            arguments: Of the script, for this operation.
            size: Of its events, in bytes.
            stream: What it writes to, of which session.
            at_once: It does not wait for the gap to be over.
        """
        item = _Item(arguments, size, stream, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._is_urgent = self._is_urgent or at_once
        self._schedule()
        return item.answer

    def _schedule(self) -> None:
        if len(self.under_way) >= self._calls_at_once:
            return
        loop = asyncio.get_running_loop()
        has_time = not self._is_urgent and len(self._waiting) < _MIN_ITEMS_AT_ONCE
        is_early = has_time and loop.time() < self._next_call
        if self._next is None:
            self._next = loop.call_at(self._next_call, self._begin) if is_early else self._begin()
        elif not isinstance(self._next, asyncio.Task) and not is_early:  # uvloop has timers of its own class.
            self._next.cancel()
            self._next = self._begin()

    def _begin(self) -> asyncio.Task[None]:
        # In a task of its own: whoever asks may be cancelled, the others' operations are not. It takes along what the
        # other tasks of this turn of the loop ask for.
        self._next = task = in_a_context_of_its_own(self._make_call())
        self.under_way.add(task)
        return task

    def _take(self) -> list[_Item]:
        """Return what the next call is for."""
        self._next = None
        self._is_urgent = False
        items: list[_Item] = []
        kept_back: list[_Item] = []
        size = 0
        share = len(self._waiting) if self._calls_at_once == 1 else max(_MIN_CALL_ITEMS, -(-len(self._waiting) // 2))
        share = min(share, _MAX_CALL_ITEMS)
        while self._waiting and len(items) < share and size < _MAX_CALL_BYTES:
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
            self._next_call = asyncio.get_running_loop().time() + self._gap_seconds
            if len(self._waiting) > len(kept_back):
                self._is_urgent = True  # The other half.
                self._schedule()
        return items

    async def _make_call(self) -> None:
        items = self._take()
        if items:
            await self._deliver(items)
        self.under_way.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        if items and self._waiting:
            self._schedule()

    async def _deliver(self, items: list[_Item]) -> None:
        try:
            answers = await self._call(self._script, *[part for item in items for part in item.arguments])
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


def client_of(url_or_client: str | Redis | RedisCluster, timeout_seconds: float) -> Redis | RedisCluster:
    """Return a client for a URL, or the one that was handed in.

    Raises:
        ValueError: When that decodes responses, or is of a cluster and its redis-py has no `pubsub` for one.
    """
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
    if isinstance(url_or_client, RedisCluster) and not hasattr(url_or_client, "pubsub"):
        raise ValueError("a client of a cluster needs redis-py 8 or newer, which has pubsub for it")
    has_options = url_or_client if isinstance(url_or_client, RedisCluster) else url_or_client.connection_pool
    if has_options.connection_kwargs.get("decode_responses"):
        raise ValueError("the client must not decode responses: events are bytes (decode_responses=False)")
    return url_or_client


def in_a_context_of_its_own(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a task that does not keep alive the session whose request happened to start it."""
    return Context().run(asyncio.get_running_loop().create_task, coroutine)
