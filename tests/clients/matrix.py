"""Runs every client through every story, with the newest server of both SDK lines: `make clients`.

Each client has an environment of its own under `.venvs`, made once. What the run shows becomes `docs/clients.md`; the
exit status says whether every client did what is expected of it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from .stories import (
    CLIENTS,
    README_BEGIN,
    README_END,
    STORIES,
    UNEXPLAINED,
    expected,
    is_promised,
    judge,
    markdown_rows,
    readme_rows,
)

__all__ = ["SERVERS", "Run", "cells", "main", "must_be_complete", "publish", "run"]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
DOCUMENT = ROOT / "docs" / "clients.md"
README = ROOT / "README.md"

SERVERS = {"mcp-1": "mcp 1.x", "mcp-2": "mcp 2.x"}
"""The servers: environment, and name."""

# The newest of each on 2026-11-29. Exact, since what each does is pinned; the npm packages' are in package.json.
_REQUIREMENTS = {
    "mcp-1": ["mcp==1.30.0"],
    "mcp-2": ["mcp==2.3.0"],
    "langchain": ["langchain-mcp-adapters==0.3.2", "mcp==1.30.0"],
    "fastmcp": ["fastmcp==4.2.3", "mcp==2.3.0"],
}

# The clients' environments and programs.
_PYTHON_PROGRAMS = {
    "py1": ("mcp-1", "mcp_v1"),
    "py2": ("mcp-2", "mcp_v2"),
    "langchain": ("langchain", "langchain_adapters"),
    "fastmcp": ("fastmcp", "prefect_fastmcp"),
}
_NODE_PROGRAMS = {"ts1": "sdk_v1.mjs", "ts2": "client_v2.mjs"}

# What both npm packages ask for.
_MIN_NODE = 20

# Seconds for all stories of one client and one server: they take 12, for the longest patience is 10.
_HARD_TIMEOUT = 90.0
_SET_UP_TIMEOUT = 600.0

# Environments that are made at the same time.
_PARALLEL = 2


@dataclass
class Run:
    """What a run has shown.

    Attributes:
        received: By server, client and story: what the client's caller saw.
        versions: By client: of its packages.
        server_versions: By server: of its SDK.
        not_run: By client: why it was not run.
        faults: What went wrong beside the clients.
    """

    received: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    server_versions: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def verdict(self, server: str, client: str, story: str) -> str:
        """Return what became of a cell."""
        received = self.received.get((server, client, story))
        if received is None:
            return "BROKEN: the client's program said nothing"
        if received["staging"] is not None:
            return f"BROKEN: {received['staging']}"
        return judge(STORIES[story], received)

    def surprises(self) -> list[str]:
        """Return the cells that are not as expected, or not as promised, as text; empty where all is well."""
        found = list(self.faults)
        for server, client, story in cells():
            if client in self.not_run:
                continue
            verdict = self.verdict(server, client, story)
            if verdict != expected(client, story) or not is_promised(STORIES[story], verdict):
                found.append(f"{server} / {client} / {story}: {verdict}; expected: {expected(client, story)}")
        return found


def cells() -> list[tuple[str, str, str]]:
    """Return all cells: server, client, story."""
    return [(server, client, story) for server in SERVERS for client in CLIENTS for story in STORIES]


async def run() -> Run:
    """Make the environments, and run all cells."""
    result = Run()
    await _set_up(result)
    async with anyio.create_task_group() as tasks:
        for server in SERVERS:
            tasks.start_soon(_run_server, result, server)
    return result


async def _run_server(result: Run, server: str) -> None:
    for client in CLIENTS:
        if client not in result.not_run:
            await _run_client(result, server, client)


async def _run_client(result: Run, server: str, client: str) -> None:
    """Run all stories of a client; they are told at the same time."""
    if client in _NODE_PROGRAMS:
        program = ["node", str(_directory("node") / _NODE_PROGRAMS[client])]
    else:
        environment, module = _PYTHON_PROGRAMS[client]
        program = [str(_python(environment)), "-m", f"{__package__}.programs.{module}"]
    with tempfile.TemporaryFile() as errors:
        output = await _output_of([str(_python(server)), "-m", f"{__package__}.scenarios", *program], errors.fileno())
        for line in output.splitlines():
            received = json.loads(line)
            if "versions" in received:
                result.versions[client] = received["versions"]
                result.server_versions[server] = received["server"]
            else:
                result.received[server, client, received["cell"]] = received
        if any((server, client, story) not in result.received for story in STORIES):
            errors.seek(0)
            tail = errors.read()[-2000:].decode(errors="replace")
            result.faults.append(f"{server} / {client}: not every story came to an end\n{tail}")


async def _output_of(command: list[str], errors: int) -> str:
    """Run a program; kill it, and all that it has started, when it takes too long."""
    process = await anyio.open_process(command, cwd=ROOT, stderr=errors, start_new_session=True)
    output = b""
    try:
        with anyio.move_on_after(_HARD_TIMEOUT):
            assert process.stdout is not None
            async for data in process.stdout:
                output += data
            await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()
    return output.decode()


def _directory(environment: str) -> Path:
    return ROOT / ".venvs" / f"clients-{environment}"


def _python(environment: str) -> Path:
    return _directory(environment) / "bin" / "python"


async def _set_up(result: Run) -> None:
    limiter = anyio.CapacityLimiter(_PARALLEL)
    async with anyio.create_task_group() as tasks:
        for environment, requirements in _REQUIREMENTS.items():
            make = functools.partial(_make_venv, environment, requirements)
            tasks.start_soon(functools.partial(anyio.to_thread.run_sync, make, limiter=limiter))
        if (reason := _why_no_node()) is not None:
            result.not_run.update(dict.fromkeys(_NODE_PROGRAMS, reason))
        else:
            tasks.start_soon(functools.partial(anyio.to_thread.run_sync, _make_node, limiter=limiter))


def _make_venv(environment: str, requirements: list[str]) -> None:
    directory = _directory(environment)
    with _made_once(directory, "\n".join([sys.version, *requirements])) as is_needed:
        if is_needed:
            _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(directory))
            # The Makefile's one uv for all environments.
            uv = [str(ROOT / ".venvs" / "uv" / "bin" / "uv"), "pip", "install", "--quiet", "--system-certs"]
            _call(*uv, "--python", str(_python(environment)), *requirements)


def _make_node() -> None:
    directory = _directory("node")
    manifest = (PROGRAMS / "package.json").read_text()
    with _made_once(directory, manifest) as is_needed:
        if is_needed:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            (directory / "package.json").write_text(manifest)
            _call("npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", cwd=directory)
    # Node looks for packages beside the program.
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, directory)


@contextlib.contextmanager
def _made_once(directory: Path, recipe: str) -> Generator[bool]:
    """Give whether `directory` is to be made anew, and note that it was made."""
    ready = directory / "ready"
    is_needed = not ready.is_file() or ready.read_text() != recipe
    if is_needed:
        ready.unlink(missing_ok=True)
        print(f"== making {directory.relative_to(ROOT)}", flush=True)  # noqa: T201
    yield is_needed
    ready.write_text(recipe)


def _call(*command: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        command, cwd=cwd, timeout=_SET_UP_TIMEOUT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout.decode(errors='replace')[-2000:]}")


def _why_no_node() -> str | None:
    """Return why the TypeScript clients cannot run; None where they can."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "NOT RUN: node and npm are not installed"
    found = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    if int(found.lstrip("v").split(".")[0]) < _MIN_NODE:
        return f"NOT RUN: node {found} is older than {_MIN_NODE}"
    return None


