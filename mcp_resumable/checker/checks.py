"""The checks: what each asks of a server, why, and how it finds out.

A check is a function from a `Run` to a `Verdict`. It opens sessions of its own, which are ended after it. What it asks
for is either in the specification (MCP 2025-11-25, Transports) or was reported from the field; `why` says which. What
the specification leaves open is never failed for the way that a server chose, only for what a client cannot live with.

Messages are compared with a call of the same tool that was not cut. So the tool has to send the same in each call.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast
from uuid import uuid4

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

__all__ = ["CHECKS", "Baseline", "Check", "CouldNotCheckError", "Outcome", "Run", "Verdict"]

Outcome = Literal["passed", "warning", "failed", "not_applicable"]

_SPEC = f"MCP {REVISION}, Transports: "
_FIELD = "From the field: "

# Messages that a call is read for before it is cut; one more has to follow before the answer.
_BEFORE_CUT = 2
_MIN_MESSAGES = _BEFORE_CUT + 2
_MAX_CUTS = 8
# Resumes in a row that may bring nothing.
_MAX_EMPTY_RESUMES = 3
# The SDKs' clients wait that long where the server does not say; and the longest that it is obeyed.
_DEFAULT_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 2.0
# That ending a session may take at the end of a check.
_END_SECONDS = 5.0
# No server or proxy has to take a longer header; most stop at 8,192 for all of them.
_MAX_EVENT_ID_CHARACTERS = 4_096
# Visible ASCII, with spaces inside only: what comes back from a header as it went in.
_HEADER_SAFE = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class CouldNotCheckError(Exception):
    """Raised when the server, or the tool, does not allow any check; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes:
        outcome: The verdict.
        detail: Why, in one line; printable.
    """

    outcome: Outcome
    detail: str


def passed(detail: str) -> Verdict:
    """Return the verdict on what is as it has to be."""
    return Verdict("passed", detail)


def warning(detail: str) -> Verdict:
    """Return the verdict on what costs a client no message."""
    return Verdict("warning", detail)


def failed(detail: str) -> Verdict:
    """Return the verdict on what a client cannot live with."""
    return Verdict("failed", detail)


def not_applicable(detail: str) -> Verdict:
    """Return the verdict on what could not be asked."""
    return Verdict("not_applicable", detail)


_ORDER: tuple[Outcome, ...] = ("failed", "warning", "passed", "not_applicable")


def worst(*verdicts: Verdict) -> Verdict:
    """Return the first of the worst verdicts; not applicable only where all are."""
    return min(verdicts, key=lambda verdict: _ORDER.index(verdict.outcome))


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a call sends that is not cut.

    Attributes:
        messages: Each as `canonical` has it, the answer last.
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
    """

    def __init__(self, target: Target, limits: Limits) -> None:
        self.target = target
        self.limits = limits
        self.wire = Wire(target, limits)
        self.server = ""
        self.revision = ""
        self.baseline = Baseline((), 0, 0)
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
        """Return what a fast and large call sends that is not cut."""
        if self._load_baseline is None:
            self._load_baseline = await self._uncut(await self.open_session(), self.target.load_arguments or {})
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
        await call.response.read_messages(_BEFORE_CUT, self.limits.timeout_seconds)
        if len(call.response.messages) < _BEFORE_CUT:
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
            limit = sys.maxsize if max_messages is None else max_messages - _messages_in(frames)
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


def _messages_in(frames: Sequence[Frame]) -> int:
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


def difference(expected: Sequence[str], frames: Sequence[Frame], call: Call) -> str | None:
    """Return how the messages in `frames` differ from `expected`, in words; None where they are the same."""
    foreign = sum(call.is_foreign(frame) for frame in frames)
    if foreign:
        return f"{foreign} messages of another call were served"
    messages = [canonical(frame) for frame in frames if frame.data]
    if messages == list(expected):
        return None
    missing = (Counter(expected) - Counter(messages)).total()
    extra = (Counter(messages) - Counter(expected)).total()
    if missing:
        return f"{missing} of {len(expected)} messages are missing"
    return f"{extra} messages came more than once, or were never sent" if extra else "messages came in another order"


