"""Each check has a server that it passes, and wrong ones that it does not: no check that cannot fail."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from mcp_resumable.checker import CHECKS, Limits, Report, Target, check_server

from .wrong_server import ALL_CHECKS_PASS, WRONGS, WrongServer, serving

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 60

# The kernel's buffers are small here, so that a reader blocks its server after some 200 kB.
SEND_BUFFER = 16_384
LOAD_ARGUMENTS: dict[str, object] = {"events": 60, "interval": 0.002, "padding": 10_000}
MIN_LOAD_BYTES = 500_000


@pytest.fixture
def anyio_backend() -> str:
    """Only asyncio: uvicorn knows no other loop."""
    return "asyncio"


def target_of(server: WrongServer, **changes: Any) -> Target:
    options: dict[str, Any] = {"load_arguments": LOAD_ARGUMENTS, "poll_arguments": {"close_after": 2}, **changes}
    return Target(url=server.url, tool="count", **options)


async def report_on(wrong: str, names: list[str] | None, *, timeout: float, silence: float, **changes: Any) -> Report:
    server = WrongServer(wrong)
    limits = Limits(
        timeout_seconds=timeout, silence_seconds=silence, min_call_seconds=0.05, min_load_bytes=MIN_LOAD_BYTES
    )
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(server, send_buffer=SEND_BUFFER):
            report = await check_server(target_of(server, **changes), limits, names=names)
    left = server.open_sessions
    assert left == [] or wrong in ("DELETE: 500",), "sessions were left behind"
    return report


@pytest.fixture(scope="module")
def passing() -> Report:
    """All checks on a server that does nothing wrong."""
    return anyio.run(lambda: report_on(ALL_CHECKS_PASS, None, timeout=20, silence=0.5))


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_passes_where_nothing_is_wrong(passing: Report, name: str) -> None:
    (result,) = [result for result in passing.results if result.name == name]
    assert (result.outcome, result.detail) == ("passed", result.detail)


def test_each_check_has_a_server_that_fails_it() -> None:
    assert {name for name, outcome in WRONGS.values() if outcome == "failed"} == set(CHECKS)


@pytest.mark.parametrize("wrong", WRONGS)
async def test_what_is_wrong_is_found(wrong: str) -> None:
    name, outcome = WRONGS[wrong]
    (result,) = (await report_on(wrong, [name], timeout=1.5, silence=0.25)).results
    assert (result.name, result.outcome) == (name, outcome), result
