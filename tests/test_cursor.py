from __future__ import annotations

import string
from base64 import urlsafe_b64encode

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcp_resumable.cursor import MAX_EVENT_ID_LENGTH, STANDALONE, EventCursor, Generation, StreamId

GENERATION = Generation(2, "k3v9q0m4x7ta")


def cursor_at(stream: StreamId, seq: int) -> EventCursor:
    return EventCursor(generation=GENERATION, stream=stream, seq=seq)


# Spelling by hand, both ways.

SPELLINGS = [
    ("2-k3v9q0m4x7ta:5.Nw:47", cursor_at(StreamId(5, "7"), 47)),
    ("2-k3v9q0m4x7ta:0:0", cursor_at(STANDALONE, 0)),
    ("2-k3v9q0m4x7ta:0:1", cursor_at(StreamId(0), 1)),
    ("2-k3v9q0m4x7ta:12:3", cursor_at(StreamId(12), 3)),
    ("2-k3v9q0m4x7ta:5.:1", cursor_at(StreamId(5, ""), 1)),
    ("2-k3v9q0m4x7ta:5.MTI:1", cursor_at(StreamId(5, "12"), 1)),
    ("2-k3v9q0m4x7ta:5.MTIz:1", cursor_at(StreamId(5, "123"), 1)),
    ("2-k3v9q0m4x7ta:5.Pz8-:1", cursor_at(StreamId(5, "??>"), 1)),
    ("2-k3v9q0m4x7ta:5.Pz8_:1", cursor_at(StreamId(5, "???"), 1)),
    ("2-k3v9q0m4x7ta:5.AA:1", cursor_at(StreamId(5, "\0"), 1)),
    ("2-k3v9q0m4x7ta:5.DQo:1", cursor_at(StreamId(5, "\r\n"), 1)),
    ("2-k3v9q0m4x7ta:5.4oKs:1", cursor_at(StreamId(5, "€"), 1)),
    ("2-k3v9q0m4x7ta:5.YTpi:1", cursor_at(StreamId(5, "a:b"), 1)),
    (
        "1-000000000000:1.Nw:1",
        EventCursor(generation=Generation(1, "000000000000"), stream=StreamId(1, "7"), seq=1),
    ),
    (
        "9223372036854775807-zzzzzzzzzzzz:9223372036854775807.Nw:9223372036854775807",
        EventCursor(
            generation=Generation(9223372036854775807, "zzzzzzzzzzzz"),
            stream=StreamId(9223372036854775807, "7"),
            seq=9223372036854775807,
        ),
    ),
]


@pytest.mark.parametrize(("event_id", "cursor"), SPELLINGS)
def test_event_id_parses_to_its_cursor(event_id: str, cursor: EventCursor) -> None:
    assert EventCursor.parse(event_id) == cursor


@pytest.mark.parametrize(("event_id", "cursor"), SPELLINGS)
def test_cursor_is_spelled_as_its_event_id(event_id: str, cursor: EventCursor) -> None:
    assert str(cursor) == event_id


def test_number_far_beyond_64_bits_is_well_formed() -> None:
    assert EventCursor.parse("2-k3v9q0m4x7ta:5:1" + "0" * 200) == cursor_at(StreamId(5), 10**200)
    assert EventCursor.parse("2-k3v9q0m4x7ta:1" + "0" * 200 + ":5") == cursor_at(StreamId(10**200), 5)
    assert EventCursor.parse("1" + "0" * 200 + "-k3v9q0m4x7ta:0:5") == EventCursor(
        generation=Generation(10**200, "k3v9q0m4x7ta"), stream=STANDALONE, seq=5
    )


def test_event_id_of_256_characters_is_well_formed_and_one_of_257_is_not() -> None:
    longest = "2-k3v9q0m4x7ta:5:" + "9" * 239
    assert (len(longest), MAX_EVENT_ID_LENGTH) == (256, 256)
    assert EventCursor.parse(longest) == cursor_at(StreamId(5), int("9" * 239))
    assert EventCursor.parse(longest + "9") is None


