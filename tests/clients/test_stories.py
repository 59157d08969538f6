"""The matrix's judge, and what is expected of the clients, without running any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .stories import CLIENTS, STORIES, WAITS, expected, is_promised, judge, readme_rows


def received(**more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "progress": [],
        "logs": [],
        "markers": [],
        "outcome": "result",
        "text": "done",
        "error": None,
    }
    return {**usual, **more}


def refused(data: object) -> dict[str, Any]:
    return received(progress=[1], outcome="error", text=None, error={"type": "E", "message": "", "data": data})


EVICTED = {"reason": "event_evicted", "outcome": "reset"}

CASES = [
    ("reset", received(progress=[*range(1, 10)]), "everything, each event once", True),
    ("reset", received(progress=[1, 2, 3, 4, 4, 5, 6, 7, 8, 9]), "everything, 4 twice", True),
    ("reset", received(progress=[1, 2, 3, 5, 6, 7, 8, 9]), "BROKEN", False),
    ("reset", received(progress=[1, 3, 2, *range(4, 10)]), "BROKEN", False),
    ("reset", received(progress=[*range(1, 10)], text="other"), "BROKEN", False),
    ("reset", received(progress=[1, 2, 3], outcome="waiting"), WAITS, False),
    ("reset", refused(None), "fails without a reason", False),
    ("evicted-status", received(progress=[1], outcome="waiting"), WAITS, True),
    ("evicted-status", received(progress=[1, 5], outcome="waiting"), "BROKEN", False),
    ("evicted-status", refused(None), "fails without a reason", True),
    ("evicted-stream", received(progress=[1], outcome="waiting"), WAITS, False),
    ("evicted-stream", refused(None), "fails without a reason", False),
    ("evicted-stream", refused(EVICTED), "fails at once: `event_evicted`", True),
    ("evicted-stream", refused({**EVICTED, "reason": "replay_gap"}), "fails at once: `replay_gap`", False),
    (
        "restarted-stream",
        received(progress=[1, 2, 3, 101, 102, 103], markers=["stream_superseded"]),
        "the current execution, whole",
        True,
    ),
    ("restarted-stream", received(progress=[1, 2, 3, 101, 102, 103]), "BROKEN", False),
    ("restarted-stream", received(progress=[1, 2, 3, 102, 103], markers=["stream_superseded"]), "BROKEN", False),
    ("standalone", received(progress=[1], logs=["1", "2", "3", "4", "end"]), "everything, each event once", True),
    ("standalone", received(progress=[1], logs=["1", "2", "4", "end"]), "BROKEN", False),
    ("standalone", received(progress=[1], logs=["1", "2", "2", "3", "4", "end"]), "BROKEN", False),
    ("standalone", received(progress=[1], logs=["1", "2"], outcome="waiting"), "BROKEN", False),
    (
        "standalone-evicted-stream",
        received(progress=[1], logs=["1", "3", "end"], markers=["event_evicted"]),
        "told of the gap, goes on",
        True,
    ),
    ("standalone-evicted-stream", received(progress=[1], logs=["1", "3", "end"]), "BROKEN", False),
    ("standalone-evicted-stream", received(progress=[1], logs=["1"]), "**silent** after notification 1", False),
    ("standalone-evicted-status", received(progress=[1], logs=["1"]), "**silent** after notification 1", True),
]


@pytest.mark.parametrize(("story", "what", "verdict", "promised"), CASES)
def test_a_verdict_says_what_a_client_received(story: str, what: dict[str, Any], verdict: str, promised: bool) -> None:
    assert judge(STORIES[story], what).split(":")[0] == verdict.split(":")[0]
    assert judge(STORIES[story], what) == verdict or verdict == "BROKEN"
    assert is_promised(STORIES[story], judge(STORIES[story], what)) is promised


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("story", STORIES)
def test_what_is_expected_of_a_client_is_what_is_promised(client: str, story: str) -> None:
    assert is_promised(STORIES[story], expected(client, story))


@pytest.mark.parametrize("client", CLIENTS)
def test_no_call_waits_with_rejection_stream(client: str) -> None:
    waiting = {story.name for story in STORIES.values() if expected(client, story.name) == WAITS}
    assert not {name for name in waiting if STORIES[name].rejection == "stream"}
    assert waiting in (set(), {f"{row}-status" for row in ("evicted", "completed", "advanced", "restarted")})


def test_the_readmes_table_says_what_is_known_of_the_clients() -> None:
    verdicts = {(client, story): expected(client, story) for client in CLIENTS for story in STORIES}
    readme = Path(__file__).resolve().parents[2] / "README.md"
    assert "\n".join(readme_rows(verdicts, list(CLIENTS))) in readme.read_text()
