"""Every order in which a storage may take effect and answer: drawn by Hypothesis, over the SDK's own session manager.

What is drawn says which operation of the storage is held next, before it takes effect or before its answer is seen, and
when it goes on, or fails; and what tools, clients and an operator do meanwhile. Between two steps the event loop makes
a drawn number of turns, so that two things also happen in the very same one. What must be true of any storage, and any
client:

- A stream has one connection at a time, once all have been told.
- A connection carries one stream, or, after a marker, the current execution of the call: each event once, in order.
- One event id never stands for two events, and a stream never for two executions. Plain GETs share what they get.
- A refusal has a cause: nothing is reset that was not restarted, advanced or lost, and nothing issued is ever invalid.
- In the end each stream has its end: whoever presents any cursor that was ever issued gets the answer or a refusal.
- Where the storage never failed, a call's current stream has all that its execution sent since it was opened.
- What was ended stays so, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_resumable import EventCursor, MemoryStorage, ResumableEventStore, SessionNotFoundError
from tests.held_storage import HeldStorage, Operation, SharedHeldStorage, When
from tests.sdk_host import Client, Frame, Host, Request, Tool, hosting

# Turns of the event loop: until everything waits for a gate, a client, a tool or the clock.
UNTIL_QUIET = -1


@dataclass(eq=False)
class Held:
    """An operation that waits for its turn."""

    goes_on: anyio.Event = field(default_factory=anyio.Event)
    fails: bool = False


class ScheduledStorage(HeldStorage):
    """A storage of which an operation takes effect, or is answered, when the schedule says so."""

    def __init__(self, inner: MemoryStorage | None = None) -> None:
        super().__init__(inner=inner)
        # Where the next operation is to be held, and those that are.
        self.planned: list[tuple[Operation, When]] = []
        self.held: list[Held] = []

    async def _spring(self, operation: Operation, when: When) -> None:
        await super()._spring(operation, when)
        if (operation, when) in self.planned:
            self.planned.remove((operation, when))
            held = Held()
            self.held.append(held)
            try:
                await held.goes_on.wait()
            finally:
                self.held.remove(held)
            if held.fails and operation != "notice":
                raise OSError("the storage is on fire")

    def let_go(self) -> None:
        self.planned.clear()
        self._traps.clear()
        for held in self.held:
            held.goes_on.set()


class SharedScheduledStorage(ScheduledStorage, SharedHeldStorage):
    """The same for events that are stored later."""


@dataclass(eq=False)
class CallLog:
    """One call, from its tool's side."""

    number: int
    request_id: int
    tool: Tool | None = None
    # What each execution has sent, in order.
    executions: list[list[str]] = field(default_factory=lambda: [[]])
    is_finished: bool = False
    # An operator has begun its stream anew: its tool does not know from which event on.
    is_begun_anew: bool = False

    @property
    def answer(self) -> str:
        return f"answer of call {self.number}"


@dataclass(eq=False)
class Reading:
    """One connection, from its client's side."""

    request: Request
    cursor: str | None = None
    is_standalone: bool = False
    # What plain GETs had been sent when this one began. What is just being written then may come twice: nobody knows
    # whether it arrives.
    not_again: set[str] = field(default_factory=set[str])
    frames: list[Frame] = field(default_factory=list[Frame])

    @property
    def is_plain(self) -> bool:
        return self.is_standalone and self.cursor is None

    @property
    def stream(self) -> str:
        """What it carries, as far as its client can tell."""
        return next((frame.id.rpartition(":")[0] for frame in reversed(self.frames) if frame.id), f"unknown {id(self)}")

    @property
    def labels(self) -> list[str]:
        messages = [frame.message for frame in self.frames if frame.data]
        return [label_of(message) for message in messages if message.get("method") != "notifications/message"]


# What is done, a number that picks with whom, and how many turns the event loop makes afterwards.
Step = tuple[str, int, int]

# What is wanted often stands there often; Hypothesis shrinks to what comes first. After an end, an eviction or an
# advance little is left to resume, so most of these are not done.
ACTIONS = (
    *(["hold"] * 6 + ["emit"] * 6 + ["go on"] * 6 + ["resume"] * 3 + ["finish"] * 2 + ["fail"] * 3 + ["advance"] * 2),
    *(["restart by operator", "restart"] * 2 + ["call", "hang up", "close", "listen", "notify", "evict", "end"]),
)


