"""Every fenced block of README.md is executed, and what its tables say is what the code does."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from packaging.requirements import Requirement

import mcp_resumable
from mcp_resumable import ResumptionError, Retention
from mcp_resumable.rejection import REJECTION_CODE

from .readme import Block, check_server, installed_line, read_blocks, server_program, serving
from .sdk_error import sdk_error

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = read_blocks(README)
LINE = installed_line()


def run_server(block: Block, _tmp_path: Path) -> None:
    assert block.line is not None
    with serving(server_program(BLOCKS, block.line)) as address:
        check_server(f"{address}/mcp")


def run_app(block: Block, _tmp_path: Path) -> None:
    with serving(block.text) as address:
        check_server(f"{address}/mcp/")


def run_more_of_server(block: Block, _tmp_path: Path) -> None:
    async def work() -> None:
        names = server_names()
        exec(compile(block.text, "README.md", "exec"), names)
        async with Client.of(names) as client:
            # Its connection is closed in the middle; how much of the void part it carried is chance.
            void = await client.call(1, "count_again", {})
            assert await client.refusal(void[-1]) == (409, "stream_superseded")
            other = await client.call(2, "count", {"steps": 2})
            assert await client.refusal(other[-1]) == (409, "stream_completed")
            await names["operate"](client.session_id)
            assert await client.refusal(other[-1]) == (404, "session_not_found")

    anyio.run(work)


def run_retention(block: Block, _tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(block.text, "README.md", "exec"), names)
    assert names["retention"] == Retention()
    assert all(field in block.text for field in Retention.model_fields)
    assert names["store"].storage.retention is names["retention"]


def run_client(block: Block, _tmp_path: Path) -> None:
    told = {"reason": "event_evicted", "outcome": "reset", "generation": "1-k3v9q0m4x7ta"}
    names: dict[str, Any] = {"error": sdk_error(REJECTION_CODE, told)}
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(block.text, "README.md", "exec"), names)
    assert printed.getvalue() == "reset event_evicted 1-k3v9q0m4x7ta\n"


def run_refusal(block: Block, _tmp_path: Path) -> None:
    async def work() -> None:
        names = server_names(store="ResumableEventStore(MemoryStorage(retention=Retention(max_events=4)))")
        async with Client.of(names) as client:
            event_ids = await client.call(1, "count", {"steps": 8})
            response = await client.resume(event_ids[2])
        shown, received = json.loads(block.text), response.json()
        assert response.status_code == 409
        # The text is for people, and the generation's nonce is random.
        shown["error"]["message"] = received["error"]["message"]
        shown["error"]["data"]["generation"] = received["error"]["data"]["generation"]
        assert shown == received

    anyio.run(work)


def run_shell(block: Block, tmp_path: Path) -> None:
    for line in block.text.splitlines():
        command = shlex.split(line, comments=True)
        while command:
            end = command.index("&&") if "&&" in command else len(command)
            run_command(command[:end], tmp_path)
            command = command[end + 1 :]


def run_command(command: list[str], tmp_path: Path) -> None:
    match command:
        case ["python3", "-m", "venv", name]:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", name], cwd=tmp_path, check=True)
        case [".venv/bin/pip", "install", requirement]:
            assert (tmp_path / ".venv/bin").is_dir()
            assert Requirement(requirement).name == "mcp_resumable"
        case _:
            pytest.fail(f"nothing runs this command: {command}")


# By the first line of a block, or by its language.
RUNNERS: dict[str, Callable[[Block, Path], None]] = {
    "server.py": run_server,
    "app.py": run_app,
    "more of server.py": run_more_of_server,
    "retention.py": run_retention,
    "client.py": run_client,
    "json": run_refusal,
    "sh": run_shell,
}


def runner_of(block: Block) -> Callable[[Block, Path], None] | None:
    name = re.split("[,:]", block.title)[0] if block.language == "python" else block.language
    return RUNNERS.get(name)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[block.title if block.language == "python" else block.language for block in BLOCKS]
)
def test_block_runs(block: Block, tmp_path: Path) -> None:
    if block.line not in (None, LINE):
        pytest.skip(f"for mcp {block.line}.x, and this is {LINE}.x")
    runner = runner_of(block)
    assert runner is not None
    runner(block, tmp_path)


def test_no_block_is_left_unexecuted() -> None:
    fences = [line for line in TEXT.splitlines() if line.lstrip().startswith(("```", "~~~"))]
    assert len(fences) == 2 * len(BLOCKS)
    assert not [block.title for block in BLOCKS if runner_of(block) is None]
    # Each of the two lines has its server; `make matrix` runs both.
    assert [block.line for block in BLOCKS if runner_of(block) is run_server] == ["2", "1"]
    assert {block.line for block in BLOCKS} == {None, "1", "2"}


def test_commands_in_the_text_exist() -> None:
    targets = set(re.findall(r"`make ([a-z]+)", TEXT + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert {"demo", "test", "check"} <= targets
    make = shutil.which("make")
    assert make is not None
    for target in targets:
        subprocess.run([make, "--dry-run", target], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https://)([^)]+)\)", TEXT):
        assert (ROOT / target).is_file(), target


def test_decision_table_is_what_the_classes_say() -> None:
    classes: dict[str, type[ResumptionError]] = {}
    for line in TEXT.splitlines():
        if match := re.fullmatch(r"\| .+ \| (\d+) \| `(\w+)` \| (\w+) \| `(\w+)` \|", line):
            status, reason, outcome, name = match.groups()
            classes[name] = kind = getattr(mcp_resumable, name)
            assert (kind.status, kind.reason, kind.outcome) == (int(status), reason, outcome)
    concrete = {
        name
        for name, value in vars(mcp_resumable).items()
        if isinstance(value, type) and issubclass(value, ResumptionError) and "reason" in vars(value)
    }
    assert classes.keys() == concrete


def test_log_messages_are_spelled_as_the_code_does() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mcp_resumable").glob("*.py"))
    table = TEXT.partition("| when you see this |")[2].partition("\n\n")[0]
    seen = [message for row in table.splitlines()[2:] for message in re.findall("`([^`]+)`", row.split("|")[1])]
    assert len(seen) >= 6
    for message in seen:
        text, _, reason = message.partition(": ")
        assert text in code
        assert reason in code


def test_it_stays_short() -> None:
    assert len(TEXT.splitlines()) < 150


def server_names(store: str = "ResumableEventStore()") -> dict[str, Any]:
    """Return the names that the installed line's shortest server defines, its last line not run."""
    program, _, last = server_program(BLOCKS, LINE).rstrip().rpartition("\n")
    assert last.startswith("mcp.run(")
    names: dict[str, Any] = {}
    program = "from mcp_resumable import *\n" + program.replace("ResumableEventStore()", store)
    exec(compile(program, "README.md", "exec"), names)
    return names


