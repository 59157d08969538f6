"""What the checker finds of real servers, pinned. Other people's software, so only `make peers` runs it.

Each failure was confirmed by hand with curl on the versions in `VERSIONS`, given up after three seconds where a
connection stayed open. A "call" is `tools/call` of `count`, with a progress token of its own; "GET id" is a GET with
that `Last-Event-ID`. "Python" is the SDK with the example store on both lines, mcp-persist and fastmcp; "TypeScript"
the other.

- `unknown-id`: GET of a made-up uuid4. Python: 200, 0 bytes, closed. TypeScript: 200, 0 bytes, open.
- `malformed-id`: GET `not an event id`: the same.
- `future-id`: mcp-persist, GET `9999999`: 200, 0 bytes, closed. The others' ids end in a random part.
- `completed-stream`: a call to its end, then GET of its third id. Python: the rest, another priming event, open; and
  GET of the answer's id: a priming event, open. TypeScript: the rest, open; 0 bytes, open.
- `reused-request-id`: two calls with request id 7, then GET of the third id of the first. Python: 6 messages and the
  answer of the first, then 8 and the answer of the second. TypeScript: those of the first only, open, and in any
  order where they were sent within a millisecond: the store sorts ids that end in a random part.
- `another-session`: a call in session A, then GET of its third id in session B. The example store: A's messages, A's
  answer, open. mcp-persist and fastmcp: 200, 0 bytes, closed, so the client waits. TypeScript: A's messages, A's
  answer, open.
- `take-over`: a call, left open; after 0.5 s GET of its last id. Python: 200, 0 bytes, closed; again a second later:
  the rest and the answer, which the first connection had too.
- `two-gets`: a GET, left open, and another. Both: 409, "Only one SSE stream is allowed per session".
- `standalone-cursor`: a GET. Both: no byte within a second.
- `frozen-reader`: a call that sends 9 MB, not read, with a receive buffer of 4 kB; after six seconds a ping. Python:
  its priming event, and no result in ten seconds. TypeScript answers at once.
- `polling`: mcp-persist, a call with `close_after`: closed, and no `retry` in what came.
- `no-loss-under-load`: a call of 2,000 messages in two seconds, cut after 0.4 s and resumed for 0.4 s until the
  answer, twice each. Example store: 8 to 11 messages never came; mcp-persist: 9 and 12; fastmcp: 7 and 14.
  TypeScript: all came, one or two of them in another order.
"""

from __future__ import annotations

import os

import anyio
import pytest

from mcp_resumable.checker import CHECKS

from . import peers

pytestmark = pytest.mark.skipif(
    "MCP_RESUMABLE_PEERS" not in os.environ,
    reason="NOT RUN: the checked servers are other people's software; `make peers` runs this",
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
