"""Every cell of the client matrix, pinned. It takes minutes and other packages, so only `make clients` runs it."""

from __future__ import annotations

import os

import anyio
import pytest

from . import matrix
from .stories import STORIES, expected, is_promised

pytestmark = pytest.mark.skipif(
    os.environ.get("MCP_RESUMABLE_CLIENTS") != "1",
    reason="NOT RUN: the client matrix needs other packages, and minutes; `make clients` runs it",
)


@pytest.fixture(scope="session")
def run() -> matrix.Run:
    """One run for all tests."""
    result = anyio.run(matrix.run)
    matrix.publish(result)
    return result


def test_nothing_went_wrong_beside_the_clients(run: matrix.Run) -> None:
    assert run.faults == []


@pytest.mark.parametrize(("server", "client", "story"), matrix.cells())
def test_a_client_does_what_is_known_of_it(run: matrix.Run, server: str, client: str, story: str) -> None:
    if (reason := run.not_run.get(client)) is not None:
        if matrix.must_be_complete():
            pytest.fail(reason)
        pytest.skip(reason)
    verdict = run.verdict(server, client, story)
    assert verdict == expected(client, story)
    assert is_promised(STORIES[story], verdict)
