"""Checks real servers and writes `docs/checked-servers.md`: `make peers`.

Each server is an entry of `PEERS`: a program, the environment under `.venvs` that it runs in, and the packages whose
versions the document names. What is known of it is pinned in `OUTCOMES`; a server of ours has to pass everything.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from mcp_resumable.checker import CHECKS, CheckResult, Limits, Report, Target, check_server

__all__ = ["OUTCOMES", "PEERS", "VERSIONS", "Peer", "Run", "expected", "publish", "run"]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
DOCUMENT = ROOT / "docs" / "checked-servers.md"

# 6.4 MB, at about 1,000 messages a second.
_LOAD_ARGUMENTS: dict[str, object] = {"events": 2000, "interval_seconds": 0.001, "padding_bytes": 3200}
_POLL_ARGUMENTS: dict[str, object] = {"close_after": 3}
_LIMITS = Limits(timeout_seconds=6, silence_seconds=1)
# They mostly wait; more at a time would slow down the loads.
_AT_A_TIME = 4
_START_SECONDS = 30
_STOP_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server.

    Attributes:
        title: In the document.
        environment: Below `.venvs`.
        command: What runs it there; `python` is the environment's.
        packages: Whose versions are named.
    """

    title: str
    environment: str
    command: tuple[str, ...]
    packages: tuple[str, ...]


_FIXTURE = ("python", "-m", "mcp_resumable", "fixture", "--port", "0")


def _program(name: str) -> tuple[str, ...]:
    return ("python", "-m", f"{__package__}.programs.{name}")


PEERS: dict[str, Peer] = {
    "ours-1": Peer(title="mcp_resumable, memory, mcp 1.x", environment="mcp-1", command=_FIXTURE, packages=("mcp",)),
    "ours-2": Peer(title="mcp_resumable, memory, mcp 2.x", environment="mcp-2", command=_FIXTURE, packages=("mcp",)),
    "example-1": Peer(
        title="Python SDK 1.x, example store",
        environment="mcp-1",
        command=_program("sdk_example"),
        packages=("mcp",),
    ),
    "example-2": Peer(
        title="Python SDK 2.x, example store",
        environment="mcp-2",
        command=_program("sdk_example"),
        packages=("mcp",),
    ),
    "persist": Peer(
        title="mcp-persist, SQLite",
        environment="peers",
        command=_program("mcp_persist"),
        packages=("mcp-persist", "mcp"),
    ),
    "fastmcp": Peer(
        title="PrefectHQ fastmcp",
        environment="peers",
        command=_program("prefect_fastmcp"),
        packages=("fastmcp", "mcp"),
    ),
    "typescript": Peer(
        title="TypeScript SDK, example store",
        environment="peers-node",
        command=("node", "typescript_sdk.mjs"),
        packages=("@modelcontextprotocol/sdk",),
    ),
}

VERSIONS = {
    "ours-1": {"mcp": "1.30.0"},
    "ours-2": {"mcp": "2.3.0"},
    "example-1": {"mcp": "1.30.0"},
    "example-2": {"mcp": "2.3.0"},
    "persist": {"mcp-persist": "2.2.0", "mcp": "2.3.0"},
    "fastmcp": {"fastmcp": "4.2.3", "mcp": "2.3.0"},
    "typescript": {"@modelcontextprotocol/sdk": "1.32.2"},
}
"""The versions whose outcomes are pinned."""

# What the Python SDK does with any store whose events it files by request id.
_PYTHON_SDK = {
    "no-loss-under-load": "failed",
    "another-session": "failed",
    "unknown-id": "failed",
    "malformed-id": "failed",
    "reused-request-id": "failed",
    "completed-stream": "failed",
    "take-over": "failed",
    "two-gets": "failed",
    "standalone-cursor": "warning",
    "frozen-reader": "failed",
}

OUTCOMES: dict[str, dict[str, str]] = {
    "ours-1": {},
    "ours-2": {},
    "example-1": {**_PYTHON_SDK, "future-id": "not_applicable"},
    "example-2": {**_PYTHON_SDK, "future-id": "not_applicable"},
    "persist": {**_PYTHON_SDK, "future-id": "failed", "polling": "warning"},
    "fastmcp": {**_PYTHON_SDK, "future-id": "not_applicable"},
    "typescript": {
        # Its ids sort by the millisecond and then at random, so what is sent within one comes in any order.
        "no-loss-under-load": "varies",
        "reused-request-id": "varies",
        "completed-stream": "failed",
        "frozen-reader": "varies",
        "another-session": "failed",
        "unknown-id": "failed",
        "malformed-id": "failed",
        "future-id": "not_applicable",
        "two-gets": "failed",
        "standalone-cursor": "warning",
    },
}
"""What is not passed, by server and check; `varies`: passed or failed, by chance."""


