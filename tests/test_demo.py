"""`examples/demo.py` shows what it promises, and fails loudly where that is not so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"

PATIENCE_SECONDS = 60.0

# A demo whose table says otherwise than the server.
_WITH_ANOTHER_TABLE = f"""
import sys
sys.path.insert(0, {str(DEMO.parent)!r})
import anyio, demo
demo.TABLE[7] = (410, "stream_completed", "reset")
sys.exit(anyio.run(demo.main))
"""

COMMANDS = {
    "plain": [str(DEMO)],
    "lose": [str(DEMO), "--tamper", "lose"],
    "repeat": [str(DEMO), "--tamper", "repeat"],
    "another table": ["-c", _WITH_ANOTHER_TABLE],
}


@pytest.fixture(scope="module")
def plain() -> tuple[int, str]:
    """Exit status and output of the demo."""
    return finish(start("plain"))


@pytest.fixture(scope="module")
def failures() -> dict[str, tuple[int, str]]:
    """The same of the ones that must fail; they run side by side."""
    running = {name: start(name) for name in COMMANDS if name != "plain"}
    return {name: finish(process) for name, process in running.items()}


def start(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *COMMANDS[name]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        try:
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    return process.returncode, output


def test_demo_succeeds_on_one_screen(plain: tuple[int, str]) -> None:
    status, output = plain
    assert status == 0, output
    lines = output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_demo_shows_the_call_before_and_after_the_cut(plain: tuple[int, str]) -> None:
    output = plain[1]
    assert "TCP reset in the middle of event 9" in output
    saw, replayed, live = re.findall(r"^   (?:saw|replayed|then live) +(.*)$", output, re.MULTILINE)
    assert saw.startswith("1 ")
    assert replayed != "nothing"
    assert f"{saw} {replayed} {live}".split() == [str(step) for step in range(1, 21)]
    assert "20 of 20 steps in order, none missing, none twice; the tool ran once" in output


@pytest.mark.parametrize(
    "row",
    [
        "404 session_not_found gone",
        "400 malformed_event_id invalid",
        "409 generation_mismatch reset",
        "400 unrecognized_generation invalid",
        "400 future_event_id invalid",
        "409 stream_superseded reset",
        "409 stream_completed reset",
        "409 event_evicted reset",
        "409 replay_gap reset",
        "200 2 events replayed resume",
        "503 storage_unavailable retry",
    ],
)
def test_demo_shows_each_row_of_the_decision_table(plain: tuple[int, str], row: str) -> None:
    assert row in " ".join(plain[1].split())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lose", "step 11 is missing"),
        ("repeat", "step 11 came 2 times"),
        ("another table", "row 7: the answer is (409,"),
    ],
)
def test_demo_fails_loudly(failures: dict[str, tuple[int, str]], name: str, says: str) -> None:
    status, output = failures[name]
    assert status == 1, output
    assert says in output
    assert "FAILED" in output
