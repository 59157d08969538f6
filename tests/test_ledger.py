"""The line that each refusal leaves in the log, and its fields for structured loggers."""

from __future__ import annotations

import logging

import pytest

from mcp_resumable import ResumableEventStore
from tests.sdk_host import Client, hosting

pytestmark = pytest.mark.anyio

FIELDS = ["reason", "outcome", "session", "stream", "cursor"]


def fields_of(record: logging.LogRecord) -> list[object]:
    return [vars(record)[f"mcp_resumable_{name}"] for name in FIELDS]


async def cursor_of_call(client: Client) -> str:
    request = await client.call(7)
    frame = await request.frame()
    assert frame is not None
    assert frame.id is not None
    return frame.id


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mcp_resumable")


def only_record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = [record for record in caplog.records if record.name == "mcp_resumable"]
    return record


async def test_refusal_is_logged_with_session_stream_reason_and_cursor(caplog: pytest.LogCaptureFixture) -> None:
    store = ResumableEventStore()
    async with hosting(store) as host:
        client = await host.open()
        cursor = await cursor_of_call(client)
        await store.advance_generation(client.session_id)
        assert await client.get(cursor).reason() == "generation_mismatch"
    record = only_record(caplog)
    # "Nw" is the request id 7; `initialize` opened the first stream.
    assert cursor.endswith(":2.Nw:0")
    assert fields_of(record) == ["generation_mismatch", "reset", client.session_id, "2.Nw", cursor]
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        f"Refused to resume: generation_mismatch (session '{client.session_id}', stream 2.Nw, Last-Event-ID '{cursor}')"
    )


async def test_invalid_claim_is_a_warning_and_names_no_stream_where_it_is_malformed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        assert await client.get("nonsense").reason() == "malformed_event_id"
    record = only_record(caplog)
    assert fields_of(record) == ["malformed_event_id", "invalid", client.session_id, None, "nonsense"]
    assert record.levelname == "WARNING"


async def test_claim_on_an_ended_session_is_logged_alike(caplog: pytest.LogCaptureFixture) -> None:
    store = ResumableEventStore()
    async with hosting(store) as host:
        client = await host.open()
        cursor = await cursor_of_call(client)
        await store.end_session(client.session_id)
        assert await client.get(cursor).reason() == "session_not_found"
    assert fields_of(only_record(caplog)) == ["session_not_found", "gone", client.session_id, "2.Nw", cursor]


async def test_refused_request_has_the_same_fields(caplog: pytest.LogCaptureFixture) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        await client.call(7)
        assert await client.post(7).reason() == "duplicate_request_id"
    assert fields_of(only_record(caplog)) == ["duplicate_request_id", "invalid", client.session_id, None, None]


@pytest.mark.parametrize(
    ("presented", "shown"),
    [
        ("a\nb\r\x00\x1b[31m", r"a\nb\r\x00\x1b[31m"),
        ("\x7f\x85\xa0é", r"\x7f\x85\xa0\xe9"),
        ("back\\slash", r"back\\slash"),
        ("x" * 10_000, "x" * 256),
        ("é" * 10_000, r"\xe9" * 256),
    ],
)
async def test_hostile_cursor_is_escaped_and_cut_in_the_fields_too(
    presented: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        assert await client.get(presented).reason() == "malformed_event_id"
    record = only_record(caplog)
    assert vars(record)["mcp_resumable_cursor"] == shown
    assert record.getMessage().isprintable()


async def test_hostile_request_id_is_named_by_its_spelling_in_the_event_id(caplog: pytest.LogCaptureFixture) -> None:
    store = ResumableEventStore()
    async with hosting(store) as host:
        client = await host.open()
        request = client.post("\n\x1b[2J")
        frame = await request.frame()
        assert frame is not None
        await store.advance_generation(client.session_id)
        assert await client.get(frame.id).reason() == "generation_mismatch"
    assert vars(only_record(caplog))["mcp_resumable_stream"] == "2.ChtbMko"
