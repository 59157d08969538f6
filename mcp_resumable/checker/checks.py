"""The checks: what each asks of a server, why, and how it finds out.

A check is a function from a `Run` to a `Verdict`. It opens sessions of its own, which are ended after it. What it asks
for is either in the specification (MCP 2025-11-25, Transports) or was reported from the field; `why` says which. What
the specification leaves open is never failed for the way that a server chose, only for what a client cannot live with.

Messages are compared with a call of the same tool that was not cut. So the tool has to send the same in each call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

import anyio

from mcp_resumable.checker.client import REVISION, Call, Frame, Response, Session, printable
from mcp_resumable.checker.run import BEFORE_CUT, Followed, Run, canonical, messages_in

__all__ = ["CHECKS", "Check", "FindOut", "Outcome", "Verdict"]

Outcome = Literal["passed", "warning", "failed", "not_applicable"]

_SPEC = f"MCP {REVISION}, Transports: "
_FIELD = "From the field: "

_MAX_CUTS = 8
# No server or proxy has to take a longer header; most stop at 8,192 for all of them.
_MAX_EVENT_ID_CHARACTERS = 4_096
# Visible ASCII, with spaces inside only: what comes back from a header as it went in.
_HEADER_SAFE = re.compile(r"[!-~](?:[ -~]*[!-~])?")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes:
        outcome: The verdict.
        detail: Why, in one line; printable.
    """

    outcome: Outcome
    detail: str


def _passed(detail: str) -> Verdict:
    """Return the verdict on what is as it has to be."""
    return Verdict("passed", detail)


def _warning(detail: str) -> Verdict:
    """Return the verdict on what costs a client no message."""
    return Verdict("warning", detail)


def _failed(detail: str) -> Verdict:
    """Return the verdict on what a client cannot live with."""
    return Verdict("failed", detail)


def _not_applicable(detail: str) -> Verdict:
    """Return the verdict on what could not be asked."""
    return Verdict("not_applicable", detail)


_ORDER: tuple[Outcome, ...] = ("failed", "warning", "passed", "not_applicable")


def _worst(*verdicts: Verdict) -> Verdict:
    """Return the first of the worst verdicts; not applicable only where all are."""
    return min(verdicts, key=lambda verdict: _ORDER.index(verdict.outcome))


def _difference(expected: Sequence[str], frames: Sequence[Frame], call: Call) -> str | None:
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


def _rest_verdict(run: Run, call: Call, followed: Followed, what: str) -> Verdict:
    """Judge what resumes brought after a call was cut."""
    expected = run.baseline.messages[messages_in(call.response.frames) :]
    problem = _difference(expected, followed.frames, call)
    if problem is None:
        return _passed(f"{what}: the {len(expected)} missed messages, each once and in order")
    return _failed(f"{what}: {problem} ({followed.last.received})")


def _ownership_verdict(call: Call, followed: Followed, what: str) -> Verdict:
    """Judge whose messages resumes brought; whether all came is for other checks."""
    foreign = sum(call.is_foreign(frame) for frame in followed.frames)
    if foreign:
        return _failed(f"{what}: {foreign} messages of another call were served ({followed.last.received})")
    if not messages_in(followed.frames):
        return _not_applicable(f"{what} brings nothing: {followed.last.received}")
    return _passed(f"{what} brings messages of its own call only")


async def _refusal_verdict(run: Run, session: Session, response: Response, what: str) -> Verdict:
    """Judge the answer to a cursor that cannot be resumed."""
    await response.read_to_end(run.limits.silence_seconds)
    verdict = _refusal(response, what)
    if verdict.outcome != "failed" and not await session.ping():
        return _failed(f"{what}: the session answers no ping afterwards")
    return verdict


