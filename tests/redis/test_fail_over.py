"""A replica is promoted that lacks what the master had last: nobody resumes over the fork, and the calls go on.

In each test the replica is promoted before the last events are appended, so that it certainly does not have them. A
worker reaches the current master through a proxy, as through a service name, and the test says what that means.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from tests.e2e.raw_client import RawClient, Response, session
from tests.in_loop import until
from tests.redis.proxy import Proxy, proxied
from tests.redis.server import Server, serving
from tests.redis.workers import TIMEOUT, Crew, answered, at, crew, new_call, refusal_of

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The logging capability is deprecated")]

MISMATCH = (409, "generation_mismatch")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """A master and its replica."""
    with ExitStack() as stack:
        master = stack.enter_context(serving())
        yield [master, stack.enter_context(serving("--replicaof", "127.0.0.1", str(master.port)))]


def synchronize(master: Server) -> None:
    """Return once the replica has all that the master has."""
    with master.client() as client:
        client.set("everything before this", "1")
        assert client.wait(1, 10_000) == 1


def promote(server: Server) -> None:
    with server.client() as client:
        client.replicaof("NO", "ONE")


async def verdict(client: RawClient, event_id: str) -> tuple[int, str]:
    response = await answered(client, event_id)
    assert response.status != 200, f"{event_id} was resumed"
    return await refusal_of(response)


@dataclass(frozen=True)
class Scene:
    """Two workers, each with its own way to a server, and a call of the first that has sent 1, 2, 3.

    Attributes:
        ways: Of the workers.
        here: The client at the first worker.
        there: The same at the second.
        response: Of the call.
        ids: Its event ids 0..3.
    """

    crew: Crew
    ways: list[Proxy]
    here: RawClient
    there: RawClient
    response: Response
    ids: list[str]

    def point_at(self, server: Server) -> None:
        for way in self.ways:
            way.point_at(server.port)

    async def progress(self, *numbers: int) -> list[str]:
        """Let the call send events, and return the ids that the client has seen."""
        hold = await self.crew.workers[0].hold("7")
        await hold.progress(*numbers)
        frames = await self.response.events(len(numbers))
        assert [frame.progress for frame in frames] == list(numbers)
        return [frame.id or "" for frame in frames]

    async def finish(self) -> None:
        await (await self.crew.workers[0].hold("7")).finish()

    async def noticed(self, events: int) -> None:
        """Wait until the first worker's store has dealt with that many events of tools; the session's first is one."""
        stats = self.crew.workers[0].store.stats
        await until(lambda: stats().appends + stats().faults > events)

    async def refused(self, *event_ids: str) -> set[tuple[int, str]]:
        """Present event ids at both workers until each answers with a verdict, which must be a refusal."""
        return {await verdict(client, event_id) for client in (self.there, self.here) for event_id in event_ids}

    async def works(self, request_id: int) -> list[str]:
        """Make a new call, and resume it at both workers; return its event ids."""
        return await new_call(self.here, request_id, self.there)


@asynccontextmanager
async def scene(master: Server, **options: Any) -> AsyncIterator[Scene]:
    with anyio.fail_after(TIMEOUT):
        async with (
            proxied(master.port) as first,
            proxied(master.port) as second,
            crew(master, urls=[first.url, second.url], **options) as c,
            session(c.workers[0]) as here,
            at(here, c.workers[1]) as there,
        ):
            response = await here.call("hold", 7, n=3, tag="7")
            ids = [frame.id or "" for frame in await response.events(4)]
            yield Scene(c, [first, second], here, there, response, ids)


async def test_what_the_promoted_replica_does_not_have_is_not_resumed_over(servers: list[Server]) -> None:
    master, replica = servers
    async with scene(master) as s:
        synchronize(master)
        promote(replica)
        seen = await s.progress(4, 5)
        assert all(seen)
        master.stop()
        s.point_at(replica)
        assert await s.refused(*s.ids, *seen) == {MISMATCH}
        await s.finish()
        await s.works(20)


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_a_tail_does_not_wait_for_an_answer_that_was_lost(servers: list[Server], rejection: str) -> None:
    """The owner had nothing more to write, so nothing told the tail, on the new master, of the fork."""
    master, replica = servers
    async with scene(master, rejection=rejection) as s:
        s.response.reset()
        tail = await s.there.get(s.ids[3])
        await tail.event()
        synchronize(master)
        promote(replica)
        s.ways[1].point_at(replica.port)
        await s.finish()
        await s.noticed(4)
        master.stop()
        s.ways[0].point_at(replica.port)
        assert [frame for frame in await tail.rest() if frame.is_message] == []
        if rejection == "status":
            assert await s.refused(*s.ids) == {MISMATCH}
        else:
            (answer,) = await (await answered(s.there, s.ids[3])).rest()
            assert (answer.reason, answer.message["id"]) == ("generation_mismatch", 7)


async def test_a_claim_that_was_lost_is_not_taken_for_the_one_after_the_fork(servers: list[Server]) -> None:
    master, replica = servers
    async with scene(master) as s:
        synchronize(master)
        promote(replica)
        lost = await s.crew.workers[0].store.advance_generation(s.here.sid)
        assert lost.counter == 2
        hold = await s.crew.workers[0].hold("7")
        await hold.progress(4)
        assert (await s.here.get(f"{lost}:1.Nw:0")).status == 200
        master.stop()
        s.point_at(replica)
        assert await s.refused(f"{lost}:1.Nw:0", f"{lost}:1.Nw:1") == {(400, "unrecognized_generation")}
        assert await s.refused(*s.ids) == {MISMATCH}
        await hold.progress(5)
        await hold.finish()
        await s.works(20)


@pytest.mark.parametrize("is_old_master", [False, True])
async def test_each_of_two_promotions_is_a_fork(servers: list[Server], is_old_master: bool) -> None:
    master, replica = servers
    with ExitStack() as stack:
        async with scene(master) as s:
            synchronize(master)
            promote(replica)
            seen = await s.progress(4)
            master.stop()
            if is_old_master:
                third = master
                third.options = ("--replicaof", "127.0.0.1", str(replica.port))
                third.start()
            else:
                third = stack.enter_context(serving("--replicaof", "127.0.0.1", str(replica.port)))
            s.point_at(replica)
            assert await s.refused(*s.ids, *seen) == {MISMATCH}
            second = await s.works(20)
            synchronize(replica)
            promote(third)
            lost = await s.works(30)
            replica.stop()
            s.point_at(third)
            assert await s.refused(*s.ids, *seen, *second, *lost) == {MISMATCH}
            await s.finish()
            await s.works(40)


async def test_a_split_brain_has_two_histories_and_no_client_goes_from_one_to_the_other(servers: list[Server]) -> None:
    master, replica = servers
    async with scene(master) as s:
        synchronize(master)
        promote(replica)
        s.ways[1].point_at(replica.port)
        seen = await s.progress(4, 5)
        assert all(seen)
        for event_id in (*s.ids, *seen):
            assert await verdict(s.there, event_id) == MISMATCH
        # The old master's side has its own history, complete.
        resumed = await s.here.get(s.ids[3])
        assert [frame.progress for frame in (await resumed.events(3))[1:]] == [4, 5]
        hold = await s.crew.workers[0].hold("7")
        await hold.progress(6)
        last = (await resumed.event()).id
        assert await verdict(s.there, last or "") == MISMATCH
        s.ways[0].point_at(replica.port)
        await hold.progress(7)
        assert await resumed.rest() == []
        assert await s.refused(*s.ids, *seen, last or "") == {MISMATCH}
        await hold.finish()
        await s.works(20)


async def test_going_back_to_the_old_master_does_not_go_back_to_the_old_generation(servers: list[Server]) -> None:
    """Its generation was current there, and was taken up again: what was sent in between was skipped."""
    master, replica = servers
    async with scene(master) as s:
        hold = await s.crew.workers[0].hold("7")
        standalone = await s.here.get()
        await standalone.event()
        await hold.announce("1", "2")
        place = (await standalone.events(2))[1].id or ""
        synchronize(master)
        promote(replica)
        s.ways[0].point_at(replica.port)
        await hold.announce("3")
        await s.noticed(6)
        assert len(await standalone.rest()) <= 1
        assert await verdict(s.here, place) == MISMATCH
        s.ways[0].point_at(master.port)
        await hold.announce("4")
        await s.noticed(7)
        assert await s.refused(place, *s.ids) == {MISMATCH}
        await hold.finish()
        await s.works(20)


@pytest.mark.parametrize("is_linked", [True, False])
async def test_a_worker_whose_server_was_demoted_asks_for_the_new_one(servers: list[Server], is_linked: bool) -> None:
    """Its connections stay open, to a server that takes no writes any more, and perhaps answers nothing at all."""
    master, replica = servers
    async with scene(master) as s:
        synchronize(master)
        promote(replica)
        for way in s.ways:
            way.server_port = replica.port
        with master.client() as client:
            client.config_set("replica-serve-stale-data", "no")
            client.replicaof("127.0.0.1", replica.port if is_linked else 1)
        hold = await s.crew.workers[0].hold("7")
        await hold.progress(4)
        assert await s.refused(*s.ids) == {MISMATCH}
        await hold.finish()
        await s.works(20)


async def test_where_info_is_not_permitted_that_is_said_and_all_else_works(
    servers: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    master, replica = servers
    for server in servers:
        with server.client() as client:
            # What a worker needs, but for INFO.
            commands = ["+@read", "+@write", "+@pubsub", "+@scripting", "+@connection", "+time"]
            client.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~{p}:*", "&{p}:*", "-@all", *commands)
    with anyio.fail_after(TIMEOUT):
        async with proxied(master.port) as proxy, AsyncExitStack() as stack:
            url = f"redis://worker:secret@127.0.0.1:{proxy.port}"
            c = await stack.enter_async_context(crew(master, urls=[url, url], prefix="p"))
            here = await stack.enter_async_context(session(c.workers[0]))
            there = await stack.enter_async_context(at(here, c.workers[1]))
            lines = [record for record in caplog.records if "INFO is not permitted" in record.message]
            assert [line.levelno for line in lines] == [logging.WARNING], "by the one that was asked"
            ids = await new_call(here, 7, there)
            synchronize(master)
            promote(replica)
            master.stop()
            proxy.point_at(replica.port)
            # Undetected, as was said.
            resumed = await answered(there, ids[0])
            assert [frame.id for frame in await resumed.rest()] == ids
