"""The README's code blocks, and what it takes to run its servers; as a program, the smoke test of an installed wheel.

Needs nothing that a server does not: the wheel's environment has no test tools. `python -I tests/readme.py README.md`
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import files, version
from pathlib import Path
from urllib.request import Request

import mcp_resumable
from mcp_resumable import EventCursor

__all__ = ["Answer", "Block", "installed_line", "read_blocks", "send", "server_program", "serving"]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# The 1.x server leaves out the tool, which is the 2.x server's.
_SAME_TOOL = "...  # the same tool\n"
_TOOL = re.compile(r"^@mcp\.tool\(\)\n.*?(?=^\n)", re.MULTILINE | re.DOTALL)

# Runs a program as it stands, but on a free port; an app that it only builds is served.
_LAUNCHER = """
import sys
import uvicorn
plain = uvicorn.Config.__init__
def on_a_free_port(self, *args, **kwargs):
    plain(self, *args, **{**kwargs, "port": 0})
uvicorn.Config.__init__ = on_a_free_port
names = {"__name__": "__main__"}
exec(compile(sys.argv[1], "README.md", "exec"), names)
uvicorn.run(names["app"])
"""

_RUNNING = re.compile(r"running on (http://\S+)")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: As the fence says.
        text: What is in it.
    """

    language: str
    text: str

    @property
    def title(self) -> str:
        """Its first line, which says what the block is."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def line(self) -> str | None:
        """The SDK line that its title names, `1` or `2`; None where it runs on either."""
        match = re.search(r"\bmcp ([12])\.x\b", self.title)
        return match[1] if match else None


@dataclass(frozen=True)
class Answer:
    """An HTTP response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def event_ids(self) -> list[str]:
        """The ids of its SSE events, in order."""
        return re.findall(r"^id: (\S+)", self.body, re.MULTILINE)


def installed_line() -> str:
    """Return the line of the installed SDK, `1` or `2`."""
    return version("mcp").partition(".")[0]


def read_blocks(readme: Path) -> list[Block]:
    """Return the fenced blocks in order."""
    return [Block(language, text) for language, text in _FENCED.findall(readme.read_text(encoding="utf-8"))]


def server_program(blocks: list[Block], line: str) -> str:
    """Return the shortest server of an SDK line, complete."""
    servers = {block.line: block.text for block in blocks if block.title.startswith("server.py")}
    tool = _TOOL.search(servers["2"])
    assert tool is not None
    return servers[line].replace(_SAME_TOOL, tool[0])


@contextmanager
def serving(program: str) -> Generator[str]:
    """Run a program in a process of its own until it serves, and yield its address without a path."""
    command = [sys.executable, "-I", "-c", _LAUNCHER, program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            log = ""
            for text in process.stderr:
                log += text
                if running := _RUNNING.search(text):
                    yield running[1]
                    return
            raise RuntimeError(f"the server ended before it served:\n{log}")
        finally:
            process.kill()


def send(method: str, url: str, headers: Mapping[str, str], message: Mapping[str, object] | None = None) -> Answer:
    """Send a request, with a JSON-RPC message as its body, and return the whole response, whatever its status."""
    body = None if message is None else json.dumps({"jsonrpc": "2.0", **message}).encode()
    every = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    request = Request(url, data=body, headers={**every, **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return Answer(response.status, dict(response.headers), response.read().decode())
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Answer(refusal.code, dict(refusal.headers), refusal.read().decode())


def initialize(url: str) -> tuple[Answer, dict[str, str]]:
    """Open a session; return the answer, and the headers of the session's further requests."""
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "readme", "version": "1"}}
    answer = send("POST", url, {}, {"id": 0, "method": "initialize", "params": params})
    return answer, {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}


def check_server(url: str) -> None:
    """Open a session, resume it, and have a cursor refused."""
    answer, headers = initialize(url)
    assert answer.status == 200, answer
    assert '"serverInfo"' in answer.body, answer
    before_first, of_answer = answer.event_ids
    cursors = [EventCursor.parse(event_id) for event_id in answer.event_ids]
    assert [cursor and cursor.seq for cursor in cursors] == [0, 1], answer
    resumed = send("GET", url, {**headers, "last-event-id": before_first})
    assert (resumed.status, resumed.event_ids) == (200, [before_first, of_answer]), resumed
    refused = send("GET", url, {**headers, "last-event-id": "nonsense"})
    assert (refused.status, "malformed_event_id" in refused.body) == (400, True), refused


def check_installation() -> None:
    """See that the package is the installed one, and whole."""
    assert Path(mcp_resumable.__file__).is_relative_to(sys.prefix), mcp_resumable.__file__
    assert "pytest" not in sys.modules
    installed = {Path(path).name for path in files("mcp_resumable") or [] if "mcp_resumable" in path.parts}
    assert {"py.typed", "testing.py"} <= installed, installed


def main() -> None:
    """Check the installed package with the README's server."""
    check_installation()
    with serving(server_program(read_blocks(Path(sys.argv[1])), installed_line())) as address:
        check_server(f"{address}/mcp")
    print(f"mcp_resumable {version('mcp_resumable')} on mcp {version('mcp')}: installed, served, resumed, refused")


if __name__ == "__main__":
    main()
