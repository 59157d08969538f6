"""The soak: clients that behave, tools that talk, a network that does not behave, and an account of every event.

A real server in this event loop, the fault proxy in front of it, several sessions at once with equal request ids. What
is done is a function of the seed: session N of a seed always makes the same calls, whose tools emit the same events,
over connections that meet the same faults. (Which event meets which fault still depends on the scheduler.)

Each event that a tool emits carries the session, the call, the execution and its place in it, and is noted before it is
emitted; each client compares what it receives with that.

| violation     | what was seen                                                                                     |
|---------------|---------------------------------------------------------------------------------------------------|
| `lost`        | an event is missing, and no refusal has said so                                                   |
| `duplicated`  | an event came again to who had it already                                                         |
| `foreign`     | an event of another session or call                                                               |
| `disordered`  | the event ids of one connection do not follow one another                                         |
| `spliced`     | one connection carried two executions, streams or generations                                     |
| `hung`        | a call, or a ping, that did not end in time, or stood still on a faultless connection             |
| `unjustified` | a refusal for which there is no cause: nothing was restarted, advanced, evicted or ended          |
| `leaked`      | something of an ended session is left in the store                                                |
| `blank`       | a call's connection ended cleanly and had carried nothing, not even a cursor to come back with     |
| `unexpected`  | anything else that is not in the protocol                                                         |

Run it: `SOAK_SECONDS=60 SOAK_SEED=7 python -m tests.soak.soak`. A violation names its session; SOAK_SESSION=N then runs
that session alone. SOAK_STORAGE=redis keeps the events in a Valkey.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import anyio
import anyio.abc

from mcp_resumable import EventCursor, MemoryStorage, ResumableEventStore, Retention, Storage
from mcp_resumable.redis import RedisStorage
from tests.e2e.raw_client import Frame, RawClient, Response
from tests.e2e.servers import Call, RunningServer, serve
from tests.redis.server import serving

from .fault_proxy import CLEAR, Direction, Fate, FaultProxy, Forecast, ProxiedConnection, Weather, proxied

__all__ = ["Report", "plan_connection", "plan_session", "soak"]

_LABEL = "x-connection"

# Sessions at once: enough to meet on the same request ids, few enough for two cores.
_WIDTH = 12

_SEND_TIMEOUT_SECONDS = 0.5

# A client gives a connection up after this time without a frame; no tool pauses nearly as long.
_QUIET_SECONDS = 2.0

# A call's longest life: every attempt quiet, and some room for a slow machine.
_CALL_SECONDS = 60.0
_PING_SECONDS = 15.0

# From this attempt on a call meets no more faults, so that it ends.
_CLEAR_FROM_ATTEMPT = 5

Kind = Literal["roomy", "roomy-stream", "tight", "tight-stream", "crowded"]

_TIGHT = Retention(max_events=25, max_bytes=90_000, max_session_bytes=250_000, max_total_bytes=1_000_000)


def _make_store(kind: Kind, redis_url: str | None) -> ResumableEventStore:
    retention = None
    if kind.startswith("tight"):
        retention = _TIGHT.model_copy(update={"completed_seconds": 1.0})
    elif kind == "crowded":
        retention = Retention(max_sessions=2, completed_seconds=0.5)
    if redis_url is None:
        storage: Storage = MemoryStorage(retention=retention)
    else:
        storage = RedisStorage(redis_url, retention=retention, prefix=kind)
    return ResumableEventStore(
        storage,
        rejection="stream" if kind.endswith("-stream") else "status",
        send_timeout=_SEND_TIMEOUT_SECONDS,
        max_tail_seconds=3.0,
    )


# ---- the plan: pure functions of the seed


@dataclass(frozen=True, slots=True)
class Emit:
    """A tool sends events of these sizes, in its call's stream, with a pause before each."""

    sizes: tuple[int, ...]
    pause_seconds: float
    as_progress: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """A tool sends events in the session's standalone stream."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Poll:
    """A tool has the SDK close its call's connection."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A tool begins again."""