def expected(peer: str, check: str) -> str:
    """Return what is known of a server."""
    return OUTCOMES[peer].get(check, "passed")


@dataclass
class Run:
    """What a run has shown.

    Attributes:
        reports: By server.
        versions: By server: of its packages.
        not_run: By server: why it was not run.
    """

    reports: dict[str, Report] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def result(self, peer: str, check: str) -> CheckResult:
        """Return what a check found."""
        return next(result for result in self.reports[peer].results if result.name == check)


async def run() -> Run:
    """Check all servers, a few at a time."""
    result = Run()
    limiter = anyio.CapacityLimiter(_AT_A_TIME)
    async with anyio.create_task_group() as tasks:
        for name, peer in PEERS.items():
            tasks.start_soon(_check, result, name, peer, limiter)
    return result


async def _check(result: Run, name: str, peer: Peer, limiter: anyio.CapacityLimiter) -> None:
    directory = _directory(peer.environment)
    if not directory.is_dir():
        result.not_run[name] = f"NOT RUN: {directory.name} is not there; `make peers` makes it"
        return
    async with limiter:
        result.versions[name] = _versions(directory, peer.packages)
        async with _serving(directory, peer.command) as url:
            target = Target(url=url, tool="count", load_arguments=_LOAD_ARGUMENTS, poll_arguments=_POLL_ARGUMENTS)
            result.reports[name] = await check_server(target, _LIMITS)


def _directory(environment: str) -> Path:
    return Path(os.environ["MCP_RESUMABLE_PEERS"]) / environment


def _versions(directory: Path, packages: tuple[str, ...]) -> dict[str, str]:
    return {package: _version(directory, package) for package in packages}


def _version(directory: Path, package: str) -> str:
    """Return the version of an installed package: of npm, or of pip."""
    manifest = directory / "node_modules" / package / "package.json"
    if manifest.is_file():
        return str(json.loads(manifest.read_text())["version"])
    pattern = f"lib/python*/site-packages/{re.sub('[-.]', '_', package)}-*.dist-info"
    (found,) = directory.glob(pattern)
    return found.name.removesuffix(".dist-info").rpartition("-")[2]


@asynccontextmanager
async def _serving(directory: Path, command: tuple[str, ...]) -> AsyncGenerator[str]:
    """Run a server; give the URL of its endpoint, the first that it prints."""
    program, *arguments = command
    if program == "python":
        program = str(directory / "bin" / "python")
    else:
        arguments = [str(directory / arguments[0])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    process = await anyio.open_process([program, *arguments], cwd=ROOT, env=environment, stderr=None)
    try:
        assert process.stdout is not None
        output = b""
        with anyio.fail_after(_START_SECONDS):
            while (found := re.search(rb"http://127\.0\.0\.1:\d+/\S*", output)) is None:
                output += await process.stdout.receive()
        yield found[0].decode()
    finally:
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with anyio.move_on_after(_STOP_SECONDS):
                await process.wait()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


_CELLS = {"passed": "passed", "warning": "warning", "failed": "**failed**", "not_applicable": "n/a"}


def render(result: Run, date: datetime.date) -> str:
    """Return the document."""
    names = [name for name in PEERS if name in result.reports]
    lines = [
        "# Checked servers",
        "",
        f"Written by `make peers` on {date.isoformat()}: what `mcp-resumable check` found of servers that",
        "each serve the same tool. A warning is about what the specification only recommends, or what costs a client",
        "no message. † varies from run to run: it depends on what is sent within the same millisecond.",
        "",
        f"| check | {' | '.join(PEERS[name].title for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for check in CHECKS:
        lines.append(f"| `{check}` | {' | '.join(_cell(result, name, check) for name in names)} |")
    lines.append(f"| versions | {' | '.join(_named(result.versions[name]) for name in names)} |")
    lines += ["", "## What each check asks for", ""]
    lines += [f"- `{check.name}`: {check.why}" for check in CHECKS.values()]
    for name in names:
        found = [one for one in result.reports[name].results if one.outcome in ("failed", "warning")]
        if found:
            lines += ["", f"## {PEERS[name].title}", ""]
            lines += [f"- `{one.name}` ({one.outcome}): {one.detail}" for one in found]
    return "\n".join(lines) + "\n"


def _cell(result: Run, name: str, check: str) -> str:
    mark = " †" if expected(name, check) == "varies" else ""
    return f"{_CELLS[result.result(name, check).outcome]}{mark}"


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def publish(result: Run) -> None:
    """Write the document, where all servers were run."""
    if not result.not_run:
        DOCUMENT.write_text(render(result, datetime.datetime.now(tz=datetime.timezone.utc).date()))