class Client:
    """A client of a server in this process."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http = http
        self.url = url
        self.headers = {"accept": "application/json, text/event-stream"}

    @classmethod
    @asynccontextmanager
    async def of(cls, names: dict[str, Any]) -> AsyncGenerator[Client]:
        server = names["mcp"]
        app = server.streamable_http_app(**({} if LINE == "1" else {"event_store": names["store"]}))
        transport = httpx.ASGITransport(app)
        async with server.session_manager.run(), httpx.AsyncClient(transport=transport) as http:
            client = cls(http, "http://127.0.0.1:8000/mcp")
            await client.initialize()
            yield client

    @property
    def session_id(self) -> str:
        return self.headers["mcp-session-id"]

    async def initialize(self) -> None:
        info = {"name": "readme", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
        response = await self.post({"id": 0, "method": "initialize", "params": params})
        self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
        self.headers["mcp-protocol-version"] = "2025-11-25"
        await self.post({"method": "notifications/initialized"})

    async def post(self, message: dict[str, Any]) -> httpx.Response:
        response = await self.http.post(self.url, headers=self.headers, json={"jsonrpc": "2.0", **message})
        return response.raise_for_status()

    async def call(self, request_id: int, tool: str, arguments: dict[str, Any]) -> list[str]:
        """Call a tool and return the event ids of its stream, the place before the first event included."""
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": request_id}}
        response = await self.post({"id": request_id, "method": "tools/call", "params": params})
        return re.findall(r"^id: (\S+)", response.text, re.MULTILINE)

    async def resume(self, event_id: str) -> httpx.Response:
        return await self.http.get(self.url, headers={**self.headers, "last-event-id": event_id})

    async def refusal(self, event_id: str) -> tuple[int, str]:
        response = await self.resume(event_id)
        return response.status_code, response.json()["error"]["data"]["reason"]
