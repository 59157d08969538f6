"""What the checker finds of real servers, pinned. Other people's software, so only `make checked-servers` runs it.

Each failure was confirmed by hand with curl on the versions in `VERSIONS`: initialize, then as follows, where a call is
`tools/call` of `count` with a progress token of its own, and `GET id` a GET with that `Last-Event-ID`. "Open" is a
connection that was given up after three seconds.

| check | Python SDK 1.x and 2.x, mcp-persist, fastmcp | TypeScript SDK |
|---|---|---|
| `unknown-id` | GET of a made-up uuid4: 200, 0 bytes, closed | 200, 0 bytes, open |
| `malformed-id` | GET `not an event id`: 200, 0 bytes, closed | 200, 0 bytes, open |
| `future-id` | mcp-persist, GET `9999999`: 200, 0 bytes, closed | ids end in a random part |
| `completed-stream` | call to its end, GET of its third id: the rest, a priming event, open | the rest, open |
| | GET of the id of the answer: a priming event, open | 0 bytes, open |
| `reused-request-id` | two calls with id 7, GET of the third id of the first: 6 messages and the answer of the first, then 8 and the answer of the second | those of the first, open |
| `another-session` | session B, GET of an id of A: the SDK: A's messages and answer; the others: 200, 0 bytes, closed | A's messages and answer |
| `take-over` | call, left open; GET of its third id: 200, 0 bytes, closed at once; again, a second later: the rest, after the first connection had it too | passed |
| `two-gets` | a GET, left open; another: 409, "Only one SSE stream is allowed per session" | the same |
| `standalone-cursor` | a GET: nothing in a second | the same |
| `frozen-reader` | a call that sends 9 MB, not read, with a receive buffer of 4 kB; after six seconds a ping: its priming event, and no result in ten seconds | answered at once |
| `polling` | mcp-persist, a call with `close_after`: no `retry` in what came | passed |
| `no-loss-under-load` | a call of 2,000 messages, cut after 0.5 s and resumed for 0.5 s until the answer | the same, in another order |
"""

from __future__ import annotations

import os

import anyio
import pytest

from mcp_resumable.checker import CHECKS

from . import peers

pytestmark = pytest.mark.skipif(
    "MCP_RESUMABLE_PEERS" not in os.environ,
    reason="NOT RUN: the checked servers are other people's software; `make checked-servers` runs this",
)


@pytest.fixture(scope="session")
def run() -> peers.Run:
    """One run for all tests."""
    result = anyio.run(peers.run)
    peers.publish(result)
    return result


def _require(run: peers.Run, peer: str) -> None:
    if (reason := run.not_run.get(peer)) is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.parametrize("peer", peers.PEERS)
def test_the_versions_are_those_whose_outcomes_are_pinned(run: peers.Run, peer: str) -> None:
    _require(run, peer)
    assert run.versions[peer] == peers.VERSIONS[peer]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("peer", peers.PEERS)
def test_a_server_does_what_is_known_of_it(run: peers.Run, peer: str, check: str) -> None:
    _require(run, peer)
    result = run.result(peer, check)
    known = peers.expected(peer, check)
    assert result.outcome == known or (known == "varies" and result.outcome in ("passed", "failed")), result
