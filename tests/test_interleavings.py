"""What else can run at each await of append, replay, hand-over and move: forced, not hoped for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from mcp_resumable import Generation, ResumableEventStore, Retention, SessionNotFoundError
from tests.held_storage import HeldStorage, SharedHeldStorage
from tests.sdk_host import HEADERS, Client, Frame, Host, Request, hosting, store_as_the_router

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("writes_at_once")]

_is_shared = False


@pytest.fixture(params=[False, True], ids=["stored at once", "stored later"], autouse=True)
def kind_of_storage(request: pytest.FixtureRequest) -> None:
    """Run each test with a storage that the router waits for, and with one that it does not."""
    global _is_shared
    _is_shared = request.param


stored_at_once = pytest.mark.parametrize("kind_of_storage", [False], ids=["stored at once"], indirect=True)
"""For what is so only there; `test_pipeline` has the counterpart."""

stored_later = pytest.mark.parametrize("kind_of_storage", [True], ids=["stored later"], indirect=True)
"""For what a writer asks only a shared storage."""


def new_storage(**options: Any) -> HeldStorage:
    return SharedHeldStorage(**options) if _is_shared else HeldStorage(**options)


@asynccontextmanager
async def held(**options: Any) -> AsyncGenerator[tuple[HeldStorage, ResumableEventStore, Host, Client]]:
    storage = new_storage()
    store = ResumableEventStore(storage, **options)
    async with hosting(store) as host:
        yield storage, store, host, await host.open()


async def read_steps(request: Request, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        frame = await request.frame()
        assert frame is not None, f"the body ended after {[f.step for f in frames]}"
        if frame.data:
            frames.append(frame)
    return frames


async def generation_of(store: ResumableEventStore, client: Client) -> Generation:
    description = await store.describe(client.session_id)
    assert description is not None
    return description.generation


def steps_of(frames: list[Frame]) -> list[str]:
    """Return what was carried, after checking that the seqs have no break."""
    messages = [frame for frame in frames if frame.data]
    if messages:
        first = messages[0].seq
        assert [frame.seq for frame in messages] == list(range(first, first + len(messages)))
    return [frame.step for frame in messages]


# Append against a resume.


async def test_event_appended_while_the_snapshot_is_read_is_replayed_once() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        request.disconnect()
        for when in ("before", "after"):
            trap = storage.hold("snapshot", when)
            resumed = client.get(cursor)
            await trap.until_reached()
            await tool.emit(f"b-{when}")
            await wait_all_tasks_blocked()
            trap.release()
            frames = await read_steps(resumed, 1 if when == "before" else 2)
            assert steps_of(frames) == (["b-before"] if when == "before" else ["b-before", "b-after"])
            resumed.disconnect()
            await resumed.until_done()


async def test_event_appended_between_decision_and_first_read_is_replayed_once() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        request.disconnect()
        trap = storage.hold("read")
        resumed = client.get(cursor)
        await trap.until_reached()
        await tool.emit("b", "c")
        tool.finish()
        await tool.ended.wait()
        trap.release()
        assert steps_of(await resumed.frames()) == ["b", "c", "answer"]


async def test_event_appended_between_read_and_wait_is_not_missed() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        request.disconnect()
        trap = storage.hold("wait")
        resumed = client.get(cursor)
        await trap.until_reached()
        await tool.emit("b")
        await wait_all_tasks_blocked()
        trap.release()
        assert steps_of(await read_steps(resumed, 1)) == ["b"]
        tool.finish()
        assert steps_of(await resumed.frames()) == ["answer"]


async def test_resume_while_an_append_is_under_way_gets_the_event_once() -> None:
    for when in ("before", "after"):
        async with held() as (storage, _, _, client):
            request = await client.call()
            tool = client.tool()
            await tool.emit("a")
            cursor = (await read_steps(request, 1))[0].id
            request.disconnect()
            trap = storage.hold("append", when)
            await tool.emit("b")
            await trap.until_reached()
            resumed = client.get(cursor)
            await wait_all_tasks_blocked()
            trap.release()
            tool.finish()
            assert steps_of(await resumed.frames()) == ["b", "answer"]


async def test_slow_reader_of_a_tail_gets_everything_in_order() -> None:
    async with held() as (_, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        request.disconnect()
        resumed = client.get(cursor)
        await resumed.until_started()
        resumed.freeze()
        await tool.emit(*(str(i) for i in range(300)))
        tool.finish()
        await tool.ended.wait()
        resumed.thaw()
        assert steps_of(await resumed.frames()) == [*(str(i) for i in range(300)), "answer"]


# Hand-over between connections.


async def test_resume_while_the_first_connection_is_open_takes_it_over() -> None:
    async with held() as (_, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a", "b")
        first = await read_steps(request, 1)
        resumed = client.get(first[0].id)
        assert steps_of(await read_steps(resumed, 1)) == ["b"]
        await request.until_done()
        assert request.is_complete, "the older connection ends cleanly"
        await tool.emit("c")
        tool.finish()
        assert steps_of(await resumed.frames()) == ["c", "answer"]


async def test_of_two_overlapping_resumes_the_newest_lives_whatever_the_order_of_their_snapshots() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        trap = storage.hold("snapshot", "after")
        slow = client.get(cursor)
        await trap.until_reached()
        quick = client.get(cursor)
        await quick.until_started()
        await tool.emit("b")
        assert steps_of(await read_steps(quick, 1)) == ["b"]
        trap.release()
        # The one that was decided last is the newest consumer; each of the two saw an unbroken stream.
        assert steps_of(await read_steps(slow, 1)) == ["b"]
        await quick.until_done()
        assert quick.is_complete
        tool.finish()
        assert steps_of(await slow.frames()) == ["answer"]


async def test_refused_resume_leaves_the_open_connection_alone() -> None:
    async with held() as (_, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        first = (await read_steps(request, 1))[0]
        assert first.id is not None
        refused = client.get(first.id.replace(":1", ":7"))
        assert await refused.reason() == "future_event_id"
        tool.finish()
        assert steps_of(await request.frames()) == ["answer"]


async def test_connection_that_was_taken_over_carries_nothing_more() -> None:
    async with held() as (_, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        old = client.get(cursor)
        await old.until_started()
        old.freeze()
        await tool.emit("b", "c")
        new = client.get(cursor)
        assert steps_of(await read_steps(new, 2)) == ["b", "c"]
        old.thaw()
        await old.until_done()
        assert old.is_complete
        assert "c" not in [frame.step for frame in await old.frames() if frame.data]


# Moves: advance, restart, end, while something is under way.


@stored_at_once
async def test_event_whose_append_is_overtaken_by_an_advance_goes_to_the_new_generation() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        trap = storage.hold("append")
        await tool.emit("b")
        await trap.until_reached()
        generation = await store.advance_generation(client.session_id)
        trap.release()
        await request.until_done()
        assert request.is_complete
        assert await request.frames() == [], "one connection never carries two generations"
        assert await client.get(old.id).reason() == "generation_mismatch"
        resumed = client.get(f"{generation}:1.MQ:0")
        tool.finish()
        assert steps_of(await resumed.frames()) == ["b", "answer"]


@stored_at_once
async def test_event_stored_just_before_an_advance_never_reaches_a_connection_after_it() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        await read_steps(request, 1)
        trap = storage.hold("append", "after")
        await tool.emit("b")
        await trap.until_reached()
        await store.advance_generation(client.session_id)
        trap.release()
        assert await request.frames() == []


async def test_append_during_the_claim_of_an_advance_waits_for_it() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        await read_steps(request, 1)
        trap = storage.hold("claim_generation", "after")
        generations = []
        async with anyio.create_task_group() as task_group:

            async def advance() -> None:
                generations.append(await store.advance_generation(client.session_id))

            task_group.start_soon(advance)
            await trap.until_reached()
            await tool.emit("b")
            await wait_all_tasks_blocked()
            trap.release()
        resumed = client.get(f"{generations[0]}:1.MQ:0")
        tool.finish()
        assert steps_of(await resumed.frames()) == ["b", "answer"]


async def test_cancelled_advance_leaves_writer_and_storage_in_one_generation() -> None:
    async with held() as (storage, store, _, client):
        await client.call()
        tool = client.tool()
        trap = storage.hold("claim_generation", "after")
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(store.advance_generation, client.session_id)
                await trap.until_reached()
                scope.cancel()
                trap.release()
        await tool.emit("a")
        tool.finish()
        await tool.ended.wait()
        description = await store.describe(client.session_id)
        assert description is not None
        assert description.generation.counter == 2
        resumed = client.get(f"{description.generation}:1.MQ:0")
        assert steps_of(await resumed.frames()) == ["a", "answer"]


async def test_resume_decided_just_before_an_advance_is_closed_by_it() -> None:
    for when in ("before", "after"):
        async with held() as (storage, store, _, client):
            request = await client.call()
            tool = client.tool()
            await tool.emit("a")
            cursor = (await read_steps(request, 1))[0].id
            trap = storage.hold("snapshot", when)
            resumed = client.get(cursor)
            await trap.until_reached()
            await store.advance_generation(client.session_id)
            trap.release()
            assert await resumed.reason() == "generation_mismatch"


@pytest.mark.parametrize("by", ["advance", "end", "newer resume"])
async def test_rest_that_is_in_hand_is_not_sent_once_it_is_superseded(by: str) -> None:
    """The snapshot has brought all of a complete call along: what a slow client has not been sent by then it is not."""
    async with held() as (_, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a", "b")
        tool.finish()
        sent = await request.frames()
        cursor = sent[0].id
        resumed = client.get(cursor)
        resumed.freeze()
        await wait_all_tasks_blocked()
        assert not resumed.started.is_set()
        if by == "advance":
            await store.advance_generation(client.session_id)
        elif by == "end":
            await store.end_session(client.session_id)
        else:
            newer = client.get(cursor)
            assert await newer.frames() == sent
        resumed.thaw()
        assert [(frame.id, frame.data) for frame in await resumed.frames()] == [(cursor, "")]
        assert (resumed.status, resumed.is_complete) == (200, True)


async def test_tail_that_waits_is_closed_by_an_advance() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        trap = storage.hold("wait")
        resumed = client.get(cursor)
        await trap.until_reached()
        await store.advance_generation(client.session_id)
        trap.release()
        await tool.emit("b")
        assert steps_of(await resumed.frames()) == []
        assert resumed.is_complete


async def test_event_of_the_earlier_execution_in_mid_append_is_not_spliced_into_the_restarted_stream() -> None:
    for when in ("before", "after"):
        async with held() as (storage, store, _, client):
            request = await client.call()
            tool = client.tool()
            await tool.emit("a")
            old = (await read_steps(request, 1))[0]
            trap = storage.hold("append", when)
            await tool.emit("b")
            await trap.until_reached()
            await tool.do(lambda: store.restart_stream(1))
            trap.release()
            await tool.emit("c")
            tool.finish()
            assert await client.get(old.id).reason() == "stream_superseded"
            description = await store.describe(client.session_id)
            assert description is not None
            current = description.streams[-1]
            resumed = client.get(f"{description.generation}:{current.stream}:0")
            assert steps_of(await resumed.frames()) == ["c", "answer"]


async def test_event_that_the_router_holds_when_a_tool_restarts_stays_with_the_earlier_execution() -> None:
    async with held() as (_, store, _, client):
        request = await client.call()
        tool = client.tool()

        async def emit_and_restart() -> None:
            await tool.context.report_progress(1, 2, "earlier")
            await store.restart_stream(tool.context.request_id)
            await tool.context.report_progress(1, 2, "later")

        await tool.do(emit_and_restart)
        tool.finish()
        await tool.ended.wait()
        await request.until_done()
        description = await store.describe(client.session_id)
        assert description is not None
        resumed = client.get(f"{description.generation}:{description.streams[-1].stream}:0")
        assert steps_of(await resumed.frames()) == ["later", "answer"]


async def test_restart_whose_storage_fails_never_goes_on_in_the_earlier_stream() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        storage.fail("open_stream")
        await tool.do(lambda: store.restart_stream(1))
        await tool.emit("b")
        tool.finish()
        await tool.ended.wait()
        await wait_all_tasks_blocked()
        assert await client.get(old.id).reason() == "stream_superseded"


async def test_restart_whose_storage_fails_takes_back_the_earlier_cursors_before_anything_new_is_sent() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a", "b")
        old = (await read_steps(request, 1))[0]
        storage.broken.add("open_stream")
        for _ in range(2):
            await tool.do(lambda: store.restart_stream(1))
            assert await client.get(old.id).reason() == "storage_unavailable"
        storage.broken.clear()
        assert await client.get(old.id).reason() == "stream_superseded"
        await tool.emit("c")
        tool.finish()
        await tool.ended.wait()
        description = await store.describe(client.session_id)
        assert description is not None
        (current,) = [stream.stream for stream in description.streams if stream.request_id == "1"]
        resumed = client.get(f"{description.generation}:{current}:0")
        assert steps_of(await resumed.frames()) == ["c", "answer"]


@stored_at_once
async def test_answer_that_is_lost_while_its_stream_is_begun_anew_for_a_claim_is_waited_for_by_nobody() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        append = storage.hold("append", then_fail=True)
        tool.finish()
        await append.until_reached()
        storage.fail("open_stream")
        await store.advance_generation(client.session_id)
        opening = storage.hold("open_stream", "after")
        refused = client.get(old.id)
        await opening.until_reached()
        append.release()
        await wait_all_tasks_blocked()
        opening.release()
        assert await refused.reason() == "generation_mismatch"
        description = await store.describe(client.session_id)
        assert description is not None
        assert description.streams[-1].is_terminal


async def test_call_whose_answer_is_being_stored_is_not_begun_anew() -> None:
    """Nobody would have ended its new stream: the answer belonged to the earlier execution."""
    for when in ("before", "after"):
        async with held() as (storage, store, _, client):
            request = await client.call()
            tool = client.tool()
            await tool.emit("a")
            cursor = (await read_steps(request, 1))[0].id
            request.disconnect()
            trap = storage.hold("append", when)
            tool.finish()
            await trap.until_reached()
            with pytest.raises(LookupError, match="no unanswered request '1'"):
                await store.restart_stream(1, client.session_id)
            trap.release()
            assert steps_of(await client.get(cursor).frames()) == ["answer"]


async def test_call_that_is_answered_while_a_restart_waits_its_turn_is_not_begun_anew() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        await read_steps(request, 1)
        claim = storage.hold("claim_generation")
        failures: list[Exception] = []

        async def restart() -> None:
            try:
                await store.restart_stream(1, client.session_id)
            except LookupError as exc:
                failures.append(exc)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(store.advance_generation, client.session_id)
            await claim.until_reached()
            task_group.start_soon(restart)
            await wait_all_tasks_blocked()
            tool.finish()
            await tool.ended.wait()
            await wait_all_tasks_blocked()
            claim.release()
        assert len(failures) == 1


async def test_answer_stored_just_before_an_advance_ends_its_call_in_the_new_generation_too() -> None:
    """The call went on in a stream of the new generation, in which nothing was ever to come."""
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        claim = storage.hold("claim_generation")
        append = storage.hold("append", "after")
        generations = []

        async def advance() -> None:
            generations.append(await store.advance_generation(client.session_id))

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(advance)
            await claim.until_reached()
            tool.finish()
            await append.until_reached()
            claim.release()
        append.release()
        assert await client.get(old.id).reason() == "generation_mismatch"
        resumed = client.get(f"{generations[0]}:1.MQ:0")
        assert steps_of(await resumed.frames()) == ["answer"]


@pytest.mark.parametrize("then_fail", [False, True], ids=["stored", "lost"])
@pytest.mark.parametrize("is_answer_first", [True, False], ids=["answer first", "advance first"])
async def test_answer_in_the_very_turn_of_an_advance_leaves_no_stream_without_an_end(
    is_answer_first: bool, then_fail: bool
) -> None:
    """Where it is stored later, the router learns of it a turn later than the advance."""
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        claim = storage.hold("claim_generation")
        append = storage.hold("append", "after", then_fail=then_fail)
        moved = storage.hold("claim_generation", "after")
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(store.advance_generation, client.session_id)
            await claim.until_reached()
            tool.finish()
            await append.until_reached()
            claim.release()
            await moved.until_reached()
            for trap in (append, moved) if is_answer_first else (moved, append):
                trap.release()
        await wait_all_tasks_blocked()
        assert await client.get(old.id).reason() == "generation_mismatch"
        description = await store.describe(client.session_id)
        assert description is not None
        assert all(stream.is_terminal for stream in description.streams if stream.request_id == "1")


async def test_answer_after_an_advance_that_failed_although_it_took_effect_leaves_no_call_behind() -> None:
    """To the writer of one process, the session looked like another's by then, and the answer was not taken note of."""
    async with held() as (storage, store, host, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        storage.fail("claim_generation", "after")
        with pytest.raises(OSError, match="on fire"):
            await store.advance_generation(client.session_id)
        await tool.emit("b")
        tool.finish()
        await tool.ended.wait()
        await wait_all_tasks_blocked()
        await store.advance_generation(client.session_id)
        await request.until_done()
        description = await store.describe(client.session_id)
        assert description is not None
        assert all(stream.is_terminal for stream in description.streams if stream.request_id == "1")
        again = await client.call()
        assert again.headers["content-type"] == "text/event-stream", "its request id is free"
        host.tools[client.session_id, "1"].finish()
        assert [frame.step for frame in await again.frames() if frame.data] == ["answer"]


async def test_event_that_is_lost_before_an_advance_is_no_hole_of_the_next_generation() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        await read_steps(request, 1)
        storage.fail("append")
        await tool.emit("b")
        await wait_all_tasks_blocked()
        await store.advance_generation(client.session_id)
        await tool.emit("c")
        tool.finish()
        await tool.ended.wait()
        description = await store.describe(client.session_id)
        assert description is not None
        stream = next(stream for stream in description.streams if stream.request_id == "1")
        assert steps_of(await client.get(f"{description.generation}:{stream.stream}:0").frames()) == ["c", "answer"]


async def test_advance_that_failed_although_it_took_effect_is_taken_in_with_the_next_event() -> None:
    """A writer of one process took its session for another's from then on: its events had no ids, until it was told."""
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        storage.fail("claim_generation", "after")
        with pytest.raises(OSError, match="on fire"):
            await store.advance_generation(client.session_id)
        await tool.emit("b")
        await request.until_done()
        tool.finish()
        await tool.ended.wait()
        description = await store.describe(client.session_id)
        assert description is not None
        stream = next(stream for stream in description.streams if stream.request_id == "1")
        assert description.generation.counter == 2
        assert steps_of(await client.get(f"{description.generation}:{stream.stream}:0").frames()) == ["b", "answer"]
        assert await client.get(old.id).reason() == "generation_mismatch"
        plain = client.get()
        begin = await plain.frame()
        assert begin is not None
        assert (plain.status, begin.id) == (200, f"{description.generation}:0:0")


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_advance_that_failed_although_it_took_effect_is_taken_in_with_the_next_get(rejection: str) -> None:
    async with held(rejection=rejection) as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        old = (await read_steps(request, 1))[0]
        storage.fail("claim_generation", "after")
        with pytest.raises(OSError, match="on fire"):
            await store.advance_generation(client.session_id)
        claim = client.get(old.id)
        if rejection == "status":
            assert await claim.reason() == "generation_mismatch"
            plain = client.get()
            begin = await plain.frame()
            assert begin is not None
            assert (plain.status, begin.id) == (200, f"{await generation_of(store, client)}:0:0")
        else:
            await claim.frame()  # The beginning of its current execution, and that is told.
            await tool.emit("b")
            tool.finish()
            assert steps_of((await claim.frames())[-2:]) == ["b", "answer"]


@pytest.mark.parametrize("fails", [False, True])
async def test_plain_get_beside_an_advance_waits_for_its_end(fails: bool) -> None:
    """Whether the session has moved is not known meanwhile."""
    async with held() as (storage, store, _, client):
        trap = storage.hold("claim_generation", "after", then_fail=fails)

        async def advance() -> None:
            with suppress(OSError):
                await store.advance_generation(client.session_id)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(advance)
            await trap.until_reached()
            plain = client.get()
            await wait_all_tasks_blocked()
            is_answered_early = bool(plain.status)
            trap.release()
        assert not is_answered_early
        begin = await plain.frame()
        assert begin is not None
        assert begin.id == f"{await generation_of(store, client)}:0:0"
        assert begin.id.startswith("2-")


async def test_advance_that_fails_before_its_effect_leaves_everything_as_it_is() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        storage.fail("claim_generation")
        with pytest.raises(OSError, match="on fire"):
            await store.advance_generation(client.session_id)
        first = (await read_steps(request, 1))[0]
        await tool.emit("b")
        tool.finish()
        assert steps_of(await client.get(first.id).frames()) == ["b", "answer"]
        assert (await generation_of(store, client)).counter == 1


async def test_advance_and_restart_that_wait_for_a_storage_that_hangs_can_be_given_up() -> None:
    async with held() as (storage, store, _, client):
        await client.call()
        tool = client.tool()
        trap = storage.hold("claim_generation")
        scope = anyio.CancelScope()
        given_up: list[str] = []

        async def give_up(name: str, change: Awaitable[object]) -> None:
            with scope:
                await change
            given_up.append(name)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(store.advance_generation, client.session_id)
            await trap.until_reached()
            task_group.start_soon(give_up, "advance", store.advance_generation(client.session_id))
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            scope = anyio.CancelScope()
            task_group.start_soon(give_up, "restart", store.restart_stream(1, client.session_id))
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            in_time = list(given_up)
            trap.release()
        assert in_time == ["advance", "restart"]
        await tool.emit("a")
        assert (await generation_of(store, client)).counter == 2, "one advance, and nothing of what was given up"


@stored_later
async def test_session_whose_claim_failed_is_this_workers_once_it_is_advanced() -> None:
    """It was nobody's for other workers, who answered each claim with 404."""
    async with held() as (storage, store, _, client):
        await storage.inner.end_session(client.session_id)
        storage.fail("claim_generation", "after")
        await client.call()
        generation = await store.advance_generation(client.session_id)
        assert isinstance(storage, SharedHeldStorage)
        found = await storage.find_owner(client.session_id)
        assert found is not None
        assert (found.generation, found.worker) == (generation, storage.worker_id)


async def test_session_that_ends_while_its_writer_looks_where_it_is_stays_ended() -> None:
    """A claim after an advance that failed: whether that took effect is being asked."""
    async with held() as (storage, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        first = (await read_steps(request, 1))[0]
        storage.fail("claim_generation", "after")
        with pytest.raises(OSError, match="on fire"):
            await store.advance_generation(client.session_id)
        trap = storage.hold("snapshot", "after")
        claim = client.get(first.id)
        await trap.until_reached()
        await store.end_session(client.session_id)
        trap.release()
        assert await claim.reason() == "session_not_found"
        assert store.stats().sessions == 0


@stored_later
async def test_session_that_ends_while_an_advance_says_whose_it_is_stays_ended() -> None:
    async with held() as (storage, store, _, client):
        await storage.inner.end_session(client.session_id)
        storage.fail("claim_generation", "after")
        await client.call()
        trap = storage.hold("own_session", "after")

        async def advance() -> None:
            with pytest.raises(SessionNotFoundError):
                await store.advance_generation(client.session_id)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(advance)
            await trap.until_reached()
            await store.end_session(client.session_id)
            trap.release()
        assert store.stats().sessions == 0


@stored_later
async def test_session_that_ends_while_its_writer_looks_whose_it_is_stays_ended() -> None:
    """It was taken for live, or for another's, whatever had come over it meanwhile."""
    async with held() as (storage, store, _, client):
        await client.call()
        tool = client.tool()
        await storage.inner.advance_generation(client.session_id)
        trap = storage.hold("find_owner", "after")
        await tool.emit("a")
        await trap.until_reached()
        await store.end_session(client.session_id)
        trap.release()
        await wait_all_tasks_blocked()
        assert store.stats().sessions == 0
        assert await client.get().reason() == "session_not_found"


async def test_event_of_the_earlier_execution_that_is_lost_after_a_restart_is_no_hole_of_the_new_stream() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        await read_steps(request, 1)
        trap = storage.hold("append", then_fail=True)
        await tool.emit("b")
        await trap.until_reached()
        await tool.do(lambda: store.restart_stream(1))
        trap.release()
        await tool.emit("c")
        tool.finish()
        await tool.ended.wait()
        description = await store.describe(client.session_id)
        assert description is not None
        resumed = client.get(f"{description.generation}:{description.streams[-1].stream}:0")
        assert steps_of(await resumed.frames()) == ["c", "answer"]


async def test_answer_that_has_no_json_text_is_a_hole_at_once_and_waited_for_by_nobody() -> None:
    """Its place was told to the storage by the next event, or the next claim; one on another worker waited for it."""

    class Unspeakable:
        def model_dump_json(self, **_options: object) -> str:
            raise ValueError("no JSON text")

    async with held() as (_, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        resumed = client.get(cursor)
        await resumed.frame()
        binding = store.find_binding(client.session_id)
        assert binding is not None
        await store_as_the_router(store, binding, "1", Unspeakable())
        description = await store.describe(client.session_id)
        assert description is not None
        assert description.streams[-1].is_terminal
        assert [frame for frame in await resumed.frames() if frame.data] == []
        assert await client.get(cursor).reason() == "stream_completed"


async def test_session_ended_in_mid_append_is_not_revived() -> None:
    for when in ("before", "after"):
        async with held() as (storage, store, _, client):
            request = await client.call()
            tool = client.tool()
            await tool.emit("a")
            cursor = (await read_steps(request, 1))[0].id
            trap = storage.hold("append", when)
            await tool.emit("b")
            await trap.until_reached()
            await store.end_session(client.session_id)
            trap.release()
            await tool.emit("c")
            await request.until_done()
            assert request.is_complete
            assert await store.describe(client.session_id) is None
            assert await client.get(cursor).reason() == "session_not_found"


async def test_session_ended_while_a_resume_reads_its_snapshot_is_404() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        trap = storage.hold("snapshot", "after")
        resumed = client.get(cursor)
        await trap.until_reached()
        await store.end_session(client.session_id)
        trap.release()
        assert await resumed.reason() == "session_not_found"
        assert resumed.status == 404
        later = client.get(cursor)
        assert (await later.reason(), later.status) == ("session_not_found", 404)
        plain = client.get()
        await plain.until_done()
        assert plain.status == 404
        assert store.stats().decisions == {"session_not_found": 2}


async def test_delete_while_a_tail_waits_closes_it_cleanly() -> None:
    async with held() as (_, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        resumed = client.get(cursor)
        await resumed.until_started()
        delete = client.request("DELETE")
        await delete.until_done()
        assert delete.status == 200
        assert steps_of(await resumed.frames()) == []
        assert resumed.is_complete
        assert await store.describe(client.session_id) is None


# Faults while something is under way.


async def test_claim_whose_session_moves_whenever_its_snapshot_is_read_is_decided_at_last() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        traps = [storage.hold("snapshot", "after") for _ in range(6)]
        resumed = client.get(cursor)
        for trap in traps:
            await trap.until_reached()
            await store.advance_generation(client.session_id)
            trap.release()
        assert await resumed.reason() == "generation_mismatch"


async def test_append_that_fails_while_the_snapshot_is_read_is_a_gap_and_not_a_hang() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        trap = storage.hold("snapshot", "after")
        resumed = client.get(cursor)
        await trap.until_reached()
        storage.fail("append")
        await tool.emit("lost")
        await wait_all_tasks_blocked()
        trap.release()
        assert await resumed.reason() == "replay_gap"


async def test_append_that_fails_closes_the_tail_that_waits_for_it_and_leaves_the_first_connection() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        storage.fail("append")
        await tool.emit("lost")
        live = await request.frame()
        assert live is not None
        assert (live.step, live.id) == ("lost", None)
        resumed = client.get(cursor)
        assert await resumed.reason() == "replay_gap"
        await tool.emit("b")
        after = await request.frame()
        assert after is not None
        assert (after.step, after.seq) == ("b", 3)
        tail = client.get(after.id)
        await tail.until_started()
        storage.fail("append")
        await tool.emit("lost too")
        assert steps_of(await tail.frames()) == []
        assert tail.is_complete
        assert await client.get(after.id).reason() == "replay_gap"


async def test_append_that_fails_although_it_took_effect_is_never_delivered_twice() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        storage.fail("append", "after")
        await tool.emit("b")
        live = await request.frame()
        assert live is not None
        assert (live.step, live.id) == ("b", None)
        assert await client.get(cursor).reason() == "replay_gap"


async def test_lost_answer_is_told_to_whoever_asks_for_it() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        storage.fail("append")
        tool.finish()
        live = await request.frames()
        assert [(frame.step, frame.id) for frame in live] == [("answer", None)]
        assert await client.get(cursor).reason() == "stream_completed"


async def test_storage_that_stays_down_is_503_and_never_another_verdict() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        storage.broken = {"append", "snapshot", "open_stream", "claim_generation"}
        await tool.emit("b")
        frame = await request.frame()
        assert frame is not None
        assert frame.step == "b"
        refused = client.get(cursor)
        assert await refused.reason() == "storage_unavailable"
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert (await client.ping())["result"] == {}
        storage.broken = set()
        assert await client.get(cursor).reason() == "replay_gap"
        tool.finish()
        assert steps_of(await request.frames()) == ["answer"]


async def test_tail_whose_storage_fails_is_closed_and_can_come_back() -> None:
    for operation in ("read", "wait"):
        async with held() as (storage, _, _, client):
            request = await client.call()
            tool = client.tool()
            await tool.emit("a")
            cursor = (await read_steps(request, 1))[0].id
            first_read = storage.hold("read")
            storage.fail(operation)
            tail = client.get(cursor)
            await first_read.until_reached()
            first_read.release()
            assert steps_of(await tail.frames()) == []
            await tool.emit("b")
            tool.finish()
            assert steps_of(await client.get(cursor).frames()) == ["b", "answer"]


async def test_resume_whose_first_read_fails_is_503_and_can_come_back() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        storage.fail("read")
        refused = client.get(cursor)
        assert await refused.reason() == "storage_unavailable"
        assert refused.status == 503
        tool.finish()
        assert steps_of(await client.get(cursor).frames()) == ["answer"]


# The opening request: the session id is not known yet.


async def test_router_waits_for_the_session_id_and_nothing_is_lost() -> None:
    storage = new_storage()
    store = ResumableEventStore(storage)
    trap = storage.hold("claim_generation")
    async with hosting(store) as host, anyio.create_task_group() as task_group:
        clients: list[Client] = []

        async def open_session() -> None:
            clients.append(await host.open())

        task_group.start_soon(open_session)
        await trap.until_reached()
        await wait_all_tasks_blocked()
        trap.release()
        while not clients:
            await checkpoint()
        frames = clients[0].opened_with
        assert [frame.seq for frame in frames] == [0, 1]
        assert frames[0].id is not None
        resumed = await clients[0].get(frames[0].id).frames()
        assert [frame.data for frame in resumed if frame.data] == [frames[1].data]


async def test_session_whose_first_claim_fails_is_claimed_by_the_next_event_that_asks() -> None:
    storage = new_storage()
    store = ResumableEventStore(storage)
    storage.fail("claim_generation")
    storage.fail("claim_generation")
    async with hosting(store) as host:
        client = await host.open()
        assert [frame.id is None or frame.seq for frame in client.opened_with] == [0, True]
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        first = (await read_steps(request, 1))[0]
        tool.finish()
        assert steps_of(await client.get(first.id).frames()) == ["answer"]
        assert client.opened_with[0].id is not None
        assert await client.get(client.opened_with[0].id).reason() in ("future_event_id", "stream_completed")


async def test_opening_request_that_the_sdk_refuses_leaves_no_session() -> None:
    store = ResumableEventStore()
    async with hosting(store) as host:
        request = host.start("POST", {**HEADERS, "accept": "text/plain"}, b"{}")
        await request.until_done()
        assert request.status == 406
        assert store.stats().sessions == 0


# The standalone stream.


async def test_plain_get_goes_on_after_what_was_written_and_a_second_one_replaces_the_first() -> None:
    async with held() as (_, _, host, client):
        await client.call("notifier")
        await host.notify(client, "before anyone listens")
        first = client.get()
        begin = await first.frame()
        assert begin is not None
        assert (begin.seq, begin.data) == (0, "")
        assert [frame.step for frame in await read_steps(first, 1)] == ["before anyone listens"]
        second = client.get()
        begin = await second.frame()
        assert begin is not None
        assert begin.seq == 1
        await first.until_done()
        assert (first.status, first.is_complete) == (200, True)
        await host.notify(client, "later")
        assert [frame.step for frame in await read_steps(second, 1)] == ["later"]


async def test_event_handed_over_but_not_written_before_a_take_over_is_not_skipped() -> None:
    async with held() as (_, _, host, client):
        await client.call("notifier")
        first = client.get()
        await first.frame()
        first.freeze()
        await host.notify(client, "x")
        await wait_all_tasks_blocked()
        second = client.get()
        await second.frame()
        assert [frame.step for frame in await read_steps(second, 1)] == ["x"]
        first.thaw()
        await first.until_done()
        assert [frame for frame in await first.frames() if frame.data] == []


# Tools that make their clients poll.


async def test_tool_closes_its_stream_on_the_first_connection_and_after_a_resume() -> None:
    async with held() as (_, _, _, client):
        request = await client.call()
        tool = client.tool()
        cursor: str | None = None
        collected: list[Frame] = []
        for text in ("a", "b", "c"):
            await tool.emit(text)
            frames = await read_steps(request, 1)
            await tool.do(tool.context.close_sse_stream)
            frames += await request.frames()
            assert request.is_complete
            collected += frames
            cursor = collected[-1].id
            await tool.emit(f"after {text}")
            request = client.get(cursor)
            collected += await read_steps(request, 1)
        tool.finish()
        collected += await request.frames()
        assert steps_of(collected) == ["a", "after a", "b", "after b", "c", "after c", "answer"]


async def test_tool_closes_the_standalone_stream_and_nothing_of_it_is_lost() -> None:
    async with held() as (_, _, host, client):
        await client.call("notifier")
        tool = client.tool("notifier")
        plain = client.get()
        await plain.frame()
        await host.notify(client, "a")
        cursor = (await read_steps(plain, 1))[0].id
        await tool.do(tool.context.close_standalone_sse_stream)
        await plain.until_done()
        assert plain.is_complete
        await host.notify(client, "b")
        resumed = client.get(cursor)
        assert [frame.step for frame in await read_steps(resumed, 1)] == ["b"]
        await tool.do(tool.context.close_standalone_sse_stream)
        await resumed.until_done()
        await host.notify(client, "c")
        assert [frame.step for frame in await read_steps(client.get(), 1)] == ["c"]


# Request ids.


async def test_request_id_in_flight_is_refused_and_free_again_after_its_answer() -> None:
    async with held() as (_, store, _, client):
        request = await client.call(1)
        tool = client.tool(1)
        for same in (1, "1"):
            twice = client.post(same)
            body = await twice.json()
            assert (twice.status, twice.headers["content-type"]) == (200, "application/json")
            assert (body["id"], body["error"]["data"]["reason"]) == (same, "duplicate_request_id")
        await tool.emit("a")
        tool.finish()
        first = await request.frames()
        assert steps_of(first) == ["a", "answer"]
        again = await client.call(1)
        await client.tool(1).emit("b")
        assert steps_of(await read_steps(again, 1)) == ["b"]
        for frame in first:
            assert await client.get(frame.id).reason() == "stream_superseded"
        assert store.stats().refused_requests == 2


async def test_request_id_is_not_free_while_its_answer_is_being_stored() -> None:
    for when in ("before", "after"):
        async with held() as (storage, _, _, client):
            request = await client.call(1)
            tool = client.tool(1)
            trap = storage.hold("append", when)
            tool.finish()
            await trap.until_reached()
            assert await client.post(1).reason() == "duplicate_request_id"
            trap.release()
            assert steps_of(await request.frames()) == ["answer"]


async def test_request_id_is_used_again_only_when_the_earlier_post_is_over() -> None:
    async with held() as (_, _, _, client):
        request = await client.call(1)
        request.freeze()
        client.tool(1).finish()
        await client.tool(1).ended.wait()
        await wait_all_tasks_blocked()
        del client.host.tools[client.session_id, "1"]
        again = client.post(1)
        await wait_all_tasks_blocked()
        assert not again.started.is_set()
        request.thaw()
        assert steps_of(await request.frames()) == ["answer"]
        await again.until_started()
        await wait_all_tasks_blocked()
        client.tool(1).finish()
        assert steps_of(await again.frames()) == ["answer"]


async def test_request_that_the_sdk_refuses_leaves_its_id_free() -> None:
    async with held() as (_, _, _, client):
        refused = client.request("POST", body={"jsonrpc": "2.0", "id": 1, "method": "ping"}, accept="text/plain")
        await refused.until_done()
        assert refused.status == 406
        assert (await client.ping(1))["result"] == {}


# Found by breaking the code: each guards one line.


async def test_advance_closes_a_tail_that_the_storage_does_not_wake() -> None:
    async with held() as (storage, store, _, client):
        trap = storage.hold("wait")
        plain = client.get()
        await plain.frame()
        await trap.until_reached()
        await store.advance_generation(client.session_id)
        assert await plain.frames() == []
        assert plain.is_complete


async def test_event_after_a_lost_one_leaves_its_seq_free() -> None:
    async with held() as (storage, _, _, client):
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        frames = await read_steps(request, 1)
        storage.fail("append")
        storage.fail("append")
        await tool.emit("lost", "lost too", "b")
        frames += await read_steps(request, 3)
        assert [(frame.step, frame.id and frame.seq) for frame in frames] == [
            ("a", 1),
            ("lost", None),
            ("lost too", None),
            ("b", 4),
        ]
        assert await client.get(frames[0].id).reason() == "replay_gap"
        tool.finish()
        assert steps_of(await client.get(frames[3].id).frames()) == ["answer"]


async def test_router_that_is_quicker_than_the_session_id_does_not_claim_a_second_generation() -> None:
    storage = new_storage()
    store = ResumableEventStore(storage)
    async with hosting(store) as host, anyio.create_task_group() as task_group:
        storage.broken = {"end_session"}
        gone = await host.open()
        await gone.request("DELETE").until_done()
        storage.broken = set()
        trap = storage.hold("end_session")
        clients: list[Client] = []

        async def open_session() -> None:
            clients.append(await host.open())

        task_group.start_soon(open_session)
        await trap.until_reached()
        await wait_all_tasks_blocked()
        trap.release()
        while not clients:
            await checkpoint()
        description = await store.describe(clients[0].session_id)
        assert description is not None
        assert description.generation.counter == 1
        assert [frame.seq for frame in clients[0].opened_with] == [0, 1]


async def test_late_event_does_not_revive_an_evicted_session_and_the_next_call_does() -> None:
    storage = new_storage(retention=Retention(max_sessions=1))
    store = ResumableEventStore(storage)
    async with hosting(store) as host:
        client = await host.open()
        request = await client.call(1)
        await client.tool(1).emit("a")
        cursor = (await read_steps(request, 1))[0].id
        await host.open()
        await client.tool(1).emit("late", "later")
        frames = await read_steps(request, 2)
        assert [(frame.step, frame.id) for frame in frames] == [("late", None), ("later", None)]
        assert await store.describe(client.session_id) is None
        assert await client.get(cursor).reason() == "session_not_found"
        second = await client.call(2)
        await client.tool(2).emit("b")
        frames = await read_steps(second, 1)
        assert frames[0].id is not None
        assert frames[0].id.startswith("2-")
        assert await client.get(cursor).reason() == "generation_mismatch"


async def test_tail_ends_at_an_event_too_large_to_keep_and_does_not_skip_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = new_storage(retention=Retention(max_bytes=1_000))
    store = ResumableEventStore(storage)
    async with hosting(store) as host:
        client = await host.open()
        request = await client.call()
        tool = client.tool()
        await tool.emit("a")
        cursor = (await read_steps(request, 1))[0].id
        tail = client.get(cursor)
        await tail.until_started()
        await tool.emit("b", "x" * 1_000, "c")
        assert steps_of(await tail.frames()) == ["b"]
        assert await client.get(cursor).reason() == "replay_gap"
        assert store.stats().oversized == 1
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_event_too_large_to_keep_reaches_the_first_connection_with_its_id() -> None:
    storage = new_storage(retention=Retention(max_bytes=1_000))
    store = ResumableEventStore(storage)
    async with hosting(store) as host:
        client = await host.open()
        request = await client.call()
        tool = client.tool()
        await tool.emit("a", "x" * 1_000, "c")
        frames = await read_steps(request, 3)
        assert steps_of(frames) == ["a", "x" * 1_000, "c"]
        assert await client.get(frames[0].id).reason() == "replay_gap"
        tool.finish()
        assert steps_of(await client.get(frames[1].id).frames()) == ["c", "answer"]


async def test_session_whose_advance_failed_halfway_is_ended_all_the_same() -> None:
    async with held() as (storage, store, _, client):
        storage.fail("claim_generation", "after")
        with pytest.raises(OSError, match="on fire"):
            await store.advance_generation(client.session_id)
        await client.request("DELETE").until_done()
        assert await store.describe(client.session_id) is None


async def test_plain_get_of_a_session_that_was_evicted_unnoticed_goes_on_in_its_next_generation() -> None:
    store = ResumableEventStore(new_storage(retention=Retention(max_sessions=1)))
    async with hosting(store) as host:
        client = await host.open()
        await host.open()
        plain = client.get()
        begin = await plain.frame()
        assert begin is not None
        assert begin.id is not None
        assert (plain.status, begin.id.partition("-")[0], begin.seq) == (200, "2", 0)


async def test_what_a_call_of_an_evicted_session_has_sent_is_a_hole_of_its_next_stream_before_anything_follows() -> (
    None
):
    store = ResumableEventStore(new_storage(retention=Retention(max_sessions=1)))
    async with hosting(store) as host:
        client = await host.open()
        request = await client.call()
        await client.tool().emit("a")
        await read_steps(request, 1)
        await host.open()
        await client.get().frame()
        description = await store.describe(client.session_id)
        assert description is not None
        (current,) = [stream.stream for stream in description.streams if stream.request_id == "1"]
        assert await client.get(f"{description.generation}:{current}:0").reason() == "replay_gap"


async def test_event_written_while_its_generation_moves_skips_nothing_of_the_next() -> None:
    """The place of the next plain GET was taken from an event of the generation before."""
    async with held() as (storage, store, host, client):
        await client.call("notifier")
        first = client.get()
        await first.frame()
        await host.notify(client, "a")
        await read_steps(first, 1)
        first.freeze()
        await host.notify(client, "b")
        await wait_all_tasks_blocked()
        trap = storage.hold("claim_generation", "after")
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(store.advance_generation, client.session_id)
            await trap.until_reached()
            first.thaw()
            trap.release()
        await first.until_done()
        await host.notify(client, "c")
        second = client.get()
        begin = await second.frame()
        assert begin is not None
        assert begin.seq == 0
        assert [frame.step for frame in await read_steps(second, 1)] == ["c"]


@stored_at_once
async def test_connection_that_is_closed_before_its_response_has_begun_gets_one() -> None:
    """It ended without any, and the server answered 500."""
    async with held() as (storage, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        trap = storage.hold("read")
        resumed = client.get(cursor)
        await trap.until_reached()
        await store.advance_generation(client.session_id)
        await wait_all_tasks_blocked()
        trap.release()
        assert [(frame.id, frame.data) for frame in await resumed.frames()] == [(cursor, "")]
        assert (resumed.status, resumed.is_complete) == (200, True)
        assert await client.get(cursor).reason() == "generation_mismatch"


@stored_at_once
async def test_connection_that_is_closed_is_decided_about_also_where_that_takes_longer_than_a_client_may_take() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        store.send_timeout = 0.2
        trap = storage.hold("read")
        resumed = client.get(cursor)
        await trap.until_reached()
        await store.advance_generation(client.session_id)
        await anyio.sleep(2 * store.send_timeout)
        trap.release()
        assert [(frame.id, frame.data) for frame in await resumed.frames()] == [(cursor, "")]
        assert (resumed.status, resumed.is_complete) == (200, True)


async def test_refusal_of_a_connection_that_was_closed_meanwhile_has_its_body() -> None:
    async with held() as (storage, store, _, client):
        request = await client.call()
        await client.tool().emit("a")
        cursor = (await read_steps(request, 1))[0].id
        trap = storage.hold("read")
        storage.fail("read", "after")
        resumed = client.get(cursor)
        await trap.until_reached()
        await store.advance_generation(client.session_id)
        trap.release()
        assert await resumed.reason() == "storage_unavailable"
        assert (resumed.status, resumed.is_complete) == (503, True)


async def test_session_whose_opening_failed_after_it_took_effect_ends_in_the_storage_with_its_router() -> None:
    """Nobody knew its generation, so it stayed until its retention ran out."""
    async with held() as (storage, store, host, _):
        claim = storage.hold("claim_generation", "after", then_fail=True)
        opened: list[Client] = []

        async def open_session() -> None:
            opened.append(await host.open())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_session)
            await claim.until_reached()
            storage.broken.add("claim_generation")  # Nor does it answer later.
            claim.release()
        session_id = opened[0].session_id
        assert await storage.inner.describe(session_id) is not None
        binding = store.find_binding(session_id)
        assert binding is not None
        assert binding.generation is None
        store._writer.router_is_over(binding)
        await store.describe("nobody")  # What is over ends with the next operation.
        assert await storage.inner.describe(session_id) is None
