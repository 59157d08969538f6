"""Each event once, in order, whatever the client's timing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import anyio
import pytest

from mcp_resumable import ResumableEventStore

from .raw_client import CutError, Frame, RawClient, Response, session
from .servers import serve

pytestmark = pytest.mark.anyio

SEED = 20_251_125


@dataclass
class Reader:
    """Reads one call's stream over any number of connections.

    Attributes:
        client: Its session.
        frames: What it has received that carries a message, in order.
        cursor: The last id that it has received.
        resumes: Connections after the first.
    """

    client: RawClient
    frames: list[Frame] = field(default_factory=list)
    cursor: str = ""
    resumes: int = 0

    async def read(self, response: Response, stop_after: int | None) -> bool:
        """Read up to the answer, or cut the connection after some messages; return whether the answer came."""
        assert response.status == 200, await response.body()
        received = 0
        try:
            # Not before the first id: a client that has none cannot resume.
            while (received != stop_after or not self.cursor) and (frame := await response.frame()) is not None:
                assert frame.id, f"an event without an id: {frame}"
                if frame.is_message:
                    self.frames.append(frame)
                    received += 1
                elif self.cursor:
                    assert frame.id == self.cursor
                self.cursor = frame.id
                if frame.is_answer:
                    assert await response.frame() is None  # Closed cleanly after the answer.
                    return True
        except CutError as exc:  # Nobody but this test cuts connections.
            raise AssertionError("the server cut a connection") from exc
        response.reset()
        return False

    async def resume(self, stop_after: int | None) -> bool:
        """Read on from the cursor."""
        self.resumes += 1
        return await self.read(await self.client.get(self.cursor), stop_after)


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
async def test_1500_events_over_25_cut_connections(seed: int) -> None:
    """A fixed hand-over between replay and live lost 3 to 13 % of the events at this rate."""
    print(f"seed {seed}")  # noqa: T201  # shown where the test fails
    chance = random.Random(seed)
    with anyio.fail_after(40):
        async with serve("fastmcp", ResumableEventStore()) as server, session(server) as client:
            reader = Reader(client)
            first = await client.call("count", 7, n=1_500, delay=0.0008, tag="x")
            is_over = await reader.read(first, chance.randint(1, 60))
            for _ in range(24):
                assert not is_over
                is_over = await reader.resume(chance.randint(0, 60))
            while not is_over:
                is_over = await reader.resume(None)
            assert reader.resumes >= 25
            assert [frame.progress for frame in reader.frames[:-1]] == list(range(1, 1_501))
            assert reader.frames[-1].answer_text == "counted 1500 x"
            assert [str(frame.id).rsplit(":", 1)[1] for frame in reader.frames] == [str(seq) for seq in range(1, 1_502)]
            assert server.store.stats().faults == 0
            assert server.store.stats().open_tails == 0


@pytest.mark.no_cover
async def test_100_sessions_with_equal_request_ids_never_meet() -> None:
    """Two sessions that share a store collide on request id "1" in the SDK."""
    print(f"seed {SEED}")  # noqa: T201  # shown where the test fails
    with anyio.fail_after(150):
        async with serve("starlette", ResumableEventStore()) as server:

            async def use_a_session(number: int) -> None:
                chance = random.Random(SEED + number)
                async with session(server) as client:
                    for request_id in (1, 2, 1):  # An answered id may be used again.
                        nonce = f"session {number} call {chance.getrandbits(64):x}"
                        n = chance.randint(5, 40)
                        reader = Reader(client)
                        call = await client.call("count", request_id, n=n, delay=0.001, tag=nonce)
                        is_over = await reader.read(call, chance.choice([0, 1, 3, 10, None]))
                        while not is_over:
                            is_over = await reader.resume(chance.choice([0, 1, 5, 20, None]))
                        received = [
                            (frame.progress, frame.message["params"]["message"]) for frame in reader.frames[:-1]
                        ]
                        assert received == [(i, nonce) for i in range(1, n + 1)]
                        assert reader.frames[-1].answer_text == f"counted {n} {nonce}"

            async with anyio.create_task_group() as sessions:
                for number in range(100):
                    sessions.start_soon(use_a_session, number)
            assert server.store.stats().sessions == 100
            assert server.store.stats().faults == 0
