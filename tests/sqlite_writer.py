"""A process that writes to a SQLite file: `python -m tests.sqlite_writer append|stop PATH NAME COUNT`."""

from __future__ import annotations

import sqlite3
import sys

import anyio

from examples.sqlite_storage import SqliteStorage
from mcp_resumable import Generation
from mcp_resumable.cursor import StreamId

__all__ = ["GENERATION", "SESSION", "STREAM"]

# What it writes to.
SESSION, GENERATION, STREAM = "s", Generation(1, "k3v9q0m4x7ta"), StreamId(1, "1")


class StopsInATransaction(SqliteStorage):
    """Waits to be killed when it has inserted an event, and has not committed."""

    def _run(self, sql: str, *values: object) -> sqlite3.Cursor:
        cursor = super()._run(sql, *values)
        if sql.startswith("INSERT INTO events"):
            tell("stopped")
            sys.stdin.read()
        return cursor


def tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a program's output


async def write(storage: SqliteStorage, name: str, count: int) -> None:
    for number in range(count):
        event = f"{name} {number}"
        seq = await storage.append(SESSION, GENERATION, STREAM, [event.encode()])
        tell(f"{seq} {event}")


def main() -> None:
    """Write, until it is done or killed."""
    what, path, name, count = sys.argv[1:]
    kinds = {"append": SqliteStorage, "stop": StopsInATransaction}
    storage = kinds[what](path)
    # A machine that is busy with other things may let a process wait for its turn for longer than a second.
    storage._run("PRAGMA busy_timeout = 30000")
    anyio.run(write, storage, name, int(count))


if __name__ == "__main__":
    main()
