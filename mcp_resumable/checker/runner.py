"""Runs the checks against a server, one after the other, and makes the report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.metadata import version

import anyio
import httpx

from mcp_resumable.checker.checks import CHECKS, Check, Verdict
from mcp_resumable.checker.client import Limits, ServerFaultError, Target, printable
from mcp_resumable.checker.report import CheckResult, Exchange, Report
from mcp_resumable.checker.run import CouldNotCheckError, Run

__all__ = ["check_server"]

# A check that takes more than this many time-outs, be it that something always comes, does not come to an end. What it
# does with a large call takes what such calls take here, and comes on top.
_CHECK_TIMEOUTS = 4


async def check_server(
    target: Target,
    limits: Limits | None = None,
    *,
    names: Collection[str] | None = None,
    on_begin: Callable[[str], None] | None = None,
) -> Report:
    """Check a server. Every session that was opened is ended, also where this is cancelled.

    Args:
        target: The server and its tool.
        limits: What may be spent.
        names: The checks to run; None: all.
        on_begin: Called with the name of each check before it is run.

    Raises:
        CouldNotCheckError: When the server or the tool does not allow any check.
    """
    run = Run(target, limits or Limits())
    begin = anyio.current_time()
    results: list[CheckResult] = []
    try:
        await _prepare(run)
        await run.close()
        for check in CHECKS.values():
            if names is None or check.name in names:
                if on_begin is not None:
                    on_begin(check.name)
                results.append(await _result_of(check, run, begin + run.limits.max_seconds))
    finally:
        await run.close()
    return Report(
        checker=f"mcp_resumable {version('mcp_resumable')}",
        revision=run.revision,
        url=printable(_without_credentials(target.url), 200),
        server=run.server,
        tool=printable(target.tool),
        seconds=round(anyio.current_time() - begin, 3),
        results=results,
    )


async def _prepare(run: Run) -> None:
    seconds = min(_CHECK_TIMEOUTS * run.limits.timeout_seconds, run.limits.max_seconds)
    with anyio.move_on_after(seconds) as scope:
        await run.prepare()
    if scope.cancelled_caught:
        raise CouldNotCheckError(f"two calls of the tool did not come to an end within {seconds:g} s")


async def _result_of(check: Check, run: Run, deadline: float) -> CheckResult:
    begin = anyio.current_time()
    run.wire.responses.clear()
    verdict = None
    try:
        with (
            anyio.CancelScope(deadline=deadline),
            anyio.move_on_after(_CHECK_TIMEOUTS * run.limits.timeout_seconds) as run.scope,
        ):
            verdict = await check.find_out(run)
    except ServerFaultError as exc:
        verdict = Verdict("failed", str(exc))
    finally:
        seconds = anyio.current_time() - begin
        exchanges = [Exchange(sent=response.sent, received=response.received) for response in run.wire.responses]
        await run.close()
    if verdict is None:
        verdict = Verdict("failed", f"it did not come to an end within {seconds:.0f} s")
    return CheckResult(
        name=check.name,
        outcome=verdict.outcome,
        detail=verdict.detail,
        why=check.why,
        exchanges=exchanges,
        seconds=round(anyio.current_time() - begin, 3),
    )


def _without_credentials(url: str) -> str:
    parsed = httpx.URL(url)
    return str(parsed.copy_with(username=None, password=None, query=None, fragment=None))