def steps_of(*actions: str) -> st.SearchStrategy[list[Step]]:
    """Return what draws a schedule of these actions."""
    turns = (*[UNTIL_QUIET] * 6, 0, 1, 2, 4)
    step = st.tuples(st.sampled_from(actions), st.integers(0, 15), st.sampled_from(turns))
    return st.lists(step, min_size=16, max_size=50)


_STEPS = steps_of(*ACTIONS)
_OPERATIONS: tuple[Operation, ...] = (
    *("append", "append", "claim_generation", "claim_generation"),
    *("open_stream", "snapshot", "read", "wait"),
)


class World:
    """A server with one session, its tools, its clients and its operator."""

    def __init__(
        self, store: ResumableEventStore, storage: ScheduledStorage, host: Host, client: Client, *, may_fail: bool
    ) -> None:
        self.store, self.storage, self.host, self.client = store, storage, host, client
        self.may_fail = may_fail
        self.calls: list[CallLog] = []
        self.readings: list[Reading] = []
        # Every event id that a client was sent, and of those with an event what it stands for.
        self.cursors: dict[str, None] = {}
        self.meaning: dict[str, str] = {}
        self.notes = 0
        self.has_failed = self.has_advanced = self.has_evicted = self.has_ended = False
        self.has_died = False  # To another worker, the one that serves the session.

    @property
    def held(self) -> list[Held]:
        return self.storage.held

    # What is done.

    def do(self, action: str, pick: int) -> None:
        held = self.held
        running = [call for call in self.calls if not call.is_finished]
        match action:
            case "hold":
                number, is_after = divmod(pick, 2)
                self.storage.planned.append((_OPERATIONS[number], "after" if is_after else "before"))
            case "go on" | "fail" if held:
                one = held[pick % len(held)]
                if action == "fail" and self.may_fail and not one.goes_on.is_set():
                    one.fails = self.has_failed = True
                one.goes_on.set()
            case "fail" if self.may_fail:
                self.has_failed = True
                number, is_after = divmod(pick, 2)
                self.storage.fail(_OPERATIONS[number], "after" if is_after else "before")
            case "call" if len(running) < 3:
                self.call()
            case "emit" | "finish" | "restart" | "restart by operator" | "close" | "notify" if running:
                self.work(running[pick % len(running)], action)
            case "listen":
                self.read()
                arrived = {label for one in self.readings if one.is_plain for label in one.labels}
                self.readings.append(Reading(self.client.get(), is_standalone=True, not_again=arrived))
            case "evict" if pick < 5:
                self.has_evicted = True
                self.host.task_group.start_soon(self.evict)
            case "end" if pick < 3:
                self.has_ended = True
                self.host.task_group.start_soon(self.end, self.store)
            case "advance" if pick < 5 and not self.has_ended:
                self.has_advanced = True
                self.host.task_group.start_soon(self.advance, self.store)
            case "hang up" if self.readings:
                self.readings[pick % len(self.readings)].request.disconnect()
            case "resume":
                self.read()
                if self.cursors:
                    self.readings.append(self.resume(list(self.cursors)[pick % len(self.cursors)]))
            case _:
                pass  # There is nothing to do it with.

    def resume(self, cursor: str, client: Client | None = None) -> Reading:
        request = (client or self.client).get(cursor)
        return Reading(request, cursor, is_standalone=cursor.split(":")[1] == "0")

    def call(self) -> None:
        busy = {call.request_id for call in self.calls if not call.is_finished}
        request_id = next(number for number in range(1, 5) if number not in busy)
        self.host.tools.pop((self.client.session_id, str(request_id)), None)
        self.calls.append(CallLog(len(self.calls) + 1, request_id))
        self.readings.append(Reading(self.client.post(request_id)))

    def work(self, call: CallLog, action: str) -> None:
        if call.tool is None:
            call.tool = self.host.tools.get((self.client.session_id, str(call.request_id)))
        if call.tool is None:
            return
        match action:
            case "finish":
                call.is_finished = True
                call.tool.result = call.answer
                call.tool.finish()
            case "emit":
                call.tool.soon(partial(self.emit, call, call.tool))
            case "restart":
                call.tool.soon(partial(self.restart, call))
            case "close":
                call.tool.soon(call.tool.context.close_sse_stream)
            case "notify":
                call.tool.soon(partial(self.notify, call.tool))
            case _:
                call.is_begun_anew = True
                self.host.task_group.start_soon(self.restart_from_outside, call)

    async def emit(self, call: CallLog, tool: Tool) -> None:
        sent = call.executions[-1]
        sent.append(f"call {call.number}, execution {len(call.executions)}, event {len(sent) + 1}")
        await tool.context.report_progress(1.0, 2.0, sent[-1])

    async def notify(self, tool: Tool) -> None:
        self.notes += 1
        await tool.context.session.send_progress_notification("nobody's", 1.0, 2.0, f"note {self.notes}")

    async def restart(self, call: CallLog) -> None:
        try:
            await self.store.restart_stream(call.request_id)
        except SessionNotFoundError:
            assert self.has_ended
        call.executions.append([])

    async def restart_from_outside(self, call: CallLog) -> None:
        with suppress(LookupError, SessionNotFoundError):  # Its answer is on its way already, or it was ended.
            await self.store.restart_stream(call.request_id, self.client.session_id)

    async def evict(self) -> None:
        await self.storage.inner.end_session(self.client.session_id)

    async def end(self, store: ResumableEventStore) -> None:
        try:
            await store.end_session(self.client.session_id)
        except OSError:
            assert self.has_failed
            await self.end(store)

    async def advance(self, store: ResumableEventStore) -> None:
        try:
            await store.advance_generation(self.client.session_id)
        except OSError:
            assert self.has_failed
        except SessionNotFoundError:
            assert self.has_ended or self.has_evicted

    def read(self) -> None:
        """Take what has arrived, and note the cursors that clients have now."""
        for reading in self.readings:
            arrived = reading.request.arrived()
            reading.frames += arrived
            self.cursors.update((frame.id, None) for frame in arrived if frame.id)

    # What must be true.

    async def check_the_end(self) -> None:
        """Let everything come to its end, and check what was seen and what is left."""
        await self.let_go()
        self.read()
        open_streams = [reading.stream for reading in self.readings if not reading.request.done.is_set()]
        assert len(open_streams) == len(set(open_streams)), f"two connections carry one stream: {open_streams}"
        for call in self.calls:
            if not call.is_finished:
                self.work(call, "finish")
        await turn(UNTIL_QUIET)
        for reading in self.readings:
            if reading.is_standalone:
                reading.request.disconnect()
        await turn(UNTIL_QUIET)
        self.read()
        for reading in self.readings:
            assert reading.request.done.is_set(), f"{reading.cursor} waits for ever"
            self.check(reading)
            if reading.is_plain:
                assert not reading.not_again.intersection(reading.labels), "a plain GET repeats what had been sent"
        for cursor in self.cursors:
            await self.check_cursor(cursor)
        if self.has_ended:
            assert await self.store.describe(self.client.session_id) is None
        else:
            await self.check_streams()

    async def let_go(self) -> None:
        """Hold nothing any more, and let everything come to where it waits for a tool or a client."""
        self.storage.let_go()
        await turn(UNTIL_QUIET)

    async def check_cursor(self, cursor: str) -> None:
        """Check what becomes of a claim in the end."""
        await self.labels_after(cursor)

    def check(self, reading: Reading) -> None:
        """Check what one connection has carried."""
        place = EventCursor.parse(reading.cursor) if reading.cursor is not None else None
        is_next = place is not None
        for frame in reading.frames:
            message: Any = frame.message if frame.data else {}
            if message.get("method") == "notifications/message":  # A marker: from here on another stream.
                self.justify(reading.cursor, message["params"]["data"]["reason"])
                place, is_next = EventCursor.parse(frame.id or ""), True
                assert place is not None
                assert place.seq == 0 or reading.is_standalone
            elif "error" in message:
                self.justify(reading.cursor, message["error"]["data"]["reason"])
            elif frame.id and message:
                assert self.meaning.setdefault(frame.id, label_of(message)) == label_of(message)
                cursor = EventCursor.parse(frame.id)
                assert cursor is not None
                if place is not None:
                    assert cursor == place._replace(seq=place.seq + 1 if is_next else max(cursor.seq, place.seq + 1))
                place, is_next = cursor, True
            elif message:
                is_next = False  # Sent live without an event id: what is lost has a place, or two where it took effect.
                assert reading.cursor is None, "what is resumed has event ids"
                has_moved = self.has_advanced or any(call.is_begun_anew for call in self.calls)
                assert self.has_failed or has_moved or self.has_evicted or self.has_ended or self.has_died

    def justify(self, cursor: str | None, reason: str) -> None:
        """Check that there is a cause for a refusal."""
        parsed = EventCursor.parse(cursor or "")
        assert parsed is not None
        calls = [call for call in self.calls if str(call.request_id) == parsed.stream.request_id]
        causes = {
            "session_not_found": self.has_ended or self.has_evicted or self.has_died,
            "replay_gap": self.has_failed or self.has_evicted or self.has_died,
            "storage_unavailable": self.has_failed,
            "generation_mismatch": self.has_advanced or self.has_evicted or self.has_died,
            "stream_superseded": len(calls) > 1 or any(len(c.executions) > 1 or c.is_begun_anew for c in calls),
            "stream_completed": any(call.is_finished for call in calls),
        }
        assert causes.get(reason), f"{cursor} was refused: {reason}"

    @property
    def has_lost_something(self) -> bool:
        return self.has_failed or self.has_advanced or self.has_evicted or self.has_died

    async def labels_after(self, cursor: str, client: Client | None = None) -> list[str]:
        """Present a cursor and return what follows it, up to the answer; nothing where it is refused for a cause."""
        reading = self.resume(cursor, client)
        await turn(UNTIL_QUIET)
        if reading.is_standalone:
            reading.request.disconnect()
            await turn(UNTIL_QUIET)
        reading.frames = reading.request.arrived()
        messages = [frame.message for frame in reading.frames if frame.data]
        assert reading.request.done.is_set(), f"{cursor} waits for ever, after {messages}"
        if reading.request.status != 200:
            self.justify(cursor, await reading.request.reason())
            return []
        self.check(reading)
        if reading.is_standalone:
            return reading.labels
        assert messages, f"{cursor} was honoured with nothing"
        assert "method" not in messages[-1], f"{cursor} was honoured, and its stream has no end"
        return [] if "error" in messages[-1] else reading.labels

    async def check_streams(self) -> None:
        """Check that each stream of a call that is left has an end, and the events of one execution."""
        # Any claim has the storage told what was lost.
        reason = await self.client.get("no event id").reason()
        assert reason == "malformed_event_id" or (reason == "session_not_found" and (self.has_evicted or self.has_died))
        description = await self.store.describe(self.client.session_id)
        if description is None:
            assert self.has_evicted
            return
        streams = [stream for stream in description.streams if stream.request_id not in (None, "init")]
        for stream in streams:
            assert stream.is_terminal or self.has_died, f"{stream.stream} has no end"
            labels = await self.labels_after(f"{description.generation}:{stream.stream}:0")
            if labels:
                (call,) = [call for call in self.calls if call.answer == labels[-1]]
                sent = [*call.executions[-1], call.answer]
                assert labels == sent[-len(labels) :], "a stream has not all, or more, than its execution sent"
                if not (call.is_begun_anew or self.has_lost_something):
                    assert labels == sent
        if not self.has_lost_something:
            called = {str(call.request_id) for call in self.calls if call.tool is not None}
            assert {stream.request_id for stream in streams} == called


