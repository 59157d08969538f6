"""The command line: exit statuses, the JSON report, what is printed, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner

from mcp_resumable.checker import CHECKS, Report
from mcp_resumable.cli import app

from .wrong_server import WrongServer, serving

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 60
START_SECONDS = 30

# An interpreter in which the packages of the extra are not there.
_WITHOUT_EXTRA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import mcp_resumable
from mcp_resumable.__main__ import main
sys.argv = ["mcp-resumable", "--help"]
main()
"""


@pytest.fixture
def anyio_backend() -> str:
    """Only asyncio: uvicorn knows no other loop."""
    return "asyncio"


async def invoke(arguments: Sequence[str]) -> Any:
    """Run the command line in a thread, beside the server."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        result: Any = await anyio.to_thread.run_sync(partial(CliRunner().invoke, app, arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


async def check(wrong: str, *options: str) -> tuple[Any, WrongServer]:
    """Check a wrong server."""
    server = WrongServer(wrong)
    async with serving(server):
        result = await invoke(["check", server.url, "--tool", "count", "--silence", "0.3", *options])
    assert server.open_sessions == []
    return result, server


SLOW = ["--args", '{"interval": 0.05}']


async def test_what_passes_exits_with_0_and_a_line_for_each_check() -> None:
    result, server = await check("", *SLOW, "--only", "event-ids", "--only", "delete")
    assert result.exit_code == 0, result.output
    assert re.search(r"^passed +event-ids +7 messages", result.stdout, re.MULTILINE)
    assert re.search(r"^passed +delete ", result.stdout, re.MULTILINE)
    assert f"wrong 1 at {server.url}: 2 passed" in " ".join(result.stdout.split())


async def test_what_fails_exits_with_1_and_shows_what_was_sent_and_what_came_back() -> None:
    result, _ = await check("a resume is refused", *SLOW, "--only", "exact-resume")
    assert result.exit_code == 1, result.output
    assert CHECKS["exact-resume"].why[:40] in result.stdout
    assert "> GET Last-Event-ID: " in result.stdout
    assert "< 400 application/json" in result.stdout
    assert re.search(r"^FAILED +exact-resume ", result.stdout, re.MULTILINE)


async def test_a_warning_exits_with_0() -> None:
    result, _ = await check("no priming event", *SLOW, "--only", "priming-event")
    assert result.exit_code == 0, result.output
    assert re.search(r"^warning +priming-event ", result.stdout, re.MULTILINE)


async def test_what_cannot_be_checked_exits_with_2_and_says_what_is_missing() -> None:
    result, _ = await check("", "--args", '{"events": 1}')
    assert (result.exit_code, result.stdout) == (2, "")
    assert "could not check: tool 'count' sends 1 messages before its answer" in " ".join(result.stderr.split())


async def test_the_json_report_has_its_schema() -> None:
    result, server = await check("a resume is refused", *SLOW, "--only", "exact-resume", "--json")
    assert result.exit_code == 1, result.output
    report = Report.model_validate_json(result.stdout)
    assert (report.schema_version, report.url, report.server, report.tool) == (1, server.url, "wrong 1", "count")
    (found,) = report.results
    assert (found.name, found.outcome) == ("exact-resume", "failed")
    assert [exchange.sent.split(",")[0].split(":")[0] for exchange in found.exchanges] == [
        "POST initialize id 1",
        "POST notifications/initialized",
        "POST tools/call id 2",
        "GET Last-Event-ID",
    ]


def test_the_schema_of_version_1_is_stable() -> None:
    """Names may be added; none of these may change its meaning or go while `schema_version` is 1."""
    schema = Report.model_json_schema()
    fields = {"Report": set(schema["properties"])} | {
        name: set(definition["properties"]) for name, definition in schema["$defs"].items()
    }
    assert fields["Report"] >= {
        "schema_version",
        "checker",
        "revision",
        "url",
        "server",
        "tool",
        "seconds",
        "results",
    }
    assert fields["CheckResult"] >= {"name", "outcome", "detail", "why", "exchanges", "seconds"}
    assert fields["Exchange"] >= {"sent", "received"}
    outcomes = schema["$defs"]["CheckResult"]["properties"]["outcome"]["enum"]
    assert set(outcomes) == {"passed", "warning", "failed", "not_applicable"}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["check"],
        ["check", "http://127.0.0.1:1/mcp"],
        ["check", "ftp://127.0.0.1/mcp", "--tool", "count"],
        ["check", "not a url", "--tool", "count"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--args", "{"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--args", "[]"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--header", "no colon"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--header", "a: b\r\nc: d"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--only", "nothing"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--timeout", "0"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count"],
    ],
)
async def test_a_command_that_cannot_be_run_exits_with_2(arguments: list[str]) -> None:
    result = await invoke(arguments)
    assert result.exit_code == 2, result.output


async def test_what_a_server_says_reaches_the_terminal_escaped_and_not_as_markup() -> None:
    """Its name, its ids and its bodies are the server's to choose."""
    server = WrongServer("control characters in ids", name="[bold]n\x1b]0;title\x07\u202e")
    async with serving(server):
        options = ["--silence", "0.3", "--only", "event-ids", *SLOW]
        result = await invoke(["check", server.url, "--tool", "count", *options])
    assert result.exit_code == 1
    assert "[bold]n\\x1b]0;title\\x07\\u202e" in result.stdout
    assert re.fullmatch(r"[\n -~…]*", result.stdout + result.stderr)


