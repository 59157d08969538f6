"""What an OpenTelemetry reader collects, driven through the SDK's real session manager."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, Metric, Sum

from mcp_resumable import MemoryStorage, ResumableEventStore, ResumptionError, Retention, errors
from mcp_resumable.cursor import STANDALONE
from mcp_resumable.metrics import Metrics
from mcp_resumable.session import Connection, SessionBinding
from tests.held_storage import HeldStorage
from tests.sdk_host import Client, Request, hosting

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
SERVER_MODULE = "fastmcp" if version("mcp").startswith("1.") else "mcpserver"


class Collector:
    """A reader of its own for each test, and the clock that times what it collects."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.now = 0.0
        self.metrics = Metrics(self.provider.get_meter("test"), clock=lambda: self.now)

    def collect(self) -> dict[str, Metric]:
        data = self.reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

    def points(self, name: str) -> dict[tuple[Any, ...], Any]:
        """Return the data points of a metric by their attributes' values, in the order of the attributes' names."""
        metric = self.collect().get(name)
        if metric is None:
            return {}
        return {
            tuple(value for _, value in sorted((point.attributes or {}).items())): point
            for point in metric.data.data_points
        }

    def value(self, name: str) -> Any:
        """Return the value of a metric without attributes."""
        (point,) = self.points(name).values()
        return point.value


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Generator[Collector]:
    collector = Collector()
    monkeypatch.setattr("mcp_resumable.metrics.shared_metrics", lambda: collector.metrics)
    yield collector
    collector.provider.shutdown()


async def emitted(client: Client, request: Request, *texts: str, request_id: int = 1) -> list[str]:
    """Have the tool emit, and return the event ids as its client receives them."""
    await client.tool(request_id).emit(*texts)
    ids: list[str] = []
    while len(ids) < len(texts):
        frame = await request.frame()
        assert frame is not None
        if frame.data:
            assert frame.id is not None
            ids.append(frame.id)
    return ids


async def leave(*requests: Request) -> None:
    for request in requests:
        request.disconnect()
        await request.until_done()


# Counts.


async def test_each_decision_is_counted_by_outcome_and_reason(collector: Collector) -> None:
    storage = HeldStorage(retention=Retention(max_events=2))
    store = ResumableEventStore(storage)
    async with hosting(store) as host:
        client = await host.open()
        ids = await emitted(client, await client.call(1), "a", "b", "c")
        stream = ids[0].rpartition(":")[0]
        resumed = client.get(ids[1])
        await resumed.until_started()
        await leave(resumed)
        assert await client.get("x").reason() == "malformed_event_id"
        assert await client.get("1-aaaaaaaaaaaa:0:0").reason() == "unrecognized_generation"
        assert await client.get(f"{stream}:99").reason() == "future_event_id"
        assert await client.get(f"{stream}:0").reason() == "event_evicted"
        storage.fail("snapshot")
        assert await client.get(ids[1]).reason() == "storage_unavailable"
        storage.fail("append")
        await client.tool(1).emit("lost")
        await wait_all_tasks_blocked()
        assert await client.get(ids[2]).reason() == "replay_gap"
        client.tool(1).finish()
        await wait_all_tasks_blocked()
        assert await client.get(f"{stream}:5").reason() == "stream_completed"
        (earlier,) = await emitted(client, await client.call(2), "a", request_id=2)
        await store.restart_stream(2, client.session_id)
        assert await client.get(earlier).reason() == "stream_superseded"
        await store.advance_generation(client.session_id)
        assert await client.get(earlier).reason() == "generation_mismatch"
        await store.end_session(client.session_id)
        assert await client.get(earlier).reason() == "session_not_found"
    counted = {attributes: point.value for attributes, point in collector.points("mcp_resumable.decisions").items()}
    assert counted == {
        ("resume",): 1,
        ("gone", "session_not_found"): 1,
        ("invalid", "malformed_event_id"): 1,
        ("reset", "generation_mismatch"): 1,
        ("invalid", "unrecognized_generation"): 1,
        ("invalid", "future_event_id"): 1,
        ("reset", "stream_superseded"): 1,
        ("reset", "stream_completed"): 1,
        ("reset", "event_evicted"): 1,
        ("reset", "replay_gap"): 1,
        ("retry", "storage_unavailable"): 1,
    }
    assert {attributes[-1] for attributes in counted} == {"resume", *store.stats().decisions}


