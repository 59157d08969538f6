"""Who may resume a session of another worker: who opened it, and nobody else learns that there is one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from mcp_resumable import ResumableEventStore
from mcp_resumable.redis import RedisStorage
from tests.redis.server import Server
from tests.test_auth import (
    OTHERS,
    AuthenticatedHost,
    UserClient,
    answer_for_an_unknown_session,
    answer_to,
    authenticated,
    open_session,
    without_ids,
)

pytestmark = pytest.mark.anyio

_numbers = itertools.count()


@asynccontextmanager
async def two_hosts(redis: Server, rejection: Any) -> AsyncGenerator[list[AuthenticatedHost]]:
    prefix = f"auth-{next(_numbers)}"
    async with AsyncExitStack() as stack:
        hosts = []
        for _ in range(2):
            storage = RedisStorage(redis.url, prefix=prefix)
            stack.push_async_callback(storage.aclose)
            store = ResumableEventStore(storage, rejection=rejection)
            hosts.append(await stack.enter_async_context(authenticated(store)))
        yield hosts


def at(host: AuthenticatedHost, client: UserClient, token: str) -> UserClient:
    """Return a session in the hands of whoever has this token, at another worker."""
    return UserClient(host, client.session_id).of(token)


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_a_session_is_resumed_on_another_worker_by_its_user_only(redis_server: Server, rejection: str) -> None:
    """Its owner answered another user with the SDK's 404, and for a session that nobody has with its own."""
    async with two_hosts(redis_server, rejection) as hosts:
        alice = await open_session(hosts[0], "alice-1")
        post = await alice.call(1)
        await alice.tool(1).emit("one", "two")
        cursors = [frame.id for frame in (await post.frame(), await post.frame()) if frame is not None]
        assert len(cursors) == 2
        for other in OTHERS:
            for host in hosts:
                thief = at(host, alice, other)
                for cursor in (*cursors, "garbage"):
                    answer = await answer_to(thief.get(cursor))
                    assert answer[0] == 404
                    assert alice.session_id not in str(answer[2])
                    unknown = await answer_for_an_unknown_session(thief, "GET", None, cursor)
                    assert without_ids(answer) == without_ids(unknown), cursor
        nobody = at(hosts[1], alice, "").get(cursors[0])
        await nobody.until_done()
        assert nobody.status == 401
        # A refreshed token is the same user's.
        resumed = at(hosts[1], alice, "alice-2").get(cursors[1])
        alice.tool(1).finish()
        frames = [frame for frame in await resumed.frames() if frame.data]
        assert [frame.step for frame in frames] == ["two", "answer"]
