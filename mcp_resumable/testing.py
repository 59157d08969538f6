"""The contract of `Storage` as tests: run them against your backend, in your own repository.

The whole of a test file, for the storage of `examples/sqlite_storage.py`:

    import sqlite3
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager, closing
    from tempfile import TemporaryDirectory

    from mcp_resumable import Retention
    from mcp_resumable.testing import StorageContract, StorageHarness
    from sqlite_storage import SqliteStorage


    class SqliteHarness(StorageHarness):
        def __init__(self, path: str, retention: Retention) -> None:
            self.path, self.retention, self.now = path, retention, 0.0
            self.opened: list[SqliteStorage] = []
            super().__init__(self.open())

        def open(self) -> SqliteStorage:
            self.opened.append(SqliteStorage(self.path, retention=self.retention, clock=lambda: self.now))
            return self.opened[-1]

        async def lose_metadata(self, session_id: str) -> None:
            with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
                database.execute("DELETE FROM sessions WHERE session_id = ?", [session_id])

        async def open_again(self) -> SqliteStorage:
            return self.open()

        async def advance(self, seconds: float) -> bool:
            self.now += seconds
            return True


    class TestSqliteStorage(StorageContract):
        @asynccontextmanager
        async def harness(self, retention: Retention) -> AsyncIterator[SqliteHarness]:
            with TemporaryDirectory() as directory:
                harness = SqliteHarness(f"{directory}/events.db", retention)
                yield harness
                for storage in harness.opened:
                    await storage.aclose()

`python -m pytest` then runs a test for each claim. The harness knows the backend, so the tests do not. Two of its
methods are optional: without `open_again` the tests that need a second instance are skipped, without `advance` those
that need a clock.

Needs pytest; the extra `testing` brings it, and trio. The tests run under the pytest plugin that comes with anyio, once
for each event loop that its `anyio_backend` fixture names: all that are installed, unless your `conftest.py` says
otherwise. A line in that file makes failures show the values compared:
`pytest.register_assert_rewrite("mcp_resumable.testing")`.

What the suite cannot show: that two processes are as safe as two instances in one, and that a write which was
acknowledged survives a crash of your database.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest

from mcp_resumable.cursor import STANDALONE, EventCursor, Generation, StreamId
from mcp_resumable.decision import (
    Dropped,
    NeverOpened,
    Resume,
    Retained,
    Snapshot,
    StreamState,
    Successor,
    Superseded,
    decide,
)
from mcp_resumable.storage import (
    MAX_BATCH_EVENTS,
    AppendRefusedError,
    Batch,
    Retention,
    SessionDescription,
    Storage,
)

__all__ = ["StorageContract", "StorageHarness"]

# What `Retention` says that the ceilings of a session and of the store charge beside the text.
_EVENT_CHARGE_BYTES = 72
_STREAM_CHARGE_BYTES = 1024

# More places than any test makes.
_ALL = 10_000


class StorageHarness(ABC):
    """A fresh and empty backend, as the tests see it."""

    def __init__(self, storage: Storage) -> None:
        """Hold the storage under test.

        Args:
            storage: What `storage` returns; a subclass that overrides that property need not call this.
        """
        # Two underscores: subclasses hold a storage of a narrower type under such names.
        self.__storage = storage

    @property
    def storage(self) -> Storage:
        """The storage under test; the same one each time."""
        return self.__storage

    @abstractmethod
    async def lose_metadata(self, session_id: str) -> None:
        """Make the backend lose what it knows about a session, as a cache that evicts or a partial restore would.

        At least what makes the session known goes, its generation numbers included. What it may leave behind is for
        the author of the backend to judge: everything that can outlive the rest (events, streams) should stay, since
        that is what the tests are about.
        """

    async def open_again(self) -> Storage | None:
        """Return another instance over the same data, as a second worker or a restarted one would have it.

        With the same retention and clock. The harness closes it. It may be asked for after `storage` was closed.

        Returns:
            The instance; None where the backend cannot (everything is in one process).
        """
        return None

    async def advance(self, seconds: float) -> bool:  # noqa: ARG002  # the default has no clock
        """Move the clock of the backend and of each of its instances forward.

        Returns:
            Whether that was done; False where the backend's clock cannot be moved.
        """
        return False


@pytest.mark.anyio
class StorageContract(ABC):
    """What a storage owes, a test for each claim. Subclass it as `Test…` and write `harness`.

    Each test opens a harness of its own. A claim that does not hold raises AssertionError.

    Attributes:
        wait_seconds: How long a test waits, at most, for what must happen.
    """

    wait_seconds = 5.0

    @abstractmethod
    def harness(self, retention: Retention) -> AbstractAsyncContextManager[StorageHarness]:
        """Open a fresh and empty backend; leaving the context closes and removes it.

        Args:
            retention: What the storage under test has to be made with.
        """

    async def test_the_first_generation_of_a_session_has_number_1(self) -> None:
        """A new session id begins at 1, and is known from then on."""
        async with self.harness(Retention()) as harness:
            generation = await harness.storage.open_session("s")
            assert generation.counter == 1
            assert await _current(harness.storage, "s") == generation

    async def test_a_promised_nonce_is_used(self) -> None:
        """The layer mints one before it knows the session id; a writer knows by it a move that only seemed to fail."""
        async with self.harness(Retention()) as harness:
            assert await harness.storage.open_session("s", nonce="k3v9q0m4x7ta") == Generation(1, "k3v9q0m4x7ta")
            assert await harness.storage.open_session("s", nonce="0123456789ab") == Generation(2, "0123456789ab")
            assert await harness.storage.advance_generation("s", nonce="ba9876543210") == Generation(3, "ba9876543210")
            assert await _current(harness.storage, "s") == Generation(3, "ba9876543210")

    async def test_no_two_generations_share_a_nonce(self) -> None:
        """Not within a session, nor between sessions."""
        async with self.harness(Retention()) as harness:
            nonces: list[str] = []
            for session_id in ("s", "t", "u"):
                nonces.append((await harness.storage.open_session(session_id)).nonce)
                for _ in range(3):
                    nonces.append((await _advanced(harness.storage, session_id)).nonce)
            assert len(set(nonces)) == 12

    async def test_an_event_id_made_of_what_the_storage_returns_parses_back(self) -> None:
        """A generation's and a stream's spelling must survive the wire."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage, request_id="a call")
            for cursor in (stream.cursor(1), stream.standalone().cursor(1)):
                assert EventCursor.parse(str(cursor)) == cursor

    async def test_advancing_makes_the_next_generation_current_and_empty(self) -> None:
        """Nothing of the earlier generation is left, and its streams are not open in the new one."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            await earlier.append(b"a", b"b")
            await earlier.standalone().append(b"c")
            generation = await _advanced(harness.storage, "s")
            assert generation.counter > earlier.generation.counter
            assert await _current(harness.storage, "s") == generation
            assert await earlier.read(0) is None
            assert await earlier.standalone().read(0) is None
            later = replace(earlier, generation=generation)
            assert await later.state() == NeverOpened()
            assert await later.read(0) is None
            assert await later.standalone().read(0) == Batch([], False)

    async def test_opening_a_live_session_supersedes_it(self) -> None:
        """A session that is opened again, as after a worker's crash, begins a new generation."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            await earlier.append(b"a")
            later = await _begin(harness.storage)
            assert later.generation.counter > earlier.generation.counter
            assert (await _refusal(earlier.append(b"late"))).current == later.generation
            assert await earlier.read(0) is None
            assert await earlier.reason(1) == "generation_mismatch"
            assert later.stream == earlier.stream, "ordinals count from 1 in each generation"
            assert await later.read(0) == Batch([], False)

    async def test_advancing_an_unknown_session_changes_nothing(self) -> None:
        """Only `open_session` makes a session."""
        async with self.harness(Retention()) as harness:
            assert await harness.storage.advance_generation("s") is None
            assert await harness.storage.snapshot("s", None) is None
            assert (await harness.storage.open_session("s")).counter == 1

    async def test_advancing_an_ended_session_changes_nothing(self) -> None:
        """A session that is over is not revived."""
        async with self.harness(Retention()) as harness:
            await harness.storage.open_session("s")
            await harness.storage.end_session("s")
            assert await harness.storage.advance_generation("s") is None
            assert await harness.storage.snapshot("s", None) is None

    async def test_counters_increase_over_advancing_ending_and_reopening(self) -> None:
        """A number is never issued twice for a session id."""
        async with self.harness(Retention()) as harness:
            storage = harness.storage
            counters = [(await storage.open_session("s")).counter]
            for _ in range(3):
                counters.append((await _advanced(storage, "s")).counter)
                counters.append((await storage.open_session("s")).counter)
                await storage.end_session("s")
                counters.append((await storage.open_session("s")).counter)
            assert _is_increasing(counters), counters

    async def test_counters_increase_over_eviction_in_favour_of_other_sessions(self) -> None:
        """A number is never issued twice, also when retention has dropped the session in between."""
        async with self.harness(Retention(max_sessions=1)) as harness:
            storage = harness.storage
            first = await storage.open_session("s")
            await storage.open_session("t")
            assert await storage.snapshot("s", None) is None
            second = await storage.open_session("s")
            assert second.counter > first.counter
            assert await _claimed(storage, "s", first) == "earlier"

    async def test_counters_increase_over_idle_eviction(self) -> None:
        """A number is never issued twice, also when the session was idle for too long in between."""
        async with self.harness(Retention(idle_seconds=100)) as harness:
            first = await harness.storage.open_session("s")
            await _advance(harness, 101)
            assert await harness.storage.snapshot("s", None) is None
            second = await harness.storage.open_session("s")
            assert second.counter > first.counter
            assert await _claimed(harness.storage, "s", first) == "earlier"

    async def test_concurrent_claims_never_issue_the_same_number(self) -> None:
        """20 workers claim at once: each gets a number of its own, and the highest is current."""
        async with self.harness(Retention()) as harness:
            storages = await _instances(harness)
            claimed: list[Generation | None] = [await harness.storage.open_session("s")]

            async def claim(number: int) -> None:
                storage = storages[number // 2 % len(storages)]
                if number % 2:
                    claimed.append(await storage.open_session("s"))
                else:
                    claimed.append(await storage.advance_generation("s"))

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(claim, number)
            generations = {generation.counter: generation for generation in claimed if generation is not None}
            assert len(generations) == 21, sorted(generations)
            assert await _current(harness.storage, "s") == generations[max(generations)]

    async def test_a_superseded_writer_is_refused_and_leaves_nothing(self) -> None:
        """Neither its events nor its streams reach the generation that took its place."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            await earlier.append(b"a")
            current = await _advanced(harness.storage, "s")
            later = replace(earlier.standalone(), generation=current)
            assert (await _refusal(earlier.append(b"late"))).current == current
            assert (await _refusal(earlier.append(b"late", is_terminal=True))).current == current
            assert (await _refusal(earlier.standalone().append(b"late"))).current == current
            assert (await _refusal(earlier.beside("2"))).current == current
            assert [stream.stream for stream in (await _description(harness.storage, "s")).streams] == ["0"]
            assert await later.read(0) == Batch([], False)
            assert await later.append(b"b") == 1
            assert (await later.beside("1")).stream == StreamId(1, "1")

    async def test_a_writer_with_a_generation_never_issued_is_refused(self) -> None:
        """Whoever guesses the number does not know the nonce."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            for generation in (Generation(1, "000000000000"), Generation(2, stream.generation.nonce)):
                guess = replace(stream, generation=generation)
                assert (await _refusal(guess.append(b"x"))).current == stream.generation
                assert (await _refusal(guess.beside("2"))).current == stream.generation
                assert await guess.read(0) is None
            assert await stream.read(0) == Batch([], False)

    async def test_a_generation_never_issued_is_told_from_an_earlier_one(self) -> None:
        """An earlier one was true once; a number with another nonce, a higher one, or another session's never was."""
        async with self.harness(Retention()) as harness:
            storage = harness.storage
            first = await storage.open_session("s")
            second = await _advanced(storage, "s")
            third = await _advanced(storage, "s")
            other = await storage.open_session("t")
            assert await _claimed(storage, "s", first) == "earlier"
            assert await _claimed(storage, "s", second) == "earlier"
            assert await _claimed(storage, "s", third) == "current"
            assert await _claimed(storage, "s", Generation(1, second.nonce)) == "never"
            assert await _claimed(storage, "s", Generation(3, first.nonce)) == "never"
            assert await _claimed(storage, "s", Generation(4, third.nonce)) == "never"
            assert await _claimed(storage, "s", Generation(10**19, third.nonce)) == "never"
            assert await _claimed(storage, "s", other) == "never"
            assert await _claimed(storage, "t", first) == "never"
            assert await _claimed(storage, "t", third) == "never"

    async def test_an_ended_session_is_unknown(self) -> None:
        """Its events are gone, its readers find nothing and its writers are refused."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a")
            assert await harness.storage.end_session("s") is True
            assert await harness.storage.end_session("s") is False
            await _check_unknown(stream)

    async def test_a_superseded_writer_cannot_end_the_session(self) -> None:
        """With its generation it ends only what is its own; without one the session is ended whoever writes it."""
        async with self.harness(Retention()) as harness:
            storage = harness.storage
            first = await storage.open_session("s")
            second = await _begin(storage)
            await second.append(b"a")
            guess = Generation(second.generation.counter, first.nonce)
            for other in (first, guess, Generation(3, second.generation.nonce)):
                assert await storage.end_session("s", generation=other) is False
            assert await storage.end_session("t", generation=second.generation) is False
            assert await second.read(0) == Batch([b"a"], False)
            assert await second.append(b"b") == 2
            assert await storage.end_session("s", generation=second.generation) is True
            assert await storage.end_session("s", generation=second.generation) is False
            await _check_unknown(second)

    async def test_a_session_claimed_while_its_writer_ends_it_is_not_ended(self) -> None:
        """Comparing and ending are one step: after the claim has returned, the session is known."""
        async with self.harness(Retention()) as harness:
            storages = await _instances(harness)
            for turns in range(6):
                generation = await harness.storage.open_session("s")
                claimed: list[Generation] = []

                async def end(generation: Generation) -> None:
                    await harness.storage.end_session("s", generation=generation)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(end, generation)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    claimed.append(await storages[-1].open_session("s"))
                assert await _current(harness.storage, "s") == claimed[0]

    async def test_late_writes_do_not_revive_an_ended_session(self) -> None:
        """The router of a session that was just deleted may still have an event to store."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a")
            await harness.storage.end_session("s")
            assert (await _refusal(stream.append(b"late"))).current is None
            assert (await _refusal(stream.standalone().append(b"late"))).current is None
            assert (await _refusal(stream.beside("2"))).current is None
            await _check_unknown(stream)
            reopened = await _begin(harness.storage, request_id=None)
            assert await reopened.read(0) == Batch([], False)

    async def test_a_session_that_is_opened_again_after_its_end_knows_its_old_cursors(self) -> None:
        """They are an earlier generation's: reset, not invalid; and they read nothing."""
        async with self.harness(Retention()) as harness:
            old = await _begin(harness.storage)
            await old.append(b"old")
            await harness.storage.end_session("s")
            new = await _begin(harness.storage)
            assert new.generation.counter > old.generation.counter
            assert await old.reason(0) == "generation_mismatch"
            assert await old.read(0) is None
            assert await new.append(b"new") == 1
            assert await new.read(0) == Batch([b"new"], False)

    async def test_a_session_never_opened_is_unknown(self) -> None:
        """No method makes a session by the way."""
        async with self.harness(Retention()) as harness:
            stream = _Stream(
                storage=harness.storage,
                session_id="s",
                generation=Generation(1, "k3v9q0m4x7ta"),
                stream=StreamId(1, "1"),
            )
            assert await harness.storage.end_session("s") is False
            await _check_unknown(stream)
            assert (await harness.storage.open_session("s")).counter == 1

    async def test_lost_metadata_makes_the_session_unknown(self) -> None:
        """What is left behind is not taken for a session: readers find nothing and writers are refused."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a", b"b")
            await stream.standalone().append(b"c")
            await harness.lose_metadata("s")
            await _check_unknown(stream)

    async def test_lost_metadata_is_never_mistaken_for_the_session_that_is_opened_next(self) -> None:
        """Its counter may begin at 1 again; the nonce keeps old cursors from being current, and old events apart."""
        async with self.harness(Retention()) as harness:
            old = await _begin(harness.storage)
            await old.append(b"old 1", b"old 2")
            await old.standalone().append(b"old 3")
            await harness.lose_metadata("s")
            new = await _begin(harness.storage)
            assert new.generation != old.generation
            assert await _claimed(harness.storage, "s", old.generation) != "current"
            assert await old.read(0) is None
            assert (await _refusal(old.append(b"late"))).current == new.generation
            for stream in (new.standalone(), new):
                assert await stream.read(0) == Batch([], False)
                assert await stream.append(b"new") == 1
                assert await stream.read(0) == Batch([b"new"], False)
            assert new.stream == StreamId(1, "1"), "ordinals count from 1 in each generation"

    async def test_lost_metadata_of_one_session_leaves_the_others(self) -> None:
        """A session does not depend on what is known of another."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            other = await _begin(harness.storage, "t")
            await stream.append(b"a")
            await other.append(b"b")
            await harness.lose_metadata("t")
            assert await stream.read(0) == Batch([b"a"], False)
            assert await stream.append(b"c") == 2

    async def test_the_standalone_stream_is_open_from_the_beginning(self) -> None:
        """Of each generation, and opening other streams does not supersede it."""
        async with self.harness(Retention()) as harness:
            standalone = await _begin(harness.storage, request_id=None)
            assert await standalone.state() == Retained(high_water_mark=0)
            assert await standalone.reason(0) == "resume"
            assert await standalone.read(0) == Batch([], False)
            assert await standalone.append(b"a") == 1
            await standalone.beside("0")
            assert await standalone.append(b"b") == 2
            assert await standalone.read(0) == Batch([b"a", b"b"], False)
            later = replace(standalone, generation=await _advanced(harness.storage, "s"))
            assert await later.append(b"c") == 1

    async def test_ordinals_count_from_1_in_order_of_opening(self) -> None:
        """Over all requests of the generation, answered or not."""
        async with self.harness(Retention()) as harness:
            first = await _begin(harness.storage, request_id="a")
            assert first.stream == StreamId(1, "a")
            await first.append(b"answer", is_terminal=True)
            assert (await first.beside("b")).stream == StreamId(2, "b")
            assert (await first.beside("a")).stream == StreamId(3, "a")
            assert (await first.beside("c")).stream == StreamId(4, "c")

    async def test_concurrently_opened_streams_get_ordinals_of_their_own(self) -> None:
        """The POSTs of a session are answered at the same time."""
        async with self.harness(Retention()) as harness:
            standalone = await _begin(harness.storage, request_id=None)
            storages = await _instances(harness)
            opened: list[StreamId] = []

            async def open_stream(number: int) -> None:
                here = replace(standalone, storage=storages[number % len(storages)])
                opened.append((await here.beside(str(number))).stream)

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(open_stream, number)
            assert sorted(stream.ordinal for stream in opened) == list(range(1, 21))
            assert {stream.request_id for stream in opened} == {str(number) for number in range(20)}

    async def test_a_request_id_may_be_any_text(self) -> None:
        """Separators, control characters, what is no valid Unicode, and what is too long for an event id."""
        request_ids = ["", "0", "7", " ", "a:b", "a.b", "a", "*", "{a}", "ünï✓", "\x00", "\ud800", "x" * 999, "y" * 999]
        async with self.harness(Retention()) as harness:
            standalone = await _begin(harness.storage, request_id=None)
            streams = [await standalone.beside(request_id) for request_id in request_ids]
            for ordinal, (stream, request_id) in enumerate(zip(streams, request_ids, strict=True), 1):
                assert stream.stream == StreamId.of_request(ordinal, request_id)
                assert await stream.append(b"%d" % ordinal) == 1
            for ordinal, stream in enumerate(streams, 1):
                assert await stream.read(0) == Batch([b"%d" % ordinal], False)
                assert await stream.reason(0) == "resume"
            again = [await standalone.beside(request_id) for request_id in request_ids]
            for earlier, later in zip(streams, again, strict=True):
                assert await earlier.read(0) is None, "the same request id supersedes"
                assert await later.read(0) == Batch([], False)

    async def test_a_stream_is_superseded_by_the_next_of_its_request_id(self) -> None:
        """The earlier execution takes no more events and keeps none."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            other = await earlier.beside("2")
            await earlier.append(b"a")
            await other.append(b"b")
            later = await earlier.beside("1")
            assert await earlier.state() == Superseded()
            assert await earlier.reason(1) == "stream_superseded"
            assert await earlier.reason(0) == "stream_superseded"
            assert await earlier.read(0) is None
            assert await later.state() == Retained(high_water_mark=0)
            assert await other.read(0) == Batch([b"b"], False)

    async def test_a_completed_stream_is_superseded_as_well(self) -> None:
        """A request id that is used again after its answer is another call."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            await earlier.append(b"a", b"answer", is_terminal=True)
            later = await earlier.beside("1")
            assert await earlier.state() == Superseded()
            assert await earlier.read(0) is None
            assert await later.append(b"b") == 1
            assert await later.read(0) == Batch([b"b"], False)

    async def test_an_origin_is_the_stream_itself_where_none_is_given(self) -> None:
        """A call that was not executed again began where it is."""
        async with self.harness(Retention()) as harness:
            first = await _begin(harness.storage)
            second = await first.beside("2")
            assert await _successor(first) == Successor(stream=first.stream, origin=(1, 1))
            assert await _successor(second) == Successor(stream=second.stream, origin=(1, 2))
            again = await first.beside("1")
            assert await _successor(first) == Successor(stream=again.stream, origin=(1, 3))
            assert await _successor(again) == Successor(stream=again.stream, origin=(1, 3))

    async def test_an_origin_that_is_given_is_carried(self) -> None:
        """Into the snapshot of the superseded stream's cursors, also over a change of generation."""
        async with self.harness(Retention()) as harness:
            first = await _begin(harness.storage)
            second = await first.beside("1", origin=(1, 1))
            assert await _successor(first) == Successor(stream=second.stream, origin=(1, 1))
            generation = await _advanced(harness.storage, "s")
            assert await _successor(first) is None
            third = await replace(first, generation=generation).beside("1", origin=(1, 1))
            expected = Successor(stream=third.stream, origin=(1, 1))
            assert await _successor(first) == expected
            assert await _successor(second) == expected
            assert await _successor(third) == expected
            assert expected.continues(first.cursor(0))

    async def test_a_stream_state_tells_what_was_opened(self) -> None:
        """A higher ordinal, or another request id at the same one, was never opened."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a")
            for never in (StreamId(2, "1"), StreamId(2, "2"), StreamId(10**19, "1"), StreamId(1, "2"), StreamId(1)):
                assert await replace(stream, stream=never).state() == NeverOpened(), never
            assert await stream.state() == Retained(high_water_mark=1)

    async def test_a_claim_of_any_size_gets_an_answer(self) -> None:
        """The numbers of a cursor are the client's: 200 digits, or what a fixed width takes for a smaller number."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a")
            for number in (2**32 + 1, 2**53 + 1, 2**63, 2**63 + 1, 2**64 + 1, 10**200):
                assert await replace(stream, stream=StreamId(number, "1")).state() == NeverOpened(), number
                assert await stream.reason(number) == "future_event_id", number
                assert await stream.read(number) is None, number
                guess = Generation(number, stream.generation.nonce)
                assert await _claimed(harness.storage, "s", guess) == "never", number

    async def test_a_request_id_too_long_for_an_event_id_leads_to_no_other_stream(self) -> None:
        """Its cursors do not carry it; neither the standalone stream nor one of the same ordinal takes its place."""
        one, two = "x" * 999, "y" * 999
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage, request_id=one)
            other = await earlier.beside(two)
            later = await earlier.beside(one)
            assert await earlier.state() in (Superseded(), Dropped())
            assert await _successor(earlier) in (None, Successor(stream=later.stream, origin=(1, 3)))
            assert await _successor(other) in (None, Successor(stream=other.stream, origin=(1, 2)))
            assert await _successor(later) in (None, Successor(stream=later.stream, origin=(1, 3)))
            generation = await _advanced(harness.storage, "s")
            reopened = await replace(other, generation=generation).beside(two)
            assert reopened.stream == earlier.stream, "without their request ids the two are spelled alike"
            assert await _successor(earlier) is None

    async def test_a_snapshot_tells_the_exact_state_of_a_stream(self) -> None:
        """Its marks, its last hole and whether it has its answer, after each append."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await stream.state() == Retained(high_water_mark=0)
            await stream.append(b"a")
            assert await stream.state() == Retained(high_water_mark=1)
            await stream.append(None, b"c", None, b"e")
            assert await stream.state() == Retained(high_water_mark=5, last_hole=4)
            await stream.append(b"answer", is_terminal=True)
            assert await stream.state() == Retained(high_water_mark=6, last_hole=4, is_terminal=True)

    async def test_a_snapshot_without_a_cursor_tells_whether_the_session_is_known(self) -> None:
        """A malformed event id is 400 in a session that is known, and 404 elsewhere."""
        async with self.harness(Retention()) as harness:
            generation = await harness.storage.open_session("s")
            snapshot = await harness.storage.snapshot("s", None)
            assert snapshot is not None
            assert snapshot.generation == generation
            assert await harness.storage.snapshot("t", None) is None

    async def test_each_row_of_the_decision_table_is_reached(self) -> None:
        """A snapshot holds what `decide` needs for each of the ten rows."""
        async with self.harness(Retention(max_events=3)) as harness:
            storage = harness.storage
            early = await _begin(storage)
            await early.append(b"a")
            standalone = replace(early.standalone(), generation=await _advanced(storage, "s"))
            evicted = await standalone.beside("evicted")
            await evicted.append(b"a", b"b", b"c", b"d", b"e")
            holed = await standalone.beside("holed")
            await holed.append(b"a", None, b"c")
            restarted = await standalone.beside("restarted")
            await restarted.append(b"a")
            await standalone.beside("restarted")
            answered = await standalone.beside("answered")
            await answered.append(b"a", b"answer", is_terminal=True)
            unanswerable = await standalone.beside("unanswerable")
            await unanswerable.append(b"a", None, is_terminal=True)
            elsewhere = await _begin(storage, "t")
            unopened = replace(standalone, stream=StreamId(99, "evicted"))

            table: list[tuple[int, str, str, str]] = [
                (1, "never opened", str(evicted.cursor(3)), "session_not_found"),
                (1, "never opened", "nonsense", "session_not_found"),
                (2, "s", "nonsense", "malformed_event_id"),
                (3, "s", str(early.cursor(1)), "generation_mismatch"),
                (3, "s", str(early.cursor(99)), "generation_mismatch"),
                (4, "s", str(elsewhere.cursor(0)), "unrecognized_generation"),
                (5, "s", str(unopened.cursor(0)), "future_event_id"),
                (5, "s", str(evicted.cursor(6)), "future_event_id"),
                (6, "s", str(restarted.cursor(1)), "stream_superseded"),
                (7, "s", str(answered.cursor(2)), "stream_completed"),
                (7, "s", str(unanswerable.cursor(0)), "stream_completed"),
                (8, "s", str(evicted.cursor(1)), "event_evicted"),
                (9, "s", str(holed.cursor(0)), "replay_gap"),
                (9, "s", str(holed.cursor(1)), "replay_gap"),
                (10, "s", str(holed.cursor(2)), "resume"),
                (10, "s", str(evicted.cursor(2)), "resume"),
                (10, "s", str(evicted.cursor(5)), "resume"),
                (10, "s", str(answered.cursor(1)), "resume"),
                (10, "s", str(standalone.cursor(0)), "resume"),
            ]
            decided = [
                (row, session_id, event_id, await _reason(storage, session_id, event_id))
                for row, session_id, event_id, _ in table
            ]
            assert decided == table

    async def test_seqs_are_contiguous_from_1(self) -> None:
        """In each stream by itself, and `append` returns them."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            seqs = [await stream.append(b"%d" % seq) for seq in range(1, 13)]
            assert seqs == list(range(1, 13))
            assert await stream.read(0) == Batch([b"%d" % seq for seq in range(1, 13)], False)

    async def test_an_append_of_several_events_returns_the_seq_of_the_last(self) -> None:
        """Holes take their seqs among the others."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await stream.append(b"a", None, b"c") == 3
            assert await stream.append(None) == 4
            assert await stream.append(None, None, b"g", is_terminal=True) == 7
            assert await stream.read(0) == Batch([b"a", None, b"c", None, None, None, b"g"], True)

    async def test_an_append_of_thousands_of_events_is_one_step(self) -> None:
        """What was lost while the backend could not answer comes at once, as holes."""
        events = [None if seq % 3 else b"%d" % seq for seq in range(9_000)]
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await stream.append(*events) == 9_000
            assert await stream.append(b"answer", is_terminal=True) == 9_001
            assert await stream.read(0) == Batch([*events, b"answer"], True)

    async def test_bytes_in_are_the_same_bytes_out(self) -> None:
        """A replay is byte-identical; an empty event is not a hole."""
        events = [
            b"{}",
            "ünï✓ \u2028".encode(),
            b"",
            b"\x00",
            b"a\x00b\r\n",
            b"\xff\xfe",
            b"None",
            b"0",
            bytes(256_000),
        ]
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            for event in events:
                await stream.append(event)
            await stream.append(*events)
            batch = await stream.read(0)
            assert batch is not None
            assert list(batch.events) == events + events
            assert all(type(event) is bytes for event in batch.events)

    async def test_streams_never_mix(self) -> None:
        """Each stream of a session has its own seqs and events."""
        async with self.harness(Retention()) as harness:
            one = await _begin(harness.storage)
            two = await one.beside("2")
            standalone = one.standalone()
            for number in range(3):
                assert await one.append(b"one %d" % number) == number + 1
                assert await two.append(b"two %d" % number) == number + 1
                assert await standalone.append(b"standalone %d" % number) == number + 1
            await two.append(b"answer", is_terminal=True)
            assert await one.read(0) == Batch([b"one 0", b"one 1", b"one 2"], False)
            assert await two.read(0) == Batch([b"two 0", b"two 1", b"two 2", b"answer"], True)
            assert await standalone.read(0) == Batch([b"standalone 0", b"standalone 1", b"standalone 2"], False)

    async def test_sessions_never_mix(self) -> None:
        """Equal request ids in two sessions are two streams, whatever separators a session id holds."""
        session_ids = ["s", "S", "s:1", "s:1:1", "s.1", "s*", "*", "?", "[s]", "{s}", "s{1}", "%", "_", "s/1"]
        async with self.harness(Retention()) as harness:
            streams = [await _begin(harness.storage, session_id, "1") for session_id in session_ids]
            for stream in streams:
                assert await stream.append(stream.session_id.encode()) == 1
            for stream in streams:
                assert await stream.read(0) == Batch([stream.session_id.encode()], False)
                for other in streams:
                    if other is not stream:
                        guess = replace(stream, session_id=other.session_id)
                        assert await guess.read(0) is None
                        assert await guess.reason(1) == "unrecognized_generation"
                        assert (await _refusal(guess.append(b"x"))).current == other.generation
            for ended in streams:
                assert await harness.storage.end_session(ended.session_id) is True
                assert await harness.storage.snapshot(ended.session_id, None) is None
                for stream in streams[streams.index(ended) + 1 :]:
                    assert await stream.read(0) == Batch([stream.session_id.encode()], False)

    async def test_an_append_to_a_stream_never_opened_is_refused(self) -> None:
        """And opens none: nor does another request id at an ordinal that is taken."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            for never in (StreamId(2, "2"), StreamId(1, "2"), StreamId(1)):
                unopened = replace(stream, stream=never)
                assert (await _refusal(unopened.append(b"x"))).current == stream.generation
                assert await unopened.state() == NeverOpened()
                assert await unopened.read(0) is None
            assert await stream.read(0) == Batch([], False)
            assert (await stream.beside("2")).stream == StreamId(2, "2")

    async def test_an_append_to_a_terminal_stream_is_refused(self) -> None:
        """Nothing follows the answer."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"answer", is_terminal=True)
            assert (await _refusal(stream.append(b"late"))).current == stream.generation
            assert (await _refusal(stream.append(b"late", is_terminal=True))).current == stream.generation
            assert await stream.state() == Retained(high_water_mark=1, is_terminal=True)
            assert await stream.read(0) == Batch([b"answer"], True)

    async def test_an_append_to_a_superseded_stream_is_refused(self) -> None:
        """Two executions of a request never share a stream."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            await earlier.append(b"a")
            later = await earlier.beside("1")
            assert (await _refusal(earlier.append(b"late"))).current == earlier.generation
            assert (await _refusal(earlier.append(b"late", is_terminal=True))).current == earlier.generation
            assert await earlier.state() == Superseded()
            assert await later.read(0) == Batch([], False)
            assert await later.append(b"b") == 1

    async def test_an_event_that_is_too_long_is_a_value_error(self) -> None:
        """Alone or among others; nothing is stored. One that just fits is."""
        async with self.harness(Retention(max_bytes=100)) as harness:
            stream = await _begin(harness.storage)
            assert await _is_value_error(stream.append(bytes(101)))
            assert await _is_value_error(stream.append(b"a", bytes(101), b"c"))
            assert await _is_value_error(stream.append(bytes(101), is_terminal=True))
            assert await _is_value_error(stream.append())
            assert await stream.state() == Retained(high_water_mark=0)
            assert await stream.append(bytes(100)) == 1
            assert await stream.read(0) == Batch([bytes(100)], False)

    async def test_a_read_returns_what_follows_from_any_seq(self) -> None:
        """Up to `limit` places, without a break, holes among them."""
        events = [b"1", b"2", None, b"4", b"5"]
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(*events)
            for after_seq in range(6):
                for limit in (1, 2, 3, 5, 6):
                    batch = await stream.read(after_seq, limit)
                    assert batch == Batch(events[after_seq : after_seq + limit], False), (after_seq, limit)

    async def test_a_read_above_the_high_water_mark_returns_none(self) -> None:
        """What follows a place that was never assigned cannot be told."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await stream.read(1) is None
            await stream.append(b"a", b"b")
            assert await stream.read(2) == Batch([], False)
            assert await stream.read(3) is None
            await stream.append(b"answer", is_terminal=True)
            assert await stream.read(4) is None

    async def test_a_read_below_the_floor_returns_none(self) -> None:
        """Rather than what is left, which would skip what was evicted."""
        async with self.harness(Retention(max_events=2)) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a", b"b", b"c", b"d")
            assert await stream.read(0) is None
            assert await stream.read(1, 1) is None
            assert await stream.read(2) == Batch([b"c", b"d"], False)

    async def test_a_batch_is_terminal_only_where_it_reaches_the_answer(self) -> None:
        """A reader that stops there must have it."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a", b"b")
            assert await stream.read(0) == Batch([b"a", b"b"], False)
            await stream.append(b"answer", is_terminal=True)
            assert await stream.read(0, 2) == Batch([b"a", b"b"], False)
            assert await stream.read(0, 3) == Batch([b"a", b"b", b"answer"], True)
            assert await stream.read(2, 1) == Batch([b"answer"], True)
            assert await stream.read(3) == Batch([], True)

    async def test_the_rest_of_a_stream_in_a_snapshot_is_what_a_read_returns(self) -> None:
        """Where a storage gives it, a reader asks for nothing more."""
        events = [b"a", None, b"c", b"d"]
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(*events)
            for seq in range(5):
                assert await stream.rest(seq) is None, seq
            await stream.append(b"answer", is_terminal=True)
            for seq in range(5):
                assert await stream.rest(seq) in (None, [*events[seq:], b"answer"]), seq
            long = await stream.beside("long")
            await long.append(*[b"x"] * MAX_BATCH_EVENTS, b"answer", is_terminal=True)
            assert await long.rest(0) is None
            assert await long.rest(1) in (None, [*[b"x"] * (MAX_BATCH_EVENTS - 1), b"answer"])

    async def test_a_description_tells_what_is_retained(self) -> None:
        """For people: each stream in order of opening, its marks, and how much of it is left."""
        async with self.harness(Retention(max_events=3)) as harness:
            stream = await _begin(harness.storage, request_id="called")
            await stream.append(b"one", None, b"three", b"four", is_terminal=True)
            await stream.beside("x" * 999)
            description = await _description(harness.storage, "s")
            assert description.session_id == "s"
            assert description.generation == stream.generation
            assert [
                (
                    stream.stream,
                    stream.request_id,
                    stream.replay_floor,
                    stream.high_water_mark,
                    stream.is_terminal,
                    stream.retained_events,
                    stream.retained_bytes,
                )
                for stream in description.streams
            ] == [
                ("0", None, 0, 0, False, 0, 0),
                ("1.Y2FsbGVk", "called", 1, 4, True, 2, 9),
                ("2", "x" * 999, 0, 0, False, 0, 0),
            ]

    async def test_wait_returns_when_an_event_is_appended(self) -> None:
        """A tail is served as soon as there is something to serve."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a")
            assert await self._next_of(stream, 1, lambda: stream.append(b"b")) == Batch([b"b"], False)
            assert await self._next_of(stream, 2, lambda: stream.append(None)) == Batch([None], False)
            answer = await self._next_of(stream, 3, lambda: stream.append(b"answer", is_terminal=True))
            assert answer == Batch([b"answer"], True)

    async def test_wait_does_not_miss_what_was_appended_before_it_was_called(self) -> None:
        """An append may happen between a reader's `read` and its `wait`."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await stream.read(0) == Batch([], False)
            await stream.append(b"a")
            await self._wait(stream, 0)
            assert await stream.read(0) == Batch([b"a"], False)

    async def test_wait_returns_where_nothing_more_can_come(self) -> None:
        """After the answer, and for what is superseded, unknown or over."""
        async with self.harness(Retention()) as harness:
            answered = await _begin(harness.storage)
            await answered.append(b"answer", is_terminal=True)
            await self._wait(answered, 1)
            superseded = await answered.beside("2")
            await answered.beside("2")
            await self._wait(superseded, 0)
            await self._wait(replace(answered, stream=StreamId(99, "x")), 0)
            await self._wait(replace(answered, session_id="t"), 0)
            await _advanced(harness.storage, "s")
            await self._wait(answered.standalone(), 0)
            await harness.storage.end_session("s")
            await self._wait(answered.standalone(), 0)

    async def test_wait_returns_when_the_stream_is_superseded(self) -> None:
        """The tail of an earlier execution ends."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            await stream.append(b"a")
            assert await self._next_of(stream, 1, lambda: stream.beside("1")) is None

    async def test_wait_returns_when_the_session_ends(self) -> None:
        """The tails of a deleted session end; the standalone stream's too."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await self._next_of(stream, 0, lambda: harness.storage.end_session("s")) is None
            standalone = await _begin(harness.storage, request_id=None)
            assert await self._next_of(standalone, 0, lambda: harness.storage.end_session("s")) is None

    async def test_wait_returns_when_the_generation_advances(self) -> None:
        """One connection never carries two generations."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            assert await self._next_of(stream, 0, lambda: harness.storage.advance_generation("s")) is None
            stream = await _begin(harness.storage)
            assert await self._next_of(stream, 0, lambda: harness.storage.open_session("s")) is None

    async def test_wait_returns_for_each_of_several_readers(self) -> None:
        """Also when one of them gives up while it waits."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            read: list[Batch | None] = []

            async def reader() -> None:
                read.append(await stream.next_batch(0))

            with anyio.move_on_after(self.wait_seconds) as waiting:
                async with anyio.create_task_group() as tasks:
                    impatient = anyio.CancelScope()

                    async def impatient_reader() -> None:
                        with impatient:
                            await stream.next_batch(0)

                    tasks.start_soon(reader)
                    tasks.start_soon(impatient_reader)
                    tasks.start_soon(reader)
                    await anyio.wait_all_tasks_blocked()
                    impatient.cancel()
                    await anyio.wait_all_tasks_blocked()
                    await stream.append(b"a")
            assert not waiting.cancelled_caught, "wait did not return"
            assert read == [Batch([b"a"], False)] * 2

    async def test_what_one_instance_writes_another_reads(self) -> None:
        """A client that reconnects may meet another worker, or this one after a restart."""
        async with self.harness(Retention(max_events=3)) as harness:
            here = await _begin(harness.storage)
            await here.append(b"a", b"b", None, b"d")
            there = replace(here, storage=await _second(harness))
            assert await there.state() == await here.state() == Retained(high_water_mark=4, replay_floor=1, last_hole=3)
            assert await there.read(1) == Batch([b"b", None, b"d"], False)
            assert await there.append(b"e", is_terminal=True) == 5
            assert await here.read(3) == Batch([b"d", b"e"], True)
            assert (await _refusal(here.append(b"late"))).current == here.generation
            assert await _description(there.storage, "s") == await _description(here.storage, "s")

    async def test_a_writer_superseded_by_another_instance_is_refused(self) -> None:
        """A worker that does not know yet that it was replaced cannot write."""
        async with self.harness(Retention()) as harness:
            earlier = await _begin(harness.storage)
            await earlier.append(b"a")
            later = await _begin(await _second(harness))
            assert later.generation.counter > earlier.generation.counter
            assert (await _refusal(earlier.append(b"late"))).current == later.generation
            assert (await _refusal(earlier.beside("2"))).current == later.generation
            assert await earlier.reason(1) == "generation_mismatch"
            assert await later.read(0) == Batch([], False)
            await later.storage.end_session("s")
            await _check_unknown(earlier)

    async def test_wait_returns_when_another_instance_writes(self) -> None:
        """An event on one worker reaches a client that is served by another."""
        async with self.harness(Retention()) as harness:
            here = await _begin(harness.storage)
            there = replace(here, storage=await _second(harness))
            assert await self._next_of(here, 0, lambda: there.append(b"a")) == Batch([b"a"], False)
            assert await self._next_of(there, 1, lambda: here.append(b"b")) == Batch([b"b"], False)
            assert await self._next_of(here, 2, lambda: there.storage.advance_generation("s")) is None

    async def test_max_events_evicts_the_oldest_of_the_stream(self) -> None:
        """The floor moves with each, and other streams keep theirs."""
        async with self.harness(Retention(max_events=3)) as harness:
            stream = await _begin(harness.storage)
            other = await stream.beside("2")
            await other.append(b"a", b"b", b"c")
            sent: list[bytes | None] = []
            for seq in range(1, 9):
                sent.append(None if seq == 4 else b"%d" % seq)
                await stream.append(sent[-1])
                state = await _check_nothing_is_skipped(stream, sent)
                assert state.replay_floor == max(0, seq - 3)
            await stream.append(*sent)
            state = await _check_nothing_is_skipped(stream, sent + sent)
            assert state.replay_floor == 13
            assert (await _check_nothing_is_skipped(other, [b"a", b"b", b"c"])).replay_floor == 0

    async def test_max_bytes_evicts_the_oldest_of_the_stream(self) -> None:
        """As many as it takes, and no more; a hole takes no bytes."""
        async with self.harness(Retention(max_bytes=10)) as harness:
            stream = await _begin(harness.storage)
            sent: list[bytes | None] = []
            floors: list[int] = []
            for event in (b"1" * 4, b"2" * 4, b"3" * 2, b"4", None, b"6" * 9, b"7" * 10, b"", b"9"):
                sent.append(event)
                await stream.append(event)
                floors.append((await _check_nothing_is_skipped(stream, sent)).replay_floor)
            # Holes and empty events are evicted in their turn, not before.
            assert floors[:4] == [0, 0, 0, 1]
            assert floors[4:6] == [1, 3]
            assert floors[6:] == [6, 6, 7]

    async def test_the_newest_event_survives_its_own_append(self) -> None:
        """An unfinished stream always has what was appended last, whatever the limits."""
        tight = Retention(max_events=1, max_bytes=100, max_session_bytes=100, max_total_bytes=100)
        async with self.harness(tight) as harness:
            stream = await _begin(harness.storage)
            sent: list[bytes | None] = []
            for events in ([bytes(100)], [b"a"], [b"b", bytes(100)], [b"c", b"d", b"e"], [None], [bytes(100)]):
                sent += events
                await stream.append(*events)
                state = await _check_nothing_is_skipped(stream, sent)
                assert state.replay_floor == len(sent) - 1

    async def test_an_answer_that_evicts_everything_else_can_still_be_replayed(self) -> None:
        """It is what the client waits for."""
        async with self.harness(Retention(max_bytes=100)) as harness:
            stream = await _begin(harness.storage)
            await stream.append(*[bytes(10)] * 9)
            await stream.append(bytes(100), is_terminal=True)
            state = await _check_nothing_is_skipped(stream, [*[bytes(10)] * 9, bytes(100)])
            assert state == Retained(high_water_mark=10, replay_floor=9, is_terminal=True)

    async def test_max_session_bytes_evicts_the_oldest_of_the_session(self) -> None:
        """In order of appending over all of its streams, and another session keeps its own."""
        async with self.harness(Retention(max_bytes=50_000, max_session_bytes=50_000)) as harness:
            one = await _begin(harness.storage)
            two = await one.beside("2")
            other = await _begin(harness.storage, "t")
            await other.append(bytes(1000))
            event = bytes(1000)
            await one.append(*[event] * 20)
            for count in range(1, 61):
                await two.append(event)
                if count == 35:
                    # Most of the older stream is gone before anything of the younger one is.
                    assert (await _check_nothing_is_skipped(one, [event] * 20)).replay_floor > 0
                    assert (await _check_nothing_is_skipped(two, [event] * 35)).replay_floor == 0
            assert (await _check_nothing_is_skipped(one, [event] * 20)).replay_floor == 20
            assert (await _check_nothing_is_skipped(two, [event] * 60)).replay_floor > 0
            for _ in range(40):
                await one.append(event)
                await two.append(event)
            floor_of_one = (await _check_nothing_is_skipped(one, [event] * 60)).replay_floor - 20
            floor_of_two = (await _check_nothing_is_skipped(two, [event] * 100)).replay_floor - 60
            assert floor_of_one > 0
            assert abs(floor_of_one - floor_of_two) <= 1
            assert 25_000 <= (await _description(harness.storage, "s")).retained_bytes <= 50_000
            assert (await _check_nothing_is_skipped(other, [event])).replay_floor == 0

    async def test_max_total_bytes_evicts_the_oldest_of_the_store(self) -> None:
        """In order of appending over all sessions."""
        tight = Retention(max_bytes=50_000, max_session_bytes=50_000, max_total_bytes=50_000)
        async with self.harness(tight) as harness:
            one = await _begin(harness.storage, "s")
            two = await _begin(harness.storage, "t")
            event = bytes(1000)
            await one.append(*[event] * 20)
            for _ in range(60):
                await two.append(event)
            assert (await _check_nothing_is_skipped(one, [event] * 20)).replay_floor == 20
            assert (await _check_nothing_is_skipped(two, [event] * 60)).replay_floor > 0
            for _ in range(40):
                await one.append(event)
                await two.append(event)
            floor_of_one = (await _check_nothing_is_skipped(one, [event] * 60)).replay_floor - 20
            floor_of_two = (await _check_nothing_is_skipped(two, [event] * 100)).replay_floor - 60
            assert floor_of_one > 0
            assert abs(floor_of_one - floor_of_two) <= 1
            retained = [(await _description(harness.storage, session_id)).retained_bytes for session_id in ("s", "t")]
            assert 25_000 <= sum(retained) <= 50_000

    async def test_what_is_gone_takes_no_room(self) -> None:
        """What was superseded, belonged to an earlier generation or has ended does not count towards the ceilings."""
        tight = Retention(max_bytes=50_000, max_session_bytes=50_000, max_total_bytes=50_000)
        async with self.harness(tight) as harness:

            async def fill(stream: _Stream) -> None:
                events = [bytes(1000)] * 40
                await stream.append(*events)
                assert (await _check_nothing_is_skipped(stream, events)).replay_floor == 0

            stream = await _begin(harness.storage)
            await fill(stream)
            await fill(await stream.beside("1"))
            await fill(replace(stream.standalone(), generation=await _advanced(harness.storage, "s")))
            await fill(await _begin(harness.storage))
            await harness.storage.end_session("s")
            await fill(await _begin(harness.storage, "t"))

    async def test_tiny_events_are_charged_for_more_than_their_text(self) -> None:
        """A flood of them cannot pass the ceiling of the session."""
        async with self.harness(Retention(max_bytes=20_000, max_session_bytes=20_000)) as harness:
            stream = await _begin(harness.storage)
            await stream.append(*[b""] * 200)
            for _ in range(200):
                await stream.append(b"")
            await _check_nothing_is_skipped(stream, [b""] * 400)
            retained = (await _description(harness.storage, "s")).retained_events
            assert 100 <= retained <= 20_000 // _EVENT_CHARGE_BYTES

    async def test_completed_streams_are_charged_for_more_than_their_text(self) -> None:
        """A flood of short calls cannot pass the ceiling of the session; the newest answers are kept."""
        async with self.harness(Retention(max_bytes=20_000, max_session_bytes=20_000)) as harness:
            standalone = await _begin(harness.storage, request_id=None)
            for number in range(50):
                stream = await standalone.beside(str(number))
                await stream.append(b"answer", is_terminal=True)
                assert await stream.reason(0) == "resume"
            first = replace(standalone, stream=StreamId(1, "0"))
            assert await first.reason(0) in ("event_evicted", "stream_completed")
            assert 10 <= len((await _description(harness.storage, "s")).streams) <= 20_000 // _STREAM_CHARGE_BYTES

    async def test_completed_seconds_drops_a_completed_stream(self) -> None:
        """Not before its time; then it is evicted, not never opened. An open stream is kept."""
        async with self.harness(Retention(completed_seconds=10)) as harness:
            completed = await _begin(harness.storage)
            running = await completed.beside("2")
            await running.append(b"a")
            await completed.append(b"a", b"answer", is_terminal=True)
            await _advance(harness, 9)
            await _check_nothing_is_skipped(completed, [b"a", b"answer"])
            await _advance(harness, 2)
            assert await completed.state() == Dropped()
            assert [await completed.reason(seq) for seq in (0, 1, 2)] == ["event_evicted"] * 3
            assert await completed.read(0) is None
            assert (await _refusal(completed.append(b"late"))).current == completed.generation
            await _check_nothing_is_skipped(running, [b"a"])
            await _advance(harness, 1000)
            assert await running.append(b"b") == 2
            await _check_nothing_is_skipped(running, [b"a", b"b"])

    async def test_a_request_id_can_be_used_again_after_its_stream_was_dropped(self) -> None:
        """The dropped stream's ordinal is not given out again."""
        async with self.harness(Retention(completed_seconds=10)) as harness:
            dropped = await _begin(harness.storage)
            await dropped.append(b"answer", is_terminal=True)
            await _advance(harness, 11)
            again = await dropped.beside("1")
            assert again.stream == StreamId(2, "1")
            assert await again.read(0) == Batch([], False)
            assert await dropped.read(0) is None
            assert await dropped.reason(0) in ("event_evicted", "stream_superseded")

    async def test_idle_seconds_drops_an_idle_session(self) -> None:
        """Any activity keeps it; then it is unknown, and its events are gone."""
        async with self.harness(Retention(idle_seconds=100)) as harness:
            stream = await _begin(harness.storage, request_id=None)
            for _ in range(3):
                await _advance(harness, 60)
                await stream.append(b"a")
            await _advance(harness, 101)
            await _check_unknown(stream)

    async def test_idle_seconds_keeps_a_session_with_an_unanswered_request(self) -> None:
        """A call that says nothing for an hour is not an idle session; once it is answered, it may become one."""
        async with self.harness(Retention(idle_seconds=100, completed_seconds=10)) as harness:
            stream = await _begin(harness.storage)
            answered = await stream.beside("2")
            await answered.append(b"answer", is_terminal=True)
            for _ in range(3):
                await _advance(harness, 101)
                assert await harness.storage.snapshot("s", None) is not None
                await _advance(harness, 101)
            await stream.append(b"answer", is_terminal=True)
            await _advance(harness, 101)
            await _check_unknown(stream)

    async def test_an_execution_that_was_superseded_does_not_keep_a_session(self) -> None:
        """Nor does one of an earlier generation: only what can still be answered does."""
        async with self.harness(Retention(idle_seconds=100)) as harness:
            stream = await _begin(harness.storage, "s")
            again = await stream.beside("1")
            await again.append(b"answer", is_terminal=True)
            await _begin(harness.storage, "t")
            await _advanced(harness.storage, "t")
            await _advance(harness, 101)
            assert await harness.storage.snapshot("s", None) is None
            assert await harness.storage.snapshot("t", None) is None

    async def test_max_sessions_drops_the_least_recently_active(self) -> None:
        """Activity counts, not age."""
        async with self.harness(Retention(max_sessions=2)) as harness:
            one = await _begin(harness.storage, "one")
            await _advance(harness, 1)
            two = await _begin(harness.storage, "two")
            await _advance(harness, 1)
            await one.append(b"a")
            await _advance(harness, 1)
            three = await _begin(harness.storage, "three")
            await _check_unknown(two)
            await _check_nothing_is_skipped(one, [b"a"])
            await _check_nothing_is_skipped(three, [])

    async def test_concurrent_appends_keep_each_writers_order(self) -> None:
        """50 writers on 5 streams: each append is one step, and each event is where the returned seq says."""
        async with self.harness(Retention()) as harness:
            storages = await _instances(harness)
            first = await _begin(harness.storage, request_id="0")
            streams = [first, *[await first.beside(str(number)) for number in range(1, 5)]]
            returned: dict[int, list[int]] = {writer: [] for writer in range(50)}

            async def write(writer: int) -> None:
                stream = replace(streams[writer % 5], storage=storages[writer % len(storages)])
                for turn in range(4):
                    returned[writer].append(await stream.append(_payload(writer, turn, 0), _payload(writer, turn, 1)))
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                for writer in range(50):
                    tasks.start_soon(write, writer)
            for number, stream in enumerate(streams):
                writers = range(number, 50, 5)
                seqs = sorted(seq for writer in writers for seq in returned[writer])
                assert seqs == list(range(2, 82, 2))
                batch = await stream.read(0)
                assert batch is not None
                assert len(batch.events) == 80
                for writer in writers:
                    assert _is_increasing(returned[writer])
                    for turn, seq in enumerate(returned[writer]):
                        expected = [_payload(writer, turn, 0), _payload(writer, turn, 1)]
                        assert list(batch.events[seq - 2 : seq]) == expected

    async def test_a_snapshot_and_a_read_during_appends_are_consistent(self) -> None:
        """A snapshot is of one moment, and a read never skips: each place holds the event that was given its seq."""
        async with self.harness(Retention(max_events=8)) as harness:
            storages = await _instances(harness)
            stream = await _begin(harness.storage)
            seen: dict[int, list[tuple[StreamState, Batch | None]]] = {reader: [] for reader in range(4)}
            is_written = False

            async def write() -> None:
                nonlocal is_written
                for seq in range(1, 121, 3):
                    await stream.append(b"%d" % seq, b"%d" % (seq + 1), b"%d" % (seq + 2))
                    await anyio.lowlevel.checkpoint()
                is_written = True

            async def read(reader: int) -> None:
                here = replace(stream, storage=storages[reader % len(storages)])
                while not is_written:
                    state = await here.state()
                    floor = state.replay_floor if isinstance(state, Retained) else 0
                    seen[reader].append((state, await here.read(floor)))
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                for reader in seen:
                    tasks.start_soon(read, reader)
                tasks.start_soon(write)
            for observations in seen.values():
                last = Retained(high_water_mark=0)
                for state, batch in observations:
                    assert isinstance(state, Retained)
                    assert state.high_water_mark % 3 == 0, "an append of several events is one step"
                    assert state.replay_floor == max(0, state.high_water_mark - 8)
                    assert state.high_water_mark >= last.high_water_mark
                    last = state
                    if batch is not None:
                        events = [b"%d" % (state.replay_floor + 1 + place) for place in range(len(batch.events))]
                        assert list(batch.events) == events
                        assert len(events) >= state.high_water_mark - state.replay_floor
            await _check_nothing_is_skipped(stream, [b"%d" % seq for seq in range(1, 121)])

    async def test_of_concurrent_answers_one_is_stored(self) -> None:
        """Each of two executions may think that it is the one that answers."""
        async with self.harness(Retention()) as harness:
            storages = await _instances(harness)
            stream = await _begin(harness.storage)
            stored: list[bytes] = []

            async def answer(number: int) -> None:
                here = replace(stream, storage=storages[number % len(storages)])
                try:
                    await here.append(b"%d" % number, is_terminal=True)
                except AppendRefusedError:
                    return
                stored.append(b"%d" % number)

            async with anyio.create_task_group() as tasks:
                for number in range(10):
                    tasks.start_soon(answer, number)
            assert len(stored) == 1
            assert await stream.read(0) == Batch(stored, True)

    async def test_appends_stop_where_a_generation_is_claimed_among_them(self) -> None:
        """None is accepted after the claim has returned, and none that was under way gets into the new generation."""
        async with self.harness(Retention()) as harness:
            storages = await _instances(harness)
            for turns in range(8):
                stream = await _begin(harness.storage, request_id=None)
                claimed: list[Generation] = []
                accepted_late: list[int] = []

                async def write(stream: _Stream, claimed: list[Generation], accepted_late: list[int]) -> None:
                    while not accepted_late:
                        is_claimed = bool(claimed)
                        try:
                            seq = await stream.append(b"a")
                        except AppendRefusedError:
                            return
                        if is_claimed:
                            accepted_late.append(seq)
                        await anyio.lowlevel.checkpoint()

                async with anyio.create_task_group() as tasks:
                    for _ in range(4):
                        tasks.start_soon(write, stream, claimed, accepted_late)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    claimed.append(await storages[-1].open_session("s"))
                assert accepted_late == []
                assert await replace(stream, generation=claimed[0]).read(0) == Batch([], False)

    async def test_a_cancelled_append_is_stored_whole_or_not_at_all(self) -> None:
        """A writer may be cancelled at any await, and its stream goes on."""
        async with self.harness(Retention()) as harness:
            stream = await _begin(harness.storage)
            for turns in range(6):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream.append, b"a", b"b", b"c")
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                # One read: what was cancelled may be under way still, and be stored after it.
                batch = await stream.read(0)
                assert batch is not None
                assert list(batch.events) == [b"a", b"b", b"c"] * (len(batch.events) // 3)
            last = await stream.append(b"d")
            assert await stream.read(last - 1, 1) == Batch([b"d"], False)

    async def test_what_was_stored_survives_a_restart(self) -> None:
        """Generations, streams, marks, holes and events: the next instance goes on where a closed one stopped."""
        async with self.harness(Retention(max_events=3)) as harness:
            past = await harness.storage.open_session("s")
            running = await _begin(harness.storage)
            answered = await running.beside("2")
            superseded = await running.beside("3")
            restarted = await running.beside("3", origin=(2, 3))
            await running.append(b"a", b"b", None, b"d")
            await answered.append(b"answer", is_terminal=True)
            ended = await _begin(harness.storage, "t")
            await harness.storage.end_session("t")
            description = await _description(harness.storage, "s")
            await harness.storage.aclose()
            again = await _second(harness)
            running, answered, superseded, restarted, ended = (
                replace(stream, storage=again) for stream in (running, answered, superseded, restarted, ended)
            )
            assert await _description(again, "s") == description
            assert await _claimed(again, "s", past) == "earlier"
            assert await running.state() == Retained(high_water_mark=4, replay_floor=1, last_hole=3)
            assert await running.read(1) == Batch([b"b", None, b"d"], False)
            assert await answered.read(0) == Batch([b"answer"], True)
            assert await superseded.state() == Superseded()
            assert await _successor(superseded) == Successor(stream=restarted.stream, origin=(2, 3))
            await _check_unknown(ended)
            assert await running.append(b"e") == 5
            assert (await running.beside("4")).stream == StreamId(5, "4")
            assert (await _advanced(again, "s")).counter > running.generation.counter
            assert (await again.open_session("t")).counter > ended.generation.counter

    async def test_closing_twice_does_nothing(self) -> None:
        """`aclose` is idempotent."""
        async with self.harness(Retention()) as harness:
            await harness.storage.aclose()
            await harness.storage.aclose()

    async def _wait(self, stream: _Stream, after_seq: int) -> None:
        """Call `wait`, which has to return."""
        with anyio.move_on_after(self.wait_seconds) as waiting:
            await stream.storage.wait(stream.session_id, stream.generation, stream.stream, after_seq)
        assert not waiting.cancelled_caught, "wait did not return"

    async def _next_of(self, stream: _Stream, after_seq: int, change: Callable[[], Awaitable[object]]) -> Batch | None:
        """Let a reader wait for what follows `after_seq`, make `change`, and return what the reader found."""
        found: list[Batch | None] = []

        async def reader() -> None:
            found.append(await stream.next_batch(after_seq))

        with anyio.move_on_after(self.wait_seconds) as waiting:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader)
                await anyio.wait_all_tasks_blocked()
                assert not found, "there was something to read before the change"
                await change()
        assert not waiting.cancelled_caught, "wait did not return"
        return found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """One stream, as its writer and its readers see it."""

    storage: Storage
    session_id: str
    generation: Generation
    stream: StreamId

    async def append(self, *events: bytes | None, is_terminal: bool = False) -> int:
        return await self.storage.append(self.session_id, self.generation, self.stream, events, is_terminal=is_terminal)

    async def read(self, after_seq: int, limit: int = _ALL) -> Batch | None:
        """Read, with the events as a list: any sequence will do."""
        batch = await self.storage.read(self.session_id, self.generation, self.stream, after_seq, limit)
        return None if batch is None else replace(batch, events=list(batch.events))

    async def next_batch(self, after_seq: int) -> Batch | None:
        """Wait until there is something to read, as a tail does."""
        while True:
            batch = await self.read(after_seq)
            if batch is None or batch.events or batch.is_terminal:
                return batch
            await self.storage.wait(self.session_id, self.generation, self.stream, after_seq)

    async def beside(self, request_id: str, *, origin: tuple[int, int] | None = None) -> _Stream:
        """Open another stream in the same generation."""
        stream = await self.storage.open_stream(self.session_id, self.generation, request_id, origin=origin)
        return replace(self, stream=stream)

    def standalone(self) -> _Stream:
        return replace(self, stream=STANDALONE)

    def cursor(self, seq: int) -> EventCursor:
        return EventCursor(generation=self.generation, stream=self.stream, seq=seq)

    async def state(self) -> StreamState:
        """Return the stream's state, with a hole below the floor told as none: both mean the same."""
        snapshot = await self.storage.snapshot(self.session_id, self.cursor(0))
        assert snapshot is not None, "the session is unknown"
        assert snapshot.claimed == "current"
        state = snapshot.stream
        if isinstance(state, Retained) and state.last_hole <= state.replay_floor:
            return replace(state, last_hole=0)
        return state

    async def rest(self, seq: int) -> list[bytes | None] | None:
        """Return the rest of the stream after a seq, where a snapshot tells it."""
        snapshot = await self.storage.snapshot(self.session_id, self.cursor(seq))
        assert snapshot is not None, "the session is unknown"
        assert isinstance(snapshot.stream, Retained)
        return None if snapshot.stream.rest is None else list(snapshot.stream.rest)

    async def reason(self, seq: int) -> str:
        """Return why a cursor at `seq` is refused; "resume" where it is not."""
        return await _reason(self.storage, self.session_id, str(self.cursor(seq)))