def _refusal(response: Response, what: str) -> Verdict:
    if response.status == 404:
        return _failed(f"{what}: answered 404, which means that the session is over; it is not")
    if 400 <= response.status < 500:
        return _passed(f"{what}: refused with {response.status}")
    if not response.is_stream:
        return _failed(f"{what}: answered {response.received}")
    if any(frame.is_error for frame in response.frames):
        return _passed(f"{what}: refused by a JSON-RPC error in the stream")
    if response.messages:
        return _failed(f"{what}: answered 200 with {len(response.messages)} messages")
    if response.ending == "silent":
        return _failed(f"{what}: answered 200 with a stream that stays open and brings nothing")
    return _failed(f"{what}: answered 200 with an empty stream")


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
async def _event_ids(run: Run) -> Verdict:
    """Look at the ids of one call."""
    call = await run.whole_call(await run.open_session())
    messages = call.response.messages
    without = sum(not frame.id for frame in messages)
    if without:
        return _failed(f"{without} of {len(messages)} messages have no event id")
    ids = [frame.id or "" for frame in call.response.frames]
    if unsafe := [found for found in ids if found and not _HEADER_SAFE.fullmatch(found)]:
        return _failed(f"event id {printable(unsafe[0])!r} cannot be sent in a header")
    longest = max(map(len, ids))
    if longest > _MAX_EVENT_ID_CHARACTERS:
        return _failed(f"an event id of {longest} characters does not fit into a header")
    return _passed(f"{len(messages)} messages, each with an event id, such as {printable(ids[-1])}")


@_check("unique-ids", f'{_SPEC}"the ID MUST be globally unique across all streams within that session".')
async def _unique_ids(run: Run) -> Verdict:
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
        return _not_applicable("there are no event ids")
    repeated = [found for found, count in ids.items() if count > 1]
    if repeated:
        return _failed(f"{len(repeated)} event ids came more than once, {printable(repeated[0])} for example")
    return _passed(f"{ids.total()} event ids of several streams, each different")


@_check(
    "priming-event",
    f'{_SPEC}"The server SHOULD immediately send an SSE event consisting of an event ID and an empty data field in '
    'order to prime the client to reconnect". Without it, a call that is cut before its first message is lost.',
)
async def _priming_event(run: Run) -> Verdict:
    """Cut a call at its first event, and resume it."""
    session = await run.open_session()
    call = await session.call()
    await call.response.read_frames(1, run.limits.timeout_seconds)
    await call.response.abandon()
    first = call.response.frames[0] if call.response.frames else Frame()
    if first.data or not first.id:
        return _warning("a call's stream begins with a message: cut before it, the call cannot be resumed")
    return _rest_verdict(run, call, await run.follow(session, call.response), "resumed from the priming event")


@_check(
    "exact-resume",
    f'{_SPEC}"replay messages that would have been sent after the last event ID, on the stream that was disconnected, '
    'and to resume the stream from that point".',
)
async def _exact_resume(run: Run) -> Verdict:
    """Cut a call between two messages, and resume it."""
    session = await run.open_session()
    call = await run.cut_call(session)
    if call.response.cursor is None:
        return _failed("there is no event id to come back with")
    return _rest_verdict(run, call, await run.follow(session, call.response), "resumed after a cut")


@_check(
    "no-loss-under-load",
    f"{_FIELD}what is sent between the replay and the live stream is lost, or comes twice (3 to 13 % of the messages "
    "at 1,000/s with the Python SDK's example store; hermes-webui #3371, tldw_server #1157).",
)
async def _no_loss_under_load(run: Run) -> Verdict:
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
            return _passed(f"after cut {cuts}: refused ({followed.last.received}), nothing was lost unnoticed")
        if not followed.frames:
            return _failed(f"after cut {cuts}: {followed.last.received}")
        frames += followed.frames
        cursor = next((frame.id for frame in reversed(followed.frames) if frame.id), cursor)
        if followed.last.ending != "abandoned":
            break
        cuts += 1
    if cursor is None:
        return _failed("there is no event id to come back with")
    problem = _difference(expected, frames, call)
    if problem is not None:
        return _failed(f"after {cuts} cuts: {problem}")
    return _passed(
        f"{cuts} cuts, {len(expected)} messages, each once and in order"
        f"{'' if is_load else '; of a slow call only: --load-args names a fast one'}"
    )


