"""Several workers over one server, each with a store of its own, in the test's event loop."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from mcp_resumable import ResumableEventStore
from mcp_resumable.redis import RedisStorage
from tests.e2e.raw_client import RawClient
from tests.e2e.servers import RunningServer, serve
from tests.redis.server import Server

__all__ = ["TIMEOUT", "Crew", "at", "crew"]

TIMEOUT = 20

_numbers = itertools.count()


@dataclass(frozen=True)
class Crew:
    """Workers, and what they share.

    Attributes:
        workers: Servers of the tools in `tests/e2e/servers.py`.
        storages: Theirs, in the same order.
        prefix: Of their keys.
        redis: Their server.
    """

    workers: list[RunningServer]
    storages: list[RedisStorage]
    prefix: str
    redis: Server

    def keys(self) -> set[bytes]:
        """All keys of these workers."""
        with self.redis.client() as client:
            return set(client.scan_iter(f"{{{self.prefix}}}:*", count=1000))

    def delete(self, key: str) -> None:
        """Delete one of their keys, given without the prefix."""
        with self.redis.client() as client:
            assert client.delete(f"{{{self.prefix}}}:{key}") == 1


def at(client: RawClient, worker: RunningServer) -> RawClient:
    """Return the same client as it reaches another worker."""
    other = RawClient(worker, version=client.version, headers=client.headers)
    other.session_id = client.session_id
    return other


@asynccontextmanager
async def crew(
    redis: Server,
    size: int = 2,
    *,
    urls: Sequence[str] = (),
    rejection: Any = "status",
    lease_seconds: float = 10.0,
    prefix: str | None = None,
    **options: Any,
) -> AsyncIterator[Crew]:
    """Serve `size` workers; each reaches the server by its own one of `urls`, where there are any."""
    prefix = prefix or f"crew-{next(_numbers)}"
    async with AsyncExitStack() as stack:
        with anyio.fail_after(TIMEOUT):
            workers, storages = [], []
            for number in range(size):
                url = urls[number] if urls else redis.url
                storage = RedisStorage(url, prefix=prefix, lease_seconds=lease_seconds, **options)
                stack.push_async_callback(storage.aclose)
                storages.append(storage)
                store = ResumableEventStore(storage, rejection=rejection)
                workers.append(await stack.enter_async_context(serve("starlette", store)))
            yield Crew(workers, storages, prefix, redis)
