"""What a hostile client can put on the wire, through the SDK's real session manager.

Where the SDK answers (a body that is no JSON-RPC, an unknown session), the same requests are sent to a server without
an event store, and the answers compared: the layer changes nothing.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, Literal, cast

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_resumable import ResumableEventStore, ResumptionLayer
from tests.sdk_host import HEADERS, Client, Frame, Host, Request, hosting

IS_1X = version("mcp").startswith("1.")
HOSTILE_VALUES = 10_000
SEED = 20251125
MAX_LOG_LINE = 2_000  # two values of at most 256 characters, escaped to at most four each

Rejection = Literal["status", "stream"]


class RawRequest(Request):
    """A request whose headers and body arrive byte for byte as given; `gone`: the client leaves after the chunks."""

    def __init__(
        self,
        method: str,
        headers: Sequence[tuple[bytes, bytes]],
        chunks: Iterable[bytes] = (b"",),
        *,
        gone: bool = False,
    ) -> None:
        super().__init__(method, {}, b"")
        self.scope["headers"] = list(headers)
        self._body = None
        self._chunks = deque(chunks)
        self._leaves = gone

    async def receive(self) -> dict[str, Any]:
        if self._chunks:
            chunk = self._chunks.popleft()
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks) or self._leaves}
        if self._leaves:
            return {"type": "http.disconnect"}
        return await super().receive()

    @property
    def rest(self) -> bytes:
        return self._rest


def raw_headers(client: Client, *more: tuple[bytes, bytes], without: bytes = b"") -> list[tuple[bytes, bytes]]:
    headers = {**HEADERS, "mcp-session-id": client.session_id, "mcp-protocol-version": client.version}
    return [(n.encode(), v.encode()) for n, v in headers.items() if n.encode() != without] + list(more)


def send(
    host: Host,
    method: str,
    headers: Sequence[tuple[bytes, bytes]],
    chunks: Iterable[bytes] = (b"",),
    *,
    gone: bool = False,
) -> RawRequest:
    request = RawRequest(method, headers, chunks, gone=gone)
    host.requests.append(request)
    host.task_group.start_soon(request.run, host.manager.handle_request)
    return request


async def present(client: Client, value: bytes) -> RawRequest:
    """Send a GET with this `Last-Event-ID` and wait for its end."""
    request = send(client.host, "GET", raw_headers(client, (b"last-event-id", value)))
    await request.until_done()
    client.host.requests.remove(request)
    return request


async def with_call(host: Host, *texts: str) -> tuple[Client, list[Frame]]:
    """Open a session whose call 7 has emitted `texts`, and return what its client received of it."""
    client = await host.open()
    request = await client.call(7)
    await client.tool(7).emit(*texts)
    frames: list[Frame] = []
    while len(frames) < len(texts) + 1:
        frame = await request.frame()
        assert frame is not None
        frames.append(frame)
    request.disconnect()
    await request.until_done()
    return client, frames


def ids_of(frames: Iterable[Frame]) -> list[str]:
    ids = [frame.id for frame in frames if frame.id is not None]
    assert ids
    return ids


def hostile_values(count: int, own: Sequence[str], foreign: Sequence[str], valid: set[str]) -> list[bytes]:
    """Return values that this session never issued, none empty, all but by chance different."""
    rng = random.Random(SEED)
    nonce = own[0].partition(":")[0]
    digits = ["\u0661", "\u00b2", "\u00b9", "\uff11", "\u2460", "\u07c1", "\U0001d7cf"]

    def noise() -> bytes:
        return rng.randbytes(rng.randint(1, 400))

    def controls() -> bytes:
        at = rng.randrange(len(own[0]) + 1)
        control = rng.choice([b"\r\n", b"\n", b"\r", b"\x00", b"\xff", b"\x7f"])
        return own[0][:at].encode() + control + own[0][at:].encode()

    def injection() -> bytes:
        return own[-1].encode() + b"\r\nset-cookie: a=b\r\n\r\ndata: {}\n\n" + rng.randbytes(4)

    def long() -> bytes:
        return rng.choice([own[-1].encode(), b"9", b"\xc3\xa9"]) * rng.randint(300, 500) + b"x"

    def look_alike() -> bytes:
        digit = rng.choice(digits)
        encoding = "latin-1" if ord(digit) < 256 and rng.random() < 0.5 else "utf-8"
        return f"{own[-1].rpartition(':')[0]}:{rng.choice(['', '1', '0'])}".encode() + digit.encode(encoding)

    def numbers() -> bytes:
        number = rng.choice(["-1", "+1", "01", "1.0", "1e3", " 1", "1 ", "0x1", "--1", str(10 ** rng.randint(3, 240))])
        spelled = [number, f"{nonce}:0:{number}", f"{nonce}:{number}.Nw:1", f"{number}-{nonce[2:]}:0:1"]
        return rng.choice(spelled).encode()

    def other_stream() -> bytes:
        return f"{nonce}:{rng.randint(3, 10**6)}.{rng.choice(['Nw', 'MQ', 'aW5pdA', ''])}:{rng.randint(0, 9)}".encode()

    def flipped() -> bytes:
        value = bytearray(rng.choice(own).encode())
        value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        return bytes(value)

    def of_another_session() -> bytes:
        return rng.choice(foreign).encode()

    def other_nonce() -> bytes:
        drawn = "".join(rng.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=12))
        return f"{rng.randint(1, 3)}-{drawn}:{own[-1].partition(':')[2]}".encode()

    kinds = [
        noise, controls, injection, long, look_alike, numbers, other_stream, flipped, of_another_session, other_nonce,
    ]  # fmt: skip
    values = [b"x" * 65_536, b"\x00", b"\r\n", own[-1].encode() * 2_000, b"\xf0\x9f\x92\xa9", b"null", b"{}", b"*"]
    while len(values) < count:
        value = kinds[len(values) % len(kinds)]()
        if value.decode("latin-1") not in valid:
            values.append(value)
    return values


def valid_ids(client: Client, frames: Sequence[Frame]) -> set[str]:
    """Return the spelling of every place in this session's streams, issued or not."""
    generation = ids_of(frames)[0].partition(":")[0]
    opened = ids_of(client.opened_with)[-1].rpartition(":")[0]
    called = ids_of(frames)[-1].rpartition(":")[0]
    marks = {opened: 1, called: len(frames) - 1, f"{generation}:0": 0}
    return {f"{stream}:{seq}" for stream, mark in marks.items() for seq in range(mark + 1)}


