"""A client that stops reading costs its own connection, and neither a call of its session nor an event.

Without a limit it blocks its whole session, pings too, once the sockets' buffers are full (2 to 5 MB), and for as long
as it likes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import anyio
import pytest

from mcp_resumable import MemoryStorage, ResumableEventStore, Retention
from mcp_resumable.session import Connection
from tests.in_loop import until

from .raw_client import CutError, Frame, RawClient, Response, session
from .servers import Call, Hold, RunningServer, serve

pytestmark = pytest.mark.anyio

Kind = Literal["post", "plain", "resumed"]

_SEND_TIMEOUT_SECONDS = 3.0
_RETENTION = Retention(max_events=200_000, max_bytes=64_000_000, max_session_bytes=128_000_000)

# More than a connection swallows here (the sockets' buffers and the server's own 64 kB), and more events than wait on
# the SDK's way to it: whoever sends another is blocked.
_FLOODED_BYTES = 500_000
_FLOODED_EVENTS = 20


@dataclass(frozen=True)
class Scene:
    """A session whose client has stopped reading one connection, and another session.

    Attributes:
        frozen: The connection that is not read.
        cursor: Of the last event that was read from it.
        hold: The tool that speaks in its stream.
        others: A client of another session.
        is_given_up: Whether the server has let go of the frozen connection.
    """

    server: RunningServer
    client: RawClient
    frozen: Response
    cursor: str
    hold: Hold
    others: RawClient
    is_given_up: Callable[[], bool]


@asynccontextmanager
async def frozen_client(kind: Kind) -> AsyncIterator[Scene]:
    store = ResumableEventStore(MemoryStorage(retention=_RETENTION), send_timeout=_SEND_TIMEOUT_SECONDS)
    with anyio.fail_after(120):
        async with serve("fastmcp", store) as server, session(server) as client, session(server) as others:
            frozen = await _call_unread(client)
            frames = await frozen.events(1)
            if kind == "plain":
                frozen = await client.get(receive_buffer=4096)
                frames = await frozen.events(1)
            elif kind == "resumed":
                frozen.reset()
                frozen = await client.get(frames[0].id, receive_buffer=4096)
                frames = await frozen.events(1)
            connection = _newest_connection(store, client)
            yield Scene(
                server=server,
                client=client,
                frozen=frozen,
                cursor=str(frames[-1].id),
                hold=await server.hold("7"),
                others=others,
                is_given_up=lambda: connection not in _connections(store, client),
            )


async def _call_unread(client: RawClient) -> Response:
    params = {"name": "hold", "arguments": {"n": 0, "tag": "7"}}
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    headers = {"content-type": "application/json"}
    return await client.request("POST", body=json.dumps(message).encode(), headers=headers, receive_buffer=4096)


def _connections(store: ResumableEventStore, client: RawClient) -> list[Connection]:
    binding = store.find_binding(client.sid)
    assert binding is not None
    return list(binding.consumers.values())


def _newest_connection(store: ResumableEventStore, client: RawClient) -> Connection:
    return _connections(store, client)[-1]


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server's sockets swallow less than the megabytes that they grow to on the loopback address."""
    create_server = socket.create_server

    def create_small_server(address: tuple[str, int]) -> socket.socket:
        listener = create_server(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)  # What it accepts inherits that.
        return listener

    monkeypatch.setattr(socket, "create_server", create_small_server)


async def flood(scene: Scene, kind: Kind, size: int) -> int:
    """Let the tool send more than a frozen connection takes, and ten more once it is given up; return the number."""

    async def speak(call: Call) -> int:
        send: Callable[[str], Awaitable[None]] = call.announce if kind == "plain" else call.log
        flooded = _FLOODED_BYTES // size + _FLOODED_EVENTS
        for number in range(1, flooded + 11):
            if number == flooded + 1:
                await until(scene.is_given_up)
            await send(f"{number} ".ljust(size, "x"))
        return flooded + 10

    return await scene.hold.do(speak)


async def read_until_cut(response: Response) -> list[Frame]:
    """Return the frames of a connection that the server has given up: it has no end."""
    frames: list[Frame] = []
    with suppress(CutError):
        while (frame := await response.frame()) is not None:
            frames.append(frame)
        pytest.fail("the response has ended as if it were complete")
    return frames


def numbers_of(frames: list[Frame]) -> list[int]:
    return [int(frame.message["params"]["data"].split(" ")[0]) for frame in frames]


@pytest.mark.parametrize("size", [200, 100_000])
@pytest.mark.parametrize("kind", ["post", "plain", "resumed"])
async def test_a_frozen_reader_delays_its_session_by_the_send_timeout_and_no_other(kind: Kind, size: int) -> None:
    async with frozen_client(kind) as scene:
        is_over = anyio.Event()
        sent = 0

        async def flood_until_given_up() -> None:
            nonlocal sent
            sent = await flood(scene, kind, size)
            is_over.set()

        async def keep_pinging(client: RawClient, seconds: float) -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                with anyio.fail_after(seconds):
                    assert "result" in (await client.ping(f"ping {number}")).message
                await anyio.sleep(0.02)  # The flood is to get its share of the processor.

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood_until_given_up)
            tasks.start_soon(keep_pinging, scene.client, _SEND_TIMEOUT_SECONDS + 1)
            # What holds up nobody else takes less time than the frozen reader is given.
            tasks.start_soon(keep_pinging, scene.others, _SEND_TIMEOUT_SECONDS)

        resumed = await scene.client.get(scene.cursor)
        frames = await resumed.events(sent + 1)
        assert numbers_of(frames[1:]) == list(range(1, sent + 1))
        await scene.hold.finish("thawed")
        if kind != "plain":
            (answer,) = await resumed.rest()
            assert answer.answer_text == "thawed"


@pytest.mark.parametrize("kind", ["post", "plain", "resumed"])
async def test_a_frozen_reader_that_thaws_gets_a_beginning_without_a_hole_and_then_the_rest(kind: Kind) -> None:
    """What waits in the sockets when the server gives up is still read, and counts."""
    async with frozen_client(kind) as scene:
        sent = await flood(scene, kind, 100_000)
        read = await read_until_cut(scene.frozen)
        assert numbers_of(read) == list(range(1, len(read) + 1))
        assert len(read) < sent
        resumed = await scene.client.get(read[-1].id if read else scene.cursor)
        rest = (await resumed.events(1 + sent - len(read)))[1:]
        assert numbers_of(read + rest) == list(range(1, sent + 1))
