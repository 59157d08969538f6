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
from tests.e2e.raw_client import Endpoint, RawClient, Response
from tests.e2e.servers import RunningServer, serve
from tests.redis.server import Server

__all__ = ["TIMEOUT", "Crew", "answered", "at", "crew", "new_call", "refusal_of"]

TIMEOUT = 60

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

    def expire_lease(self, worker: int) -> None:
        """Have a worker taken for dead: its lease is gone, and no pulse of it renews it meanwhile."""
        pulse = self.storages[worker]._pulse
        pulse._renew_lease = _nothing  # type: ignore[method-assign]
        self.delete(f"w:{self.storages[worker].worker_id}")


async def _nothing() -> None:
    """Stands for a pulse that does not come."""


def at(client: RawClient, worker: Endpoint) -> RawClient:
    """Return the same client as it reaches another worker."""
    other = RawClient(worker, version=client.version, headers=client.headers)
    other.session_id = client.session_id
    return other


async def refusal_of(response: Response) -> tuple[int, str]:
    """Return status and reason of a refused resume; a 503 must say when to come again."""
    assert response.status >= 400
    if response.status == 503:
        assert int(response.headers["retry-after"]) >= 1
    reason: str = (await response.json())["error"]["data"]["reason"]
    return response.status, reason


async def answered(client: RawClient, event_id: str) -> Response:
    """Present an event id until the storage has an answer; to be used under `fail_after`."""
    while True:
        response = await client.get(event_id)
        if response.status != 503:
            return response
        assert await refusal_of(response) == (503, "storage_unavailable")
        await anyio.sleep(0.02)


async def new_call(client: RawClient, request_id: int, *others: RawClient) -> list[str]:
    """Make a call, once the storage has recovered, and resume it in every place; return its event ids."""
    while True:
        frames = await (await client.call("count", request_id, n=2)).rest()
        if all(frame.id for frame in frames):
            break
        request_id += 100  # It came too early.
    for place in (client, *others):
        resumed = await answered(place, frames[0].id or "")
        assert resumed.status == 200
        assert [frame.id for frame in await resumed.rest()] == [frame.id for frame in frames]
    return [frame.id or "" for frame in frames]


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
