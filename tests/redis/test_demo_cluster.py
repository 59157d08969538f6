"""`make demo-cluster`, as its user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo_cluster.py"


def test_the_demo_tells_both_stories_on_one_screen() -> None:
    run = subprocess.run([sys.executable, DEMO], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    assert "Nothing lost, nothing twice, nobody left waiting" in run.stdout
    lines = run.stdout.splitlines()
    assert len(lines) <= 24, "one screen"
    assert max(map(len, lines)) <= 100
