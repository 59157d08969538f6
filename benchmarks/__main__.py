"""Run the benchmark: `python -m benchmarks [--quick] [--only PART ...] [--output DIRECTORY]`.

Each part runs in a process of its own with a time limit. A part that fails or takes too long is reported with what it
had measured by then, and the others run all the same; so does a store that is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks import append, end_to_end, idle, machine, memory, resume, storm, workers
from benchmarks.measure import Figure, Options
from benchmarks.report import environment, print_table, write_chart, write_json
from benchmarks.valkey import running_valkey

_PARTS: dict[str, Callable[[Options], AsyncIterator[Figure]]] = {
    "machine": machine.run,
    "append": append.run,
    "resume": resume.run,
    "memory": memory.run,
    "end-to-end": end_to_end.run,
    "storm": storm.run,
    "workers": workers.run,
    "idle": idle.run,
}
# Each takes one to five minutes on two cores that nothing else uses; three times that where neighbours are loud.
_PART_SECONDS = 1_800.0


def main() -> int:
    """Run what the command line asks for; the result is 0 where every part came to its end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller numbers: to see that it runs")
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS), metavar="PART")
    parser.add_argument("--output", type=Path, help="where results.json and results.svg are written; default: nowhere")
    parser.add_argument("--part", choices=_PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--valkey", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        asyncio.run(_run_part(arguments.part, Options(quick=arguments.quick, valkey_url=arguments.valkey)))
        return 0
    # Who is asked to stop ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    measured_on = {**environment(), "quick": arguments.quick, "load_before": _load()}
    figures: list[Figure] = []
    is_complete = True
    with ExitStack() as resources:
        valkey_url = None
        try:
            valkey_url = resources.enter_context(running_valkey())
        except Exception as exc:
            console.print(f"No Valkey server: {exc}", markup=False)
        for part in arguments.only:
            began = time.monotonic()
            console.print(f"{part} …", markup=False)
            found, failure = asyncio.run(_measure(part, arguments.quick, valkey_url))
            figures += found
            if failure:
                is_complete = False
                figures.append(Figure(part=part, what="the part itself", unit="", store="all", note=failure))
            console.print(f"{part}: {failure or f'done after {time.monotonic() - began:.0f} s'}", markup=False)
    measured_on["load_after"] = _load()
    print_table(figures)
    if arguments.output:
        write_json(arguments.output / "results.json", measured_on, figures)
        write_chart(arguments.output / "results.svg", figures)
    return 0 if is_complete else 1


def _load() -> float:
    """Return the average load of the last minute: above the number of cores, others were measured too."""
    return round(os.getloadavg()[0], 2)


async def _run_part(part: str, options: Options) -> None:
    """Print each figure of a part as it is measured, a line of JSON each."""
    async for figure in _PARTS[part](options):
        sys.stdout.write(json.dumps(asdict(figure)) + "\n")
        sys.stdout.flush()


async def _measure(part: str, quick: bool, valkey_url: str | None) -> tuple[list[Figure], str]:
    """Run a part in a process of its own; return its figures, and why it did not come to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks", f"--part={part}"),
        *(["--quick"] if quick else []),
        *([f"--valkey={valkey_url}"] if valkey_url else []),
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    assert process.stdout is not None
    figures: list[Figure] = []

    async def read(stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            figures.append(Figure(**json.loads(line)))

    try:
        await asyncio.wait_for(read(process.stdout), _PART_SECONDS)
        status = await process.wait()
    except asyncio.TimeoutError:
        return figures, f"stopped after {_PART_SECONDS:.0f} s"
    finally:
        if process.returncode is None:
            # Its own subprocesses end with their standard input.
            process.terminate()
            await process.wait()
    return figures, f"failed with exit status {status}" if status else ""


if __name__ == "__main__":
    sys.exit(main())