MALFORMED = {
    "empty": "",
    "the SDK's own kind of id": "3f0c6e2a-5c39-4a49-9d4f-0b8d7b0c8a11",
    "a number": "47",
    "only separators": "-::",
    # Parts missing or too many.
    "counter empty": "-k3v9q0m4x7ta:5.Nw:47",
    "nonce empty": "2-:5.Nw:47",
    "generation empty": ":5.Nw:47",
    "stream empty": "2-k3v9q0m4x7ta::47",
    "ordinal empty": "2-k3v9q0m4x7ta:.Nw:47",
    "seq empty": "2-k3v9q0m4x7ta:5.Nw:",
    "seq missing": "2-k3v9q0m4x7ta:5.Nw",
    "stream missing": "2-k3v9q0m4x7ta:47",
    "nonce missing": "2:5.Nw:47",
    "a fourth part": "2-k3v9q0m4x7ta:5.Nw:47:1",
    "a second request id": "2-k3v9q0m4x7ta:5.Nw.Nw:47",
    "a trailing separator": "2-k3v9q0m4x7ta:5.Nw:47:",
    "a leading separator": ":2-k3v9q0m4x7ta:5.Nw:47",
    # Other spellings of numbers.
    "counter zero": "0-k3v9q0m4x7ta:5.Nw:47",
    "counter with leading zero": "02-k3v9q0m4x7ta:5.Nw:47",
    "ordinal with leading zero": "2-k3v9q0m4x7ta:05.Nw:47",
    "standalone with two zeros": "2-k3v9q0m4x7ta:00:47",
    "seq with leading zero": "2-k3v9q0m4x7ta:5.Nw:047",
    "seq with two zeros": "2-k3v9q0m4x7ta:5.Nw:00",
    "counter with plus": "+2-k3v9q0m4x7ta:5.Nw:47",
    "counter negative": "-2-k3v9q0m4x7ta:5.Nw:47",
    "ordinal with plus": "2-k3v9q0m4x7ta:+5.Nw:47",
    "ordinal negative": "2-k3v9q0m4x7ta:-5.Nw:47",
    "seq with plus": "2-k3v9q0m4x7ta:5.Nw:+47",
    "seq negative": "2-k3v9q0m4x7ta:5.Nw:-1",
    "seq negative zero": "2-k3v9q0m4x7ta:5.Nw:-0",
    "seq with underscore": "2-k3v9q0m4x7ta:5.Nw:4_7",
    "seq hexadecimal": "2-k3v9q0m4x7ta:5.Nw:0x2f",
    "seq with fraction": "2-k3v9q0m4x7ta:5.Nw:47.0",
    "seq with exponent": "2-k3v9q0m4x7ta:5.Nw:4e1",
    # What strip() would forgive.
    "leading space": " 2-k3v9q0m4x7ta:5.Nw:47",
    "trailing space": "2-k3v9q0m4x7ta:5.Nw:47 ",
    "inner space": "2-k3v9q0m4x7ta:5.Nw: 47",
    "leading tab": "\t2-k3v9q0m4x7ta:5.Nw:47",
    "trailing LF": "2-k3v9q0m4x7ta:5.Nw:47\n",
    "trailing CR": "2-k3v9q0m4x7ta:5.Nw:47\r",
    "trailing CRLF": "2-k3v9q0m4x7ta:5.Nw:47\r\n",
    "leading LF": "\n2-k3v9q0m4x7ta:5.Nw:47",
    "inner LF": "2-k3v9q0m4x7ta:5.Nw\n:47",
    "trailing NUL": "2-k3v9q0m4x7ta:5.Nw:47\0",
    "leading NUL": "\x002-k3v9q0m4x7ta:5.Nw:47",
    "inner NUL": "2-k3v9q0m4x7ta:5.N\0w:47",
    "byte order mark": "\ufeff2-k3v9q0m4x7ta:5.Nw:47",
    "no-break space": "2-k3v9q0m4x7ta:5.Nw:47\xa0",
    # What int() and \d would take for digits, and what looks like a separator.
    "fullwidth counter": "\uff12-k3v9q0m4x7ta:5.Nw:47",
    "fullwidth seq": "2-k3v9q0m4x7ta:5.Nw:\uff14\uff17",
    "Arabic-Indic seq": "2-k3v9q0m4x7ta:5.Nw:\u0664\u0667",
    "Devanagari ordinal": "2-k3v9q0m4x7ta:\u096b.Nw:47",
    "superscript seq": "2-k3v9q0m4x7ta:5.Nw:4\u2077",
    "mathematical digit in the nonce": "2-k3v9q0m4x7t\U0001d7ce:5.Nw:47",
    "Cyrillic letter in the nonce": "2-k3v9q0m4x7t\u0430:5.Nw:47",
    "dotless i in the nonce": "2-k3v9q0m4x7t\u0131:5.Nw:47",
    "Kelvin sign in the nonce": "2-\u212a3v9q0m4x7ta:5.Nw:47",
    "long s in the request id": "2-k3v9q0m4x7ta:5.N\u017f:47",
    "fullwidth colon": "2-k3v9q0m4x7ta\uff1a5.Nw:47",
    "non-breaking hyphen": "2\u2011k3v9q0m4x7ta:5.Nw:47",
    "lone surrogate": "2-k3v9q0m4x7ta:5.\ud800w:47",
    # The nonce.
    "nonce of 11": "2-k3v9q0m4x7t:5.Nw:47",
    "nonce of 13": "2-k3v9q0m4x7tab:5.Nw:47",
    "nonce in capitals": "2-K3V9Q0M4X7TA:5.Nw:47",
    "nonce with hyphen": "2-k3v9q0-4x7ta:5.Nw:47",
    "nonce with underscore": "2-k3v9q0_4x7ta:5.Nw:47",
    # The request id.
    "padding": "2-k3v9q0m4x7ta:5.Nw==:47",
    "half a padding": "2-k3v9q0m4x7ta:5.Nw=:47",
    "percent-encoded padding": "2-k3v9q0m4x7ta:5.Nw%3D%3D:47",
    "plus of the other alphabet": "2-k3v9q0m4x7ta:5.Pz8+:47",
    "slash of the other alphabet": "2-k3v9q0m4x7ta:5.Pz8/:47",
    "one character alone": "2-k3v9q0m4x7ta:5.N:47",
    "five characters": "2-k3v9q0m4x7ta:5.MTIzN:47",
    "stray trailing bits after one byte": "2-k3v9q0m4x7ta:5.Nx:47",
    "all trailing bits after one byte": "2-k3v9q0m4x7ta:5.N_:47",
    "stray trailing bits after two bytes": "2-k3v9q0m4x7ta:5.MTJ:47",
    "not UTF-8": "2-k3v9q0m4x7ta:5._w:47",
    "UTF-8 cut short": "2-k3v9q0m4x7ta:5.4oI:47",
    "UTF-8 of a surrogate": "2-k3v9q0m4x7ta:5.7aCA:47",
    "overlong UTF-8 of NUL": "2-k3v9q0m4x7ta:5.wIA:47",
    "request id on the standalone stream": "2-k3v9q0m4x7ta:0.Nw:47",
    "empty request id on the standalone stream": "2-k3v9q0m4x7ta:0.:47",
    # Length.
    "257 characters": "2-k3v9q0m4x7ta:5:" + "9" * 240,
    "a million characters": "2-k3v9q0m4x7ta:5:" + "9" * 1_000_000,
    "a million letters": "a" * 1_000_000,
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_other_spelling_is_malformed(text: str) -> None:
    assert EventCursor.parse(text) is None


# Every cursor, every text.

nonces = st.text(string.digits + string.ascii_lowercase, min_size=12, max_size=12)
# Above 10**18: 19 digits, the largest that a 64-bit counter can spell.
counts = st.one_of(st.integers(1, 20), st.integers(1, 2**63 - 1))
request_ids = st.one_of(st.integers(0, 10**20).map(str), st.text(), st.text(min_size=100, max_size=200))
request_streams = st.builds(StreamId.of_request, counts, request_ids)
cursors = st.builds(
    EventCursor,
    generation=st.builds(Generation, counts, nonces),
    stream=st.one_of(st.just(STANDALONE), request_streams),
    seq=st.one_of(st.just(0), counts),
)
SYMBOLS = string.digits + string.ascii_letters + "_.:-=+ \n\uff11\u0661"


def canonical_or_nothing(text: str) -> bool:
    cursor = EventCursor.parse(text)
    return cursor is None or str(cursor) == text


@given(cursors)
@settings(deadline=None)
def test_cursor_round_trips_whatever_its_request_id(cursor: EventCursor) -> None:
    event_id = str(cursor)
    assert EventCursor.parse(event_id) == cursor
    assert len(event_id) <= 256
    assert set(event_id) <= set(string.digits + string.ascii_letters + "_.:-")


@given(
    st.one_of(st.text(), st.text(SYMBOLS), st.from_regex(r"\d+-[0-9a-z]{12}:\d+(\.[\w-]{0,6})?:\d+", fullmatch=True))
)
@settings(deadline=None)
def test_any_text_is_malformed_or_the_one_spelling_of_its_cursor(text: str) -> None:
    assert canonical_or_nothing(text)


@given(cursors.map(str), st.data())
@settings(deadline=None)
def test_event_id_with_one_character_changed_is_malformed_or_another_cursor(event_id: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(event_id)))
    replaced = data.draw(st.integers(0, 1))
    changed = event_id[:at] + data.draw(st.text(SYMBOLS, max_size=1)) + event_id[at + replaced :]
    assert canonical_or_nothing(changed)
    assert changed == event_id or EventCursor.parse(changed) != EventCursor.parse(event_id)


