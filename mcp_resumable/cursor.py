"""Event ids: the one place that knows how a cursor is spelled.

    2-k3v9q0m4x7ta:5.Nw:47
    |     |        | |  seq: decimal; 0 is "before the first event"
    |     |        | request id, unpadded base64url of its text (left out where the id would get too long)
    |     |        ordinal of the stream within the generation; the standalone stream is `0` and has no request id
    |     nonce: 12 characters of [0-9a-z], 62 random bits
    counter of the session's generations: decimal, from 1

Every cursor has exactly one spelling, of at most 256 characters from `[0-9A-Za-z_.:-]`: no leading zeros, no signs, no
padding, no other digits than ASCII. Everything else is malformed. Source of the rules that an id obeys: MCP
2025-11-25, "Resumability and Redelivery" (unique over the session's streams, names its stream).

The values are named tuples, not frozen dataclasses: those take one and a half times as long to make, and two to three
times as long to compare and to hash (CPython 3.11); a resume from memory does a dozen of these.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from typing import NamedTuple

__all__ = ["MAX_EVENT_ID_LENGTH", "STANDALONE", "EventCursor", "Generation", "StreamId"]

MAX_EVENT_ID_LENGTH = 256

# A request id is left out of the event id above this length, so that generation and seq still fit beside it: 19 digits
# each for counter, ordinal and seq, 12 for the nonce and 4 separators leave 183; 160 keeps a margin.
_MAX_ENCODED_REQUEST_ID_LENGTH = 160

# Unpadded base64url. Invariant: one spelling per text. Decoders accept stray bits in a last character ("Nx" for "Nw"):
# of the 2 characters that spell one byte, the last has 4 to spare, of the 3 that spell two bytes, 2.
_BASE64URL = r"(?:[0-9A-Za-z_-]{4})*(?:[0-9A-Za-z_-][AQgw]|[0-9A-Za-z_-]{2}[AEIMQUYcgkosw048])?"

_EVENT_ID = re.compile(
    r"(?P<counter>[1-9][0-9]*)-(?P<nonce>[0-9a-z]{12})"
    rf":(?:0|(?P<ordinal>[1-9][0-9]*)(?:\.(?P<request>{_BASE64URL}))?)"
    r":(?P<seq>0|[1-9][0-9]*)",
    re.ASCII,
)


class Generation(NamedTuple):
    """One unbroken logical life of a session's history.

    Attributes:
        counter: From 1, higher with each generation of the session, never issued twice.
        nonce: 12 characters of `[0-9a-z]`, random, so that a counter that was lost is never mistaken for an old one.
    """

    counter: int
    nonce: str

    def __str__(self) -> str:
        """Return the wire spelling, e.g. `2-k3v9q0m4x7ta`."""
        return f"{self.counter}-{self.nonce}"


class StreamId(NamedTuple):
    """One SSE stream of a generation.

    Attributes:
        ordinal: Order of opening within the generation, from 1; 0 is the standalone stream.
        request_id: The JSON-RPC request id as text, or None for the standalone stream and for an id too long to carry.
    """

    ordinal: int
    request_id: str | None = None

    @classmethod
    def of_request(cls, ordinal: int, request_id: str) -> StreamId:
        """Return the stream id for a request's stream, without the request id where that is too long to carry.

        A request id that is not valid Unicode (a lone surrogate) is left out too: it has no UTF-8 form.
        """
        try:
            encoded_length = -(-len(request_id.encode()) * 4 // 3)
        except UnicodeEncodeError:
            return cls(ordinal)
        return cls(ordinal, request_id if encoded_length <= _MAX_ENCODED_REQUEST_ID_LENGTH else None)

    def __str__(self) -> str:
        """Return the wire spelling, e.g. `5.Nw`."""
        if self.request_id is None:
            return str(self.ordinal)
        return f"{self.ordinal}.{_encoded(self.request_id)}"


def _encoded(request_id: str) -> str:
    return urlsafe_b64encode(request_id.encode()).decode().rstrip("=")


STANDALONE = StreamId(0)
"""The stream of the GET that no request opened; every generation has one from its beginning."""


class EventCursor(NamedTuple):
    """A place in a stream: the parsed form of an event id.

    Attributes:
        generation: The generation in which the event was sent.
        stream: The stream that carried it.
        seq: Its 1-based place in the stream; 0 is the place before the first event.
    """

    generation: Generation
    stream: StreamId
    seq: int

    @classmethod
    def parse(cls, event_id: str) -> EventCursor | None:
        """Return the cursor that `event_id` spells, or None where it is malformed.

        Total: any string whatever is answered, none raises. `str(EventCursor.parse(text)) == text` for every text that
        is not malformed.
        """
        if len(event_id) > MAX_EVENT_ID_LENGTH:
            return None
        match = _EVENT_ID.fullmatch(event_id)
        if match is None:
            return None
        counter, nonce, ordinal, encoded, seq = match.groups()
        if ordinal is None:
            stream = STANDALONE
        elif encoded is None:
            stream = StreamId(int(ordinal))
        else:
            try:
                # A third of what `urlsafe_b64decode` takes. More padding than is missing is ignored.
                request_id = a2b_base64(encoded.replace("-", "+").replace("_", "/") + "==").decode()
            except UnicodeDecodeError:
                return None
            stream = StreamId(int(ordinal), request_id)
        return cls(Generation(int(counter), nonce), stream, int(seq))

    def __str__(self) -> str:
        """Return the event id, e.g. `2-k3v9q0m4x7ta:5.Nw:47`."""
        return f"{self.generation}:{self.stream}:{self.seq}"
