"""What the checks share: the sessions that they open, the calls that they cut and resume, and what uncut calls send."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import anyio

from mcp_resumable.checker.client import (
    REVISION,
    Call,
    Frame,
    Json,
    Limits,
    Response,
    ServerFaultError,
    Session,
    Target,
    Wire,
    printable,
)

__all__ = ["BEFORE_CUT", "Baseline", "CouldNotCheckError", "Followed", "Run", "canonical", "messages_in"]

# Messages that a call is read for before it is cut; one more has to follow before the answer.
BEFORE_CUT = 2
_MIN_MESSAGES = BEFORE_CUT + 2
# Resumes in a row that may bring nothing.
_MAX_EMPTY_RESUMES = 3
# The SDKs' clients wait that long where the server does not say; and the longest that it is obeyed.
_DEFAULT_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 2.0
# That ending a session may take at the end of a check.
_END_SECONDS = 5.0
# What a check may take for its large call, in units of what that takes uncut: it does not read for one and a half of
# them, then the rest is resumed, and a machine may be half as fast by then.
_LOAD_CALLS = 6


class CouldNotCheckError(Exception):
    """Raised when the server, or the tool, does not allow any check; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a call sends that is not cut.

    Attributes:
        messages: Without ids, progress tokens and metadata, the answer last.
        seconds: From the first message to the answer.
        body_bytes: All that was sent.
    """

    messages: tuple[str, ...]
    seconds: float
    body_bytes: int


class Run:
    """What the checks share: the wire, the open sessions, and what uncut calls send.

    Attributes:
        target: The server under test.
        limits: What may be spent.
        wire: Sends, and keeps what came back.
        baseline: Of a slow call; set by `prepare`.
        server: What the server says that it is; printable.
        revision: The protocol revision that was agreed upon; printable.
        scope: What ends the check that is under way when it takes too long.
    """

    def __init__(self, target: Target, limits: Limits) -> None:
        self.target = target
        self.limits = limits
        self.wire = Wire(target, limits)
        self.server = ""
        self.revision = ""
        self.baseline = Baseline((), 0, 0)
        self.scope = anyio.CancelScope()
        self._load_baseline: Baseline | None = None
        self._sessions: list[Session] = []

    async def prepare(self) -> None:
        """Call the tool twice, uncut.

        Raises:
            CouldNotCheckError: When nothing can be checked; the message says what is missing.
        """
        try:
            session = await self.open_session()
            self.server, self.revision = session.server, session.revision
            if session.revision != REVISION:
                raise CouldNotCheckError(f"the server speaks revision {session.revision!r} instead of {REVISION}")
            first, second = [await self._uncut(session, self.target.arguments) for _ in range(2)]
        except ServerFaultError as exc:
            raise CouldNotCheckError(str(exc)) from exc
        tool = f"tool {printable(self.target.tool)!r}"
        if len(first.messages) < _MIN_MESSAGES:
            raise CouldNotCheckError(
                f"{tool} sends {len(first.messages) - 1} messages before its answer; "
                f"it has to send at least {_MIN_MESSAGES - 1} to be cut between them"
            )
        if first.seconds < self.limits.min_call_seconds:
            raise CouldNotCheckError(
                f"a call of {tool} is over in {first.seconds:.2f} s; "
                f"it has to last {self.limits.min_call_seconds:g} s to be cut in the middle"
            )
        if first.messages != second.messages:
            raise CouldNotCheckError(f"two calls of {tool} sent different messages; each call has to send the same")
        self.baseline = first

    async def load_baseline(self) -> Baseline:
        """Return what a fast and large call sends that is not cut; the check gets the time for more such calls."""
        if self._load_baseline is None:
            self._load_baseline = await self._uncut(await self.open_session(), self.target.load_arguments or {})
        self.scope.deadline += _LOAD_CALLS * self._load_baseline.seconds
        return self._load_baseline

    async def open_session(self) -> Session:
        """Open a session; it is ended after the check."""
        session = Session(self.wire, "ABCDEFGH"[len(self._sessions) % 8])
        self._sessions.append(session)
        await session.open()
        return session

    async def close(self) -> None:
        """End every session that is still open, and close every connection."""
        with anyio.CancelScope(shield=True):
            await self.wire.abandon_all()
            async with anyio.create_task_group() as tasks:
                for session in self._sessions:
                    tasks.start_soon(_end, session)
            self._sessions.clear()
            await self.wire.abandon_all()

    async def cut_call(self, session: Session, *, request_id: int | None = None) -> Call:
        """Call the tool, read a few messages, and cut the connection."""
        call = await self.live_call(session, request_id=request_id)
        await call.response.abandon()
        return call

    async def live_call(self, session: Session, *, request_id: int | None = None) -> Call:
        """Call the tool and read a few messages; the connection stays open.

        Raises:
            ServerFaultError: When they do not come.
        """
        call = await session.call(request_id=request_id)
        await call.response.read_messages(BEFORE_CUT, self.limits.timeout_seconds)
        if len(call.response.messages) < BEFORE_CUT:
            raise ServerFaultError(f"a call was answered {call.response.received}")
        return call

    async def whole_call(self, session: Session, *, request_id: int | None = None) -> Call:
        """Call the tool and read up to its answer.

        Raises:
            ServerFaultError: When not everything comes.
        """
        call = await session.call(request_id=request_id)
        await call.response.read_to_answer(self.limits.timeout_seconds)
        if call.response.ending != "answered" or len(call.response.messages) != len(self.baseline.messages):
            raise ServerFaultError(f"a call was answered {call.response.received}")
        return call

    async def follow(
        self, session: Session, after: Response, *, cursor: str | None = None, max_messages: int | None = None
    ) -> Followed:
        """Resume as a client does: again from the last event id, where the server closes before the answer.

        Args:
            session: The session.
            after: The response that was cut.
            cursor: The event id to come back with; None: the last of `after`.
            max_messages: After which the connection is cut; None: at the answer.
        """
        frames: list[Frame] = []
        empty = 0
        cursor, retry_seconds = cursor or after.cursor, after.retry_seconds
        while True:
            response = await session.get(cursor)
            if not response.is_stream:
                return Followed(frames, response)
            limit = sys.maxsize if max_messages is None else max_messages - messages_in(frames)
            await response.read_messages(limit, self.limits.timeout_seconds)
            frames += response.frames
            if response.ending == "open":  # Enough.
                await response.abandon()
                return Followed(frames, response)
            empty = 0 if response.messages else empty + 1
            if response.ending in ("answered", "silent") or empty == _MAX_EMPTY_RESUMES:
                return Followed(frames, response)
            cursor = response.cursor or cursor
            if response.retry_seconds is not None:
                retry_seconds = response.retry_seconds
            await anyio.sleep(
                _DEFAULT_RETRY_SECONDS if retry_seconds is None else min(retry_seconds, _MAX_RETRY_SECONDS)
            )

    async def _uncut(self, session: Session, arguments: Json) -> Baseline:
        call = await session.call(arguments)
        response = call.response
        if not response.is_stream:
            raise ServerFaultError(f"the call was answered {response.received} instead of by an SSE stream")
        await response.read_messages(1, self.limits.timeout_seconds)
        begin = anyio.current_time()
        await response.read_to_answer(self.limits.timeout_seconds)
        seconds = anyio.current_time() - begin
        answer = response.frames[-1].message if response.ending == "answered" else None
        if answer is None:
            raise ServerFaultError(f"an uncut call was answered {response.received}, without its answer")
        result = answer.get("result")
        if not isinstance(result, dict) or cast("Json", result).get("isError") is True:
            raise ServerFaultError(f"the call failed: {printable(response.frames[-1].data, 200)}")
        messages = tuple(canonical(frame) for frame in response.messages)
        return Baseline(messages, seconds, response.body_bytes)


@dataclass(frozen=True, slots=True)
class Followed:
    """What one or more resumes brought.

    Attributes:
        frames: Of all of them.
        last: The last response.
    """

    frames: list[Frame]
    last: Response

    @property
    def is_refused(self) -> bool:
        """Whether the server said that it cannot be resumed: a client knows that it has to call again."""
        errors = [frame for frame in self.frames if frame.is_error]
        return bool(errors) or (400 <= self.last.status < 500 and self.last.status != 404)


async def _end(session: Session) -> None:
    try:
        with anyio.move_on_after(_END_SECONDS):
            if session.session_id is not None:
                await session.delete()
    except ServerFaultError:
        pass  # The report is about what was checked; there is nothing else to be done about it.
    finally:
        await session.aclose()


def messages_in(frames: Sequence[Frame]) -> int:
    """Return how many of the frames carry a message."""
    return sum(bool(frame.data) for frame in frames)


def canonical(frame: Frame) -> str:
    """Return a message without what differs between two calls: its id, its progress token, its metadata."""
    if frame.message is None:
        return f"not a JSON object: {frame.data}"
    message = {key: value for key, value in frame.message.items() if key != "id"}
    for key in ("params", "result"):
        inner = message.get(key)
        if isinstance(inner, dict):
            fields = cast("Json", inner)
            message[key] = {name: fields[name] for name in fields if name not in ("progressToken", "_meta")}
    try:
        return json.dumps(message, sort_keys=True)
    except RecursionError:
        return frame.data
