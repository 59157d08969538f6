"""A stranger's repository: a copy of the SQLite example, and the test file that `mcp_resumable.testing` shows.

As a program, the test of an installed wheel beside pytest alone: `python -I tests/stranger.py`
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from mcp_resumable import testing

__all__ = ["EXAMPLES", "make_repository"]

EXAMPLES = Path(__file__).parent.parent / "examples"


def make_repository(folder: Path) -> Path:
    """Make a stranger's repository in `folder`, which must not exist, and return it."""
    folder.mkdir()
    for name in ("sqlite_storage.py", "sqlite_storage.sql"):
        shutil.copy(EXAMPLES / name, folder)
    (folder / "test_sqlite_storage.py").write_text(_documented_test_file(), encoding="utf-8")
    return folder


def _documented_test_file() -> str:
    blocks = re.findall(r"(?:^    .*\n|^\n)+", testing.__doc__ or "", re.MULTILINE)
    return textwrap.dedent(max(blocks, key=len)).strip() + "\n"


def main() -> None:
    """Run the suite there, with nothing of the checkout importable."""
    with tempfile.TemporaryDirectory() as temporary:
        repository = make_repository(Path(temporary) / "repository")
        done = subprocess.run([sys.executable, "-I", "-m", "pytest", "-W", "error", "--quiet"], cwd=repository)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
