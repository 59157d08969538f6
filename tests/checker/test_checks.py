"""Each check has a server that it passes, and wrong ones that it does not: no check that cannot fail."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import pytest
import trio.testing

from mcp_resumable.checker import CHECKS, CheckResult, CouldNotCheckError, Limits, Report, Target, check_server
from mcp_resumable.checker.checks import Check, Verdict
from mcp_resumable.checker.run import Baseline, Run
from tests.loops import ASYNCIO

from .wrong_server import ALL_CHECKS_PASS, WRONGS, WrongServer, serving

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 60
SERVERS_AT_A_TIME = 8

# The kernel's buffers are small here, so that a reader blocks its server after some 200 kB.
SEND_BUFFER = 16_384
LOAD_ARGUMENTS: dict[str, object] = {"events": 60, "interval": 0.002, "padding": 10_000}
MIN_LOAD_BYTES = 500_000


async def report_on(wrong: str, names: list[str], *, patience: float, silence: float) -> Report:
    server = WrongServer(wrong)
    limits = Limits(
        timeout_seconds=patience, silence_seconds=silence, min_call_seconds=0.01, min_load_bytes=MIN_LOAD_BYTES
    )
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(server, send_buffer=SEND_BUFFER):
            target = Target(
                url=server.url, tool="count", load_arguments=LOAD_ARGUMENTS, poll_arguments={"close_after": 2}
            )
            report = await check_server(target, limits, names=names)
    assert server.open_sessions == [] or wrong in ("DELETE: 500", "no DELETE"), "sessions were left behind"
    return report


@pytest.fixture
def anyio_backend() -> object:
    """Only asyncio: uvicorn knows no other loop."""
    return ASYNCIO


@pytest.fixture(scope="module")
def findings() -> dict[tuple[str, str], CheckResult]:
    """What was found, by server and check. They mostly wait, so they wait side by side."""
    found: dict[tuple[str, str], CheckResult] = {}

    async def find(wrong: str, names: list[str], limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            # What is right does not let the checker wait, so it may take its time.
            patience, silence = (3.0, 0.3) if wrong in WRONGS else (20.0, 0.5)
            for result in (await report_on(wrong, names, patience=patience, silence=silence)).results:
                found[wrong, result.name] = result

    async def find_all() -> None:
        limiter = anyio.CapacityLimiter(SERVERS_AT_A_TIME)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(find, ALL_CHECKS_PASS, list(CHECKS), limiter)
            for wrong, outcomes in WRONGS.items():
                tasks.start_soon(find, wrong, list(outcomes), limiter)

    anyio.run(find_all)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_passes_where_nothing_is_wrong(findings: dict[tuple[str, str], CheckResult], name: str) -> None:
    assert findings[ALL_CHECKS_PASS, name].outcome == "passed", findings[ALL_CHECKS_PASS, name]


def test_each_check_has_a_server_that_fails_it() -> None:
    failing = {name for outcomes in WRONGS.values() for name, outcome in outcomes.items() if outcome == "failed"}
    assert failing == set(CHECKS)


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong, outcomes in WRONGS.items() for name in outcomes])
def test_what_is_wrong_is_found(findings: dict[tuple[str, str], CheckResult], wrong: str, name: str) -> None:
    assert findings[wrong, name].outcome == WRONGS[wrong][name], findings[wrong, name]


async def test_what_needs_arguments_of_its_own_is_left_out_without_them() -> None:
    server = WrongServer()
    limits = Limits(timeout_seconds=20, silence_seconds=0.3, min_call_seconds=0.01)
    names = ["no-loss-under-load", "frozen-reader", "polling"]
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(server):
            report = await check_server(Target(url=server.url, tool="count"), limits, names=names)
            small = Target(url=server.url, tool="count", load_arguments={})
            small_report = await check_server(small, limits, names=["frozen-reader"])
    assert [result.outcome for result in report.results] == ["passed", "not_applicable", "not_applicable"]
    assert [result.outcome for result in small_report.results] == ["not_applicable"]


# httpx leaves the generators of a body that is not read to its end to the garbage collector, of which trio warns.
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning")
async def test_the_checker_runs_on_trio_too() -> None:
    server = WrongServer()
    limits = Limits(timeout_seconds=20, silence_seconds=0.5, min_call_seconds=0.01)
    names = ["exact-resume", "standalone-cursor"]
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with serving(server):
            run = partial(check_server, Target(url=server.url, tool="count"), limits, names=names)
            report = await anyio.to_thread.run_sync(partial(anyio.run, run, backend="trio"))
    assert [result.outcome for result in report.results] == ["passed", "passed"]
    assert server.open_sessions == []


async def test_a_run_is_bounded_in_time() -> None:
    server = WrongServer("a resume is never answered")
    limits = Limits(timeout_seconds=60, max_seconds=1, min_call_seconds=0.01)
    with anyio.fail_after(TIMEOUT_SECONDS / 2):
        async with serving(server):
            target = Target(url=server.url, tool="count")
            report = await check_server(target, limits, names=["exact-resume", "take-over"])
    assert [result.outcome for result in report.results] == ["failed", "failed"]
    assert server.open_sessions == []


async def test_a_tool_that_never_answers_is_not_waited_for_though_it_always_sends_something() -> None:
    server = WrongServer()
    limits = Limits(timeout_seconds=0.5, max_seconds=1, min_call_seconds=0.01)
    with anyio.fail_after(TIMEOUT_SECONDS / 2):
        async with serving(server):
            target = Target(url=server.url, tool="count", arguments={"events": 1_000_000_000})
            with pytest.raises(CouldNotCheckError, match="within 1 s"):
                await check_server(target, limits)
    assert server.open_sessions == []


@pytest.mark.parametrize(("calls", "outcome"), [(6, "passed"), (20, "failed")])
def test_a_check_of_a_large_call_may_take_as_long_as_such_calls_take(
    monkeypatch: pytest.MonkeyPatch, calls: int, outcome: str
) -> None:
    call_seconds, timeout_seconds = 30.0, 10.0

    async def prepare(_run: Run) -> None:
        pass

    async def uncut(*_arguments: object) -> Baseline:
        await anyio.sleep(call_seconds)
        return Baseline(("message", "answer"), call_seconds, 1)

    async def open_session(_run: Run) -> None:
        pass

    async def find_out(run: Run) -> Verdict:
        baseline = await run.load_baseline()
        await anyio.sleep(calls * baseline.seconds)
        return Verdict("passed", "")

    monkeypatch.setattr(Run, "prepare", prepare)
    monkeypatch.setattr(Run, "open_session", open_session)
    monkeypatch.setattr(Run, "_uncut", uncut)
    monkeypatch.setattr(
        "mcp_resumable.checker.runner.CHECKS", {"large": Check(name="large", why="", find_out=find_out)}
    )
    target, limits = Target(url="http://localhost", tool="count"), Limits(timeout_seconds=timeout_seconds)
    clock = trio.testing.MockClock(autojump_threshold=0)
    report = anyio.run(check_server, target, limits, backend="trio", backend_options={"clock": clock})
    assert [result.outcome for result in report.results] == [outcome], report
