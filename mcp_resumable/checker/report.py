"""The report: a stable JSON schema, and how it is shown on a screen.

`schema_version` grows when a field changes its meaning or goes; new fields may appear within a version. All text that
came from the server is printable ASCII already. On the screen it is never read as markup either.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mcp_resumable.checker.checks import Outcome

__all__ = ["CheckResult", "Exchange", "Report", "render"]

_SIGNS: dict[Outcome, tuple[str, str]] = {
    "passed": ("passed", "green"),
    "warning": ("warning", "yellow"),
    "failed": ("FAILED", "bold red"),
    "not_applicable": ("n/a", "dim"),
}

# Exchanges shown below a check that did not pass; all are in the JSON.
_MAX_EXCHANGES = 6


class Exchange(BaseModel):
    """One request of a check.

    Attributes:
        sent: Method, what is asked for, and the session's name within the check.
        received: Status, and what came of the stream.
    """

    sent: str
    received: str


class CheckResult(BaseModel):
    """What one check found.

    Attributes:
        name: Of the check.
        outcome: The verdict.
        detail: Why, in one line.
        why: The sentence of the specification, or the report, that says why it matters.
        exchanges: What was sent and what came back, in order.
        seconds: How long it took.
    """

    name: str
    outcome: Outcome
    detail: str
    why: str
    exchanges: list[Exchange]
    seconds: float


class Report(BaseModel):
    """What all checks found.

    Attributes:
        schema_version: Of this schema.
        checker: The package that checked.
        revision: The protocol revision that was spoken.
        url: Of the server, without credentials.
        server: What the server says that it is.
        tool: The tool that was called.
        seconds: How long it took.
        results: In the order in which they were found.
    """

    schema_version: Literal[1] = 1
    checker: str
    revision: str
    url: str
    server: str
    tool: str
    seconds: float
    results: list[CheckResult]

    def count(self, outcome: Outcome) -> int:
        """Return how many checks ended so."""
        return sum(result.outcome == outcome for result in self.results)


def render(report: Report, console: Console) -> None:
    """Print what did not pass with its exchanges, then a line for each check."""
    for result in report.results:
        if result.outcome in ("failed", "warning"):
            console.print(_detailed(result))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(min_width=max(len(sign) for sign, _ in _SIGNS.values()))
    table.add_column(min_width=max((len(result.name) for result in report.results), default=0))
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for result in report.results:
        sign, style = _SIGNS[result.outcome]
        table.add_row(Text(sign, style), Text(result.name), Text(result.detail, "dim"))
    counts = ", ".join(
        f"{report.count(outcome)} {outcome.replace('_', ' ')}" for outcome in _SIGNS if report.count(outcome)
    )
    console.print(table)
    console.print(Text(f"{report.server} at {report.url}: {counts}, in {report.seconds:.0f} s", "bold"))


def _detailed(result: CheckResult) -> RenderableType:
    sign, style = _SIGNS[result.outcome]
    lines = [Text.assemble((sign, style), f" {result.name}: {result.detail}"), Text(result.why, "dim")]
    hidden = len(result.exchanges) - _MAX_EXCHANGES
    if hidden > 0:
        lines.append(Text(f"  … {hidden} earlier requests"))
    for exchange in result.exchanges[-_MAX_EXCHANGES:]:
        lines.append(Text(f"  > {exchange.sent}"))
        lines.append(Text(f"  < {exchange.received}"))
    return Group(*lines, Text())