@_check(
    "another-session",
    f"{_FIELD}one session was served the events of another (PrefectHQ/fastmcp #4402, frontmcp GHSA-84j6-jc92-77jm). "
    "An event id of another session has to be like one that was never issued.",
)
async def _another_session(run: Run) -> Verdict:
    """Present session A's cursor in session B, and resume in both a call with the same request id."""
    ours, theirs = await run.open_session(), await run.open_session()
    request_id = 7
    call = await run.cut_call(ours, request_id=request_id)
    other = await run.cut_call(theirs, request_id=request_id)
    if call.response.cursor is None or other.response.cursor is None:
        return _not_applicable("there are no event ids")
    claim = await theirs.get(call.response.cursor)
    foreign = await _refusal_verdict(run, theirs, claim, "the cursor of another session")
    return _worst(
        foreign,
        _ownership_verdict(other, await run.follow(theirs, other.response), "the session's own cursor"),
        _ownership_verdict(call, await run.follow(ours, call.response), "the other session's own cursor"),
    )


@_check(
    "another-stream",
    f'{_SPEC}"The server MUST NOT replay messages that would have been delivered on a different stream."',
)
async def _another_stream(run: Run) -> Verdict:
    """Cut two calls of one session that run at the same time, and resume both."""
    session = await run.open_session()
    calls = [await run.cut_call(session) for _ in range(2)]
    verdicts: list[Verdict] = []
    for name, call in zip(("first", "second"), calls, strict=True):
        if call.response.cursor is None:
            return _not_applicable("there are no event ids")
        followed = await run.follow(session, call.response)
        verdicts.append(_ownership_verdict(call, followed, f"the cursor of the {name} of two calls"))
    return _worst(*verdicts)


_DEAD_CURSOR = (
    f"{_FIELD}a cursor that cannot be resumed was answered 200 with nothing, and the client waited for ever or came "
    "back for ever (rust-sdk #958, python-sdk #2393, #3257); or 404, and a healthy session was given up "
    "(typescript-sdk #2068). The specification leaves the answer open (modelcontextprotocol #1939)."
)


@_check("unknown-id", _DEAD_CURSOR)
async def _unknown_id(run: Run) -> Verdict:
    """Present event ids that were never issued, one of them spelled like the server's own."""
    session = await run.open_session()
    call = await run.cut_call(session)
    verdicts = [await _refusal_verdict(run, session, await session.get(str(uuid4())), "an id that was never issued")]
    cursor = call.response.cursor or ""
    if len(cursor) >= 16:  # A shorter one might be another event's.
        changed = await session.get(cursor.translate(_OTHERS))
        verdicts.append(await _refusal_verdict(run, session, changed, "an id like the server's own"))
    return _worst(*verdicts)


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
async def _malformed_id(run: Run) -> Verdict:
    """Present what no server issues."""
    session = await run.open_session()
    verdicts = [
        await _refusal_verdict(run, session, await session.get(event_id), what) for what, event_id in _MALFORMED.items()
    ]
    found = _worst(*verdicts)
    return _passed(f"{len(verdicts)} kinds of nonsense, each refused") if found.outcome == "passed" else found


@_check("future-id", _DEAD_CURSOR)
async def _future_id(run: Run) -> Verdict:
    """Present the event id of an event far after the last."""
    session = await run.open_session()
    call = await run.whole_call(session)
    ids = [frame.id for frame in call.response.frames if frame.id]
    numbers = [re.search("(?:^|[^0-9A-Za-z])([0-9]{1,15})$", event_id) for event_id in ids]
    number = numbers[-1] if numbers else None
    # Each of them: a single one may be random, and end in digits by chance.
    if number is None or None in numbers:
        return _not_applicable("the event ids do not end in a number")
    future = f"{ids[-1][: number.start(1)]}{int(number[1]) + 1_000_000}"
    return await _refusal_verdict(run, session, await session.get(future), "the id of an event that is yet to come")


