"""The command line: exit statuses, the JSON report, what is printed, and that nothing is left behind."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from typing import Any

import anyio
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner

from mcp_resumable.__main__ import main
from mcp_resumable.checker import CHECKS, Limits, Report, Target, check_server
from mcp_resumable.checker.fixture import LOAD_ARGUMENTS, POLL_ARGUMENTS, TOOL, fixture_app
from mcp_resumable.cli import app
from tests.loops import ASYNCIO

from .wrong_server import WrongServer, serving

TIMEOUT_SECONDS = 60

# For an interpreter in which a package of the extra is not there.
_WITHOUT_EXTRA = """
import sys
sys.modules["typer"] = None
import mcp_resumable
from mcp_resumable.__main__ import main
main()
"""


def invoke(*arguments: str) -> Any:
    """Run the command line in this process."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def check(server: WrongServer, *options: str) -> Any:
    """Check a server, which is served by another thread."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(server)):
        result = invoke("check", server.url, "--tool", "count", "--silence", "0.3", *options)
    assert server.open_sessions == []
    return result


@pytest.fixture
def anyio_backend() -> object:
    """Only asyncio: uvicorn knows no other loop."""
    return ASYNCIO


# As from a terminal: what a shell starts in the background ignores interrupts, and so does what that starts.
_INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("mcp_resumable", run_name="__main__")
"""

SLOW = ["--args", '{"interval": 0.08}']


def test_what_passes_exits_with_0_and_a_line_for_each_check() -> None:
    server = WrongServer()
    result = check(server, *SLOW, "--only", "event-ids", "--only", "delete", "--header", "X-Key: a b ")
    assert result.exit_code == 0, result.output
    assert re.search(r"^passed +event-ids +7 messages", result.stdout, re.MULTILINE)
    assert re.search(r"^passed +delete ", result.stdout, re.MULTILINE)
    assert f"wrong 1 at {server.url}: 2 passed" in " ".join(result.stdout.split())


def test_what_fails_exits_with_1_and_shows_what_was_sent_and_what_came_back() -> None:
    result = check(WrongServer("a resume is refused"), *SLOW, "--only", "exact-resume")
    assert result.exit_code == 1, result.output
    assert CHECKS["exact-resume"].why[:40] in result.stdout
    assert "> GET Last-Event-ID: " in result.stdout
    assert "< 409 application/json" in result.stdout
    assert re.search(r"^FAILED +exact-resume ", result.stdout, re.MULTILINE)


def test_a_warning_exits_with_0() -> None:
    result = check(WrongServer("no priming event"), *SLOW, "--only", "priming-event")
    assert result.exit_code == 0, result.output
    assert re.search(r"^warning +priming-event ", result.stdout, re.MULTILINE)


def test_what_cannot_be_checked_exits_with_2_and_says_what_is_missing() -> None:
    result = check(WrongServer(), "--args", '{"events": 1}')
    assert (result.exit_code, result.stdout) == (2, "")
    assert "could not check: tool 'count' sends 1 messages before its answer" in " ".join(result.stderr.split())


def test_the_json_report_has_its_schema() -> None:
    server = WrongServer("a resume is refused")
    result = check(server, *SLOW, "--only", "exact-resume", "--json")
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
        ["check", "http://[", "--tool", "count"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--args", "{"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--args", "[]"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--header", "no colon"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--header", "a: b\r\nc: d"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--only", "nothing"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count", "--timeout", "0"],
        ["check", "http://127.0.0.1:1/mcp", "--tool", "count"],
    ],
)
def test_a_command_that_cannot_be_run_exits_with_2(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output


def test_what_a_server_says_reaches_the_terminal_escaped_and_not_as_markup() -> None:
    """Its name, its ids and its bodies are the server's to choose."""
    server = WrongServer("control characters in ids", name="[bold]n\x1b]0;title\x07\u202e")
    result = check(server, *SLOW, "--only", "event-ids")
    assert result.exit_code == 1, result.output
    assert "[bold]n\\x1b]0;title\\x07\\u202e" in result.stdout
    assert re.fullmatch(r"[\n -~…]*", result.stdout + result.stderr)


@pytest.mark.anyio
async def test_an_interrupt_leaves_no_session_behind_and_exits_with_2() -> None:
    server = WrongServer("a resume is never answered")
    async with serving(server):
        command = [sys.executable, "-c", _INTERRUPTIBLE, "check", server.url, "--tool", "count", *SLOW]
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


def test_without_the_extra_the_package_imports_and_the_command_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRA], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mcp-resumable needs the package typer: pip install 'mcp_resumable[cli]'\n"


@pytest.mark.parametrize("missing", ["typer", "rich", "httpx", "uvicorn"])
def test_each_package_of_the_extra_is_named_when_it_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("mcp_resumable.cli", "mcp_resumable.checker"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert f"needs the package {missing}:" in capsys.readouterr().err


def test_another_module_that_is_missing_is_not_taken_for_one_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp_resumable.cli", None)
    with pytest.raises(ModuleNotFoundError):
        main()


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mcp-resumable", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "fixture" in capsys.readouterr().out


def test_the_fixture_says_how_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda _self, sockets: None)  # noqa: ARG005  # as uvicorn names it
    result = CliRunner().invoke(app, ["fixture", "--port", "0"])
    assert result.exit_code == 0
    words = shlex.split(result.stdout.replace("\\\n", ""))
    assert words[:2] == ["mcp-resumable", "check"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/mcp", words[2])
    assert words[3:] == ["--tool", TOOL, "--load-args", LOAD_ARGUMENTS, "--poll-args", POLL_ARGUMENTS]


def test_the_fixture_says_where_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = invoke("fixture", "--port", str(port))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"port {port}" in result.stderr


@pytest.mark.anyio
async def test_the_fixture_serves_the_tool_on_this_line_of_the_sdk() -> None:
    """All checks, with a load, are for `make peers`."""
    limits = Limits(timeout_seconds=20, silence_seconds=0.5)
    names = ["exact-resume", "standalone-cursor", "polling"]
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(fixture_app(), lifespan="on") as port:
            target = Target(
                url=f"http://127.0.0.1:{port}/mcp",
                tool=TOOL,
                arguments={"interval_seconds": 0.03},
                poll_arguments=json.loads(POLL_ARGUMENTS),
            )
            report = await check_server(target, limits, names=names)
    assert {result.name: result.outcome for result in report.results} == dict.fromkeys(names, "passed")