async def _begin(storage: Storage, session_id: str = "s", request_id: str | None = "1") -> _Stream:
    """Open a session and a stream in it; None is the standalone stream."""
    generation = await storage.open_session(session_id)
    standalone = _Stream(storage=storage, session_id=session_id, generation=generation, stream=STANDALONE)
    return standalone if request_id is None else await standalone.beside(request_id)


async def _advanced(storage: Storage, session_id: str) -> Generation:
    generation = await storage.advance_generation(session_id)
    assert generation is not None, "the session is unknown"
    return generation


async def _current(storage: Storage, session_id: str) -> Generation:
    snapshot = await storage.snapshot(session_id, None)
    assert snapshot is not None, "the session is unknown"
    assert (await _description(storage, session_id)).generation == snapshot.generation
    return snapshot.generation


async def _claimed(storage: Storage, session_id: str, generation: Generation) -> str:
    """Return what a snapshot says of a cursor's generation."""
    snapshot = await storage.snapshot(session_id, EventCursor(generation=generation, stream=STANDALONE, seq=0))
    assert snapshot is not None, "the session is unknown"
    return snapshot.claimed


async def _successor(stream: _Stream) -> Successor | None:
    snapshot = await stream.storage.snapshot(stream.session_id, stream.cursor(0))
    assert snapshot is not None, "the session is unknown"
    return snapshot.successor


