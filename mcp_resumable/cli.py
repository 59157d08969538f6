"""The command line: `check` any server, and serve a `fixture` to try it on."""

from __future__ import annotations

import json
import re
import socket
from typing import Annotated, cast

import anyio
import httpx
import typer
import uvicorn
from rich.console import Console
from rich.text import Text

from mcp_resumable.checker import CHECKS, CouldNotCheckError, Limits, Report, Target, check_server
from mcp_resumable.checker.fixture import LOAD_ARGUMENTS, POLL_ARGUMENTS, TOOL, fixture_app
from mcp_resumable.checker.report import render

__all__ = ["app", "check", "fixture"]

_DEFAULTS = Limits()
_FAILED = 1
_COULD_NOT_CHECK = 2
# What RFC 9110 allows: a name's characters, and visible ones, spaces and tabs in a value.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~]*)")

# Before a paragraph, \b keeps its lines as they are.
_CHECK_HELP = """Check a server from outside, over sessions of its own, which are ended afterwards.

The tool has to send at least three messages before its answer, the same in each call, over a second or so. Three lines
make one, here with the Python SDK:

\b
    for step in range(1, 9):
        await anyio.sleep(0.1)
        await ctx.report_progress(step, 8)

`mcp-resumable fixture` serves one. Exit status: 0, nothing failed; 1, a check failed; 2, it could not be checked.
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Check any streamable-HTTP MCP server for what a client that loses its connection needs.",
)


def _parse_object(text: str) -> dict[str, object]:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise typer.BadParameter("not JSON") from exc
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object")
    return cast("dict[str, object]", value)


def _parse_header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text)
    if found is None:
        raise typer.BadParameter("not of the form 'Name: value'")
    return found[1], found[2].rstrip()


def _parse_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as exc:
        raise typer.BadParameter("not a URL") from exc
    if url.scheme not in ("http", "https") or not url.host:
        raise typer.BadParameter("not an http or https URL")
    return text


def _parse_check(text: str) -> str:
    if text not in CHECKS:
        raise typer.BadParameter(f"not one of {', '.join(CHECKS)}")
    return text


@app.command(help=_CHECK_HELP)
def check(
    url: Annotated[str, typer.Argument(parser=_parse_url, metavar="URL", help="Of the MCP endpoint.")],
    tool: Annotated[str, typer.Option(help="The tool to call; see above.")],
    args: Annotated[
        object, typer.Option(parser=_parse_object, metavar="JSON", help="Arguments for a slow call of it.")
    ] = "{}",
    load_args: Annotated[
        object,
        typer.Option(
            parser=_parse_object,
            metavar="JSON",
            help="Arguments for a call that sends at least 6 MB, about 1,000 messages a second.",
        ),
    ] = None,
    poll_args: Annotated[
        object,
        typer.Option(
            parser=_parse_object,
            metavar="JSON",
            help="Arguments for a call that sends the same as with --args, and whose connection the server closes.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="To be sent with each request; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(parser=_parse_check, metavar="NAME", help="Run only this check; repeatable."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=600, help="Seconds for a response, and for each event of it. More than the server's own."
        ),
    ] = _DEFAULTS.timeout_seconds,
    silence: Annotated[
        float, typer.Option(min=0.05, max=60, help="Seconds after which a stream is taken to bring nothing more.")
    ] = _DEFAULTS.silence_seconds,
) -> None:
    """Check a server; the help is `_CHECK_HELP`."""
    target = Target(
        url=url,
        tool=tool,
        arguments=cast("dict[str, object]", args),
        load_arguments=cast("dict[str, object] | None", load_args),
        poll_arguments=cast("dict[str, object] | None", poll_args),
        headers=dict(_parse_header(text) for text in header or ()),
    )
    limits = Limits(timeout_seconds=timeout, silence_seconds=silence)
    errors = Console(stderr=True)
    try:
        report = anyio.run(_check, target, limits, only, errors)
    except CouldNotCheckError as exc:
        errors.print(Text(f"could not check: {exc}"))
        raise typer.Exit(_COULD_NOT_CHECK) from exc
    except KeyboardInterrupt as exc:
        errors.print("could not check: interrupted")
        raise typer.Exit(_COULD_NOT_CHECK) from exc
    if is_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        render(report, Console())
    if report.count("failed"):
        raise typer.Exit(_FAILED)


async def _check(target: Target, limits: Limits, names: list[str] | None, errors: Console) -> Report:
    with errors.status("calling the tool") as status:
        return await check_server(target, limits, names=names, on_begin=status.update)


@app.command()
def fixture(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on.")] = 8_765,
) -> None:
    """Serve a tool to try `check` on, with this package's event store."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as exc:
        typer.echo(f"cannot listen on {host}, port {port}: {exc.strerror}", err=True)
        raise typer.Exit(_COULD_NOT_CHECK) from exc
    with listener:
        named = f"[{host}]" if ":" in host else host
        typer.echo(
            f"mcp-resumable check http://{named}:{listener.getsockname()[1]}/mcp --tool {TOOL} \\\n"
            f"  --load-args '{LOAD_ARGUMENTS}' \\\n  --poll-args '{POLL_ARGUMENTS}'"
        )
        config = uvicorn.Config(fixture_app(), log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])
