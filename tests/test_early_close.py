"""A call whose connection is closed before its first frame was written: its client must have a cursor all the same.

A stream that ends without one cannot be resumed: the client waits for its answer for ever, or fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from mcp_resumable import ResumableEventStore

from .held_storage import HeldStorage, SharedHeldStorage
from .sdk_host import PATIENCE_SECONDS, Client, Host, Request, Tool, hosting

pytestmark = pytest.mark.anyio


async def begun_before_its_first_frame(host: Host, client: Client) -> tuple[Request, Tool]:
    """Call the tool, and let it run before a byte of the response's body is written."""
    post = client.post(1)
    await post.until_started()
    post.freeze()
    with anyio.fail_after(PATIENCE_SECONDS):
        while (client.session_id, "1") not in host.tools:
            await anyio.lowlevel.checkpoint()
    return post, client.tool(1)


@pytest.mark.parametrize("rejection", ["status", "stream"])
async def test_a_tool_that_polls_at_once_leaves_its_client_a_cursor(rejection: Any) -> None:
    """The SDK still writes the priming event that it holds; the layer dropped it, as of a connection that is closed."""
    async with hosting(ResumableEventStore(rejection=rejection)) as host:
        client = await host.open()
        post, tool = await begun_before_its_first_frame(host, client)
        await tool.do(tool.context.close_sse_stream)
        post.thaw()
        (primed,) = await post.frames()
        assert primed.seq == 0
        resumed = client.get(primed.id)
        tool.finish()
        assert [frame.data and frame.step for frame in await resumed.frames()] == ["", "answer"]


@pytest.mark.parametrize("move", ["advance", "restart"])
async def test_a_stream_that_is_superseded_at_once_leaves_its_client_a_cursor(move: str) -> None:
    async with hosting(ResumableEventStore(rejection="stream")) as host:
        client = await host.open()
        post, tool = await begun_before_its_first_frame(host, client)
        if move == "advance":
            await host.store.advance_generation(client.session_id)
        else:
            await host.store.restart_stream(1, client.session_id)
        post.thaw()
        (primed,) = await post.frames()
        assert primed.seq == 0
        tool.finish()
        resumed = await client.get(primed.id).frames()
        assert resumed[-1].step == "answer"


@pytest.mark.parametrize("move", ["advance", "restart"])
@pytest.mark.parametrize("new_storage", [HeldStorage, SharedHeldStorage])
async def test_a_stream_whose_successor_is_being_opened_leaves_its_client_a_cursor(
    move: str, new_storage: Callable[[], HeldStorage]
) -> None:
    """The response ended empty where it came to its end within the round trip that opens the next stream."""
    storage = new_storage()
    async with hosting(ResumableEventStore(storage, rejection="stream")) as host:
        client = await host.open()
        post, tool = await begun_before_its_first_frame(host, client)
        opening = storage.hold("open_stream")
        async with anyio.create_task_group() as tasks:
            if move == "advance":
                tasks.start_soon(host.store.advance_generation, client.session_id)
            else:
                tasks.start_soon(host.store.restart_stream, 1, client.session_id)
            await opening.until_reached()
            post.thaw()
            frames = await post.frames()
            opening.release()
        (primed,) = frames
        assert primed.seq == 0
        tool.finish()
        resumed = await client.get(primed.id).frames()
        assert resumed[-1].step == "answer"
