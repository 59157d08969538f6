"""OpenTelemetry metrics of all stores of this process, through the application's global meter provider.

Imported only where the extra `otel` is installed, and then there is nothing to switch on: an application that sets a
meter provider, before or after its stores are made, gets the metrics; in any other they are OpenTelemetry's no-ops.

| name (after `mcp_resumable.`) | kind                       | unit          | attributes        |
|-------------------------------|----------------------------|---------------|-------------------|
| `decisions`                   | observable counter         | `{decision}`  | outcome, reason   |
| `refused.requests`            | observable counter         | `{request}`   |                   |
| `appended.events`             | observable counter         | `{event}`     |                   |
| `replayed.events`             | observable counter         | `{event}`     |                   |
| `evicted.events`              | observable counter         | `{event}`     |                   |
| `oversized.events`            | observable counter         | `{event}`     |                   |
| `storage.faults`              | observable counter         | `{fault}`     |                   |
| `stalled.readers`             | observable counter         | `{reader}`    |                   |
| `take_overs`                  | observable counter         | `{take_over}` |                   |
| `tail.count`                  | observable up-down counter | `{tail}`      |                   |
| `storage.usage`               | observable up-down counter | `By`          |                   |
| `append.duration`             | histogram                  | `s`           |                   |
| `resume.duration`             | histogram                  | `s`           | outcome, reason   |

Attributes have the same prefix; there is no `reason` where the outcome is `resume`. None tells sessions, streams or
clients apart. Names are after the OpenTelemetry semantic conventions, "Naming": countable things are plural, up-down
counters are not.

What a `Ledger` counts anyway is read when it is collected: a synchronous counter takes as long as an append (3.4 µs,
opentelemetry-sdk 1.45).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from mcp_resumable.errors import (
    EventEvictedError,
    FutureEventIdError,
    GenerationMismatchError,
    MalformedEventIdError,
    ReplayGapError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
)
from mcp_resumable.ledger import Ledger
from mcp_resumable.storage import Storage

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

__all__ = ["Metrics", "shared_metrics"]

if "explicit_bucket_boundaries_advisory" not in inspect.signature(Meter.create_histogram).parameters:
    raise ImportError("the metrics of mcp_resumable need opentelemetry-api>=1.30")

# From an append in memory (3 µs) to a storage's time-out. OpenTelemetry's own are made for milliseconds.
_BOUNDARIES_SECONDS = [
    5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
]  # fmt: skip

# Each is reported from the beginning, as 0: a series that begins with its first refusal shows no increase.
_REFUSALS: tuple[type[ResumptionError], ...] = (
    SessionNotFoundError,
    MalformedEventIdError,
    GenerationMismatchError,
    UnrecognizedGenerationError,
    FutureEventIdError,
    StreamSupersededError,
    StreamCompletedError,
    EventEvictedError,
    ReplayGapError,
    StorageUnavailableError,
)

# Name, what is counted, description, and where the count is.
_COUNTS: tuple[tuple[str, str, str, Callable[[Ledger], int]], ...] = (
    ("refused.requests", "request", "Requests whose id was still unanswered", lambda ledger: ledger.refused_requests),
    ("appended.events", "event", "Events stored", lambda ledger: ledger.appends),
    ("replayed.events", "event", "Events that resuming clients had missed", lambda ledger: ledger.replayed_events),
    ("oversized.events", "event", "Events too large to keep", lambda ledger: ledger.oversized),
    ("storage.faults", "fault", "Failures of the storage", lambda ledger: ledger.faults),
    ("stalled.readers", "reader", "Clients given up since they did not read", lambda ledger: ledger.stalled_readers),
    ("take_overs", "take_over", "Connections closed for a newer one", lambda ledger: ledger.take_overs),
)

_HONOURED: dict[str, AttributeValue] = {"mcp_resumable.outcome": "resume"}

_S = TypeVar("_S")


class Metrics:
    """The instruments of one meter, over the ledgers that it watches, each for as long as its store lives.

    Collecting may happen in any thread: it reads single numbers, and waits for nothing.
    """

    def __init__(self, meter: Meter, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Make the instruments.

        Args:
            meter: Where to make them. It takes one `Metrics`: the counts of a second one would be ignored.
            clock: Seconds, monotonic, fine enough for an append; for tests.
        """
        self.clock = clock
        self._ledgers = WeakKeyDictionary[Ledger, None]()
        self._append_duration = meter.create_histogram(
            "mcp_resumable.append.duration",
            "s",
            "Time to store an event, while the next event of its session waits",
            explicit_bucket_boundaries_advisory=_BOUNDARIES_SECONDS,
        )
        self._resume_duration = meter.create_histogram(
            "mcp_resumable.resume.duration",
            "s",
            "Time from a claim to the decision about it",
            explicit_bucket_boundaries_advisory=_BOUNDARIES_SECONDS,
        )
        meter.create_observable_counter(
            "mcp_resumable.decisions",
            [
                _Count(self._watched, _decisions_by("resume"), _attributes_of(None)),
                *(_Count(self._watched, _decisions_by(kind.reason), _attributes_of(kind)) for kind in _REFUSALS),
            ],
            "{decision}",
            "Claims honoured and refused",
        )
        for name, thing, description, read in _COUNTS:
            counts = [_Count(self._watched, read)]
            meter.create_observable_counter(f"mcp_resumable.{name}", counts, f"{{{thing}}}", description)
        meter.create_observable_counter(
            "mcp_resumable.evicted.events",
            [_Count(self._storages, lambda storage: storage.evicted_events)],
            "{event}",
            "Events evicted by retention",
        )
        meter.create_observable_up_down_counter(
            "mcp_resumable.tail.count",
            [lambda _: [Observation(sum(ledger.open_tails for ledger in self._watched()))]],
            "{tail}",
            "Connections that are served from the storage",
        )
        meter.create_observable_up_down_counter(
            "mcp_resumable.storage.usage",
            [self._observe_usage],
            "By",
            "Bytes that count against max_total_bytes",
        )

    def watch(self, ledger: Ledger) -> None:
        """Report what `ledger` counts from now on, until it is gone."""
        self._ledgers[ledger] = None

    def appended(self, started: float) -> None:
        """Record an append that began at `started`, a reading of `clock`."""
        self._append_duration.record(self.clock() - started)

    def decided(self, refusal: ResumptionError | None, started: float) -> None:
        """Record a decision about a claim that arrived at `started`; None where it was honoured."""
        self._resume_duration.record(self.clock() - started, _attributes_of(refusal))

    def _watched(self) -> list[Ledger]:
        # A list first, in one step: other threads may make stores meanwhile.
        return [ledger for ref in self._ledgers.keyrefs() if (ledger := ref()) is not None]

    def _storages(self) -> list[Storage]:
        """Return each storage once, also where several stores keep their events in it."""
        return list({id(ledger.storage): ledger.storage for ledger in self._watched()}.values())

    def _observe_usage(self, _options: CallbackOptions) -> list[Observation]:
        told = [used for storage in self._storages() if (used := storage.charged_bytes) is not None]
        return [Observation(sum(told))] if told else []


