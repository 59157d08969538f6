"""`examples/sqlite_storage.py`: in a stranger's repository, over several processes, and through kill -9."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

import mcp_resumable
from examples.sqlite_storage import SqliteStorage
from mcp_resumable import EventCursor
from mcp_resumable.decision import Retained
from mcp_resumable.testing import StorageContract

from . import sqlite_writer, stranger
from .sqlite_writer import GENERATION, SESSION, STREAM

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent

TIMEOUT = 60


class Writer:
    """A process that writes."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def line(self) -> str:
        """Return the next line that it tells."""
        return (await self._lines.receive_until(b"\n", 100)).decode()

    async def rest(self) -> list[str]:
        """Return the lines that it tells until its end; the last may be cut."""
        lines = []
        while True:
            try:
                lines.append(await self.line())
            except (anyio.EndOfStream, anyio.IncompleteRead):
                return lines


@asynccontextmanager
async def writing(path: Path, what: str, name: str = "writer", count: int = sys.maxsize) -> AsyncGenerator[Writer]:
    command = [sys.executable, "-m", sqlite_writer.__name__, what, str(path), name, str(count)]
    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
        try:
            yield Writer(process)
        finally:
            if process.returncode is None:
                process.kill()


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[SqliteStorage]:
    storage = SqliteStorage(path)
    try:
        yield storage
    finally:
        await storage.aclose()


async def begin(path: Path) -> None:
    async with opened(path) as storage:
        assert await storage.open_session(SESSION, nonce=GENERATION.nonce) == GENERATION
        assert await storage.open_stream(SESSION, GENERATION, "1") == STREAM


async def read(storage: SqliteStorage) -> list[str]:
    batch = await storage.read(SESSION, GENERATION, STREAM, 0, 10_000)
    assert batch is not None
    return [event.decode() for event in batch.events if event is not None]


async def high_water_mark(storage: SqliteStorage) -> int:
    snapshot = await storage.snapshot(SESSION, EventCursor(generation=GENERATION, stream=STREAM, seq=0))
    assert snapshot is not None
    assert isinstance(snapshot.stream, Retained)
    return snapshot.stream.high_water_mark


def check_integrity(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("appends", [1, 20, 300])
async def test_a_writer_killed_between_two_appends_loses_nothing_acknowledged(tmp_path: Path, appends: int) -> None:
    path = tmp_path / "events.db"
    await begin(path)
    with anyio.fail_after(TIMEOUT):
        async with writing(path, "append") as writer:
            acknowledged = [await writer.line() for _ in range(appends)]
            writer.process.kill()
            acknowledged += await writer.rest()
            await writer.process.wait()
    async with opened(path) as storage:
        stored = await read(storage)
        # The last may have been stored and not acknowledged: its writer takes it as lost.
        assert len(acknowledged) <= len(stored) <= len(acknowledged) + 1
        assert stored == [f"writer {number}" for number in range(len(stored))]
        assert acknowledged == [f"{seq} writer {seq - 1}" for seq in range(1, len(acknowledged) + 1)]
        assert await storage.append(SESSION, GENERATION, STREAM, [b"after it"]) == len(stored) + 1
        assert await high_water_mark(storage) == len(stored) + 1
    check_integrity(path)


async def test_a_writer_killed_within_an_append_leaves_nothing_of_it_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    await begin(path)
    async with opened(path) as storage:
        assert await storage.append(SESSION, GENERATION, STREAM, [b"before it"]) == 1
        with anyio.fail_after(TIMEOUT):
            async with writing(path, "stop") as writer:
                assert await writer.line() == "stopped"
                assert await read(storage) == ["before it"], "a reader does not wait for it"
                writer.process.kill()
                await writer.process.wait()
        assert await high_water_mark(storage) == 1
        assert await storage.append(SESSION, GENERATION, STREAM, [b"after it"]) == 2
        assert await read(storage) == ["before it", "after it"]
    check_integrity(path)


async def test_a_writer_that_is_stuck_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    await begin(path)
    async with opened(path) as storage:
        with anyio.fail_after(TIMEOUT):
            async with writing(path, "stop") as writer:
                assert await writer.line() == "stopped"
                with pytest.raises(sqlite3.OperationalError):
                    await storage.append(SESSION, GENERATION, STREAM, [b"lost"])
        assert await storage.append(SESSION, GENERATION, STREAM, [None, b"after it"]) == 2


async def test_processes_that_write_to_one_stream_never_share_a_seq(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    await begin(path)
    told: dict[str, list[str]] = {}

    async def run(name: str) -> None:
        async with writing(path, "append", name, 100) as writer:
            told[name] = await writer.rest()
            assert await writer.process.wait() == 0

    with anyio.fail_after(TIMEOUT):
        async with anyio.create_task_group() as tasks:
            for name in ("one", "two", "three"):
                tasks.start_soon(run, name)
    async with opened(path) as storage:
        stored = [f"{seq} {event}" for seq, event in enumerate(await read(storage), 1)]
    assert len(stored) == 300
    for name, lines in told.items():
        assert lines == [line for line in stored if line.split()[1] == name]
        assert [line.split()[2] for line in lines] == [str(number) for number in range(100)]


# In a stranger's repository.


def run_suite(repository: Path, *options: str) -> tuple[int, str]:
    """Run the tests of a stranger's repository; return pytest's exit status and output."""
    installed = repository.parent / "installed"
    installed.mkdir()
    (installed / "mcp_resumable").symlink_to(Path(mcp_resumable.__file__).parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", *options],
        cwd=repository,
        env={**environment, "PYTHONPATH": str(installed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_strangers_copy_passes_the_whole_suite(tmp_path: Path) -> None:
    status, output = run_suite(stranger.make_repository(tmp_path / "repository"))
    claims = [name for name in vars(StorageContract) if name.startswith("test_")]
    assert status == 0, output
    # Once for each event loop, and none is skipped.
    assert re.search(rf"={{3,}} {2 * len(claims)} passed in", output), output


@pytest.mark.parametrize(
    ("file", "right", "wrong", "caught_by"),
    [
        (
            "sqlite_storage.py",
            "if current != generation or kept is None or",
            "if kept is None or",
            "test_a_superseded_writer_is_refused_and_leaves_nothing",
        ),
        (
            "sqlite_storage.sql",
            "SET replay_floor = OLD.seq,",
            "SET replay_floor = OLD.seq - 1,",
            "test_max_events_evicts_the_oldest_of_the_stream",
        ),
    ],
)
def test_a_broken_copy_fails(tmp_path: Path, file: str, right: str, wrong: str, caught_by: str) -> None:
    repository = stranger.make_repository(tmp_path / "repository")
    text = (repository / file).read_text(encoding="utf-8")
    assert text.count(right) == 1
    (repository / file).write_text(text.replace(right, wrong), encoding="utf-8")
    status, output = run_suite(repository, "-k", caught_by)
    assert status == 1, output
    assert re.search(r"={3,} 2 failed, ", output), output


def test_the_example_is_short() -> None:
    assert len((stranger.EXAMPLES / "sqlite_storage.py").read_text(encoding="utf-8").splitlines()) <= 150