@given(st.binary(max_size=12))
@example(b"\xff")
@example(b"\xed\xa0\x80")
@settings(deadline=None)
def test_request_part_is_well_formed_exactly_where_it_is_utf8(raw: bytes) -> None:
    try:
        text: str | None = raw.decode()
    except UnicodeDecodeError:
        text = None
    encoded = urlsafe_b64encode(raw).decode().rstrip("=")
    cursor = EventCursor.parse(f"2-k3v9q0m4x7ta:5.{encoded}:47")
    assert cursor == (None if text is None else cursor_at(StreamId(5, text), 47))


# A stream id for any request id.


@pytest.mark.parametrize(
    ("request_id", "carried"),
    [
        ("7", "7"),
        ("", ""),
        ("a" * 120, "a" * 120),
        ("a" * 121, None),
        ("a" * 100_000, None),
        ("é" * 60, "é" * 60),
        ("é" * 60 + "a", None),
        ("\U0001f680" * 30, "\U0001f680" * 30),
        ("\U0001f680" * 31, None),
        ("\ud800", None),
        ("fine until \udfff here", None),
    ],
)
def test_request_id_is_carried_whole_or_left_out(request_id: str, carried: str | None) -> None:
    assert StreamId.of_request(5, request_id) == StreamId(5, carried)


