"""Servers that answer nonsense: the checker says so, and is not harmed by it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from mcp_resumable.checker import CHECKS, CouldNotCheckError, Limits, Report, Target, check_server
from tests.loops import ASYNCIO

from .wrong_server import Request, WrongServer, serving

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 60
LIMITS = Limits(
    timeout_seconds=1.5,
    silence_seconds=0.3,
    max_requests=60,
    max_body_bytes=300_000,
    max_frame_bytes=100_000,
    max_frames=2_000,
    min_call_seconds=0.01,
)

Answer = Callable[[Request], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> object:
    """Only asyncio: uvicorn knows no other loop."""
    return ASYNCIO


def target_of(port: int, **changes: Any) -> Target:
    return Target(url=f"http://127.0.0.1:{port}/mcp", tool="count", **changes)


def printed(report: Report) -> str:
    """Return all text of a report, which has to be printable."""
    text = report.model_dump_json()
    assert "\\u" not in text.replace("\\\\", "")
    for line in re.findall(r'"((?:[^"\\]|\\.)*)"', text):
        assert re.fullmatch("[ -~…]*", json.loads(f'"{line}"'))
    return text


# Before anything can be checked.


async def redirect(request: Request) -> None:
    await request.reply(307, location="http://192.0.2.1/elsewhere")


async def page(request: Request) -> None:
    await request.start(200, "text/html")
    await request.write("<html>\x1b[31mhello")
    await request.end()


async def empty(request: Request) -> None:
    await request.reply(200)


async def no_session_id(request: Request) -> None:
    await request.reply(200, {"jsonrpc": "2.0", "id": 1, "result": {}})


async def another_revision(request: Request) -> None:
    await request.reply(200, {"id": 1, "result": {"protocolVersion": "2024-\x1b11-05"}}, mcp_session_id="1")


async def huge(request: Request) -> None:
    await request.start(200, "text/event-stream")
    for _ in range(100):
        await request.write("data: " + "x" * 50_000)


async def silent(request: Request) -> None:
    await request.watch()


async def unauthorized(request: Request) -> None:
    await request.reply(401, {"error": "no [bold]credentials[/bold] \x1b[31m"})


async def deep(request: Request) -> None:
    await request.start(200, "text/event-stream", mcp_session_id="1")
    await request.write(f"data: {'[' * 90_000}\n\n")
    await request.end()


NONSENSE: list[tuple[Answer, str]] = [
    (redirect, "307"),
    (page, "text/html"),
    (empty, "200"),
    (no_session_id, "Mcp-Session-Id"),
    (another_revision, "revision"),
    (huge, "larger than"),
    (silent, "no response"),
    (unauthorized, "401"),
    (deep, "initialize"),
]


@pytest.mark.parametrize(("answer", "says"), NONSENSE, ids=[answer.__name__ for answer, _ in NONSENSE])
async def test_nonsense_cannot_be_checked_and_the_message_says_what_came(answer: Answer, says: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(Request(scope, receive, send))

    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(app) as port:
            with pytest.raises(CouldNotCheckError) as caught:
                await check_server(target_of(port), LIMITS)
    assert says in str(caught.value)
    assert re.fullmatch("[ -~…]+", str(caught.value))


async def test_nothing_that_listens_cannot_be_checked() -> None:
    async with serving(empty) as port:
        pass
    with anyio.fail_after(TIMEOUT_SECONDS), pytest.raises(CouldNotCheckError):
        await check_server(target_of(port), LIMITS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"events": 2}, "at least 3"),
        ({"events": 8, "interval": 0}, "has to last"),
        ({"fails": True}, "the call failed"),
        ({"plain": True}, "instead of by an SSE stream"),
        ({"interval": 30}, "without its answer"),
        ({"close_after": 1}, "without its answer"),
        ({"differs": True, "interval": 0.15}, "different messages"),
    ],
)
async def test_a_tool_that_does_not_do_cannot_be_used(arguments: dict[str, object], says: str) -> None:
    server = WrongServer()
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(server) as port:
            with pytest.raises(CouldNotCheckError) as caught:
                await check_server(target_of(port, arguments=arguments), replace(LIMITS, min_call_seconds=0.5))
    assert says in str(caught.value)
    assert server.open_sessions == []


# In the middle of a check.


async def hostile_frames(request: Request) -> None:
    await request.start(200, "text/event-stream")
    await request.write("id: \x1b[31m[red]\x00\u202e\ndata: \x1b]0;title\x07\n\n" * 10)
    await request.end()


async def too_many(request: Request) -> None:
    await request.start(200, "text/event-stream")
    for _ in range(100):
        await request.write("data: {}\n\n" * 100)


async def huge_frame(request: Request) -> None:
    await request.start(200, "text/event-stream")
    for _ in range(100):
        await request.write("data: " + "x" * 10_000 + "\n")


async def cut_in_the_middle(request: Request) -> None:
    await request.start(200, "text/event-stream", content_length="100")
    await request.write("data: {")


async def not_a_stream(request: Request) -> None:
    await request.start(200, "\x01[red]text/weird")
    await request.write("\x1b[31m" * 100_000)
    await request.end()


async def claims_to_be_compressed(request: Request) -> None:
    await request.start(200, "text/event-stream", content_encoding="gzip")
    await request.write("data: {}\n\n")
    await request.end()


async def elsewhere(request: Request) -> None:
    await request.start(302, "text/plain", location="http://192.0.2.1/\x1b[31m")
    await request.end()


async def deeply_nested(request: Request) -> None:
    await request.start(200, "text/event-stream")
    for depth in (500, 950, 1_500, 5_000, 12_000):
        await request.write(f'data: {{"method": "m", "params": {"[" * depth}{"]" * depth}}}\n\n')
    await request.end()


IN_THE_MIDDLE: list[Answer] = [
    deeply_nested,
    hostile_frames,
    too_many,
    huge_frame,
    cut_in_the_middle,
    not_a_stream,
    claims_to_be_compressed,
    elsewhere,
]


@asynccontextmanager
async def answering_resumes(answer: Answer) -> AsyncIterator[tuple[WrongServer, int]]:
    """Serve a right server, whose resumes are answered with nonsense."""
    server = WrongServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send)
        if request.method == "GET" and "last-event-id" in request.headers:
            await answer(request)
        else:
            await server(scope, receive, send)

    async with serving(app) as port:
        yield server, port
        server.stop()


async def answer_only(request: Request) -> None:
    await request.start(200, "text/event-stream")
    await request.write('data: {"jsonrpc": "2.0", "id": 7, "result": []}\n\n')
    await request.end()


async def cursors_only(request: Request) -> None:
    await request.start(200, "text/event-stream")
    await request.write("id: 1\nretry: 1\ndata:\n\n" * 5)
    await request.end()


async def two_errors(request: Request) -> None:
    await request.start(200, "text/event-stream")
    await request.write('id: 1\ndata: {"id": null, "error": {}}\n\n' * 2)
    await request.end()


async def no_body(request: Request) -> None:
    await request.start(200, "text/event-stream")
    await request.end()


TO_EVERYTHING: list[Answer] = [*IN_THE_MIDDLE, answer_only, cursors_only, two_errors, no_body, page, unauthorized]


@pytest.mark.parametrize("answer", TO_EVERYTHING, ids=[answer.__name__ for answer in TO_EVERYTHING])
async def test_nonsense_to_everything_after_the_first_calls_crashes_no_check(answer: Answer) -> None:
    """Sessions can be opened and ended; each call after the first ones, each ping and each GET is answered nonsense."""
    server = WrongServer()
    calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        request = Request(scope, receive, send)
        body = await request.json() if request.method == "POST" else {}
        calls += body.get("method") == "tools/call"
        is_asked = request.method == "GET" or body.get("method") in ("ping", "tools/call")
        if calls > 2 and is_asked:
            await answer(request)
            return

        unread = [{"type": "http.request", "body": json.dumps(body).encode()}] if body else []

        async def receive_again() -> Any:
            return unread.pop() if unread else await receive()

        await server(scope, receive_again, send)

    limits = replace(LIMITS, silence_seconds=0.05, max_requests=1_000, min_load_bytes=1)
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(app) as port:
            target = target_of(port, load_arguments={"events": 8}, poll_arguments={"close_after": 2})
            report = await check_server(target, limits)
        server.stop()
    assert len(report.results) == len(CHECKS)
    printed(report)
    assert server.open_sessions == []


@pytest.mark.parametrize("answer", IN_THE_MIDDLE, ids=[answer.__name__ for answer in IN_THE_MIDDLE])
async def test_nonsense_in_the_middle_fails_the_check_and_leaves_no_session_behind(answer: Answer) -> None:
    names = ["exact-resume", "unknown-id", "completed-stream"]
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with answering_resumes(answer) as (server, port):
            report = await check_server(target_of(port), LIMITS, names=names)
    assert [(result.name, result.outcome) for result in report.results] == [(name, "failed") for name in names]
    assert "192.0.2.1" not in report.url
    printed(report)
    assert server.open_sessions == []


async def test_a_run_is_bounded_in_requests() -> None:
    async with answering_resumes(empty) as (server, port):
        limits = Limits(timeout_seconds=5, silence_seconds=0.2, max_requests=8, min_call_seconds=0.01)
        report = await check_server(target_of(port), limits, names=["malformed-id"])
    assert report.results[0].outcome == "failed"
    assert "8 requests" in report.results[0].detail
    assert server.open_sessions == []


async def test_credentials_of_the_url_are_not_shown_and_headers_are_sent_with_each_request() -> None:
    server = WrongServer()
    seen: list[str | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]).get(b"x-secret", b"").decode())
        await server(scope, receive, send)

    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(app) as port:
            target = Target(
                url=f"http://user:hidden@127.0.0.1:{port}/mcp?key=hidden", tool="count", headers={"x-secret": "hidden"}
            )
            report = await check_server(target, LIMITS, names=["exact-resume", "delete"])
    assert {result.outcome for result in report.results} == {"passed"}
    assert set(seen) == {"hidden"}
    assert "hidden" not in printed(report)