async def _description(storage: Storage, session_id: str) -> SessionDescription:
    description = await storage.describe(session_id)
    assert description is not None, "the session is unknown"
    return description


async def _reason(storage: Storage, session_id: str, event_id: str) -> str:
    cursor = EventCursor.parse(event_id)
    snapshot: Snapshot | None = await storage.snapshot(session_id, cursor)
    decision = decide(event_id, cursor, snapshot, replay_completed=True)
    return "resume" if isinstance(decision, Resume) else decision.error.reason


async def _refusal(write: Awaitable[object]) -> AppendRefusedError:
    try:
        result = await write
    except AppendRefusedError as refusal:
        return refusal
    raise AssertionError(f"a write that has to be refused was accepted: {result!r}")


async def _is_value_error(write: Awaitable[object]) -> bool:
    try:
        await write
    except ValueError:
        return True
    return False


async def _instances(harness: StorageHarness) -> list[Storage]:
    """Return the storage under test and, where the backend can, a second instance over the same data."""
    again = await harness.open_again()
    return [harness.storage] if again is None else [harness.storage, again]


async def _second(harness: StorageHarness) -> Storage:
    again = await harness.open_again()
    if again is None:
        pytest.skip("this backend cannot have a second instance over the same data")
    return again


async def _advance(harness: StorageHarness, seconds: float) -> None:
    if not await harness.advance(seconds):
        pytest.skip("this backend's clock cannot be moved")


