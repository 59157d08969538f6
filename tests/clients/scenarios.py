"""Makes the stories happen to one client, on the SDK line that runs this: `scenarios.py PROGRAM...`.

Each story has a server, a store and a proxy of its own in this process, and all are told at once. The client's program
does all of their calls; this prints a line of JSON for each, as the program does, with what went wrong here added.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anyio

from mcp_resumable import ResumableEventStore, Retention
from tests.e2e.servers import Hold, RunningServer, serve
from tests.e2e.storages import ScriptedStorage

from .proxy import CuttingProxy, cutting_proxy
from .stories import LAST_LOG, STORIES, Story

# Milliseconds, as the server tells clients: they wait a second where it does not.
_RETRY = 50

# Bytes of a line; a client may print a long error.
_MAX_LINE = 1_000_000


@dataclass
class Scene:
    """Where one story is told.

    Attributes:
        story: Which.
        server: Of this story alone.
        proxy: Between it and the client.
        storage: Of the server's store.
        over: Ends the story.
        error: What went wrong on this side; None if nothing did.
    """

    story: Story
    server: RunningServer
    proxy: CuttingProxy
    storage: ScriptedStorage
    over: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: str | None = None

    @property
    def job(self) -> dict[str, Any]:
        """What the client's program is to do."""
        story = self.story
        sent_at_once = 1 if story.logs or story.row == "evicted" else 2 if story.row == "poll" else 3
        return {
            "cell": story.name,
            "url": f"http://127.0.0.1:{self.proxy.port}{self.server.path}",
            "tool": "hold",
            "arguments": {"n": sent_at_once, "tag": story.name},
            "patience": story.patience,
            "last_log": LAST_LOG if story.logs else None,
        }

    async def until_stored(self, hold: Hold, seq: int) -> None:
        """Wait until the call's stream has reached `seq`."""
        await self.storage.until_stored(hold.call.session_id, hold.call.request_id, seq)

    async def tell(self) -> None:
        """Tell the story."""
        try:
            with self.over:
                hold = await self.server.hold(self.story.name)
                await _DIRECTIONS[self.story.row](self, hold)
                await hold.finish()
        except Exception as exc:
            self.error = f"{type(exc).__name__}: {exc}"


async def reset(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 3)
    scene.proxy.cut("call")
    await hold.progress(4, 5, 6)
    scene.proxy.let_in("call")
    await scene.proxy.until_carried("call", 6)
    await hold.progress(7, 8, 9)


async def poll(scene: Scene, hold: Hold) -> None:
    await hold.do(lambda call: call.close_sse_stream())
    await hold.progress(3, 4)
    await scene.proxy.until_carried("call", 4)
    await hold.do(lambda call: call.close_sse_stream())
    await hold.progress(5, 6)
    await scene.proxy.until_carried("call", 6)


async def reset_in_replay(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 3)
    scene.proxy.cut("call")
    await hold.progress(*range(4, 11))
    await scene.until_stored(hold, 10)
    scene.proxy.cut_next("call", after=2)
    scene.proxy.let_in("call")
    await scene.proxy.until_cuts(2)
    await hold.progress(11)


async def two_resets(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 3)
    scene.proxy.cut("call")
    await hold.progress(4, 5)
    scene.proxy.cut_next("call", after=0)
    scene.proxy.let_in("call")
    await scene.proxy.until_cuts(2)
    await hold.progress(6, 7)


async def evicted(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 1)
    scene.proxy.cut("call")
    await hold.progress(2, 3, 4, 5)
    await scene.until_stored(hold, 5)
    scene.proxy.let_in("call")
    await anyio.sleep_forever()  # The call has no answer but the refusal.


async def completed(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 3)
    scene.proxy.cut("call")
    await hold.progress(4)
    await hold.finish()
    await scene.until_stored(hold, 5)
    scene.proxy.let_in("call")
    await anyio.sleep_forever()