def check_refusal(request: RawRequest, value: bytes, session_id: str, generation: str) -> str:
    """Return the reason of a refusal by status, after checking all that a client sees of it."""
    assert request.status in (400, 409), value[:80]
    assert request.headers["content-type"] == "application/json"
    assert request.headers["mcp-session-id"] == session_id
    assert request.rest.isascii()
    body = json.loads(request.rest)
    assert body["id"] is None
    assert body["error"]["data"]["generation"] == generation
    if len(value) > len(generation):
        text = value.decode("latin-1")
        assert text not in request.rest.decode()
        assert json.dumps(text)[1:-1] not in request.rest.decode()
    reason = body["error"]["data"]["reason"]
    assert isinstance(reason, str)
    return reason


@pytest.mark.no_cover
def test_ten_thousand_hostile_cursors_are_each_refused_with_a_reason_and_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.INFO, logger="mcp_resumable")
    reasons: set[str] = set()

    async def main() -> None:
        store = ResumableEventStore()
        async with hosting(store) as host:
            client, frames = await with_call(host, "a", "b")
            _, foreign = await with_call(host, "secret", "secret")
            own = ids_of(frames)
            generation = own[0].partition(":")[0]
            values = hostile_values(HOSTILE_VALUES, own, ids_of(foreign), valid_ids(client, frames))
            caplog.clear()
            for value in values:
                request = await present(client, value)
                reason = check_refusal(request, value, client.session_id, generation)
                reasons.add(reason)
                (record,) = caplog.records
                line = record.getMessage()
                fields = [str(value) for name, value in vars(record).items() if name.startswith("mcp_resumable_")]
                assert len(fields) == 5
                assert all(re.fullmatch(r"[ -~]+", text) for text in (line, *fields))
                assert max(map(len, fields)) < MAX_LOG_LINE
                assert len(line) <= MAX_LOG_LINE
                assert reason in line
                caplog.clear()
            assert store.stats().open_tails == 0
            assert sum(store.stats().decisions.values()) == HOSTILE_VALUES
            assert (await client.ping())["result"] == {}
            client.tool(7).finish()
            assert [f.step for f in await client.get(own[1]).frames() if f.data] == ["b", "answer"]

    anyio.run(main)
    assert reasons >= {"malformed_event_id", "unrecognized_generation", "future_event_id"}