async def test_an_interrupt_leaves_no_session_behind_and_exits_with_2() -> None:
    server = WrongServer("a resume is never answered")
    command = [sys.executable, "-m", "mcp_resumable", "check", server.url, "--tool", "count", *SLOW]
    async with serving(server):
        command[4] = server.url
        with anyio.fail_after(TIMEOUT_SECONDS):
            options = ["--timeout", "60", "--only", "exact-resume"]
            process = await anyio.open_process([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            async with process:
                await server.held.wait()
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None
                errors = b"".join([chunk async for chunk in process.stderr])
                assert await process.wait() == 2
    assert b"interrupted" in errors
    assert b"Traceback" not in errors
    assert server.sessions != {}
    assert server.open_sessions == []


@pytest.mark.parametrize("missing", ["typer", "httpx"])
def test_without_the_extra_the_package_imports_and_the_command_says_what_is_missing(missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRA.format(missing=[missing])],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if missing in done.stderr and "mcp/" in done.stderr:
        pytest.skip(f"this SDK needs {missing} itself")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mcp-resumable needs the package {missing}: pip install 'mcp_resumable[cli]'\n"


async def test_the_fixture_passes_what_the_checker_asks_for_as_its_first_lines_say() -> None:
    """The whole of it, with a load, is for `make checked-servers`."""
    command = [sys.executable, "-m", "mcp_resumable", "fixture", "--port", "0"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with anyio.fail_after(TIMEOUT_SECONDS):
        process = await anyio.open_process(command, env=environment, stderr=subprocess.DEVNULL)
        async with process:
            try:
                assert process.stdout is not None
                said = b""
                with anyio.fail_after(START_SECONDS):
                    while said.count(b"\n") < 3:
                        said += await process.stdout.receive()
                words: list[Any] = re.findall(r"'[^']*'|[^\s\\]+", said.decode())
                options = [word.strip("'") for word in words[1:]]
                assert json.loads(options[options.index("--load-args") + 1])["events"] >= 1000
                names = ["exact-resume", "polling"]
                only = [option for name in names for option in ("--only", name)]
                result = await invoke([*options, "--json", "--args", '{"interval_seconds": 0.03}', *only])
            finally:
                process.terminate()
                await process.wait()
    report = Report.model_validate_json(result.stdout)
    assert {found.name: found.outcome for found in report.results} == dict.fromkeys(names, "passed")
    assert result.exit_code == 0