@_check(
    "reused-request-id",
    f"{_FIELD}a web client gives each call the same request id, and the resume of one showed the messages of a later "
    "one (python-sdk #3060).",
)
async def _reused_request_id(run: Run) -> Verdict:
    """Call twice with one request id, and resume the first call."""
    session = await run.open_session()
    request_id = 7
    first = await run.whole_call(session, request_id=request_id)
    cursor = first.response.messages[BEFORE_CUT - 1].id
    if cursor is None:
        return _not_applicable("there are no event ids")
    second = await session.call(request_id=request_id)
    await second.response.read_to_answer(run.limits.timeout_seconds)
    is_refused = second.response.status < 500 and not second.response.is_stream
    if is_refused or any(frame.is_error for frame in second.response.frames):
        return _passed(f"the request id is not taken again ({second.response.received})")
    if second.response.ending != "answered":
        return _failed(f"a second call with the same request id: {second.response.received}")
    response = await session.get(cursor)
    await response.read_to_end(run.limits.silence_seconds)
    later = {frame.id for frame in second.response.frames}
    if any(first.is_foreign(frame) or frame.id in later for frame in response.messages):
        return _failed(f"the cursor of the first call was served messages of the second ({response.received})")
    if response.messages and not any(frame.is_error for frame in response.messages):
        problem = _difference(run.baseline.messages[BEFORE_CUT:], response.frames, first)
        if problem is not None:
            return _failed(f"the cursor of the first call: {problem} ({response.received})")
        return _passed("the cursor of the first call brings the rest of the first call")
    return await _refusal_verdict(run, session, response, "the cursor of the first call")


@_check(
    "completed-stream",
    f'{_SPEC}"After the JSON-RPC response has been sent, the server SHOULD terminate the SSE stream." {_FIELD}a '
    "resumed stream that never closes after its answer (vercel/resumable-stream #47).",
)
async def _completed_stream(run: Run) -> Verdict:
    """Resume a call whose answer was sent, before and after its answer."""
    session = await run.open_session()
    call = await run.whole_call(session)
    messages = call.response.messages
    middle, last = messages[BEFORE_CUT - 1].id, messages[-1].id
    if middle is None or last is None:
        return _not_applicable("there are no event ids")
    response = await session.get(middle)
    await response.read_to_end(run.limits.silence_seconds)
    if response.messages and not any(frame.is_error for frame in response.messages):
        problem = _difference(run.baseline.messages[BEFORE_CUT:], response.frames, call)
        if problem is not None:
            return _failed(f"the cursor before the answer: {problem} ({response.received})")
        if response.ending == "silent":
            return _failed("the cursor before the answer: the stream stays open after the answer")
        found = _passed("the cursor before the answer brings the rest, and the stream closes")
    else:
        found = await _refusal_verdict(run, session, response, "the cursor before the answer")
    response = await session.get(last)
    await response.read_to_end(run.limits.silence_seconds)
    if response.messages and not any(frame.is_error for frame in response.messages):
        return _failed(f"the cursor of the answer: messages came after it ({response.received})")
    if response.is_stream and response.ending == "silent":
        return _failed("the cursor of the answer: a stream is opened that stays open and brings nothing")
    if response.status == 404 or response.status >= 500:
        return _failed(f"the cursor of the answer: {response.received}")
    return found