def test_a_thousand_hostile_cursors_get_no_event_of_anyone_where_refusals_are_streams() -> None:
    async def main() -> None:
        async with hosting(ResumableEventStore(rejection="stream")) as host:
            client, frames = await with_call(host, "secret of mine", "b")
            _, foreign = await with_call(host, "secret of another", "secret of another")
            own = ids_of(frames)
            for value in hostile_values(1_000, own, ids_of(foreign), valid_ids(client, frames)):
                request = await present(client, value)
                assert b"secret" not in request.rest
                if request.status == 200:
                    (answer,) = await request.frames()
                    assert answer.id is None
                    assert answer.message["error"]["data"]["outcome"] == "invalid"
                else:
                    check_refusal(request, value, client.session_id, own[0].partition(":")[0])
            assert (await client.ping())["result"] == {}
            client.tool(7).finish()
            assert [f.step for f in await client.get(own[1]).frames() if f.data] == ["b", "answer"]

    anyio.run(main)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=20, max_size=20))
def test_any_bytes_as_a_cursor_are_malformed_and_the_session_lives(values: list[bytes]) -> None:
    async def main() -> None:
        async with hosting(ResumableEventStore()) as host:
            client = await host.open()
            for value in values:
                assert await (await present(client, value)).reason() == "malformed_event_id"
            assert (await client.ping())["result"] == {}

    anyio.run(main)


@pytest.mark.anyio
@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_id_of_another_session_is_indistinguishable_from_one_never_issued(rejection: Rejection) -> None:
    async with hosting(ResumableEventStore(rejection=rejection)) as host:
        client, _ = await with_call(host, "a")
        other, foreign = await with_call(host, "a", "b")
        for real in [*ids_of(foreign), *ids_of(other.opened_with)]:
            generation, _, place = real.partition(":")
            counter, _, nonce = generation.partition("-")
            never = f"{counter}-{nonce[::-1]}:{place}"
            first, second = await present(client, real.encode()), await present(client, never.encode())
            assert (first.status, first.rest, first.headers) == (second.status, second.rest, second.headers)
            assert b"unrecognized_generation" in first.rest


# Bodies.

PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'


def ping_with_id(request_id: str) -> bytes:
    return b'{"jsonrpc":"2.0","id":' + request_id.encode() + b',"method":"ping"}'


