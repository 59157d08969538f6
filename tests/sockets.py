"""What the proxies of the tests do to the sockets under anyio's streams, on asyncio's own loop and on uvloop."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from anyio.abc import SocketAttribute, SocketStream

__all__ = ["reset_when_closed", "set_option", "shut_down"]


def set_option(stream: SocketStream, option: int, value: int | bytes) -> None:
    """Set an option of a connection's socket.

    Raises:
        OSError: When the connection is closed.
    """
    try:
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, option, value)
    except (AttributeError, ValueError) as exc:  # So uvloop says it.
        raise OSError("the connection is closed") from exc


def reset_when_closed(stream: SocketStream) -> None:
    """Have a connection end with an RST, if it is still open."""
    with suppress(OSError):
        set_option(stream, socket.SO_LINGER, struct.pack("ii", 1, 0))


def shut_down(stream: SocketStream) -> None:
    """End both directions of a connection, if it is still open: who reads it is woken."""
    # By a socket of our own: those that uvloop gives out do not do it. The AttributeError is uvloop's too.
    with (
        suppress(OSError, AttributeError),
        socket.socket(fileno=os.dup(stream.extra(SocketAttribute.raw_socket).fileno())) as duplicate,
    ):
        duplicate.shutdown(socket.SHUT_RDWR)
