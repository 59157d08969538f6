"""Nothing is left behind: every key expires by itself, and after all sessions are over there is none."""

from __future__ import annotations

import anyio
import pytest

from mcp_resumable import Retention
from mcp_resumable.redis import RedisStorage
from tests.e2e.raw_client import session
from tests.in_loop import until
from tests.redis.server import Server
from tests.redis.storages import Log, fresh_prefix, opened
from tests.redis.workers import TIMEOUT, at, crew

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The logging capability is deprecated")]

SHORT = Retention(completed_seconds=0.5, idle_seconds=2)


def keys(server: Server, prefix: str) -> list[str]:
    with server.client() as client:
        return sorted(key.decode().removeprefix(f"{{{prefix}}}:") for key in client.scan_iter(f"{{{prefix}}}:*"))


def keys_for_ever(server: Server, prefix: str) -> list[str]:
    """Return the keys that do not expire."""
    with server.client() as client:
        return [key for key in keys(server, prefix) if client.ttl(f"{{{prefix}}}:{key}") == -1]


async def test_every_key_expires_from_its_first_moment(redis_server: Server) -> None:
    """A worker that was killed right after its first answer left keys behind for ever."""
    prefix = fresh_prefix()
    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url, prefix=prefix) as storage:
            checked: set[str] = set()

            def check() -> None:
                assert keys_for_ever(redis_server, prefix) == []
                checked.update(key.partition(":")[0] for key in keys(redis_server, prefix))

            log = await Log.open(storage, "s")
            check()
            await storage.own_session("s", log.generation, "")
            await log.append(storage, b"1")
            check()
            call = await Log.open(storage, "s", "7")
            await call.append(storage, b"1")
            check()
            await call.append(storage, b"answer", is_terminal=True)
            check()
            await storage.advance_generation("s")
            check()
            ranked = anyio.Event()
            storage.take_over("s", log.stream, lambda _rank: ranked.set(), lambda _exc: None)
            await ranked.wait()
            await storage.end_session("s")
            check()
            assert checked == {"s", "e", "o", "w", "oldest", "sessions", "completed", "past", "charges", "totals"}


@pytest.mark.parametrize("kind", ["oldest", "sessions", "completed", "past", "charges", "totals", "o"])
async def test_a_key_that_was_lost_expires_when_it_is_made_again(redis_server: Server, kind: str) -> None:
    prefix = fresh_prefix()
    with anyio.fail_after(TIMEOUT):
        async with opened(redis_server.url, prefix=prefix) as storage:
            call = await Log.open(storage, "s", "7")
            await call.append(storage, b"1")
            with redis_server.client() as client:
                client.delete(f"{{{prefix}}}:{kind}", f"{{{prefix}}}:{kind}:s")
            for request_id in "89":
                call = await Log.open(storage, "s", request_id)
                await call.append(storage, b"1")
                await call.append(storage, b"answer", is_terminal=True)
            await storage.open_session("other")
            await storage.end_session("other")
            assert keys_for_ever(redis_server, prefix) == []


async def test_with_workers_alive_nothing_is_left_of_sessions_that_are_over(redis_server: Server) -> None:
    with anyio.fail_after(TIMEOUT):
        async with crew(redis_server, lease_seconds=2, retention=SHORT) as c:
            async with session(c.workers[0]) as client, at(client, c.workers[1]) as there:
                frames = await (await client.call("count", 7, n=2)).rest()
                assert (await there.get(frames[0].id)).status == 200
                held = await client.call("hold", 8, n=1, tag="8")
                await held.events(2)
                assert keys_for_ever(redis_server, c.prefix) == []
                await (await c.workers[0].hold("8")).finish()
                await held.rest()
            assert keys(redis_server, c.prefix)
            await until(lambda: not keys(redis_server, c.prefix))
            assert await c.workers[0].store.describe(client.sid) is None


async def test_with_workers_gone_nothing_is_left(redis_server: Server) -> None:
    prefix = fresh_prefix()
    with anyio.fail_after(TIMEOUT):
        storage = RedisStorage(redis_server.url, prefix=prefix, retention=SHORT, lease_seconds=2)
        for session_id in ("idle", "waiting", "over"):
            log = await Log.open(storage, session_id)
            await log.append(storage, b"1")
            await storage.own_session(session_id, log.generation, "")
            # One that is answered, and one that never will be.
            for request_id in "78":
                call = await Log.open(storage, session_id, request_id)
                await call.append(storage, b"1", is_terminal=request_id == "7" or session_id == "idle")
        await storage.end_session("over")
        await storage.aclose()
        assert keys(redis_server, prefix)
        assert keys_for_ever(redis_server, prefix) == []
        await until(lambda: not keys(redis_server, prefix))
