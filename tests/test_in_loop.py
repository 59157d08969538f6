"""What the tests serve and forward with leaves nothing open, whatever the turn of the loop in which it is stopped."""

from __future__ import annotations

import gc
import socket
import warnings
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from .clients.proxy import cutting_proxy
from .e2e.proxy import proxied
from .in_loop import serving

# Turns of the loop from a connection to its last step, and some more.
TURNS = 10


async def app(_scope: Any, _receive: Any, _send: Any) -> None:
    """Answers nothing."""


def serve(_port: int) -> AbstractAsyncContextManager[Any]:
    return serving(app, lifespan="off", log_level="critical")


@pytest.mark.parametrize("listen", [serve, proxied, cutting_proxy])
def test_what_connects_while_it_is_stopped_is_closed(
    listen: Callable[[int], AbstractAsyncContextManager[Any]],
) -> None:
    async def stop_after(turns: int, server_port: int) -> None:
        async with listen(server_port) as listening:
            port = listening if isinstance(listening, int) else listening.port
            with socket.create_connection(("127.0.0.1", port)):
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()

    gc.collect()  # What others have left is not of this test.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with socket.create_server(("127.0.0.1", 0)) as behind:
            for turns in range(TURNS):
                anyio.run(stop_after, turns, behind.getsockname()[1])
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