def over_both_servers(result: Run, clients: list[str]) -> dict[tuple[str, str], str]:
    """Return the verdicts by client and story: one where the servers agree, else one for each."""
    both: dict[tuple[str, str], str] = {}
    for client in clients:
        for story in STORIES:
            verdicts = {server: result.verdict(server, client, story) for server in SERVERS}
            same = len(set(verdicts.values())) == 1
            both[client, story] = (
                next(iter(verdicts.values()))
                if same
                else "; ".join(f"{SERVERS[server]}: {verdict}" for server, verdict in verdicts.items())
            )
    return both


def render(result: Run, date: datetime.date) -> str:
    """Return the document."""
    clients = [client for client in CLIENTS if client not in result.not_run]
    both = over_both_servers(result, clients)
    servers = " and ".join(f"mcp {version}" for version in sorted(result.server_versions.values()))
    # In the rows of a call that is refused in its stream, or goes on.
    slowest = max(
        (
            result.received[server, client, story]["elapsed"]
            for server, client, story in cells()
            if STORIES[story].dead
            and STORIES[story].rejection == "stream"
            and (server, client, story) in result.received
        ),
        default=0.0,
    )
    lines = [
        "# What each client makes of it",
        "",
        f"Written by `make clients` on {date.isoformat()}, from a run of unmodified clients with their default",
        f"settings, against servers on {servers}, which gave the same results unless a cell says otherwise.",
        "Connections are cut with a TCP reset; the servers ask clients to retry after 50 ms.",
        "",
        *markdown_rows(both, clients),
        "",
        "- **waits**: the call has no outcome until the client's own time-out: none by default in Python `mcp` 1.x and",
        "  `langchain-mcp-adapters`, 60 s in the TypeScript clients. The run stops waiting after 10 s.",
        "- *twice*: the Python clients retry a resume that was cut with the cursor that it began with, and so ask for",
        "  what they have already had. Both copies carry the same event id.",
        "- **silent**: no later notification of the standalone stream arrives, and no error is shown. The Python",
        "  clients count the resets of that stream over its whole life, and give up at the second.",
        f'- With `rejection="stream"`, the slowest call with a dead cursor had its outcome {slowest:.1f} s after it',
        "  began, with all stories told at the same time.",
        "",
        "What the caller of a refused call is shown, for `event_evicted`:",
        "",
        '| client | `rejection="status"` | `rejection="stream"` |',
        "|---|---|---|",
    ]
    for client in clients:
        shown = [_shown(result, client, f"evicted-{rejection}") for rejection in ("status", "stream")]
        lines.append(f"| {CLIENTS[client]} | {' | '.join(shown)} |")
    lines += ["", "| client | versions |", "|---|---|"]
    for client in clients:
        versions = [f"`{name}` {version}" for name, version in result.versions.get(client, {}).items()]
        lines.append(f"| {CLIENTS[client]} | {', '.join(versions)} |")
    return "\n".join(lines) + "\n"