def rest_verdict(run: Run, call: Call, followed: Followed, what: str) -> Verdict:
    """Judge what resumes brought after a call was cut."""
    expected = run.baseline.messages[_messages_in(call.response.frames) :]
    problem = difference(expected, followed.frames, call)
    if problem is None:
        return passed(f"{what}: the {len(expected)} missed messages, each once and in order")
    return failed(f"{what}: {problem} ({followed.last.received})")


def ownership_verdict(call: Call, followed: Followed, what: str) -> Verdict:
    """Judge whose messages resumes brought; whether all came is for other checks."""
    foreign = sum(call.is_foreign(frame) for frame in followed.frames)
    if foreign:
        return failed(f"{what}: {foreign} messages of another call were served ({followed.last.received})")
    if not _messages_in(followed.frames):
        return not_applicable(f"{what} brings nothing: {followed.last.received}")
    return passed(f"{what} brings messages of its own call only")


async def refusal_verdict(run: Run, session: Session, response: Response, what: str) -> Verdict:
    """Judge the answer to a cursor that cannot be resumed."""
    await response.read_to_end(run.limits.silence_seconds)
    verdict = _refusal(response, what)
    if verdict.outcome != "failed" and not await session.ping():
        return failed(f"{what}: the session answers no ping afterwards")
    return verdict


def _refusal(response: Response, what: str) -> Verdict:
    if response.status == 404:
        return failed(f"{what}: answered 404, which means that the session is over; it is not")
    if 400 <= response.status < 500:
        return passed(f"{what}: refused with {response.status}")
    if not response.is_stream:
        return failed(f"{what}: answered {response.received}")
    if any(frame.is_error for frame in response.frames):
        return passed(f"{what}: refused by a JSON-RPC error in the stream")
    if response.messages:
        return failed(f"{what}: answered 200 with {len(response.messages)} messages")
    if response.ending == "silent":
        return failed(f"{what}: answered 200 with a stream that stays open and brings nothing")
    return failed(f"{what}: answered 200 with an empty stream")