async def advanced(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 3)
    scene.proxy.cut("call")
    await hold.do(lambda call: scene.server.store.advance_generation(call.session_id))
    await _execute_again(scene, hold)


async def restarted(scene: Scene, hold: Hold) -> None:
    await scene.proxy.until_carried("call", 3)
    scene.proxy.cut("call")
    await hold.do(lambda call: scene.server.store.restart_stream(call.request_id))
    await _execute_again(scene, hold)


async def _execute_again(scene: Scene, hold: Hold) -> None:
    await hold.progress(101, 102)
    scene.proxy.let_in("call")
    await hold.progress(103)


async def standalone(scene: Scene, hold: Hold) -> None:
    await hold.announce("1")
    await scene.proxy.until_carried("standalone", 1)
    scene.proxy.cut("standalone")
    await hold.announce("2", "3")
    scene.proxy.let_in("standalone")
    await scene.proxy.until_carried("standalone", 3)
    await hold.announce("4", LAST_LOG)


async def standalone_twice(scene: Scene, hold: Hold) -> None:
    await hold.announce("1")
    await scene.proxy.until_carried("standalone", 1)
    scene.proxy.cut("standalone")
    await hold.announce("2")
    scene.proxy.let_in("standalone")
    await scene.proxy.until_carried("standalone", 2)
    scene.proxy.cut("standalone")
    await hold.announce("3")
    scene.proxy.let_in("standalone")
    await hold.announce("4", LAST_LOG)


async def standalone_evicted(scene: Scene, hold: Hold) -> None:
    await hold.announce("1")
    await scene.proxy.until_carried("standalone", 1)
    scene.proxy.cut("standalone")
    await hold.announce("2", "3")
    await scene.storage.until_stored(hold.call.session_id, None, 3)
    scene.proxy.let_in("standalone")
    if scene.story.rejection == "stream":
        await scene.proxy.until_carried("standalone", 3)
    await hold.announce(LAST_LOG)


_DIRECTIONS: dict[str, Callable[[Scene, Hold], Awaitable[None]]] = {
    direction.__name__.replace("_", "-"): direction
    for direction in (
        reset,
        poll,
        reset_in_replay,
        two_resets,
        evicted,
        completed,
        advanced,
        restarted,
        standalone,
        standalone_twice,
        standalone_evicted,
    )
}


async def _set(stack: AsyncExitStack, story: Story) -> Scene:
    is_evicting = story.dead == "event_evicted"
    storage = ScriptedStorage(retention=Retention(max_events=1) if is_evicting else Retention())
    store = ResumableEventStore(storage, rejection=story.rejection, replay_completed=story.dead != "stream_completed")
    server = await stack.enter_async_context(serve("fastmcp", store, retry_interval=_RETRY))
    proxy = await stack.enter_async_context(cutting_proxy(server.port))
    return Scene(story, server, proxy, storage)


async def run(program: list[str]) -> None:
    """Tell all stories to the client that `program` runs."""
    async with AsyncExitStack() as stack:
        scenes = {story.name: await _set(stack, story) for story in STORIES.values()}
        client = await asyncio.create_subprocess_exec(
            *program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_MAX_LINE
        )
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            client.stdin.write(json.dumps([scene.job for scene in scenes.values()]).encode())
            client.stdin.close()
            async with anyio.create_task_group() as tasks:
                for scene in scenes.values():
                    tasks.start_soon(scene.tell)
                while line := await client.stdout.readline():
                    _pass_on(json.loads(line), scenes)
                for scene in scenes.values():
                    scene.over.cancel()
            await client.wait()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()


def _pass_on(received: dict[str, Any], scenes: dict[str, Scene]) -> None:
    if "versions" in received:
        received["server"] = version("mcp")
    else:
        scene = scenes[received["cell"]]
        scene.over.cancel()
        received["staging"] = scene.error
    print(json.dumps(received), flush=True)  # noqa: T201  # a program's output


if __name__ == "__main__":
    anyio.run(run, sys.argv[1:])
