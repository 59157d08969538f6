"""What happens in each row of the matrix, how what a client received is judged, and what is expected of each client.

Pure: no network, no clock. `scenarios.py` makes it happen, `matrix.py` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "CLIENTS",
    "LAST_LOG",
    "README_BEGIN",
    "README_END",
    "STORIES",
    "UNEXPLAINED",
    "WAITS",
    "Story",
    "expected",
    "is_promised",
    "judge",
    "markdown_rows",
    "readme_rows",
]

Rejection = Literal["status", "stream"]

CLIENTS: dict[str, str] = {
    "py1": "Python `mcp` 1.x",
    "py2": 'Python `mcp` 2.x, `mode="legacy"`',
    "ts1": "TypeScript `sdk` 1.x",
    "ts2": "TypeScript `client` 2.x",
    "langchain": "`langchain-mcp-adapters`",
    "fastmcp": 'PrefectHQ `fastmcp`, `mode="legacy"`',
}
"""The columns: how the matrix calls a client, and how the table does."""

LAST_LOG = "end"
"""The last notification of the standalone stream."""

# The outcomes that are not about a list of events.
COMPLETE = "everything, each event once"
CURRENT = "the current execution, whole"
GOES_ON = "told of the gap, goes on"
WAITS = "**waits**"
UNEXPLAINED = "fails without a reason"
SILENT = "**silent** after notification"


@dataclass(frozen=True, kw_only=True)
class Story:
    """One cell's story.

    Attributes:
        row: Key of its row.
        rejection: How the store tells a client that it is refused.
        progress: Numbers of all progress notifications that the client is to receive.
        logs: Texts of all notifications of the standalone stream that it is to receive; empty where there are none.
        text: Of the result.
        dead: The reason why its cursor is refused; None where it resumes.
        restarted: Whether the call has a current execution to go on with.
        patience: Seconds after which a client that has received nothing is one that waits.
    """

    row: str
    rejection: Rejection = "status"
    progress: tuple[int, ...]
    logs: tuple[str, ...] = ()
    text: str = "done"
    dead: str | None = None
    restarted: bool = False
    patience: float = 30.0

    @property
    def name(self) -> str:
        """Unique among the stories."""
        return f"{self.row}-{self.rejection}" if self.dead else self.row


ROWS: dict[str, str] = {
    "reset": "connection reset in the middle of a call",
    "poll": "server closes the connection, twice; the client polls",
    "reset-in-replay": "the resume is reset in the middle of the replay",
    "two-resets": "two resets in a row: the resume is reset before it is answered",
    "evicted": "dead cursor: the missed events are no longer retained",
    "completed": "dead cursor: the call was completed (`replay_completed=False`)",
    "advanced": "dead cursor: the generation advanced while the call runs",
    "restarted": "dead cursor: the call was executed again",
    "standalone": "standalone stream reset: its notifications",
    "standalone-twice": "standalone stream reset, resumed, reset: its notifications",
    "standalone-evicted": "standalone stream, dead cursor: its notifications",
}
"""The rows: key, and what happens."""

# Long enough for any client that does not wait; the clients retry after 50 ms, and give up after two tries.
_SHORT_PATIENCE = 10.0


def _both(row: str, dead: str, progress: tuple[int, ...], **more: Any) -> list[Story]:
    return [
        Story(row=row, rejection="status", dead=dead, progress=progress, patience=_SHORT_PATIENCE, **more),
        Story(row=row, rejection="stream", dead=dead, progress=progress, **more),
    ]


STORIES: dict[str, Story] = {
    story.name: story
    for story in (
        Story(row="reset", progress=tuple(range(1, 10))),
        Story(row="poll", progress=tuple(range(1, 7))),
        Story(row="reset-in-replay", progress=tuple(range(1, 12))),
        Story(row="two-resets", progress=tuple(range(1, 8))),
        *_both("evicted", "event_evicted", (1,)),
        *_both("completed", "stream_completed", (1, 2, 3)),
        *_both("advanced", "generation_mismatch", (1, 2, 3, 101, 102, 103), restarted=True),
        *_both("restarted", "stream_superseded", (1, 2, 3, 101, 102, 103), restarted=True),
        Story(row="standalone", progress=(1,), logs=("1", "2", "3", "4", LAST_LOG)),
        Story(row="standalone-twice", progress=(1,), logs=("1", "2", "3", "4", LAST_LOG), patience=_SHORT_PATIENCE),
        *_both("standalone-evicted", "event_evicted", (1,), logs=("1", "3", LAST_LOG)),
    )
}
"""All cells of one client and one server."""


def judge(story: Story, received: dict[str, Any]) -> str:
    """Return what became of the cell, as the table says it; what no client should ever see begins with `BROKEN`."""
    outcome, progress, logs = received["outcome"], received["progress"], received["logs"]
    markers = received["markers"]
    if outcome != "result" and tuple(progress) != story.progress[: len(progress)]:
        return f"BROKEN: {received}"
    if not story.logs and outcome == "waiting":
        return WAITS
    if not story.logs and outcome == "error":
        data = received["error"]["data"]
        if not isinstance(data, dict):
            return UNEXPLAINED
        return f"fails at once: `{data['reason']}`" if data.get("outcome") else f"BROKEN: {data}"
    if outcome != "result" or received["text"] != story.text or (story.logs and tuple(progress) != story.progress):
        return f"BROKEN: {received}"
    if story.logs and story.logs[: len(logs)] == tuple(logs) and LAST_LOG not in logs and not markers:
        return f"{SILENT} {len(logs)}"
    # Two where a generation advanced: the standalone stream is told too.
    if set(markers) != ({story.dead} if story.dead else set()):
        return f"BROKEN: markers {markers}"
    if story.logs:
        whole = GOES_ON if story.dead else COMPLETE
        return whole if tuple(logs) == story.logs else f"BROKEN: {logs}"
    whole = CURRENT if story.dead else COMPLETE
    return whole if tuple(progress) == story.progress else _describe(progress, story.progress)


def _describe(got: list[int], sent: tuple[int, ...]) -> str:
    """Describe how `got` differs from `sent`."""
    if tuple(dict.fromkeys(got)) != sent:
        return f"BROKEN: {got}"
    repeated = sorted({number for number in got if got.count(number) > 1})
    return f"everything, {', '.join(map(str, repeated))} twice"


# Row by row and cell by cell. The first is what all clients do that are not named.
_PYTHON = ("py1", "py2", "langchain", "fastmcp")
_EXPECTED: dict[str, tuple[str, dict[str, str]]] = {
    "reset": (COMPLETE, {}),
    "poll": (COMPLETE, {}),
    # Python's clients retry a resume that was cut with the cursor that it began with, and so ask for repetition.
    "reset-in-replay": (COMPLETE, dict.fromkeys(_PYTHON, "everything, 4, 5 twice")),
    "two-resets": (COMPLETE, {}),
    **{
        f"{row}-status": (WAITS, dict.fromkeys(("py2", "fastmcp"), UNEXPLAINED))
        for row in ("evicted", "completed", "advanced", "restarted")
    },
    "evicted-stream": ("fails at once: `event_evicted`", {}),
    "completed-stream": ("fails at once: `stream_completed`", {}),
    "advanced-stream": (CURRENT, {}),
    "restarted-stream": (CURRENT, {}),
    "standalone": (COMPLETE, {}),
    # Python's clients count the resets of a standalone stream over its whole life, and give up at the second.
    "standalone-twice": (COMPLETE, dict.fromkeys(_PYTHON, f"{SILENT} 2")),
    "standalone-evicted-status": (f"{SILENT} 1", {}),
    "standalone-evicted-stream": (GOES_ON, {}),
}


def expected(client: str, story: str) -> str:
    """Return what a client is known to do in a story, with either server."""
    usual, exceptions = _EXPECTED[story]
    return exceptions.get(client, usual)


def is_promised(story: Story, verdict: str) -> bool:
    """Return whether a verdict is one that this package allows, whatever the client.

    Nothing is lost or out of order, unless the client stops asking. What is received twice was asked for twice. With
    `rejection="stream"` no call waits, and a refusal says why.
    """
    if verdict.startswith("BROKEN"):
        return False
    if story.dead is None:
        return verdict.startswith("everything") or (story.row == "standalone-twice" and verdict.startswith(SILENT))
    if story.rejection == "status":
        return verdict in (WAITS, UNEXPLAINED) or verdict.startswith(SILENT)
    if story.logs:
        return verdict == GOES_ON
    return verdict == (CURRENT if story.restarted else f"fails at once: `{story.dead}`")


def markdown_rows(verdicts: Mapping[tuple[str, str], str], clients: list[str]) -> list[str]:
    """Return the table; `verdicts` is by client and story."""
    lines = [
        "| what happens | " + " | ".join(CLIENTS[client] for client in clients) + " |",
        "|---|" + "---|" * len(clients),
    ]
    for name, story in STORIES.items():
        title = ROWS[story.row] + (f'; `rejection="{story.rejection}"`' if story.dead else "")
        lines.append(f"| {title} | " + " | ".join(verdicts[client, name] for client in clients) + " |")
    return lines


README_BEGIN = "<!-- written by `make clients` -->"
README_END = "<!-- end of what `make clients` writes -->"


def readme_rows(verdicts: Mapping[tuple[str, str], str], clients: list[str]) -> list[str]:
    """Return the README's short table: clients that do the same share a row."""
    columns = {
        'refused, `"status"`': ("evicted-status", "completed-status"),
        'refused, `"stream"`': ("evicted-stream", "completed-stream"),
        'moved on, `"stream"`': ("advanced-stream", "restarted-stream"),
        "cut while resuming": ("reset-in-replay",),
        "notifications cut twice": ("standalone-twice",),
    }
    rows: dict[tuple[str, ...], list[str]] = {}
    for client in clients:
        cells = tuple(_merged([verdicts[client, name] for name in names]) for names in columns.values())
        rows.setdefault(cells, []).append(CLIENTS[client])
    lines = [README_BEGIN, "| client | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return [*lines, README_END]


def _merged(verdicts: list[str]) -> str:
    """Return what verdicts say together, without the reasons by which they differ."""
    return "; ".join(dict.fromkeys(verdict.partition(": `")[0] for verdict in verdicts))