def _shown(result: Run, client: str, story: str) -> str:
    """Return the error that a client's caller sees."""
    received = result.received.get(("mcp-2", client, story), {})
    error = received.get("error")
    if error is None:
        return "nothing"
    if judge(STORIES[story], received) == UNEXPLAINED:
        return f"`{error['type']}`: {error['message']}"
    return f"`{error['type']}`, with `data`"


def publish(result: Run) -> None:
    """Print the table and what is surprising; where all clients were run, write the document."""
    text = render(result, datetime.datetime.now(tz=datetime.timezone.utc).date())
    print(text)  # noqa: T201
    for client, reason in result.not_run.items():
        print(f"!! {CLIENTS[client]}: {reason}")  # noqa: T201
    for surprise in result.surprises():
        print(f"!! {surprise}")  # noqa: T201
    if not result.not_run and not result.faults:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(text)
        verdicts = over_both_servers(result, list(CLIENTS))
        README.write_text(with_table(README.read_text(), readme_rows(verdicts, list(CLIENTS))))
        print(f"== {DOCUMENT.relative_to(ROOT)} written", flush=True)  # noqa: T201


def with_table(readme: str, rows: list[str]) -> str:
    """Return the README with its table of clients replaced."""
    before, _, rest = readme.partition(README_BEGIN)
    _, _, after = rest.partition(README_END)
    return before + "\n".join(rows) + after


def must_be_complete() -> bool:
    """Return whether a client that cannot be run is a failure."""
    return os.environ.get("CI") == "true"


def main() -> int:
    """Run everything; return the exit status."""
    result = anyio.run(run)
    publish(result)
    return 1 if result.surprises() or (result.not_run and must_be_complete()) else 0


if __name__ == "__main__":
    sys.exit(main())