def test_longest_carried_request_id_fits_beside_the_largest_numbers() -> None:
    """120 bytes become 160 characters: 19 + 1 + 12 + 1 + 19 + 1 + 160 + 1 + 19 = 233."""
    largest = 2**63 - 1
    cursor = EventCursor(
        generation=Generation(largest, "zzzzzzzzzzzz"),
        stream=StreamId.of_request(largest, "a" * 120),
        seq=largest,
    )
    event_id = str(cursor)
    assert cursor.stream.request_id == "a" * 120
    assert len(event_id) == 233
    assert EventCursor.parse(event_id) == cursor


def test_empty_request_id_is_not_the_stream_without_one() -> None:
    assert StreamId.of_request(5, "") != StreamId(5)
    assert (str(StreamId.of_request(5, "")), str(StreamId(5))) == ("5.", "5")


def test_executions_of_one_request_id_are_different_streams() -> None:
    assert StreamId.of_request(5, "7") != StreamId.of_request(6, "7")


def test_parts_are_spelled_as_they_appear_in_the_event_id() -> None:
    assert str(GENERATION) == "2-k3v9q0m4x7ta"
    assert str(StreamId(5, "7")) == "5.Nw"
    assert str(STANDALONE) == "0"


def test_cursor_is_a_value() -> None:
    cursor, same = EventCursor.parse("2-k3v9q0m4x7ta:5.Nw:47"), EventCursor.parse("2-k3v9q0m4x7ta:5.Nw:47")
    assert cursor is not None
    assert cursor == same
    assert len({cursor, same}) == 1
    for value, name in ((cursor, "seq"), (cursor.generation, "counter"), (cursor.stream, "ordinal")):
        with pytest.raises(AttributeError):
            setattr(value, name, 48)