FindOut = Callable[[Run], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: Stable; what `--only` takes.
        why: The sentence of the specification, or the report, that says why it matters.
        find_out: Does it.
    """

    name: str
    why: str
    find_out: FindOut


CHECKS: dict[str, Check] = {}
"""By name, in the order in which they are run."""


def _check(name: str, why: str) -> Callable[[FindOut], FindOut]:
    def register(find_out: FindOut) -> FindOut:
        CHECKS[name] = Check(name=name, why=why, find_out=find_out)
        return find_out

    return register


@_check(
    "event-ids",
    f"{_SPEC}a client resumes with the Last-Event-ID that it received, so each message needs an id, and one that fits "
    "into a header.",
)
async def event_ids(run: Run) -> Verdict:
    """Look at the ids of one call."""
    call = await run.whole_call(await run.open_session())
    messages = call.response.messages
    without = sum(not frame.id for frame in messages)
    if without:
        return failed(f"{without} of {len(messages)} messages have no event id")
    ids = [frame.id or "" for frame in call.response.frames]
    if unsafe := [found for found in ids if found and not _HEADER_SAFE.fullmatch(found)]:
        return failed(f"event id {printable(unsafe[0])!r} cannot be sent in a header")
    longest = max(map(len, ids))
    if longest > _MAX_EVENT_ID_CHARACTERS:
        return failed(f"an event id of {longest} characters does not fit into a header")
    return passed(f"{len(messages)} messages, each with an event id, such as {printable(ids[-1])}")


@_check("unique-ids", f'{_SPEC}"the ID MUST be globally unique across all streams within that session".')
async def unique_ids(run: Run) -> Verdict:
    """Compare the ids of all streams of a session."""
    session = await run.open_session()
    standalone = await session.get()
    calls = [await run.live_call(session), await run.live_call(session)]
    for call in calls:
        await call.response.read_to_answer(run.limits.timeout_seconds)
    await standalone.read_to_end(run.limits.silence_seconds)
    frames = [frame for response in run.wire.responses for frame in response.frames]
    ids = Counter(frame.id for frame in frames if frame.id)
    if not ids:
        return not_applicable("there are no event ids")
    repeated = [found for found, count in ids.items() if count > 1]
    if repeated:
        return failed(f"{len(repeated)} event ids came more than once, {printable(repeated[0])} for example")
    return passed(f"{ids.total()} event ids of several streams, each different")


@_check(
    "priming-event",
    f'{_SPEC}"The server SHOULD immediately send an SSE event consisting of an event ID and an empty data field in '
    'order to prime the client to reconnect". Without it, a call that is cut before its first message is lost.',
)
async def priming_event(run: Run) -> Verdict:
    """Cut a call at its first event, and resume it."""
    session = await run.open_session()
    call = await session.call()
    await call.response.read_frames(1, run.limits.timeout_seconds)
    await call.response.abandon()
    first = call.response.frames[0] if call.response.frames else Frame()
    if first.data or not first.id:
        return warning("a call's stream begins with a message: cut before it, the call cannot be resumed")
    return rest_verdict(run, call, await run.follow(session, call.response), "resumed from the priming event")


@_check(
    "exact-resume",
    f'{_SPEC}"replay messages that would have been sent after the last event ID, on the stream that was disconnected, '
    'and to resume the stream from that point".',
)
async def exact_resume(run: Run) -> Verdict:
    """Cut a call between two messages, and resume it."""
    session = await run.open_session()
    call = await run.cut_call(session)
    if call.response.cursor is None:
        return failed("there is no event id to come back with")
    return rest_verdict(run, call, await run.follow(session, call.response), "resumed after a cut")


@_check(
    "no-loss-under-load",
    f"{_FIELD}what is sent between the replay and the live stream is lost, or comes twice (3 to 13 % of the messages "
    "at 1,000/s with the Python SDK's example store; hermes-webui #3371, tldw_server #1157).",
)
async def no_loss_under_load(run: Run) -> Verdict:
    """Cut a fast call several times."""
    is_load = run.target.load_arguments is not None
    expected = (await run.load_baseline() if is_load else run.baseline).messages
    session = await run.open_session()
    call = await session.call(run.target.load_arguments)
    share = max(1, len(expected) // (_MAX_CUTS + 1))
    await call.response.read_messages(share, run.limits.timeout_seconds)
    await call.response.abandon()
    frames, cuts, cursor = list(call.response.frames), 1, call.response.cursor
    while cursor is not None and not frames[-1].is_answer:
        followed = await run.follow(
            session, call.response, cursor=cursor, max_messages=share if cuts < _MAX_CUTS else None
        )
        if followed.is_refused:
            return passed(f"after cut {cuts}: refused ({followed.last.received}), nothing was lost unnoticed")
        if not followed.frames:
            return failed(f"after cut {cuts}: {followed.last.received}")
        frames += followed.frames
        cursor = next((frame.id for frame in reversed(followed.frames) if frame.id), cursor)
        if followed.last.ending != "abandoned":
            break
        cuts += 1
    if cursor is None:
        return failed("there is no event id to come back with")
    problem = difference(expected, frames, call)
    if problem is not None:
        return failed(f"after {cuts} cuts: {problem}")
    return passed(
        f"{cuts} cuts, {len(expected)} messages, each once and in order"
        f"{'' if is_load else '; of a slow call only: --load-args names a fast one'}"
    )


@_check(
    "another-session",
    f"{_FIELD}one session was served the events of another (PrefectHQ/fastmcp #4402, frontmcp GHSA-84j6-jc92-77jm). "
    "An event id of another session has to be like one that was never issued.",
)
async def another_session(run: Run) -> Verdict:
    """Present session A's cursor in session B, and resume in both a call with the same request id."""
    ours, theirs = await run.open_session(), await run.open_session()
    request_id = 7
    call = await run.cut_call(ours, request_id=request_id)
    other = await run.cut_call(theirs, request_id=request_id)
    if call.response.cursor is None or other.response.cursor is None:
        return not_applicable("there are no event ids")
    claim = await theirs.get(call.response.cursor)
    foreign = await refusal_verdict(run, theirs, claim, "the cursor of another session")
    return worst(
        foreign,
        ownership_verdict(other, await run.follow(theirs, other.response), "the session's own cursor"),
        ownership_verdict(call, await run.follow(ours, call.response), "the other session's own cursor"),
    )


@_check(
    "another-stream",
    f'{_SPEC}"The server MUST NOT replay messages that would have been delivered on a different stream."',
)
async def another_stream(run: Run) -> Verdict:
    """Cut two calls of one session that run at the same time, and resume both."""
    session = await run.open_session()
    calls = [await run.cut_call(session) for _ in range(2)]
    verdicts: list[Verdict] = []
    for name, call in zip(("first", "second"), calls, strict=True):
        if call.response.cursor is None:
            return not_applicable("there are no event ids")
        followed = await run.follow(session, call.response)
        verdicts.append(ownership_verdict(call, followed, f"the cursor of the {name} of two calls"))
    return worst(*verdicts)


_DEAD_CURSOR = (
    f"{_FIELD}a cursor that cannot be resumed was answered 200 with nothing, and the client waited for ever or came "
    "back for ever (rust-sdk #958, python-sdk #2393, #3257); or 404, and a healthy session was given up "
    "(typescript-sdk #2068). The specification leaves the answer open (modelcontextprotocol #1939)."
)


@_check("unknown-id", _DEAD_CURSOR)
async def unknown_id(run: Run) -> Verdict:
    """Present event ids that were never issued, one of them spelled like the server's own."""
    session = await run.open_session()
    call = await run.cut_call(session)
    verdicts = [await refusal_verdict(run, session, await session.get(str(uuid4())), "an id that was never issued")]
    cursor = call.response.cursor or ""
    if len(cursor) >= 16:  # A shorter one might be another event's.
        changed = await session.get(cursor.translate(_OTHERS))
        verdicts.append(await refusal_verdict(run, session, changed, "an id like the server's own"))
    return worst(*verdicts)


# Each digit and letter becomes another one of its kind.
_OTHERS = str.maketrans(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "1234567890bcdefabcdefghijklmnopqrstuBCDEFABCDEFGHIJKLMNOPQRSTU",
)

_MALFORMED: dict[str, bytes] = {
    "an id with spaces": b"not an event id",
    "an id with quotes": b"';--\"<script>",
    "an id that is not ASCII": b"\xff\xfe\xc3\xa9",
    "an id with escapes": b"%0d%0a%00\\r\\n",
    "an id of 4,000 characters": b"x" * 4_000,
}


@_check("malformed-id", _DEAD_CURSOR)
async def malformed_id(run: Run) -> Verdict:
    """Present what no server issues."""
    session = await run.open_session()
    verdicts = [
        await refusal_verdict(run, session, await session.get(event_id), what) for what, event_id in _MALFORMED.items()
    ]
    found = worst(*verdicts)
    return passed(f"{len(verdicts)} kinds of nonsense, each refused") if found.outcome == "passed" else found


@_check("future-id", _DEAD_CURSOR)
async def future_id(run: Run) -> Verdict:
    """Present the event id of an event far after the last."""
    session = await run.open_session()
    call = await run.whole_call(session)
    cursor = call.response.cursor or ""
    number = re.search("(?:^|[^0-9A-Za-z])([0-9]{1,15})$", cursor)
    if number is None:
        return not_applicable("the event ids do not end in a number")
    future = f"{cursor[: number.start(1)]}{int(number[1]) + 1_000_000}"
    return await refusal_verdict(run, session, await session.get(future), "the id of an event that is yet to come")


@_check(
    "reused-request-id",
    f"{_FIELD}a web client gives each call the same request id, and the resume of one showed the messages of a later "
    "one (python-sdk #3060).",
)
async def reused_request_id(run: Run) -> Verdict:
    """Call twice with one request id, and resume the first call."""
    session = await run.open_session()
    request_id = 7
    first = await run.whole_call(session, request_id=request_id)
    cursor = first.response.messages[_BEFORE_CUT - 1].id
    if cursor is None:
        return not_applicable("there are no event ids")
    second = await session.call(request_id=request_id)
    await second.response.read_to_answer(run.limits.timeout_seconds)
    is_refused = second.response.status < 500 and not second.response.is_stream
    if is_refused or any(frame.is_error for frame in second.response.frames):
        return passed(f"the request id is not taken again ({second.response.received})")
    if second.response.ending != "answered":
        return failed(f"a second call with the same request id: {second.response.received}")
    response = await session.get(cursor)
    await response.read_to_end(run.limits.silence_seconds)
    later = {frame.id for frame in second.response.frames}
    if any(first.is_foreign(frame) or frame.id in later for frame in response.messages):
        return failed(f"the cursor of the first call was served messages of the second ({response.received})")
    if response.messages and not any(frame.is_error for frame in response.messages):
        problem = difference(run.baseline.messages[_BEFORE_CUT:], response.frames, first)
        if problem is not None:
            return failed(f"the cursor of the first call: {problem} ({response.received})")
        return passed("the cursor of the first call brings the rest of the first call")
    return await refusal_verdict(run, session, response, "the cursor of the first call")


@_check(
    "completed-stream",
    f'{_SPEC}"After the JSON-RPC response has been sent, the server SHOULD terminate the SSE stream." {_FIELD}a '
    "resumed stream that never closes after its answer (vercel/resumable-stream #47).",
)
async def completed_stream(run: Run) -> Verdict:
    """Resume a call whose answer was sent, before and after its answer."""
    session = await run.open_session()
    call = await run.whole_call(session)
    messages = call.response.messages
    middle, last = messages[_BEFORE_CUT - 1].id, messages[-1].id
    if middle is None or last is None:
        return not_applicable("there are no event ids")
    response = await session.get(middle)
    await response.read_to_end(run.limits.silence_seconds)
    if response.messages and not any(frame.is_error for frame in response.messages):
        problem = difference(run.baseline.messages[_BEFORE_CUT:], response.frames, call)
        if problem is not None:
            return failed(f"the cursor before the answer: {problem} ({response.received})")
        if response.ending == "silent":
            return failed("the cursor before the answer: the stream stays open after the answer")
        found = passed("the cursor before the answer brings the rest, and the stream closes")
    else:
        found = await refusal_verdict(run, session, response, "the cursor before the answer")
    response = await session.get(last)
    await response.read_to_end(run.limits.silence_seconds)
    if response.messages and not any(frame.is_error for frame in response.messages):
        return failed(f"the cursor of the answer: messages came after it ({response.received})")
    if response.is_stream and response.ending == "silent":
        return failed("the cursor of the answer: a stream is opened that stays open and brings nothing")
    if response.status == 404 or response.status >= 500:
        return failed(f"the cursor of the answer: {response.received}")
    return found


@_check(
    "take-over",
    f"{_FIELD}a server that did not notice that a connection broke kept sending to it, and the client that came back "
    "was refused, or waited for ever (LibreChat #14816, kotlin-sdk #715, render-mcp-server #26).",
)
async def take_over(run: Run) -> Verdict:
    """Resume a call whose first connection is still open."""
    session = await run.open_session()
    call = await run.live_call(session)
    cursor = call.response.cursor
    if cursor is None:
        return not_applicable("there are no event ids")
    expected = run.baseline.messages[_messages_in(call.response.frames) :]
    followed = await run.follow(session, call.response)
    problem = difference(expected, followed.frames, call)
    if problem is not None:
        return failed(f"the second connection: {problem} ({followed.last.received})")
    await call.response.read_to_end(run.limits.silence_seconds)
    if any(frame.is_answer for frame in call.response.frames):
        return failed("both connections were sent the answer")
    if call.response.ending == "silent":
        return warning("the second connection was sent the rest, but the first stays open and brings nothing")
    resumes = len(run.wire.responses) - run.wire.responses.index(call.response) - 1
    if resumes > 1:
        return warning(f"the rest came over {resumes} connections, each closed before the answer")
    return passed("the second connection was sent the rest, the first was closed")


@_check(
    "two-gets",
    f'{_SPEC}"The client MAY remain connected to multiple SSE streams simultaneously"; the server "MUST NOT broadcast '
    f'the same message across multiple streams". {_FIELD}409 because the server still held a dead GET '
    "(LibreChat #14816).",
)
async def two_gets(run: Run) -> Verdict:
    """Open the standalone stream twice, and call the tool meanwhile."""
    session = await run.open_session()
    first = await session.get()
    if first.status == 405:
        return not_applicable("the server offers no standalone stream")
    if not first.is_stream:
        return failed(f"the first GET: {first.received}")
    second = await session.get()
    if not second.is_stream:
        return failed(f"the second GET, while the first is open: {second.received}")
    await run.whole_call(session)
    for response in (first, second):
        await response.read_to_end(run.limits.silence_seconds)
    both = Counter(frame.data for frame in first.messages) & Counter(frame.data for frame in second.messages)
    if both:
        return failed(f"{both.total()} messages were sent on both")
    return passed(f"both were answered, and {len(first.messages) + len(second.messages)} messages sent on one of them")


@_check(
    "standalone-cursor",
    f"{_FIELD}a standalone stream that begins without a cursor cannot be resumed before its first message, so what is "
    "sent while its connection is broken is lost; the SDKs' do.",
)
async def standalone_cursor(run: Run) -> Verdict:
    """Cut the standalone stream, and resume it from its first event id."""
    session = await run.open_session()
    standalone = await session.get()
    if standalone.status == 405:
        return not_applicable("the server offers no standalone stream")
    await standalone.read_frames(1, run.limits.silence_seconds)
    first = standalone.frames[0] if standalone.frames else Frame()
    if not standalone.is_stream:
        return failed(standalone.received)
    if first.id is None or first.data:
        return warning("the stream begins without a cursor: what is sent while it is cut cannot be asked for")
    call = await run.whole_call(session)
    if await standalone.read_to_end(run.limits.silence_seconds) != "silent":
        return warning(f"the stream does not stay open: {standalone.received}")
    expected = [canonical(frame) for frame in standalone.messages]
    resumed = await session.get(first.id)
    await resumed.read_to_end(run.limits.silence_seconds)
    if not resumed.is_stream:
        return failed(f"its first event id: {resumed.received}")
    if any(frame.is_answer or call.is_foreign(frame) for frame in resumed.messages):
        return failed("its first event id brings messages of a call")
    problem = difference(expected, resumed.frames, call)
    if problem is not None:
        return failed(f"its first event id: {problem} ({resumed.received})")
    if resumed.ending != "silent":
        return warning(f"its first event id: the stream does not stay open ({resumed.received})")
    return passed(f"its first event id brings its {len(expected)} messages, and the stream goes on")


@_check(
    "frozen-reader",
    f"{_FIELD}a client that stopped reading blocked every other call of its session (python-sdk #1764, sse-starlette "
    "#89).",
)
async def frozen_reader(run: Run) -> Verdict:
    """Stop reading a large call, ping the session meanwhile, and resume the call."""
    if run.target.load_arguments is None:
        return not_applicable("--load-args names no call that is large enough")
    baseline = await run.load_baseline()
    if baseline.body_bytes < run.limits.min_load_bytes:
        return not_applicable(
            f"the call of --load-args sends {baseline.body_bytes:,} bytes; buffers take up to "
            f"{run.limits.min_load_bytes:,}"
        )
    session = await run.open_session()
    call = await session.call(run.target.load_arguments, is_frozen=True)
    await call.response.read_messages(1, run.limits.timeout_seconds)
    cursor = call.response.cursor
    slowest, begin = 0.0, anyio.current_time()
    # By then an unhindered call is over: what is not blocked now will not be.
    while anyio.current_time() - begin < 1.5 * baseline.seconds + run.limits.min_call_seconds:
        asked = anyio.current_time()
        if not await session.ping():
            return failed(f"while one call was not read, a ping had no answer in {run.limits.timeout_seconds:g} s")
        slowest = max(slowest, anyio.current_time() - asked)
        await anyio.sleep(max(baseline.seconds / 10, 0.02))
    await call.response.abandon()
    if cursor is None:
        return failed("there is no event id to come back with")
    followed = await run.follow(session, call.response)
    said = f"the slowest ping took {slowest:.1f} s"
    if followed.is_refused:
        return passed(f"{said}; the frozen call was then refused: {followed.last.received}")
    problem = difference(baseline.messages[_messages_in(call.response.frames) :], followed.frames, call)
    if problem is not None:
        return failed(f"{said}; the frozen call, resumed: {problem} ({followed.last.received})")
    return passed(f"{said}; the frozen call was resumed, and complete")


@_check(
    "polling",
    f'{_SPEC}"If the server does close the connection prior to terminating the SSE stream, it SHOULD send an SSE event '
    'with a standard retry field before closing the connection."',
)
async def polling(run: Run) -> Verdict:
    """Call a tool whose connection the server closes, and poll for the rest."""
    session = await run.open_session()
    call = await session.call(run.target.poll_arguments)
    await call.response.read_to_answer(run.limits.timeout_seconds)
    if call.response.ending == "answered":
        return not_applicable("the connection is not closed before the answer; --poll-args names a call that does it")
    cursor = call.response.cursor
    if call.response.ending != "closed" or cursor is None:
        return failed(f"the call was answered {call.response.received}")
    found = rest_verdict(run, call, await run.follow(session, call.response), "polled")
    retries = [frame.retry for frame in call.response.frames if frame.retry is not None]
    if not retries:
        return worst(found, warning("the connection was closed without a retry field before"))
    if call.response.retry_seconds is None:
        return worst(found, failed(f"retry is {printable(retries[-1])!r}, not a number of milliseconds"))
    return found


@_check(
    "delete",
    f'{_SPEC}a session that was terminated: the server "MUST respond to requests containing that session ID with HTTP '
    f'404 Not Found". {_FIELD}rows and open streams survive DELETE (csharp-sdk #1287).',
)
async def delete(run: Run) -> Verdict:
    """End a session while a stream of it is open, and ask for its events."""
    session = await run.open_session()
    call = await run.cut_call(session)
    standalone = await session.get()
    response = await session.delete()
    if response.status in (405, 501):
        return not_applicable(f"the server does not let clients end sessions ({response.status})")
    if not 200 <= response.status < 300:
        return failed(f"DELETE: {response.received}")
    claim = await session.get(call.response.cursor)
    if claim.is_stream:
        await claim.read_to_end(run.limits.silence_seconds)
    ping = await session.post({"id": session.next_id(), "method": "ping"})
    for what, later in (("a cursor of the ended session", claim), ("a request in the ended session", ping)):
        if later.status != 404:
            return failed(f"{what}: {later.received}, instead of 404")
    await standalone.read_to_end(run.limits.silence_seconds)
    if standalone.is_stream and standalone.ending == "silent":
        return warning("answered 404 from then on, but a stream that was open stays open")
    return passed("answered 404 from then on, and the stream that was open is closed")


@_check(
    "unknown-session",
    f"{_SPEC}404 tells a client that it has to initialize a new session. {_FIELD}people expect sessions to outlive a "
    "restart (python-sdk #880); where they do not, only 404 says so.",
)
async def unknown_session(run: Run) -> Verdict:
    """Name a session that was never opened."""
    session = await run.open_session()
    call = await run.cut_call(session)
    stranger = Session(run.wire, "unknown")
    stranger.session_id = uuid4().hex
    try:
        ping = await stranger.post({"id": 1, "method": "ping"})
        claim = await stranger.get(call.response.cursor)
        if claim.is_stream:
            await claim.read_to_end(run.limits.silence_seconds)
    finally:
        await stranger.aclose()
    verdicts: list[Verdict] = []
    for what, response in (("a request", ping), ("a cursor", claim)):
        if response.status == 404:
            verdicts.append(passed("a request and a cursor are answered 404"))
        elif 400 <= response.status < 500:
            verdicts.append(warning(f"{what}: answered {response.status}, which tells no client to initialize anew"))
        else:
            verdicts.append(failed(f"{what}: {response.received}"))
    return worst(*verdicts)