async def _check_unknown(stream: _Stream) -> None:
    """Check that nothing is left of the session of `stream` that a reader or a writer could use."""
    storage, session_id = stream.storage, stream.session_id
    assert await storage.snapshot(session_id, None) is None
    assert await storage.describe(session_id) is None
    assert await storage.advance_generation(session_id) is None
    for each in (stream, stream.standalone()):
        assert await storage.snapshot(session_id, each.cursor(0)) is None
        assert await each.reason(0) == "session_not_found"
        assert await each.read(0) is None
        assert (await _refusal(each.append(b"late"))).current is None
    assert (await _refusal(stream.beside("late"))).current is None
    assert await storage.snapshot(session_id, None) is None, "a refused write revived the session"


async def _check_nothing_is_skipped(stream: _Stream, sent: Sequence[bytes | None]) -> Retained:
    """Check the invariant of retention: from the floor on everything can be read, and below it nothing resumes.

    Args:
        stream: A stream that is open, or whose answer is retained.
        sent: All that was ever appended to it.
    """
    state = await stream.state()
    assert isinstance(state, Retained)
    floor, mark = state.replay_floor, state.high_water_mark
    assert mark == len(sent)
    assert 0 <= floor <= mark
    holes = [seq for seq in range(floor + 1, mark + 1) if sent[seq - 1] is None]
    assert state.last_hole == max(holes, default=0)
    for after_seq in range(floor, mark + 1):
        assert await stream.read(after_seq) == Batch(list(sent[after_seq:]), state.is_terminal), after_seq
    for after_seq in range(floor):
        assert await stream.read(after_seq) is None, after_seq
    if not (state.is_terminal and floor == mark):
        assert await stream.reason(floor) == ("replay_gap" if holes else "resume")
    if floor > 0:
        assert await stream.reason(floor - 1) == "event_evicted"
    assert await stream.reason(mark + 1) == "future_event_id"
    return state


def _payload(writer: int, turn: int, place: int) -> bytes:
    return b"%d:%d:%d" % (writer, turn, place)


def _is_increasing(numbers: Sequence[int]) -> bool:
    return all(earlier < later for earlier, later in pairwise(numbers))