BODIES: dict[str, tuple[bytes, ...]] = {
    "empty": (b"",),
    "not JSON": (b"{",),
    "not UTF-8": (b'{"jsonrpc":"2.0","id":"\xff","method":"ping"}',),
    "UTF-16": (PING.decode().encode("utf-16"),),
    "BOM": (b"\xef\xbb\xbf" + PING,),
    "deep lists": (b"[" * 100_000,),
    "deep objects": (b'{"a":' * 100_000,),
    "deep params": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}}",),
    "scalar": (b"1",),
    "null": (b"null",),
    "string": (b'"ping"',),
    "list": (b"[" + PING + b"]",),
    "empty list": (b"[]",),
    "duplicate id": (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}',),
    "duplicate method": (b'{"jsonrpc":"2.0","id":1,"method":1,"method":"ping"}',),
    "id true": (ping_with_id("true"),),
    "id null": (ping_with_id("null"),),
    "id float": (ping_with_id("1.5"),),
    "id integral float": (ping_with_id("1.0"),),
    "id NaN": (ping_with_id("NaN"),),
    "id object": (ping_with_id('{"a":1}'),),
    "id list": (ping_with_id("[1]"),),
    "id 64 KB": (ping_with_id('"' + "i" * 65_536 + '"'),),
    "id lone surrogate": (ping_with_id('"\\ud800"'),),
    "id huge": (ping_with_id("9" * 200),),
    "id too huge for int": (ping_with_id("9" * 5_000),),
    "id negative": (ping_with_id("-1"),),
    "method number": (b'{"jsonrpc":"2.0","id":1,"method":1}',),
    "method null": (b'{"jsonrpc":"2.0","id":1,"method":null}',),
    "no method": (b'{"jsonrpc":"2.0","id":1}',),
    "answer to nothing": (b'{"jsonrpc":"2.0","id":1,"result":{}}',),
    "wrong version": (b'{"jsonrpc":"1.0","id":1,"method":"ping"}',),
    "unknown method": (b'{"jsonrpc":"2.0","id":1,"method":"\\r\\n"}',),
    "bytes one by one": tuple(PING[n : n + 1] for n in range(len(PING))),
    "empty chunks": (b"", *(PING[n : n + 1] for n in range(len(PING))), b"", b""),
    "over the limit": (b" " * (4 * 1024 * 1024), PING),
    "over the limit in one": (b" " * (4 * 1024 * 1024) + PING,),
}


async def answer_to(client: Client, chunks: Iterable[bytes], *, gone: bool = False) -> tuple[int, object]:
    """Return status and what the client sees of the answer, without what differs between any two sessions."""
    request = send(client.host, "POST", raw_headers(client), chunks, gone=gone)
    await request.until_done()
    if request.headers.get("content-type", "").startswith("text/event-stream"):
        return request.status, [frame.data for frame in await request.frames() if frame.data]
    return request.status, request.rest.replace(client.session_id.encode(), b"")


@pytest.mark.anyio
async def test_hostile_body_is_answered_as_without_the_store_and_leaves_nothing() -> None:
    store = ResumableEventStore()
    async with hosting(store) as host, hosting(cast(ResumableEventStore, None)) as plain_host:
        client, plain = await host.open(), await plain_host.open()
        binding = store.find_binding(client.session_id)
        assert binding is not None
        for name, chunks in BODIES.items():
            assert await answer_to(client, chunks) == await answer_to(plain, chunks), name
            assert binding.calls == {}, name
            assert (await client.ping())["result"] == {}, name


@pytest.mark.anyio
async def test_client_that_leaves_in_mid_body_leaves_nothing() -> None:
    store = ResumableEventStore()
    async with hosting(store) as host:
        client = await host.open()
        binding = store.find_binding(client.session_id)
        assert binding is not None
        for chunks in ((PING[:10],), (PING,), ()):
            request = send(host, "POST", raw_headers(client), chunks, gone=True)
            await request.until_done()
            assert request.status not in (200, 202)
        assert binding.calls == {}
        assert (await client.ping(1))["result"] == {}