class _Count(Generic[_S]):
    """A count, summed over sources that come and go: called to collect it."""

    def __init__(
        self,
        sources: Callable[[], Iterable[_S]],
        read: Callable[[_S], int],
        attributes: dict[str, AttributeValue] | None = None,
    ) -> None:
        self._sources = sources
        self._read = read
        self._attributes = attributes
        self._total = 0
        self._seen: dict[int, int] = {}

    def __call__(self, _options: CallbackOptions) -> list[Observation]:
        # Invariant: never falls, which would be taken for a restart. What has been seen of a source that is gone stays.
        seen = {id(source): self._read(source) for source in self._sources()}
        for key, count in seen.items():
            earlier = self._seen.get(key, 0)
            # A lower count is that of another source, made where one that is gone was.
            self._total += count - earlier if count >= earlier else count
        self._seen = seen
        return [Observation(self._total, self._attributes)]


def _decisions_by(reason: str) -> Callable[[Ledger], int]:
    return lambda ledger: ledger.decisions[reason]


def _attributes_of(refusal: ResumptionError | type[ResumptionError] | None) -> dict[str, AttributeValue]:
    if refusal is None:
        return _HONOURED
    return {"mcp_resumable.outcome": refusal.outcome, "mcp_resumable.reason": refusal.reason}


@cache
def shared_metrics() -> Metrics:
    """Return the instruments of the global meter provider, which every store of this process reports through."""
    return Metrics(get_meter("mcp_resumable"))
