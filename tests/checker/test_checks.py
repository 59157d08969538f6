"""Each check has a server that it passes, and wrong ones that it does not: no check that cannot fail."""

from __future__ import annotations

import anyio
import pytest

from mcp_resumable.checker import CHECKS, CheckResult, Limits, Report, Target, check_server

from .wrong_server import ALL_CHECKS_PASS, WRONGS, WrongServer, serving

TIMEOUT_SECONDS = 60
SERVERS_AT_A_TIME = 4

# The kernel's buffers are small here, so that a reader blocks its server after some 200 kB.
SEND_BUFFER = 16_384
LOAD_ARGUMENTS: dict[str, object] = {"events": 60, "interval": 0.002, "padding": 10_000}
MIN_LOAD_BYTES = 500_000


async def report_on(wrong: str, names: list[str] | None, *, patience: float, silence: float) -> Report:
    server = WrongServer(wrong)
    limits = Limits(
        timeout_seconds=patience, silence_seconds=silence, min_call_seconds=0.05, min_load_bytes=MIN_LOAD_BYTES
    )
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(server, send_buffer=SEND_BUFFER):
            target = Target(
                url=server.url, tool="count", load_arguments=LOAD_ARGUMENTS, poll_arguments={"close_after": 2}
            )
            report = await check_server(target, limits, names=names)
    assert server.open_sessions == [] or wrong == "DELETE: 500", "sessions were left behind"
    return report


@pytest.fixture(scope="module")
def passing() -> Report:
    """All checks on a server that does nothing wrong."""
    return anyio.run(lambda: report_on(ALL_CHECKS_PASS, None, patience=20, silence=0.5))


@pytest.fixture(scope="module")
def findings() -> dict[str, CheckResult]:
    """For each wrong server, what the check found that is to find it. They mostly wait, so they wait side by side."""
    found: dict[str, CheckResult] = {}

    async def find(wrong: str, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            (found[wrong],) = (await report_on(wrong, [WRONGS[wrong][0]], patience=3, silence=0.3)).results

    async def find_all() -> None:
        limiter = anyio.CapacityLimiter(SERVERS_AT_A_TIME)
        async with anyio.create_task_group() as tasks:
            for wrong in WRONGS:
                tasks.start_soon(find, wrong, limiter)

    anyio.run(find_all)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_passes_where_nothing_is_wrong(passing: Report, name: str) -> None:
    (result,) = [result for result in passing.results if result.name == name]
    assert result.outcome == "passed", result


def test_each_check_has_a_server_that_fails_it() -> None:
    assert {name for name, outcome in WRONGS.values() if outcome == "failed"} == set(CHECKS)


@pytest.mark.parametrize("wrong", WRONGS)
def test_what_is_wrong_is_found(findings: dict[str, CheckResult], wrong: str) -> None:
    result = findings[wrong]
    assert (result.name, result.outcome) == WRONGS[wrong], result