@pytest.mark.anyio
async def test_hostile_request_ids_give_event_ids_that_are_header_safe_and_resume() -> None:
    hostile: list[int | str] = [
        "\u00e9\u2603\U0001f4a9", "x" * 300, "\u00e9" * 300, "", ":", "0", "\r\n", "\x00", "1.0", "01", "-1", " ",
        "\u0661", "2-aaaaaaaaaaaa:0:0", "_GET", 0, -5, 2**53, 10**30,
    ]  # fmt: skip
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        for request_id in hostile:
            request = await client.call(request_id)
            tool = client.tool(request_id)
            await tool.emit("a")
            tool.finish()
            frames = await request.frames()
            # The 1.x SDK takes an empty request id for none, and sends the progress on the standalone stream.
            assert [frame.seq for frame in frames] == ([0, 1] if IS_1X and request_id == "" else [0, 1, 2]), request_id
            for frame in frames:
                assert re.fullmatch(r"[0-9A-Za-z_.:-]{1,256}", frame.id or "")
            assert frames[-1].message["id"] == request_id
            for place in range(len(frames) - 1):
                resumed = await client.get(frames[place].id).frames()
                assert [frame.data for frame in resumed if frame.data] == [f.data for f in frames[place + 1 :]]


@pytest.mark.anyio
async def test_call_whose_id_is_the_sdks_name_of_the_standalone_stream_does_not_write_to_that_stream() -> None:
    """Such a call was answered in the standalone stream, its own stayed open, and its id was never free again."""
    store = ResumableEventStore()
    async with hosting(store) as host:
        client = await host.open()
        refused = client.request("POST", body={"jsonrpc": "2.0", "id": "_GET_stream", "method": "ping"})
        assert (await refused.json())["id"] == "_GET_stream"
        assert await refused.reason() == "duplicate_request_id"
        description = await store.describe(client.session_id)
        assert description is not None
        standalone = description.streams[0]
        assert (standalone.stream, standalone.high_water_mark) == ("0", 0)
        assert all(stream.is_terminal for stream in description.streams[1:])


# Headers and methods.

HOSTILE_SESSION_IDS = (
    b"", b" ", b"\r\n", b"\x00", b"\xff\xfe", b"\xc3\xa9", b"x" * 65_536, b"../..", b"null", b"1", b"-1", b"*",
)  # fmt: skip


@pytest.mark.anyio
async def test_hostile_session_id_is_answered_as_without_the_store() -> None:
    async with hosting(ResumableEventStore()) as host, hosting(cast(ResumableEventStore, None)) as plain_host:
        client, plain = await host.open(), await plain_host.open()
        for method in ("GET", "POST", "DELETE"):
            for hostile in HOSTILE_SESSION_IDS:
                answers = []
                for one in (client, plain):
                    named = (b"mcp-session-id", hostile)
                    headers = raw_headers(one, named, (b"last-event-id", b"1"), without=b"mcp-session-id")
                    request = send(one.host, method, headers, (PING,))
                    await request.until_done()
                    answers.append((request.status, request.rest))
                assert answers[0] == answers[1], (method, hostile)
                assert answers[0][0] in (400, 404), (method, hostile)
        assert (await client.ping())["result"] == {}


@pytest.mark.anyio
async def test_session_id_is_compared_as_a_whole() -> None:
    async with hosting(ResumableEventStore()) as host:
        client, frames = await with_call(host, "a")
        own, cursor = client.session_id.encode(), (b"last-event-id", ids_of(frames)[0].encode())
        for near in (own[:-1], own + b"0", own.upper(), b" " + own, own + b",", own + b"\x00"):
            headers = raw_headers(client, (b"mcp-session-id", near), cursor, without=b"mcp-session-id")
            request = send(host, "GET", headers)
            await request.until_done()
            assert request.status == (404 if near != own else 200)
        assert (await client.ping())["result"] == {}