def label_of(message: Any) -> str:
    """Return what a tool has called an event, or its answer."""
    if "params" in message:
        return str(message["params"]["message"])
    return str(message["result"]["content"][0]["text"])


async def turn(turns: int) -> None:
    """Let the event loop make so many turns."""
    if turns == UNTIL_QUIET:
        loop: Any = asyncio.get_running_loop()
        await checkpoint()
        while loop._ready:
            await checkpoint()
    for _ in range(turns):
        await checkpoint()


async def _run(
    kind: type[ScheduledStorage], rejection: Literal["status", "stream"], may_fail: bool, steps: list[Step]
) -> None:
    storage = kind()
    store = ResumableEventStore(storage, rejection=rejection)
    async with hosting(store) as host:
        world = World(store, storage, host, await host.open(), may_fail=may_fail)
        for action, pick, turns in [("call", 0, UNTIL_QUIET), ("emit", 0, UNTIL_QUIET), *steps]:
            world.do(action, pick)
            await turn(turns)
        await world.check_the_end()


@pytest.mark.usefixtures("writes_at_once")
@pytest.mark.parametrize("rejection", ["status", "stream"])
@pytest.mark.parametrize("kind", [ScheduledStorage, SharedScheduledStorage], ids=["stored at once", "stored later"])
@given(may_fail=st.booleans(), steps=_STEPS)
@settings(
    max_examples=int(os.environ.get("SCHEDULES", "40")),
    # CI repeats itself; every other run explores.
    derandomize=os.environ.get("CI") == "true",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_no_order_of_effects_and_answers_corrupts_a_stream(
    kind: type[ScheduledStorage], rejection: Literal["status", "stream"], may_fail: bool, steps: list[Step]
) -> None:
    anyio.run(partial(_run, kind, rejection, may_fail, steps), backend="asyncio")
