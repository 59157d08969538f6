"""The Lua in `lua/`, and the connections on which it is run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from mcp_resumable.storage import MAX_BATCH_EVENTS, Retention

__all__ = ["Scripts", "writing"]

# Earlier generations of one session whose nonces are remembered, to tell "earlier" (409) from "never" (400).
_MAX_REMEMBERED_GENERATIONS = 1_000


@contextmanager
def writing() -> Generator[None]:
    """Raise as a lost connection what uvloop raises where one that is written to is closed already: a RuntimeError.

    asyncio's own loop lets the write pass; the connection is lost when the answer is read. redis-py knows only that.
    """
    try:
        yield
    except RuntimeError as exc:
        if type(exc) is not RuntimeError:
            raise
        raise RedisConnectionError(str(exc)) from exc


class Scripts:
    """The scripts, made for one storage.

    Attributes:
        is_server_known: What must be known of the server before it is asked is known.
        detects_forks: Whether the scripts may ask for the server's replication id.
    """

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
            f"local MAX_REMEMBERED, MAX_REST = {_MAX_REMEMBERED_GENERATIONS}, {MAX_BATCH_EVENTS}\n"
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
            with writing():
                return await client.execute_command(*command)
        # On connections that are kept: to take one from the pool each time, and to be told of each command's duration,
        # costs as much as the call itself (40 of 120 µs).
        with writing():
            connection = self._idle.pop() if self._idle else await cast("Any", client.connection_pool).get_connection()
        try:
            with writing():
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
            directory = files("mcp_resumable.redis") / "lua"
            parts = [(directory / f"{part}.lua").read_text("utf-8") for part in ("common", name)]
            forks = f"local FORKS = {str(self.detects_forks).lower()}\n"
            source = "".join([self._constants, forks, *parts])
            self._sources[key] = (source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
        return self._sources[key]


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