@pytest.mark.anyio
@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_of_repeated_headers_sdk_and_layer_read_the_same_one(rejection: Rejection) -> None:
    async with hosting(ResumableEventStore(rejection=rejection)) as host:
        client, frames = await with_call(host, "a")
        other, foreign = await with_call(host, "secret")
        client.tool(7).finish()
        good, bad = (b"last-event-id", ids_of(frames)[0].encode()), (b"last-event-id", b"bad")
        resumed = send(host, "GET", raw_headers(client, good, bad))
        assert [frame.step for frame in await resumed.frames() if frame.data] == ["a", "answer"]
        assert await send(host, "GET", raw_headers(client, bad, good)).reason() == "malformed_event_id"
        # Own session first, another's second, with that one's cursor: the other's events stay where they are.
        both = raw_headers(
            client, (b"mcp-session-id", other.session_id.encode()), (b"last-event-id", ids_of(foreign)[0].encode())
        )
        request = send(host, "GET", both)
        await request.until_done()
        assert b"secret" not in request.rest
        assert b"unrecognized_generation" in request.rest
        for one in (client, other):
            assert (await one.ping())["result"] == {}


@pytest.mark.anyio
async def test_other_methods_are_answered_as_without_the_store() -> None:
    async with hosting(ResumableEventStore()) as host, hosting(cast(ResumableEventStore, None)) as plain_host:
        client, plain = await host.open(), await plain_host.open()
        for method in ("HEAD", "PUT", "PATCH", "OPTIONS", "get", "BREW"):
            answers = []
            for one in (client, plain):
                request = send(one.host, method, raw_headers(one, (b"last-event-id", b"1")), (PING,))
                await request.until_done()
                answers.append((request.status, request.rest.replace(one.session_id.encode(), b"")))
            assert answers[0] == answers[1], method
            assert answers[0][0] == 405, method
        assert (await client.ping())["result"] == {}


@pytest.mark.anyio
async def test_hostile_protocol_version_is_answered_as_without_the_store() -> None:
    async with hosting(ResumableEventStore()) as host, hosting(cast(ResumableEventStore, None)) as plain_host:
        client, plain = await host.open(), await plain_host.open()
        for hostile in (b"zzz", b"2026-07-28", b"9999-99-99", b"1999-01-01", b"\xff", b"2025-11-25\r\n", b"x" * 65_536):
            for method in ("GET", "POST", "PUT"):
                answers = []
                for one in (client, plain):
                    named = (b"mcp-protocol-version", hostile)
                    headers = raw_headers(one, named, (b"last-event-id", b"1"), without=b"mcp-protocol-version")
                    request = send(one.host, method, headers, (PING,))
                    await request.until_done()
                    answers.append((request.status, request.rest.replace(one.session_id.encode(), b"")))
                assert answers[0] == answers[1], (method, hostile)
        assert (await client.ping())["result"] == {}


@pytest.mark.anyio
async def test_initialize_that_names_a_revision_the_sdk_does_not_know_is_answered_as_without_the_store() -> None:
    """A 1.x SDK does not look at the version header of `initialize`, so what it opens is a session like any other."""
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).encode()
    async with hosting(ResumableEventStore()) as host, hosting(cast(ResumableEventStore, None)) as plain_host:
        statuses = []
        for one in (host, plain_host):
            request = one.start("POST", {**HEADERS, "mcp-protocol-version": "2026-07-28"}, body)
            await request.until_done()
            statuses.append(request.status)
        assert statuses[0] == statuses[1]


@pytest.mark.anyio
async def test_other_protocols_pass_through_untouched() -> None:
    passed: list[tuple[object, object, object]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        passed.append((scope, receive, send))

    async def receive() -> dict[str, Any]:
        raise AssertionError("the layer reads what is not its business")

    async def send_nothing(_message: object) -> None:
        raise AssertionError("the layer answers what is not its business")

    layer = ResumptionLayer(app, ResumableEventStore())
    for scope in ({"type": "websocket", "headers": []}, {"type": "lifespan"}, {"type": "of the future"}):
        before = dict(scope)
        await layer(scope, receive, send_nothing)
        assert passed.pop() == (scope, receive, send_nothing)
        assert scope == before
    await wait_all_tasks_blocked()
    assert passed == []
