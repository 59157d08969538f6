"""One server for all tests of this folder; each test uses a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loops import ASYNCIO
from tests.redis.server import Server, serving


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(params=[pytest.param(ASYNCIO, id="asyncio")])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    # redis-py's asynchronous client is for asyncio.
    return request.param
