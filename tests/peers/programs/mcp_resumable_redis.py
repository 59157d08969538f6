"""`mcp-resumable fixture`, either line of the SDK, with the store on a Valkey of its own."""

from __future__ import annotations

import signal
import sys

from mcp_resumable import ResumableEventStore, Retention
from mcp_resumable.checker.fixture import fixture_app
from mcp_resumable.redis import RedisStorage
from tests.redis.server import serving

from .serving import serve


def main() -> None:
    # uvicorn stops first, then raises the signal again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with serving() as redis:
        storage = RedisStorage(redis.url, retention=Retention(max_bytes=16 * 2**20, completed_seconds=60))
        serve(fixture_app(ResumableEventStore(storage, send_timeout=2.0)))


if __name__ == "__main__":
    main()
