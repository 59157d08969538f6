"""Run the official conformance suite's server scenarios of revision 2025-11-25 against this interpreter's SDK line.

`run.py DIRECTORY [none]`: the directory holds the suite, installed as package.json beside this file says (`make
conformance` does both). With `none` the server has no event store, to see whether a failure is the SDK's own.

It is stricter than the suite, which takes a warning for a pass: here nothing may fail or warn, and the server's log may
hold no warning of ours, no error and no traceback of anyone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from importlib.metadata import version
from pathlib import Path

REVISION = "2025-11-25"

NAMED = {"server-sse-polling", "server-sse-multiple-streams", "server-session-lifecycle"}
"""What an event store is tested by; the suite itself does not score the first and the last."""

SCENARIOS = 33
"""Of the revision, those that are not scored included, as `list --server` of 0.2.0-alpha.12 counts them."""

START_SECONDS = 30
SUITE_SECONDS = 300
STOP_SECONDS = 10

_RUNNING = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")
_BAD_LOG_LINE = re.compile(r"^(ERROR|CRITICAL|Traceback|(WARNING|INFO) mcp_resumable)")


class Server:
    """The server under test, as a process; what it logs is kept."""

    def __init__(self, *options: str) -> None:
        program = Path(__file__).with_name("server.py")
        self.log: list[str] = []
        self.url = ""
        self._started = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), "0", *options], stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Server:
        self._started.wait(START_SECONDS)
        if not self.url:
            self.stop()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.log.append("ERROR the server did not stop\n")
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            found = _RUNNING.search(line)
            if found:
                self.url = f"{found[1]}/mcp/"
                self._started.set()
        self._started.set()


def node_of(directory: Path) -> Path | str:
    """Return the Node that was installed beside the suite, or else the one of the machine."""
    return next(directory.glob("node_modules/node-*/bin/node"), "node")


def run_suite(directory: Path, url: str, results: Path) -> str:
    program = directory / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    command = [str(node_of(directory)), str(program), "server", "--url", url, "--output-dir", str(results)]
    completed = subprocess.run(
        [*command, "--suite", "all", "--spec-version", REVISION],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_SECONDS,
        check=False,
    )
    return completed.stdout if completed.returncode else ""


def read_results(results: Path) -> dict[str, list[dict[str, str]]]:
    """Return the checks of each scenario."""
    checks: dict[str, list[dict[str, str]]] = {}
    for path in results.glob("*/checks.json"):
        # server-<scenario>-<time>, and the time has dashes too.
        scenario = re.sub(r"-\d{4}-\d\d-\d\dT.*$", "", path.parent.name).removeprefix("server-")
        checks[scenario] = json.loads(path.read_text())
    return checks


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # a program's output


def main() -> int:
    """Return the exit status: 0 where all is well."""
    directory, options = Path(sys.argv[1]), sys.argv[2:]
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as results:
        with Server(*options) as server:
            output = run_suite(directory, server.url, Path(results))
        checks = read_results(Path(results))
    if output:
        problems.append(f"the suite ended with an error:\n{output}")
    if len(checks) != SCENARIOS or not checks.keys() >= NAMED:
        problems.append(f"{len(checks)} scenarios were run, not {SCENARIOS}: {sorted(checks)}")
    counts: Counter[str] = Counter()
    for scenario, found in sorted(checks.items()):
        counts.update(check["status"] for check in found)
        if not any(check["status"] == "SUCCESS" for check in found):
            problems.append(f"{scenario}: nothing was checked")
        problems += [
            f"{scenario}: {check['status']} {check['id']}: {check.get('errorMessage')}"
            for check in found
            if check["status"] in ("FAILURE", "WARNING")
        ]
    problems += [f"log: {line.rstrip()}" for line in server.log if _BAD_LOG_LINE.search(line)]
    for problem in problems:
        say(problem)
    store = "no event store" if options else "our event store"
    numbers = ", ".join(f"{count} {status.lower()}" for status, count in sorted(counts.items()))
    say(f"== mcp {version('mcp')}, {store}: conformance {REVISION}, {len(checks)} scenarios: {numbers}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