@_check(
    "take-over",
    f"{_FIELD}a server that did not notice that a connection broke kept sending to it, and the client that came back "
    "was refused, or waited for ever (LibreChat #14816, kotlin-sdk #715, render-mcp-server #26).",
)
async def _take_over(run: Run) -> Verdict:
    """Resume a call whose first connection is still open."""
    session = await run.open_session()
    call = await run.live_call(session)
    cursor = call.response.cursor
    if cursor is None:
        return _not_applicable("there are no event ids")
    expected = run.baseline.messages[messages_in(call.response.frames) :]
    followed = await run.follow(session, call.response)
    problem = _difference(expected, followed.frames, call)
    if problem is not None:
        return _failed(f"the second connection: {problem} ({followed.last.received})")
    await call.response.read_to_end(run.limits.silence_seconds)
    if any(frame.is_answer for frame in call.response.frames):
        return _failed("both connections were sent the answer")
    if call.response.ending == "silent":
        return _warning("the second connection was sent the rest, but the first stays open and brings nothing")
    resumes = len(run.wire.responses) - run.wire.responses.index(call.response) - 1
    if resumes > 1:
        return _warning(f"the rest came over {resumes} connections, each closed before the answer")
    return _passed("the second connection was sent the rest, the first was closed")


@_check(
    "two-gets",
    f'{_SPEC}"The client MAY remain connected to multiple SSE streams simultaneously"; the server "MUST NOT broadcast '
    f'the same message across multiple streams". {_FIELD}409 because the server still held a dead GET '
    "(LibreChat #14816).",
)
async def _two_gets(run: Run) -> Verdict:
    """Open the standalone stream twice, and call the tool meanwhile."""
    session = await run.open_session()
    first = await session.get()
    if first.status == 405:
        return _not_applicable("the server offers no standalone stream")
    if not first.is_stream:
        return _failed(f"the first GET: {first.received}")
    second = await session.get()
    if not second.is_stream:
        return _failed(f"the second GET, while the first is open: {second.received}")
    await run.whole_call(session)
    for response in (first, second):
        await response.read_to_end(run.limits.silence_seconds)
    both = Counter(frame.data for frame in first.messages) & Counter(frame.data for frame in second.messages)
    if both:
        return _failed(f"{both.total()} messages were sent on both")
    return _passed(f"both were answered, and {len(first.messages) + len(second.messages)} messages sent on one of them")


@_check(
    "standalone-cursor",
    f"{_FIELD}a standalone stream that begins without a cursor cannot be resumed before its first message, so what is "
    "sent while its connection is broken is lost; the SDKs' do.",
)
async def _standalone_cursor(run: Run) -> Verdict:
    """Cut the standalone stream, and resume it from its first event id."""
    session = await run.open_session()
    standalone = await session.get()
    if standalone.status == 405:
        return _not_applicable("the server offers no standalone stream")
    await standalone.read_frames(1, run.limits.silence_seconds)
    first = standalone.frames[0] if standalone.frames else Frame()
    if not standalone.is_stream:
        return _failed(standalone.received)
    if first.id is None or first.data:
        return _warning("the stream begins without a cursor: what is sent while it is cut cannot be asked for")
    call = await run.whole_call(session)
    if await standalone.read_to_end(run.limits.silence_seconds) != "silent":
        return _warning(f"the stream does not stay open: {standalone.received}")
    expected = [canonical(frame) for frame in standalone.messages]
    resumed = await session.get(first.id)
    await resumed.read_to_end(run.limits.silence_seconds)
    if not resumed.is_stream:
        return _failed(f"its first event id: {resumed.received}")
    if any(frame.is_answer or call.is_foreign(frame) for frame in resumed.messages):
        return _failed("its first event id brings messages of a call")
    problem = _difference(expected, resumed.frames, call)
    if problem is not None:
        return _failed(f"its first event id: {problem} ({resumed.received})")
    if resumed.ending != "silent":
        return _warning(f"its first event id: the stream does not stay open ({resumed.received})")
    return _passed(f"its first event id brings its {len(expected)} messages, and the stream goes on")


