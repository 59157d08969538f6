"""The contract of a storage, on a real server."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mcp_resumable import Retention
from mcp_resumable.redis import RedisStorage
from mcp_resumable.testing import StorageContract, StorageHarness
from tests.redis.server import Server

_numbers = itertools.count()


class RedisHarness(StorageHarness):
    def __init__(self, server: Server, retention: Retention) -> None:
        self.server = server
        self.prefix = f"contract-{next(_numbers)}"
        self.retention = retention
        self.shift = 0.0
        self.instances = [self.instance()]

    def instance(self) -> RedisStorage:
        return RedisStorage(
            self.server.url, retention=self.retention, prefix=self.prefix, clock_shift=lambda: self.shift
        )

    @property
    def storage(self) -> RedisStorage:
        return self.instances[0]

    async def lose_metadata(self, session_id: str) -> None:
        with self.server.client() as client:
            assert client.delete(f"{{{self.prefix}}}:s:{session_id}") == 1

    async def open_again(self) -> RedisStorage:
        self.instances.append(self.instance())
        return self.instances[-1]

    async def advance(self, seconds: float) -> bool:
        self.shift += seconds
        return True


class TestRedisStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: Server) -> None:
        self.server = redis_server

    @asynccontextmanager
    async def harness(self, retention: Retention) -> AsyncIterator[RedisHarness]:
        harness = RedisHarness(self.server, retention)
        try:
            yield harness
        finally:
            for instance in harness.instances:
                await instance.aclose()