Step = Emit | Announce | Poll | Restart


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """One call.

    Attributes:
        steps: What its tool does.
        delay_seconds: Before it is made.
        is_repeated: The same request id is used again while it runs.
        tries_again: After a refusal it is made again so many times.
    """

    steps: tuple[Step, ...]
    delay_seconds: float
    is_repeated: bool
    tries_again: int

    @property
    def restarts(self) -> bool:
        """Whether the tool begins again."""
        return any(isinstance(step, Restart) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """One session.

    Attributes:
        number: From 0.
        kind: The server that it is opened on.
        lanes: Calls that follow one another, for each of those that run at once.
        advances_after_seconds: When an operator advances its generation.
        deletes_after_seconds: When it is ended under its calls; None for at the end.
    """

    number: int
    kind: Kind
    lanes: tuple[tuple[CallPlan, ...], ...]
    advances_after_seconds: tuple[float, ...]
    deletes_after_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionPlan:
    """One connection: the network, and what the client does on it, after so many frames each; None for never.

    Attributes:
        forecast: The network's faults.
        switch: The weather changes later: when, in which direction, to what.
        resets_after: The client cuts.
        freezes_after: The client stops reading for longer than the server waits for it.
        overlaps_after: The client resumes without closing.
        receive_buffer: Of the client's socket in bytes, 0 for the system's.
    """

    forecast: Forecast = field(default_factory=Forecast)
    switch: tuple[float, Direction, Weather] | None = None
    resets_after: int | None = None
    freezes_after: int | None = None
    overlaps_after: int | None = None
    receive_buffer: int = 0

    @property
    def is_faultless(self) -> bool:
        """Whether nothing but the server can hold up what it carries."""
        return self == ConnectionPlan()


def plan_session(seed: int, number: int) -> SessionPlan:
    """Return what session `number` does."""
    rng = random.Random(f"{seed}/{number}")
    kind: Kind = rng.choice(["roomy", "roomy", "roomy-stream", "roomy-stream", "tight", "tight-stream", "crowded"])
    lanes = tuple(tuple(_plan_call(rng) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
    advances = tuple(rng.uniform(0, 2) for _ in range(rng.choice([0, 0, 0, 1, 2])))
    deletes = rng.uniform(0.1, 2) if rng.random() < 0.15 else None
    return SessionPlan(
        number=number, kind=kind, lanes=lanes, advances_after_seconds=advances, deletes_after_seconds=deletes
    )


def _plan_call(rng: random.Random) -> CallPlan:
    steps: list[Step] = [_plan_emit(rng)]
    for _ in range(rng.randint(0, 3)):
        match rng.choice(["emit", "announce", "announce", "poll", "restart"]):
            case "announce":
                steps.append(Announce(tuple(_plan_size(rng) for _ in range(rng.randint(1, 8)))))
            case "poll":
                steps.append(Poll())
            case "restart":
                steps.append(Restart())
        steps.append(_plan_emit(rng))
    return CallPlan(
        steps=tuple(steps),
        delay_seconds=rng.choice([0.0, 0.0, rng.uniform(0, 0.3)]),
        is_repeated=rng.random() < 0.15,
        tries_again=rng.randint(0, 2),
    )


def _plan_emit(rng: random.Random) -> Emit:
    number = rng.choice([0, 1, rng.randint(2, 10), rng.randint(10, 60)])
    biggest = rng.choice([200, 200, 2_000, 100_000])
    sizes = tuple(_plan_size(rng, biggest) for _ in range(number))
    pause = rng.choice([0.0, 0.0, 0.001, 1 / (number + 1)])
    return Emit(sizes, pause, as_progress=rng.random() < 0.5)


def _plan_size(rng: random.Random, biggest: int = 2_000) -> int:
    return biggest if rng.random() < 0.3 else rng.randint(200, biggest)


def plan_connection(seed: int, label: str) -> ConnectionPlan:
    """Return what happens on a connection: label `<session>/<what>/<attempt>`; an attempt `clear` meets no fault."""
    attempt = label.rsplit("/", 1)[1]
    if attempt == "clear" or int(attempt) >= _CLEAR_FROM_ATTEMPT:
        return ConnectionPlan()
    rng = random.Random(f"{seed}/{label}")
    plan = ConnectionPlan()
    down, up = _plan_weather(rng, 0.45, 300_000), _plan_weather(rng, 0.08, 700)
    plan = replace(plan, forecast=Forecast(up=up, down=down))
    if rng.random() < 0.15:
        weather = Weather(fate=rng.choice(["reset", "close", "half_close", "freeze"]))
        plan = replace(plan, switch=(rng.uniform(0, 0.8), rng.choice(["down", "down", "up"]), weather))
    elif plan.forecast.down.fate == "freeze" and rng.random() < 0.5:
        plan = replace(plan, switch=(rng.uniform(0, 1.5), "down", CLEAR))
    if rng.random() < 0.4:
        after = int(2 ** rng.uniform(0, 6))
        match rng.choice(["reset", "freeze", "overlap"]):
            case "reset":
                plan = replace(plan, resets_after=after)
            case "freeze":
                plan = replace(plan, freezes_after=after, receive_buffer=rng.choice([0, 4096]))
            case "overlap":
                plan = replace(plan, overlaps_after=after)
    return plan


def _plan_weather(rng: random.Random, share: float, most_bytes: int) -> Weather:
    weather = Weather()
    if rng.random() < share:
        fate: Fate = rng.choice(["reset", "reset", "close", "half_close", "freeze"])
        weather = replace(weather, fate=fate, fate_after_bytes=int(most_bytes ** rng.uniform(0.4, 1)))
    if rng.random() < share / 2:
        weather = replace(weather, single_bytes=rng.randint(1, 1_500))
    if rng.random() < share / 2:
        weather = replace(weather, latency_seconds=rng.uniform(0, 0.02))
    return weather


# ---- what was emitted


@dataclass
class Emission:
    """What the tool of one call has emitted so far.

    Attributes:
        execution: From 0.
        index: Of the last event of this execution, from 1.
        answered_at: When it returned; None before.
        advanced_at: For each generation that began meanwhile: (execution, index) at that time.
    """

    execution: int = 0
    index: int = 0
    answered_at: float | None = None
    advanced_at: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Session:
    """One session's account.

    Attributes:
        tag: Unique; in each of its events.
        emissions: By call nonce; the standalone stream's is "".
        advances: Generations that an operator began, or is about to begin.
        is_deleted: It was ended, or is about to be.
    """

    plan: SessionPlan
    client: RawClient
    server: RunningServer
    emissions: dict[str, Emission] = field(default_factory=lambda: {"": Emission()})
    advances: int = 0
    is_deleted: bool = False
    used_ids: set[int] = field(default_factory=set)
    announcing: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def tag(self) -> str:
        return str(self.plan.number)

    @property
    def is_roomy(self) -> bool:
        """Whether retention evicts nothing of it."""
        return self.plan.kind.startswith("roomy")

    def new_id(self) -> int:
        """Return the lowest request id that no call of this client uses: ids are used again, as clients do."""
        request_id = next(number for number in range(1, 1_000) if number not in self.used_ids)
        self.used_ids.add(request_id)
        return request_id


# ---- what is received


class ViolationError(Exception):
    """Raised where a client sees what must not be."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class RefusedError(Exception):
    """Raised where a claim or a call is refused with a reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class History:
    """What a client has of one stream: it follows from its cursor alone.

    Attributes:
        cursor: Last event id.
        execution: Of its events; None where there are none.
        index: Of its last event; 0 where there are none.
        may_skip: The next event may be any later one.
    """

    cursor: str | None = None
    execution: int | None = None
    index: int = 0
    may_skip: bool = False


@dataclass
class Tally:
    """Sums.

    Attributes:
        reasons: Refusals by reason.
        faults: Faults by name.
        violations: (kind, label, detail).
    """

    sessions: int = 0
    calls: int = 0
    answers: int = 0
    given_up: int = 0
    emitted: int = 0
    received: int = 0
    connections: int = 0
    resumes: int = 0
    pings: int = 0
    unstored: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    violations: list[tuple[str, str, str]] = field(default_factory=list)


class Reading:
    """One connection of a stream, compared with what was emitted, event by event."""

    def __init__(
        self, session: Session, nonce: str, history: History, tally: Tally, presented: str | None, *, is_plain: bool
    ) -> None:
        self.history = history
        self.is_answered = False
        self.frames = 0
        self._session = session
        self._nonce = nonce
        self._tally = tally
        self._presented = presented
        self._is_plain = is_plain
        self._seq: int | None = None
        self._prefix: str | None = None
        self._is_marked = False

    def take(self, frame: Frame) -> None:
        """Account for a frame.

        Raises:
            ViolationError: When it must not be here.
            RefusedError: When it ends the call with a reason.
        """
        self.frames += 1
        message = frame.message if frame.is_message else None
        if message is None:
            self._take_priming(frame)
        elif "error" in message:
            self._take_error(message)
        elif "method" not in message:
            self._take_answer(frame)
        elif message["params"].get("logger") == "mcp_resumable":
            self._take_marker(frame)
        else:
            self._take_event(frame, message["params"])

    def _take_error(self, message: dict[str, Any]) -> None:
        self._tally.received += 1
        data = message["error"].get("data")
        if not isinstance(data, dict) or "reason" not in data:
            raise ViolationError("unexpected", f"an answer that is an error: {message}")
        raise RefusedError(str(data["reason"]))

    def _take_event(self, frame: Frame, params: dict[str, Any]) -> None:
        self._tally.received += 1
        self._follow_id(frame)
        if "logger" in params:
            # Of the SDK itself: 1.x tells the client of a request whose body was cut. It is nobody's call's.
            if self._nonce:
                raise ViolationError("foreign", f"{frame}"[:300])
        else:
            payload = json.loads(params["data"] if "data" in params else params["message"])
            self._follow(payload["session"], payload["call"], payload["execution"], payload["index"])
            self.history.execution, self.history.index = payload["execution"], payload["index"]
            self.history.may_skip = False
        if frame.id:
            self.history.cursor = frame.id

    def _take_priming(self, frame: Frame) -> None:
        if self.frames != 1:
            raise ViolationError("unexpected", f"a priming event in mid-stream: {frame}")
        if not frame.id:
            if self._session.is_roomy:
                raise ViolationError("unexpected", "a priming event without an id")
            return
        self._follow_id(frame, is_event=False)
        if self._is_plain:
            before = self.history.cursor
            self.history.cursor = frame.id
            if before is not None:
                was, now = EventCursor.parse(before), EventCursor.parse(frame.id)
                assert was is not None
                assert now is not None
                if was.generation != now.generation:
                    self.history.may_skip = True
                elif now.seq < was.seq:
                    raise ViolationError("duplicated", f"a plain GET begins at {frame.id}, before {before}")
        elif self._presented is None:
            self.history.cursor = frame.id

    def _take_marker(self, frame: Frame) -> None:
        if self.frames != 2 or self._presented is None:
            raise ViolationError("unexpected", f"a marker in mid-stream: {frame}")
        reason = frame.reason
        self._tally.reasons[reason] += 1
        _justify(self._session, reason, frame.id or "")
        self._is_marked = True
        # What was received before is dropped. A standalone stream has its own beginning.
        self.history.cursor = frame.id
        self.history.execution, self.history.index = None, 0
        self.history.may_skip = self._nonce == ""

    def _take_answer(self, frame: Frame) -> None:
        self._tally.received += 1
        self._follow_id(frame)
        text = json.loads(frame.answer_text)
        if "failed" in text:
            raise ViolationError("unexpected", f"a tool failed: {text}")
        self._follow(text["session"], text["call"], text["execution"], text["count"] + 1)
        if frame.id:
            self.history.cursor = frame.id
        self.is_answered = True

    def _follow_id(self, frame: Frame, *, is_event: bool = True) -> None:
        """Compare the event id with the one before on this connection."""
        if not frame.id:
            if self._session.is_roomy:
                raise ViolationError("unexpected", f"an event without an id: {frame}"[:300])
            self._tally.unstored += 1
            if self._seq is not None:
                self._seq += 1
            return
        cursor = EventCursor.parse(frame.id)
        if cursor is None:
            raise ViolationError("unexpected", f"a malformed event id: {frame.id}")
        prefix = frame.id.rsplit(":", 1)[0]
        if self._prefix is None:
            self._prefix = prefix
            if not is_event and not self._is_plain:
                if self._presented is None and cursor.seq != 0:
                    raise ViolationError("disordered", f"a stream begins with {frame.id}")
            elif is_event and self._presented is not None:
                raise ViolationError("unexpected", f"a resumed stream begins without a cursor: {frame.id}")
            elif is_event and cursor.seq != 1:
                raise ViolationError("lost", f"a stream begins with {frame.id}")
        elif prefix != self._prefix:
            raise ViolationError("spliced", f"{frame.id} on a connection of {self._prefix}")
        elif is_event and self._seq is not None and cursor.seq != self._seq + 1:
            raise ViolationError("disordered", f"{frame.id} after seq {self._seq}")
        if is_event and self.frames == 2 and self._presented is not None and not self._is_marked:
            presented = self._presented.rsplit(":", 1)
            if [prefix, str(cursor.seq - 1)] != presented:
                raise ViolationError("spliced", f"{frame.id} after the cursor {self._presented}")
        self._seq = cursor.seq

    def _follow(self, session: str, call: str, execution: int, index: int) -> None:
        """Compare an event with the one before in this history; an answer is the one after the last."""
        history = self.history
        what = f"event {execution}.{index} of {session}/{call}"
        if (session, call) != (self._session.tag, self._nonce):
            raise ViolationError("foreign", f"{what} at {self._session.tag}/{self._nonce}")
        has = f"{history.execution}.{history.index}"
        if history.execution is not None and execution != history.execution:
            raise ViolationError("spliced", f"{what} after {has}")
        if history.execution is not None or history.may_skip:
            if index <= history.index:
                raise ViolationError("duplicated", f"{what} after {has}")
            if index != history.index + 1 and not history.may_skip:
                raise ViolationError("lost", f"{what} after {has}")
        elif index != 1 and self._session.plan.kind != "crowded":
            # The rest of an execution that runs on in another generation.
            generation = (self._prefix or "").split(":", 1)[0]
            at = self._session.emissions[self._nonce].advanced_at.get(generation)
            if at is None or at[0] != execution or index > at[1] + 1:
                raise ViolationError("lost", f"{what} is the first; generation {generation} began at {at}")


def _justify(session: Session, reason: str, place: str, *, restarts: bool = True, is_cut_short: bool = True) -> None:
    """Ask whether there is a cause for a refusal."""
    roomy = session.is_roomy
    crowded = session.plan.kind == "crowded"
    is_right = {
        "session_not_found": session.is_deleted or crowded,
        "generation_mismatch": session.advances > 0 or crowded,
        # A crowded storage remembers the past of two sessions only.
        "unrecognized_generation": crowded,
        "stream_superseded": restarts,
        "stream_completed": not roomy,
        "event_evicted": not roomy,
        "replay_gap": not roomy,
        "duplicate_request_id": is_cut_short,
    }.get(reason, False)
    if not is_right:
        raise ViolationError("unjustified", f"{reason} at {place}")


# ---- what is done


class SeededPolicy:
    """The proxy's policy: the connection's label, in a header of its first request, says what its plan is."""

    def __init__(self, seed: int, tally: Tally, tasks: anyio.abc.TaskGroup) -> None:
        self._seed = seed
        self._tally = tally
        self._tasks = tasks

    def forecast(self, head: bytes) -> Forecast:
        """Return the plan's forecast."""
        forecast = self._plan(head).forecast
        self._tally.connections += 1
        for weather in (forecast.up, forecast.down):
            self._count(weather)
        return forecast

    def opened(self, head: bytes, connection: ProxiedConnection) -> None:
        """Change the weather when the plan says so."""
        switch = self._plan(head).switch
        if switch is not None:
            self._tasks.start_soon(self._switch, connection, *switch)

    async def _switch(
        self, connection: ProxiedConnection, after_seconds: float, direction: Direction, weather: Weather
    ) -> None:
        await anyio.sleep(after_seconds)
        self._count(weather)
        connection.switch(direction, weather)

    def _count(self, weather: Weather) -> None:
        if weather.fate is not None:
            self._tally.faults[weather.fate] += 1
        if weather.single_bytes:
            self._tally.faults["single bytes"] += 1
        if weather.latency_seconds:
            self._tally.faults["latency"] += 1

    def _plan(self, head: bytes) -> ConnectionPlan:
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b": ")
            if name == _LABEL.encode():
                return plan_connection(self._seed, value.decode())
        return ConnectionPlan()


@dataclass(frozen=True)
class _Endpoint:
    port: int
    path: str


class _Soak:
    """One run."""

    def __init__(
        self,
        seed: int,
        tally: Tally,
        servers: dict[Kind, tuple[RunningServer, FaultProxy]],
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._seed = seed
        self._tally = tally
        self._servers = servers
        self._tasks = tasks
        self._foreign_cursors: deque[tuple[str, str]] = deque(maxlen=20)
        # The last of what each session did, for a violation's detail.
        self._traces: dict[str, deque[str]] = {}

    def _trace(self, label: str, text: str) -> None:
        tag = label.split("/", 1)[0]
        trace = self._traces.setdefault(tag, deque(maxlen=400))
        trace.append(f"{time.monotonic() % 1_000:.3f} {label}: {text}")

    def _report(self, kind: str, label: str, detail: str) -> None:
        tag, what = label.split("/")[:2]
        lines = [line for line in self._traces.get(tag, ()) if f" {tag}/{what.split('.')[0]}" in line]
        self._tally.violations.append((kind, label, "\n    ".join([detail, *lines[-25:]])))

    async def run_session(self, number: int) -> None:
        """Run one session from its plan."""
        plan = plan_session(self._seed, number)
        server, proxy = self._servers[plan.kind]
        endpoint = _Endpoint(proxy.port, server.path)
        async with RawClient(endpoint, headers={_LABEL: f"{number}/init/clear"}) as client:
            with anyio.fail_after(30):
                await client.initialize()
            self._tally.sessions += 1
            session = Session(plan, client, server)
            async with anyio.create_task_group() as background:
                background.start_soon(self._advance, session)
                background.start_soon(self._delete_early, session)
                background.start_soon(self._ping, session)
                listener = _Listener(self, session)
                background.start_soon(listener.run)
                async with anyio.create_task_group() as lanes:
                    for lane, calls in enumerate(plan.lanes):
                        lanes.start_soon(self._run_lane, session, lane, calls, background)
                await listener.finish()
                await self._probe(session)
                session.is_deleted = True
                with anyio.move_on_after(10):
                    await self._delete(session)
                # Tools that nobody waits for any more may go on until here.
                background.cancel_scope.cancel()
        self._traces.pop(session.tag, None)

    async def _run_lane(
        self, session: Session, lane: int, calls: tuple[CallPlan, ...], background: anyio.abc.TaskGroup
    ) -> None:
        for position, call in enumerate(calls):
            await anyio.sleep(call.delay_seconds)
            for attempt in range(call.tries_again + 1):
                nonce = f"{lane}{position}{'abc'[attempt]}"
                label = f"{session.tag}/{nonce}"
                try:
                    with anyio.fail_after(_CALL_SECONDS):
                        is_answered = await _CallRun(self, session, call, nonce, background).run()
                except TimeoutError:
                    self._report("hung", label, "it did not end")
                    return
                except ViolationError as violation:
                    self._report(violation.kind, label, violation.detail)
                    return
                if is_answered or session.is_deleted:
                    break
                self._tally.given_up += attempt == call.tries_again

    async def _advance(self, session: Session) -> None:
        start = anyio.current_time()
        for after_seconds in sorted(session.plan.advances_after_seconds):
            await anyio.sleep_until(start + after_seconds)
            if session.is_deleted:
                return
            session.advances += 1
            try:
                generation = await session.server.store.advance_generation(session.client.sid)
            except Exception as exc:
                if not session.is_deleted and session.plan.kind != "crowded":
                    self._report("unexpected", f"{session.tag}/operator", repr(exc))
                return
            self._trace(f"{session.tag}/", f"advanced to {generation}")
            self._tally.faults["advance"] += 1
            for nonce, emission in session.emissions.items():
                emission.advanced_at[str(generation)] = (emission.execution, emission.index)
                self._trace(f"{session.tag}/{nonce}", f"advanced to {generation} at {emission.index}")

    async def _delete_early(self, session: Session) -> None:
        if session.plan.deletes_after_seconds is not None:
            await anyio.sleep(session.plan.deletes_after_seconds)
            session.is_deleted = True
            self._tally.faults["delete"] += 1
            await self._delete(session)

    async def _delete(self, session: Session) -> None:
        label = f"{session.tag}/delete/clear"
        self._trace(f"{session.tag}/", "DELETE")
        try:
            response = await session.client.request("DELETE", headers={_LABEL: label})
            response.reset()
            again = await session.client.get(f"1-{'0' * 12}:1.MQ:0")
        except OSError as exc:
            self._report("unexpected", label, repr(exc))
            return
        if again.status != 404:
            self._report("unexpected", label, f"{again.status} after the DELETE")
        again.reset()
        if await session.server.store.describe(session.client.sid) is not None:
            self._report("leaked", label, "the store still knows the session")

    async def _ping(self, session: Session) -> None:
        for number in range(1_000):
            await anyio.sleep(0.3)
            label = f"{session.tag}/ping{number}/clear"
            body = json.dumps({"jsonrpc": "2.0", "id": f"ping {number}", "method": "ping"}).encode()
            headers = {"content-type": "application/json", _LABEL: label}
            try:
                with anyio.fail_after(_PING_SECONDS):
                    response = await session.client.request("POST", body=body, headers=headers)
                    frames = await response.rest() if response.is_stream else []
            except TimeoutError:
                if not session.is_deleted:
                    self._report("hung", label, "no answer to a ping")
                return
            if not any(frame.is_answer and "result" in frame.message for frame in frames):
                if not session.is_deleted and not (frames and session.advances) and session.plan.kind != "crowded":
                    self._report("hung" if frames else "blank", label, f"a ping is answered {response.status} {frames}")
                response.close()
                continue
            response.close()
            self._tally.pings += 1

    async def _probe(self, session: Session) -> None:
        """Present what never was this session's, and what is over: no byte of anyone else, no empty 200."""
        own = session.client.sid
        claims = [("Last-Event-ID nonsense", 400)]
        claims += [(cursor, 400) for sid, cursor in self._foreign_cursors if sid != own][-2:]
        for cursor, status in claims:
            if session.is_deleted or session.plan.kind == "crowded":
                return
            response = await session.client.get(cursor)
            if response.status != status and not (response.status == 200 and session.plan.kind.endswith("-stream")):
                self._report("foreign", f"{own}/probe/clear", f"{cursor} is answered {response.status}")
            elif response.status == 200:
                frames = await response.rest()
                if [frame.is_answer and "error" in frame.message for frame in frames] != [True]:
                    self._report("foreign", f"{own}/probe/clear", f"{cursor} is answered {frames}"[:500])
            response.reset()

    async def act(
        self,
        session: Session,
        response: Response,
        reading: Reading,
        plan: ConnectionPlan,
        overlap: Callable[[], Awaitable[None]] | None,
        label: str,
        is_enough: Callable[[], bool] | None = None,
    ) -> Literal["answered", "clean", "cut", "quiet", "overlapped"]:
        """Read a connection as its plan says, until it ends or is given up."""
        while True:
            frame: Frame | None = None
            with anyio.move_on_after(_QUIET_SECONDS) as patience:
                try:
                    frame = await response.frame()
                except (OSError, anyio.ClosedResourceError):
                    self._trace(label, f"cut after {reading.history.cursor}")
                    return "cut"
            if patience.cancelled_caught:
                self._trace(label, f"quiet after {reading.history.cursor}")
                response.reset()
                return "quiet"
            if frame is None:
                self._trace(label, f"clean end after {reading.history.cursor}")
                response.close()
                return "clean"
            reading.take(frame)
            if reading.frames <= 3:
                self._trace(label, f"{frame.id} {(frame.data or '')[:150]}")
            if reading.is_answered:
                self._foreign_cursors.append((session.client.sid, str(reading.history.cursor)))
                self._trace(label, f"answered at {reading.history.cursor}")
                response.close()
                return "answered"
            if is_enough is not None and is_enough():
                response.reset()
                return "quiet"
            if reading.frames == plan.resets_after:
                self._tally.faults["client resets"] += 1
                self._trace(label, f"client resets after {reading.history.cursor}")
                response.reset()
                return "cut"
            if reading.frames == plan.freezes_after:
                self._tally.faults["client freezes"] += 1
                await anyio.sleep(_SEND_TIMEOUT_SECONDS * 1.6)
            if reading.frames == plan.overlaps_after and overlap is not None:
                self._tally.faults["client overlaps"] += 1
                self._trace(label, f"client overlaps after {reading.history.cursor}")
                await overlap()
                return "overlapped"

    async def read_leftovers(
        self,
        session: Session,
        response: Response,
        reading: Reading,
        plan: ConnectionPlan,
        label: str,
        *,
        is_replaced: bool,
    ) -> None:
        """Read what an overlapped connection still has; it must be closed for the newer one."""
        try:
            end = await self.act(session, response, reading, plan, None, f"{label} (older)")
            if end == "quiet" and is_replaced and plan.is_faultless:
                self._report("hung", label, "the older connection was not closed for the newer one")
        except ViolationError as violation:
            self._report(violation.kind, label, violation.detail)
        except RefusedError:
            pass

    async def request(
        self, session: Session, method: str, label: str, *, body: bytes = b"", cursor: str | None = None
    ) -> Response | None:
        """Send a request; None where no answer comes.

        Raises:
            RefusedError: When it is refused with a reason.
        """
        headers = {_LABEL: label}
        if body:
            headers["content-type"] = "application/json"
        plan = plan_connection(self._seed, label)
        last_event_id = cursor.encode() if cursor is not None else None
        if cursor is not None:
            self._tally.resumes += 1
        self._trace(label, f"{method} {cursor or ''}")
        try:
            with anyio.fail_after(_QUIET_SECONDS + 1):
                response = await session.client.request(
                    method, body=body, headers=headers, last_event_id=last_event_id, receive_buffer=plan.receive_buffer
                )
                if response.status == 200 and response.is_stream:
                    return response
                text = await response.body()
        except (OSError, anyio.ClosedResourceError):
            self._trace(label, "no response")
            return None
        response.close()
        reason = _reason_of(response.status, text)
        self._trace(label, f"{response.status} {reason}")
        if reason is None:
            raise ViolationError("unexpected", f"{method} {cursor} is answered {response.status} {text!r}"[:500])
        raise RefusedError(reason)


def _reason_of(status: int, text: bytes) -> str | None:
    if status == 404:
        return "session_not_found"  # The SDK's own says it otherwise.
    try:
        reason = json.loads(text)["error"]["data"]["reason"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(reason)


class _CallRun:
    """One call, from its POST to its answer or refusal."""

    def __init__(
        self, soak: _Soak, session: Session, plan: CallPlan, nonce: str, background: anyio.abc.TaskGroup
    ) -> None:
        self._soak = soak
        self._tally = soak._tally
        self._session = session
        self._plan = plan
        self._nonce = nonce
        self._background = background
        self._label = f"{session.tag}/{nonce}"
        self._emission = session.emissions[nonce] = Emission()
        self._attempt = 0
        self._was_cut = False

    async def run(self) -> bool:
        """Make the call; return whether it was answered."""
        session = self._session
        self._tally.calls += 1
        request_id = session.new_id()
        self._background.start_soon(self._serve_tool)
        try:
            is_answered = await self._follow(request_id)
        except RefusedError as refusal:
            self._tally.reasons[refusal.reason] += 1
            # The id is taken where an earlier call of this client was given up while it ran.
            _justify(session, refusal.reason, self._label, restarts=self._plan.restarts or self._plan.is_repeated)
            return False
        if is_answered:
            self._tally.answers += 1
            # Given-up calls may still run on the server: their ids stay used.
            session.used_ids.discard(request_id)
        return is_answered

    async def _follow(self, request_id: int) -> bool:
        session, soak = self._session, self._soak
        history = History()
        label = f"{self._label}/0"
        response = await soak.request(session, "POST", label, body=self._body(request_id, self._nonce))
        if response is None:
            return False  # Nobody can tell whether it runs; there is no cursor.
        presented: str | None = None
        if self._plan.is_repeated:
            self._background.start_soon(self._repeat, request_id)
        while True:
            plan = plan_connection(soak._seed, label)
            reading = Reading(session, self._nonce, history, self._tally, presented, is_plain=False)
            successor: list[tuple[Response | None, str]] = []
            current, here = response, label

            async def overlap(
                reading: Reading = reading,
                current: Response = current,
                here: str = here,
                plan: ConnectionPlan = plan,
                successor: list[tuple[Response | None, str]] = successor,
            ) -> None:
                if reading.history.cursor is None:
                    return
                mine = replace(reading.history)
                self._attempt += 1
                next_label = f"{self._label}/{self._attempt}"
                successor.append((await soak.request(session, "GET", next_label, cursor=mine.cursor), next_label))
                leftovers = partial(soak.read_leftovers, is_replaced=successor[0][0] is not None)
                older_plan = replace(plan, overlaps_after=None)
                self._background.start_soon(leftovers, session, current, reading, older_plan, here)

            end = await soak.act(session, response, reading, plan, overlap, label)
            if end == "answered":
                return True
            if end == "overlapped" and reading.history.cursor is not None:
                # What the older connection still gets is not this history's.
                history = replace(history)
            if history.cursor is None:
                if end == "clean":
                    self._check_is_blank(label)
                return False
            if end == "quiet" and plan.is_faultless:
                self._check_is_alive(label)
            following, label = successor[0] if successor else (None, label)
            presented = history.cursor
            while following is None:
                if self._attempt > 30:
                    raise ViolationError("hung", "resumed 30 times without an end")
                self._attempt += 1
                label = f"{self._label}/{self._attempt}"
                presented = history.cursor
                following = await soak.request(session, "GET", label, cursor=presented)
            response = following

    def _check_is_blank(self, label: str) -> None:
        """A client that has no cursor cannot come back: its call would wait for ever."""
        if self._session.is_roomy and not self._session.is_deleted:
            raise ViolationError("blank", f"{label} ended before its first frame")

    def _check_is_alive(self, label: str) -> None:
        answered_at = self._emission.answered_at
        if answered_at is not None and time.monotonic() - answered_at > _QUIET_SECONDS:
            raise ViolationError("hung", f"{label} stands still, though the tool has answered")

    def _body(self, request_id: int, nonce: str) -> bytes:
        params = {
            "name": "hold",
            "arguments": {"n": 0, "tag": f"{self._session.tag}/{nonce}"},
            "_meta": {"progressToken": f"token {request_id}"},
        }
        message = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}
        return json.dumps(message).encode()

    async def _repeat(self, request_id: int) -> None:
        """Use the id again while the call runs: it is refused, or the call was over."""
        label = f"{self._label}dup/clear"
        self._tally.faults["duplicate id"] += 1
        emission = self._emission
        try:
            body = {"jsonrpc": "2.0", "id": request_id, "method": "ping"}
            response = await self._soak.request(self._session, "POST", label, body=json.dumps(body).encode())
        except RefusedError as refusal:
            self._tally.reasons[refusal.reason] += 1
            if refusal.reason != "duplicate_request_id" and not self._session.is_deleted:
                self._soak._report("unjustified", label, refusal.reason)
            return
        except ViolationError as violation:
            self._soak._report(violation.kind, label, violation.detail)
            return
        except TimeoutError:
            response = None
        if emission.answered_at is None and not self._session.is_deleted:
            self._soak._report("unexpected", label, f"a second request with id {request_id} is taken")
        if response is not None:
            response.reset()

    async def _serve_tool(self) -> None:
        """Do the tool's part when it is called, if it ever is."""
        # Shielded: who gives up waiting must not take the place where the tool would arrive.
        hold = await asyncio.shield(self._session.server.hold(f"{self._session.tag}/{self._nonce}"))
        outcome: dict[str, Any] = {"failed": "cancelled"}
        try:
            await hold.do(self._perform)
            emission = self._emission
            outcome = {
                "session": self._session.tag,
                "call": self._nonce,
                "execution": emission.execution,
                "count": emission.index,
            }
        except Exception as exc:
            outcome = {"failed": repr(exc)}
            if not self._session.is_deleted:
                self._soak._report("unexpected", self._label, f"the tool failed: {exc!r}")
        finally:
            self._emission.answered_at = time.monotonic()
            if not hold.is_over:
                await hold.finish(json.dumps(outcome))

    async def _perform(self, call: Call) -> None:
        session, emission = self._session, self._emission
        for step in self._plan.steps:
            match step:
                case Emit():
                    for size in step.sizes:
                        await anyio.sleep(step.pause_seconds)
                        emission.index += 1
                        self._tally.emitted += 1
                        text = self._payload(self._nonce, emission, size)
                        if step.as_progress:
                            await call.progress(emission.index, text)
                        else:
                            await call.log(text)
                case Announce():
                    standalone = session.emissions[""]
                    for size in step.sizes:
                        async with session.announcing:
                            standalone.index += 1
                            self._tally.emitted += 1
                            await call.announce(self._payload("", standalone, size))
                case Poll():
                    self._tally.faults["poll"] += 1
                    await call.close_sse_stream()
                case Restart():
                    self._tally.faults["restart"] += 1
                    self._soak._trace(self._label, f"restart after {emission.execution}.{emission.index}")
                    await session.server.store.restart_stream(call.request_id)
                    emission.execution += 1
                    emission.index = 0

    def _payload(self, nonce: str, emission: Emission, size: int) -> str:
        payload = {
            "session": self._session.tag,
            "call": nonce,
            "execution": emission.execution,
            "index": emission.index,
            "filling": "x" * size,
        }
        return json.dumps(payload)


class _Listener:
    """Reads the standalone stream of a session, with plain and resumed GETs."""

    def __init__(self, soak: _Soak, session: Session) -> None:
        self._soak = soak
        self._session = session
        self._history = History()
        self._is_finishing = False
        self._is_done = anyio.Event()
        self._response: Response | None = None
        self._had_cut = False
        self._label = f"{session.tag}/standalone"

    async def finish(self) -> None:
        """Read to the last event that was announced."""
        self._is_finishing = True
        with anyio.move_on_after(_CALL_SECONDS) as patience:
            await self._is_done.wait()
        if patience.cancelled_caught:
            self._soak._report("hung", self._label, "the standalone stream does not come to its end")

    def _has_all(self) -> bool:
        return self._history.index == self._session.emissions[""].index and not self._history.may_skip

    def _is_over(self) -> bool:
        return self._is_finishing and self._has_all()

    async def run(self) -> None:
        try:
            await self._run()
        except ViolationError as violation:
            self._soak._report(violation.kind, self._label, violation.detail)
        finally:
            self._is_done.set()

    async def _run(self) -> None:
        session, soak, attempt = self._session, self._soak, -1
        rng = random.Random(f"{soak._seed}/{self._label}")
        while not session.is_deleted:
            attempt += 1
            last = self._is_finishing
            label = f"{self._label}/{'clear' if last else attempt % _CLEAR_FROM_ATTEMPT}"
            if not last:
                label = f"{self._label}{attempt // _CLEAR_FROM_ATTEMPT}/{attempt % _CLEAR_FROM_ATTEMPT}"
            is_plain = self._history.cursor is None or (not last and rng.random() < 0.3)
            cursor = None if is_plain else self._history.cursor
            if last and self._has_all():
                break
            if is_plain and (self._had_cut or not session.is_roomy):
                self._history.may_skip = True
            try:
                response = await soak.request(session, "GET", label, cursor=cursor)
                if response is None:
                    self._had_cut = True
                    continue
                reading = Reading(session, "", self._history, soak._tally, cursor, is_plain=is_plain)
                plan = replace(plan_connection(soak._seed, label), overlaps_after=None)
                end = await soak.act(session, response, reading, plan, None, label, self._is_over)
            except RefusedError as refusal:
                soak._tally.reasons[refusal.reason] += 1
                _justify(session, refusal.reason, label, restarts=False)
                self._history.cursor = None
                self._history.may_skip = True
                if session.plan.kind == "crowded":
                    if self._is_finishing:
                        break
                    await anyio.sleep(0.2)  # Two sessions out of many: not at every turn.
                continue
            self._had_cut |= end != "clean"
            if last and end == "quiet":
                break
        index = session.emissions[""].index
        if not session.is_deleted and self._history.index < index and not self._history.may_skip:
            raise ViolationError("lost", f"event {index} was announced, {self._history.index} was the last to come")


# ---- the run


@dataclass(frozen=True)
class Report:
    """What a run has found.

    Attributes:
        seed: Of its plan.
        tally: Its sums.
        stats: Of each store.
    """

    seed: int
    tally: Tally
    stats: dict[str, str]

    def __str__(self) -> str:
        """Return the summary, and each violation with how to see it again."""
        t = self.tally
        lines = [
            f"seed {self.seed}: {t.sessions} sessions, {t.calls} calls ({t.answers} answered, {t.given_up} given up), "
            f"{t.emitted} events emitted, {t.received} received ({t.unstored} without an id), "
            f"{t.connections} connections, {t.resumes} resumes, {t.pings} pings; {len(t.violations)} violations",
            f"  faults: {_listed(t.faults)}",
            f"  refusals: {_listed(t.reasons)}",
            *(f"  {kind}: {text}" for kind, text in self.stats.items()),
        ]
        for kind, label, detail in t.violations:
            number = label.split("/", 1)[0]
            lines.append(f"  VIOLATION {kind} at {label} (SOAK_SEED={self.seed} SOAK_SESSION={number}): {detail}")
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


@asynccontextmanager
async def _serve_all(
    seed: int, tally: Tally, tasks: anyio.abc.TaskGroup
) -> AsyncIterator[dict[Kind, tuple[RunningServer, FaultProxy]]]:
    kinds: tuple[Kind, ...] = ("roomy", "roomy-stream", "tight", "tight-stream", "crowded")
    servers: dict[Kind, tuple[RunningServer, FaultProxy]] = {}
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(serving()).url if os.environ.get("SOAK_STORAGE") == "redis" else None
        for kind in kinds:
            store = _make_store(kind, redis_url)
            stack.push_async_callback(store.storage.aclose)
            server = await stack.enter_async_context(serve("fastmcp", store, retry_interval=10))
            proxy = await stack.enter_async_context(proxied(server.port, SeededPolicy(seed, tally, tasks)))
            servers[kind] = (server, proxy)
        yield servers


async def soak(seed: int, seconds: float, only_session: int | None = None) -> Report:
    """Run sessions for so many seconds, and let those that have begun end."""
    tally = Tally()
    stats: dict[str, str] = {}
    async with anyio.create_task_group() as tasks:
        await _run_all(seed, seconds, only_session, tally, stats, tasks)
        tasks.cancel_scope.cancel()
    return Report(seed, tally, stats)


async def _run_all(
    seed: int,
    seconds: float,
    only_session: int | None,
    tally: Tally,
    stats: dict[str, str],
    tasks: anyio.abc.TaskGroup,
) -> None:
    async with _serve_all(seed, tally, tasks) as servers:
        run = _Soak(seed, tally, servers, tasks)
        deadline = time.monotonic() + seconds
        numbers = iter(range(1_000_000) if only_session is None else [only_session])

        async def work() -> None:
            while time.monotonic() < deadline:
                number = next(numbers, None)
                if number is None:
                    return
                await run.run_session(number)

        async with anyio.create_task_group() as workers:
            for _ in range(_WIDTH):
                workers.start_soon(work)
        for kind, (server, _) in servers.items():
            with anyio.move_on_after(10):
                while server.store.stats().open_tails:  # noqa: ASYNC110  # nothing tells of it
                    await anyio.sleep(0.05)
            gc.collect()
            end = server.store.stats()
            stats[kind] = str(end)
            if end.sessions or end.open_tails or end.faults:
                tally.violations.append(("leaked", f"-/{kind}", stats[kind]))


def main() -> int:
    """Run as the environment says: SOAK_SECONDS (20), SOAK_SEED (a new one), SOAK_SESSION (all), SOAK_STORAGE."""
    seconds = float(os.environ.get("SOAK_SECONDS") or 20)
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(1_000_000))
    only = os.environ.get("SOAK_SESSION")
    warnings.filterwarnings("ignore", "The logging capability is deprecated")
    for name in ("mcp", "mcp_resumable"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.stdout.write(f"soak: seed {seed}, {seconds:g} seconds\n")
    sys.stdout.flush()
    report = anyio.run(soak, seed, seconds, int(only) if only else None)
    sys.stdout.write(f"{report}\n")
    return 1 if report.tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