def test_each_reason_is_reported_as_zero_before_its_first_refusal(collector: Collector) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ResumptionError)]
    expected = {kind.reason: 0 for kind in kinds if "reason" in vars(kind)} | {"resume": 0}
    del expected["duplicate_request_id"]  # It answers a POST, not a claim.
    points = collector.points("mcp_resumable.decisions")
    assert {attributes[-1]: point.value for attributes, point in points.items()} == expected


async def test_appended_events_leave_out_those_too_large_to_keep(collector: Collector) -> None:
    async with hosting(ResumableEventStore(MemoryStorage(retention=Retention(max_bytes=1_000)))) as host:
        client = await host.open()
        request = await client.call()
        before = collector.value("mcp_resumable.appended.events")
        await emitted(client, request, "a", "x" * 1_000, "b")
        assert collector.value("mcp_resumable.appended.events") - before == 2
        assert collector.value("mcp_resumable.oversized.events") == 1


async def test_replayed_events_are_those_that_the_client_had_missed(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        ids = await emitted(client, await client.call(), "a", "b", "c")
        resumed = client.get(ids[0])
        await resumed.started.wait()
        await emitted(client, resumed, "live")
        assert collector.value("mcp_resumable.replayed.events") == 2


async def test_evicted_events_are_counted(collector: Collector) -> None:
    async with hosting(ResumableEventStore(MemoryStorage(retention=Retention(max_events=2)))) as host:
        client = await host.open()
        await emitted(client, await client.call(), "a", "b", "c", "d", "e")
        assert collector.value("mcp_resumable.evicted.events") == 3


async def test_storage_fault_is_counted(collector: Collector) -> None:
    storage = HeldStorage()
    async with hosting(ResumableEventStore(storage)) as host:
        client = await host.open()
        await client.call()
        storage.fail("append")
        await client.tool().emit("lost")
        await wait_all_tasks_blocked()
        assert collector.value("mcp_resumable.storage.faults") == 1


async def test_stalled_reader_is_counted(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        host.store.send_timeout = 0.2  # Of the requests from now on.
        request = await client.call()
        request.freeze()
        await client.tool().emit("a")
        await request.until_done()
        assert collector.value("mcp_resumable.stalled.readers") == 1


async def test_refused_request_is_counted(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        await client.call(7)
        assert await client.post(7).reason() == "duplicate_request_id"
        assert collector.value("mcp_resumable.refused.requests") == 1


async def test_take_over_is_counted_where_the_older_connection_was_open(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        first = await client.call()
        ids = await emitted(client, first, "a")
        second = client.get(ids[0])
        await second.until_started()
        await first.until_done()
        assert collector.value("mcp_resumable.take_overs") == 1
        await leave(second)
        third = client.get(ids[0])
        await third.until_started()
        plain = client.get()
        await plain.until_started()
        await client.get().until_started()
        await plain.until_done()
        assert collector.value("mcp_resumable.take_overs") == 2


async def test_take_over_of_a_current_execution_is_counted(collector: Collector) -> None:
    store = ResumableEventStore(rejection="stream")
    async with hosting(store) as host:
        client = await host.open()
        (earlier,) = await emitted(client, await client.call(), "a")
        await store.restart_stream(1, client.session_id)
        first = client.get(earlier)
        await first.until_started()
        assert collector.value("mcp_resumable.take_overs") == 0
        await client.get(earlier).until_started()
        await first.until_done()
        assert collector.value("mcp_resumable.take_overs") == 1


def test_connection_that_is_closed_already_is_not_taken_over() -> None:
    binding = SessionBinding(store=None, layer=None, credential=None, nonce="aaaaaaaaaaaa")
    first, second, third = Connection(), Connection(), Connection()
    assert [binding.take_over(STANDALONE, connection) for connection in (first, first, second)] == [False, False, True]
    second.close()
    assert not binding.take_over(STANDALONE, third)


# What there is now.


async def test_tail_is_counted_while_it_is_open(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        assert collector.value("mcp_resumable.tail.count") == 0
        tail = client.get()
        await tail.until_started()
        await wait_all_tasks_blocked()
        assert collector.value("mcp_resumable.tail.count") == 1
        await leave(tail)
        assert collector.value("mcp_resumable.tail.count") == 0


async def test_storage_usage_is_what_counts_against_the_limit_and_is_given_back(collector: Collector) -> None:
    storage = MemoryStorage()
    async with hosting(ResumableEventStore(storage)) as host:
        client = await host.open()
        request = await client.call()
        before = collector.value("mcp_resumable.storage.usage")
        assert before == storage.charged_bytes
        await emitted(client, request, "x" * 10_000)
        assert 10_000 < collector.value("mcp_resumable.storage.usage") - before < 11_000
        await client.request("DELETE").until_done()
        assert collector.value("mcp_resumable.storage.usage") == 0


async def test_storage_that_cannot_tell_its_usage_is_left_out(collector: Collector) -> None:
    stores = [ResumableEventStore(HeldStorage())]
    assert collector.points("mcp_resumable.storage.usage") == {}
    stores.append(ResumableEventStore())
    await stores[1].storage.open_session("s")
    assert collector.value("mcp_resumable.storage.usage") == stores[1].storage.charged_bytes


async def test_storage_of_two_stores_is_reported_once(collector: Collector) -> None:
    storage = MemoryStorage(retention=Retention(max_events=1))
    stores = [ResumableEventStore(storage), ResumableEventStore(storage)]
    generation = await storage.open_session("s")
    stream = await storage.open_stream("s", generation, "1")
    await storage.append("s", generation, stream, [b"a", b"b"])
    assert collector.value("mcp_resumable.storage.usage") == storage.charged_bytes
    assert collector.value("mcp_resumable.evicted.events") == 1
    assert len(stores) == 2


# Durations.


async def test_append_duration_is_the_time_that_the_storage_takes(collector: Collector) -> None:
    storage = HeldStorage()
    async with hosting(ResumableEventStore(storage)) as host:
        client = await host.open()
        await client.call()
        before = collector.points("mcp_resumable.append.duration")[()]
        trap = storage.hold("append")
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(client.tool().emit, "a")
            await trap.until_reached()
            collector.now += 0.25
            trap.release()
        await wait_all_tasks_blocked()
        after = collector.points("mcp_resumable.append.duration")[()]
    assert (after.count - before.count, after.sum - before.sum) == (1, 0.25)


async def test_resume_duration_is_the_time_to_the_decision(collector: Collector) -> None:
    storage = HeldStorage()
    async with hosting(ResumableEventStore(storage)) as host:
        client = await host.open()
        ids = await emitted(client, await client.call(), "a")
        for cursor, seconds in ((ids[0], 0.5), ("1-aaaaaaaaaaaa:0:0", 0.125)):
            trap = storage.hold("snapshot")
            request = client.get(cursor)
            await trap.until_reached()
            collector.now += seconds
            trap.release()
            await request.until_started()
            collector.now += 100
        storage.fail("snapshot")
        assert await client.get(ids[0]).reason() == "storage_unavailable"
    points = collector.points("mcp_resumable.resume.duration")
    assert {attributes: (point.count, point.sum) for attributes, point in points.items()} == {
        ("resume",): (1, 0.5),
        ("invalid", "unrecognized_generation"): (1, 0.125),
        ("retry", "storage_unavailable"): (1, 0),
    }


# All of them.


async def test_names_kinds_and_units(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        client = await host.open()
        ids = await emitted(client, await client.call(), "a")
        await client.get(ids[0]).until_started()
        metrics = collector.collect()

    def kind(metric: Metric) -> str:
        if isinstance(metric.data, Sum):
            return "counter" if metric.data.is_monotonic else "up-down counter"
        return "histogram" if isinstance(metric.data.data_points[0], HistogramDataPoint) else "gauge"

    assert {name: (kind(metric), metric.unit) for name, metric in metrics.items()} == {
        "mcp_resumable.decisions": ("counter", "{decision}"),
        "mcp_resumable.refused.requests": ("counter", "{request}"),
        "mcp_resumable.appended.events": ("counter", "{event}"),
        "mcp_resumable.replayed.events": ("counter", "{event}"),
        "mcp_resumable.evicted.events": ("counter", "{event}"),
        "mcp_resumable.oversized.events": ("counter", "{event}"),
        "mcp_resumable.storage.faults": ("counter", "{fault}"),
        "mcp_resumable.stalled.readers": ("counter", "{reader}"),
        "mcp_resumable.take_overs": ("counter", "{take_over}"),
        "mcp_resumable.tail.count": ("up-down counter", "{tail}"),
        "mcp_resumable.storage.usage": ("up-down counter", "By"),
        "mcp_resumable.append.duration": ("histogram", "s"),
        "mcp_resumable.resume.duration": ("histogram", "s"),
    }
    assert all(metric.description for metric in metrics.values())


async def test_no_attribute_tells_sessions_apart(collector: Collector) -> None:
    async with hosting(ResumableEventStore()) as host:
        for _ in range(2):
            client = await host.open()
            ids = await emitted(client, await client.call(), "a")
            await client.get(ids[0]).until_started()
            await client.get(f"hostile {client.session_id}").until_done()
        collected = collector.collect()
    names = {
        name for metric in collected.values() for point in metric.data.data_points for name in point.attributes or ()
    }
    assert names == {"mcp_resumable.outcome", "mcp_resumable.reason"}
    assert len(collector.points("mcp_resumable.decisions")) == 11
    assert set(collector.points("mcp_resumable.resume.duration")) == {("resume",), ("invalid", "malformed_event_id")}


async def test_counts_of_all_stores_are_summed_and_never_fall_when_one_is_gone(collector: Collector) -> None:
    stores = [ResumableEventStore(), ResumableEventStore()]
    for store, faults in zip(stores, (3, 4), strict=True):
        store.ledger.faults = faults
    assert collector.value("mcp_resumable.storage.faults") == 7
    del stores[0], store
    gc.collect()
    assert collector.value("mcp_resumable.storage.faults") == 7
    stores[0].ledger.faults += 1
    stores.append(ResumableEventStore())
    stores[1].ledger.faults = 2
    assert collector.value("mcp_resumable.storage.faults") == 10


def test_count_that_falls_is_taken_for_one_that_began_anew(collector: Collector) -> None:
    storage = MemoryStorage()
    store = ResumableEventStore(storage)
    totals: list[int] = []
    for storage.evicted_events in (5, 2, 3):
        totals.append(collector.value("mcp_resumable.evicted.events"))
    assert totals == [5, 7, 8]
    assert store.storage is storage


# With no SDK, no OpenTelemetry, or one that is too old.

USE = """
async def use(store):
    async with hosting(store) as host:
        client = await host.open()
        request = await client.call()
        await client.tool().emit("a", "b")
        frames = [await request.frame() for _ in range(3)]
        client.tool().finish()
        assert [frame.step for frame in await client.get(frames[1].id).frames() if frame.data] == ["b", "answer"]
        assert await client.get("x").reason() == "malformed_event_id"
    assert store.stats().decisions == {"resume": 1, "malformed_event_id": 1}
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_meter_provider_that_is_set_after_the_store_is_made_gets_the_metrics() -> None:
    script = f"""
import anyio
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from mcp_resumable import ResumableEventStore
from tests.sdk_host import hosting
{USE}
store = ResumableEventStore()
reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
anyio.run(use, store)
(scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
points = {{metric.name: metric.data.data_points for metric in scope.metrics}}
appended, timed = (points[f"mcp_resumable.{{name}}"][0] for name in ("appended.events", "append.duration"))
print(scope.scope.name, len(points), appended.value, timed.count)
"""
    assert run(script).split() == ["mcp_resumable", "13", "4", "4"]


def test_without_opentelemetry_everything_works_and_nothing_is_timed() -> None:
    # mcp 2.x needs the API for itself, so it is taken away once mcp is there.
    script = f"""
import importlib, sys
import anyio
import mcp.server.streamable_http_manager
importlib.import_module("mcp.server.{SERVER_MODULE}")
for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
    del sys.modules[name]
sys.modules["opentelemetry"] = None
from mcp_resumable import ResumableEventStore
from tests.sdk_host import hosting
{USE}
store = ResumableEventStore()
assert store.ledger.clock is None
anyio.run(use, store)
print([name for name in sys.modules if name.startswith("opentelemetry.")], "mcp_resumable.metrics" in sys.modules)
"""
    assert run(script).split() == ["[]", "False"]


def test_opentelemetry_that_is_too_old_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_histogram(_self: Meter, _name: str, _unit: str = "", _description: str = "") -> None: ...

    monkeypatch.setattr(Meter, "create_histogram", create_histogram)
    monkeypatch.delitem(sys.modules, "mcp_resumable.metrics")
    assert ResumableEventStore().ledger.clock is None
