"""Values as the scripts are sent them, and as they answer them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from mcp_resumable.cursor import STANDALONE, EventCursor, Generation, StreamId
from mcp_resumable.decision import (
    Dropped,
    NeverOpened,
    Retained,
    Snapshot,
    StreamState,
    Successor,
    Superseded,
)
from mcp_resumable.storage import StreamDescription

__all__ = ["bytes_of", "description_of", "events_of", "generation_of", "snapshot_of", "spelling_of", "text_of"]

# The bytes of a place before its event: its number, and "=".
_PLACE_OVERHEAD = 7


@lru_cache(maxsize=4096)
def spelling_of(generation: Generation, stream: StreamId) -> tuple[str, bytes]:
    """Return a stream's name, and how an append begins that writes to it."""
    # Remembered: a stream is written to event by event, and to spell it takes as long as the rest of an append.
    return str(stream), f"{generation} {stream}".encode()


def bytes_of(text: str) -> bytes:
    """Return any text as bytes."""
    # A request id may hold lone surrogates, which have no UTF-8 form of their own.
    return text.encode("utf-8", "surrogatepass")


def text_of(data: bytes) -> str:
    """Return the text that `bytes_of` was given."""
    return data.decode("utf-8", "surrogatepass")


def generation_of(answer: bytes) -> Generation | None:
    """Return a generation; None where there is none."""
    if not answer:
        return None
    counter, _, nonce = answer.decode().partition("-")
    return Generation(int(counter), nonce)


def events_of(places: Sequence[bytes]) -> list[bytes | None]:
    """Return the events at places; None where one is a hole."""
    return [place[_PLACE_OVERHEAD:] if len(place) >= _PLACE_OVERHEAD else None for place in places]


def snapshot_of(answer: list[Any] | bytes, cursor: EventCursor | None) -> Snapshot | None:
    """Return what `snapshot.lua` answers for one cursor."""
    if not answer:
        return None
    current, claimed, kind, mark, floor, hole, is_terminal, rest, newest, counter, ordinal = cast("list[Any]", answer)
    generation = generation_of(current)
    assert generation is not None, "a session that is known has a generation"
    if cursor is None:
        return Snapshot(generation=generation, claimed="never", stream=NeverOpened())
    stream: StreamState
    match kind:
        case b"retained":
            stream = Retained(
                high_water_mark=mark,
                replay_floor=floor,
                last_hole=hole,
                is_terminal=bool(is_terminal),
                rest=events_of(rest) if rest else None,
            )
        case b"superseded":
            stream = Superseded()
        case b"dropped":
            stream = Dropped()
        case _:
            stream = NeverOpened()
    # A cursor of another generation that carries no request id names no call of this one.
    is_named = claimed == b"current" or cursor.stream.request_id is not None or cursor.stream == STANDALONE
    return Snapshot(
        generation=generation,
        claimed=cast("Literal['current', 'earlier', 'never']", claimed.decode()),
        stream=stream,
        successor=Successor(stream=_stream_id(newest.decode()), origin=(counter, ordinal))
        if newest and is_named
        else None,
    )


def description_of(row: list[Any]) -> StreamDescription:
    """Return what `describe.lua` answers for one stream."""
    name, request_id, floor, mark, is_terminal, events, size = row
    return StreamDescription(
        stream=name.decode(),
        request_id=None if name == b"0" else text_of(request_id),
        replay_floor=floor,
        high_water_mark=mark,
        is_terminal=bool(is_terminal),
        retained_events=events,
        retained_bytes=size,
    )


def _stream_id(name: str) -> StreamId:
    cursor = EventCursor.parse(f"1-{'0' * 12}:{name}:0")
    assert cursor is not None, "a stream's name is one that this package has made"
    return cursor.stream
