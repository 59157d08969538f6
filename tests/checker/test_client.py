"""What the checker reads from the wire, and what it refuses to read."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from mcp_resumable.checker.client import Frame, FrameParser, Limits, Response, ServerFaultError, printable

MAX_FRAME_BYTES = 1_000


def parse(body: bytes, size: int = 1_000_000) -> list[Frame]:
    """Return the frames of a body that comes in pieces of `size` bytes."""
    parser = FrameParser(MAX_FRAME_BYTES)
    return [frame for start in range(0, len(body), size) for frame in parser.feed(body[start : start + size])]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1_000])
def test_a_frame_is_the_same_for_each_line_end_and_piece(end: bytes, size: int) -> None:
    body = end.join([b"id: 1", b"retry: 5", b"data: {", b"data: }", b"", b": comment", b"", b"id:2", b"data", b"", b""])
    assert parse(body, size) == [
        Frame(id="1", retry="5", data="{\n}", message={}),
        Frame(id="2", data="", message=None),
    ]


def test_a_frame_without_its_blank_line_is_none() -> None:
    assert parse(b"id: 1\ndata: {}\n") == []


@pytest.mark.parametrize("data", ["[1]", "null", "{", '"', "[" * 900, "9" * 900, "é", "\x00"])
def test_data_that_is_no_object_is_no_message(data: str) -> None:
    (frame,) = parse(f"data: {data}\n\n".encode())
    assert (frame.data, frame.message) == (data, None)


@pytest.mark.parametrize("unit", [b"x" * 100, b"data: x\n", b": comment\n", b"\xff" * 100])
def test_a_frame_that_is_too_large_is_refused(unit: bytes) -> None:
    with pytest.raises(ServerFaultError):
        parse(unit * MAX_FRAME_BYTES, 100)


@given(st.binary(max_size=MAX_FRAME_BYTES), st.integers(1, 20))
def test_any_bytes_give_the_same_frames_in_any_pieces(body: bytes, size: int) -> None:
    assert parse(body, size) == parse(body)


@given(st.text(), st.integers(1, 50))
def test_printable_is_short_ascii_without_control_characters(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert re.fullmatch(r"[ -~]*…?[ -~]*", shown)
    assert shown.count("…") <= 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain [red]", "plain [red]"), ("\x1b[31m", "\\x1b[31m"), ("a\r\nb", "a\\r\\nb"), ("\u202e", "\\u202e")],
)
def test_printable_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_error_is_an_answer_and_a_notification_is_none() -> None:
    error, notification = parse(b'data: {"id": 1, "error": {}}\n\ndata: {"method": "m"}\n\n')
    assert (error.is_answer, error.is_error) == (True, True)
    assert (notification.is_answer, notification.is_error) == (False, False)


@pytest.mark.parametrize(
    ("piece", "ending", "frames"),
    [(b'data: {"method": "m"}\n\n', "answered", 11), (b": keep-alive\n\n", "silent", 0)],
)
def test_each_event_may_take_its_time_and_what_is_no_event_gives_it_none(
    piece: bytes, ending: str, frames: int
) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(10):
            await anyio.sleep(0.6)
            yield piece
        yield b'data: {"result": {}}\n\n'

    async def read() -> Response:
        response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body())
        read = Response("GET", response, Limits())
        await read.read_to_answer(1.0)
        return read

    clock = trio.testing.MockClock(autojump_threshold=0)
    response = anyio.run(read, backend="trio", backend_options={"clock": clock})
    assert (response.ending, len(response.frames)) == (ending, frames)
