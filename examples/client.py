"""A client that does what a refusal says, on mcp 1.x and 2.x: `python examples/client.py URL TOOL [ARGUMENTS]`.

For servers with `rejection="stream"`: the SDK's clients do not show a status to their callers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from mcp_resumable import RejectionData, rejection_of

# How often to call in a session, and in how many sessions.
ATTEMPTS = 3

# A client of mcp 1.x waits for ever where a resume is refused by status.
CALL_SECONDS = 300

# The longest wait that a server may ask for.
RETRY_SECONDS = 60


@dataclass
class Call:
    """A call of a tool, which must bear being done twice.

    Attributes:
        tool: Its name.
        arguments: What it takes.
        progress: What the execution that answers has reported, and no other.
    """

    tool: str
    arguments: dict[str, Any]
    progress: list[float] = field(default_factory=list)

    async def make(self, url: str) -> Any:
        """Call until there is an answer, and return that.

        Raises:
            Exception: What the last attempt raised, where there is nothing to be done, or not often enough.
        """
        for _ in range(ATTEMPTS):
            async with self._connected(url) as session:
                outcome = await self._make_in(session)
            # Raised out here: the task groups of the SDK would wrap it.
            if not isinstance(outcome, Exception):
                return outcome
            if not _is_gone(outcome):
                break
        raise outcome

    async def _make_in(self, session: ClientSession) -> Any:
        """Call in one session; return the answer, or the error after which the session is of no more use."""
        for _ in range(ATTEMPTS):
            self.progress.clear()
            try:
                with anyio.fail_after(CALL_SECONDS):
                    return await session.call_tool(self.tool, self.arguments, progress_callback=self._on_progress)
            except Exception as error:
                failure = error
            match rejection_of(failure):
                case RejectionData(outcome="reset"):
                    pass  # What came is void, and the session is well.
                case RejectionData(outcome="retry", retry_after_seconds=seconds):
                    await anyio.sleep(min(1 if seconds is None else seconds, RETRY_SECONDS))
                case _:
                    break
        return failure

    @asynccontextmanager
    async def _connected(self, url: str) -> AsyncIterator[ClientSession]:
        async with (
            streamable_http_client(url) as (read, write, *_),
            ClientSession(read, write, logging_callback=self._on_log) as session,
        ):
            await session.initialize()
            yield session

    async def _on_progress(self, progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG002
        self.progress.append(progress)

    async def _on_log(self, params: object) -> None:
        if rejection_of(params) is not None:
            self.progress.clear()  # The call was executed again: what follows is all of the current execution.


def _is_gone(error: Exception) -> bool:
    rejection = rejection_of(error)
    if rejection is not None:
        return rejection.outcome == "gone"
    # How mcp 1.x tells that a session is over, without the data.
    return getattr(getattr(error, "error", None), "code", None) == 32600


async def main() -> None:
    """Make the call that the command line names, and print what came of it."""
    url, tool, *arguments = sys.argv[1:]
    call = Call(tool, json.loads(arguments[0]) if arguments else {})
    answer = await call.make(url)
    print("progress:", *call.progress)
    # Escaped: it is a server's text, and this is a terminal.
    print("answer:", ascii(answer.content))


if __name__ == "__main__":
    anyio.run(main)