@_check(
    "frozen-reader",
    f"{_FIELD}a client that stopped reading blocked every other call of its session (python-sdk #1764, sse-starlette "
    "#89).",
)
async def _frozen_reader(run: Run) -> Verdict:
    """Stop reading a large call, ping the session meanwhile, and resume the call."""
    if run.target.load_arguments is None:
        return _not_applicable("--load-args names no call that is large enough")
    baseline = await run.load_baseline()
    if baseline.body_bytes < run.limits.min_load_bytes:
        return _not_applicable(
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
            return _failed(f"while one call was not read, a ping had no answer in {run.limits.timeout_seconds:g} s")
        slowest = max(slowest, anyio.current_time() - asked)
        await anyio.sleep(max(baseline.seconds / 10, 0.02))
    await call.response.abandon()
    if cursor is None:
        return _failed("there is no event id to come back with")
    followed = await run.follow(session, call.response)
    said = f"the slowest ping took {slowest:.1f} s"
    if followed.is_refused:
        return _passed(f"{said}; the frozen call was then refused: {followed.last.received}")
    problem = _difference(baseline.messages[messages_in(call.response.frames) :], followed.frames, call)
    if problem is not None:
        return _failed(f"{said}; the frozen call, resumed: {problem} ({followed.last.received})")
    return _passed(f"{said}; the frozen call was resumed, and complete")


@_check(
    "polling",
    f'{_SPEC}"If the server does close the connection prior to terminating the SSE stream, it SHOULD send an SSE event '
    'with a standard retry field before closing the connection."',
)
async def _polling(run: Run) -> Verdict:
    """Call a tool whose connection the server closes, and poll for the rest."""
    session = await run.open_session()
    call = await session.call(run.target.poll_arguments)
    await call.response.read_to_answer(run.limits.timeout_seconds)
    if call.response.ending == "answered":
        return _not_applicable("the connection is not closed before the answer; --poll-args names a call that does it")
    cursor = call.response.cursor
    if call.response.ending != "closed" or cursor is None:
        return _failed(f"the call was answered {call.response.received}")
    found = _rest_verdict(run, call, await run.follow(session, call.response), "polled")
    retries = [frame.retry for frame in call.response.frames if frame.retry is not None]
    if not retries:
        return _worst(found, _warning("the connection was closed without a retry field before"))
    if call.response.retry_seconds is None:
        return _worst(found, _failed(f"retry is {printable(retries[-1])!r}, not a number of milliseconds"))
    return found


@_check(
    "delete",
    f'{_SPEC}a session that was terminated: the server "MUST respond to requests containing that session ID with HTTP '
    f'404 Not Found". {_FIELD}rows and open streams survive DELETE (csharp-sdk #1287).',
)
async def _delete(run: Run) -> Verdict:
    """End a session while a stream of it is open, and ask for its events."""
    session = await run.open_session()
    call = await run.cut_call(session)
    standalone = await session.get()
    response = await session.delete()
    if response.status in (405, 501):
        return _not_applicable(f"the server does not let clients end sessions ({response.status})")
    if not 200 <= response.status < 300:
        return _failed(f"DELETE: {response.received}")
    claim = await session.get(call.response.cursor)
    if claim.is_stream:
        await claim.read_to_end(run.limits.silence_seconds)
    ping = await session.post({"id": session.next_id(), "method": "ping"})
    for what, later in (("a cursor of the ended session", claim), ("a request in the ended session", ping)):
        if later.status != 404:
            return _failed(f"{what}: {later.received}, instead of 404")
    await standalone.read_to_end(run.limits.silence_seconds)
    if standalone.is_stream and standalone.ending == "silent":
        return _warning("answered 404 from then on, but a stream that was open stays open")
    return _passed("answered 404 from then on, and the stream that was open is closed")


@_check(
    "unknown-session",
    f"{_SPEC}404 tells a client that it has to initialize a new session. {_FIELD}people expect sessions to outlive a "
    "restart (python-sdk #880); where they do not, only 404 says so.",
)
async def _unknown_session(run: Run) -> Verdict:
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
            verdicts.append(_passed("a request and a cursor are answered 404"))
        elif 400 <= response.status < 500:
            verdicts.append(_warning(f"{what}: answered {response.status}, which tells no client to initialize anew"))
        else:
            verdicts.append(_failed(f"{what}: {response.received}"))
    return _worst(*verdicts)
