"""What happened, in numbers and in the log: the one place that counts and logs decisions and faults.

Whatever a client presented is logged escaped and cut, and a row of faults is logged once.

The line of a refusal carries its parts as fields of the record too, for structured loggers: `mcp_resumable_reason`,
`_outcome`, `_session`, `_stream` (wire spelling, None where the claim names none) and `_cursor`, escaped and cut alike.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcp_resumable.cursor import EventCursor
from mcp_resumable.decision import Resume
from mcp_resumable.errors import DuplicateRequestIdError, ResumptionError
from mcp_resumable.session import SessionBinding
from mcp_resumable.storage import Storage

if TYPE_CHECKING:
    from mcp_resumable.metrics import Metrics

__all__ = ["Ledger", "StoreStats"]

logger = logging.getLogger("mcp_resumable")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What this store has done since it was made, for people and probes.

    Attributes:
        decisions: Number of decisions by reason; `resume` counts those that were honoured.
        appends: Events stored.
        replayed_events: Events that resuming clients had missed: those from cursor to high-water mark of each resume.
        oversized: Events larger than `retention.max_bytes`: delivered live, a hole in their stream.
        faults: Events that could not be stored, and tails that broke, because the storage failed.
        refused_requests: POSTs whose request id was still unanswered.
        evicted_events: Events that retention has evicted.
        stalled_readers: Connections closed because their client did not read for `send_timeout`.
        take_overs: Connections closed because a newer one took over their stream.
        open_tails: Connections that are being served from the storage now.
        sessions: Sessions that live in this process now.
    """

    decisions: dict[str, int]
    appends: int
    replayed_events: int
    oversized: int
    faults: int
    refused_requests: int
    stalled_readers: int
    take_overs: int
    evicted_events: int
    open_tails: int
    sessions: int

    def __str__(self) -> str:
        """Return one line."""
        decisions = ", ".join(f"{reason} {count}" for reason, count in sorted(self.decisions.items())) or "none"
        return (
            f"{self.sessions} sessions, {self.open_tails} open tails; {self.appends} events stored, "
            f"{self.replayed_events} replayed, {self.evicted_events} evicted, {self.oversized} oversized, "
            f"{self.faults} faults, {self.refused_requests} requests refused, {self.stalled_readers} stalled readers, "
            f"{self.take_overs} take-overs; decisions: {decisions}"
        )


class Ledger:
    """Counts since the store was made, and logs.

    Attributes:
        clock: Seconds, monotonic, for what is timed; None where nothing is, since OpenTelemetry is not installed.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.decisions: Counter[str] = Counter()
        self.appends = 0
        self.replayed_events = 0
        self.oversized = 0
        self.faults = 0
        self.refused_requests = 0
        self.stalled_readers = 0
        self.take_overs = 0
        self.open_tails = 0
        self._metrics = _shared_metrics()
        self.clock = self._metrics.clock if self._metrics is not None else None
        if self._metrics is not None:
            self._metrics.watch(self)

    def resumed(self, decision: Resume, started: float | None) -> None:
        """Count a claim that is honoured; `started` is when it arrived, by `clock`."""
        self.decisions["resume"] += 1
        self.replayed_events += decision.high_water_mark - decision.cursor.seq
        if self._metrics is not None and started is not None:
            self._metrics.decided(None, started)

    def refused(self, binding: SessionBinding, error: ResumptionError, started: float | None = None) -> None:
        """Count and log a refused claim: a reset is news, an invalid claim a warning."""
        self.decisions[error.reason] += 1
        if self._metrics is not None and started is not None:
            self._metrics.decided(error, started)
        cursor = EventCursor.parse(error.event_id or "")
        stream = str(cursor.stream) if cursor is not None else None
        logger.log(
            logging.WARNING if error.outcome == "invalid" else logging.INFO,
            "Refused to resume: %s (session %a, stream %s, Last-Event-ID %a)",
            error.reason,
            binding.session_id,
            stream,
            error.event_id,
            extra=_fields_of(binding, error, stream),
        )

    def refused_request(self, binding: SessionBinding, error: DuplicateRequestIdError) -> None:
        """Count and log a POST whose request id is still unanswered."""
        self.refused_requests += 1
        logger.warning(
            "Refused a request: id %a is still unanswered (session %a)",
            str(error.request_id)[:_MAX_LOGGED],
            binding.session_id,
            extra=_fields_of(binding, error, None),
        )

    def stalled(self, binding: SessionBinding, seconds: float) -> None:
        """Count and log a client that was given up because it does not read."""
        self.stalled_readers += 1
        logger.warning(
            "A client did not read for %g seconds: its connection is given up, and it can resume (session %a)",
            seconds,
            binding.session_id,
        )

    def stored(self, binding: SessionBinding, event: bytes | None, started: float | None) -> None:
        """Count an event that is stored (None: its hole); the next fault of this session is news again."""
        self.appends += event is not None
        binding.is_fault_logged = False
        if started is not None and self._metrics is not None:
            self._metrics.appended(started)

    def fault(self, binding: SessionBinding, exc: Exception) -> None:
        """Count a fault, and log the first of a row of them."""
        self.faults += 1
        if not binding.is_fault_logged:
            binding.is_fault_logged = True
            logger.error(
                "An event could not be stored, or the storage could not be read; session %a goes on live, and does "
                "not resume over what is lost",
                binding.session_id,
                exc_info=exc,
            )

    def too_large(self, binding: SessionBinding, request_id: str | None, size: int) -> None:
        """Count and log an event that is delivered live and not kept."""
        self.oversized += 1
        logger.warning(
            "An event of %d bytes is larger than max_bytes: delivered live, not kept (session %a, request %a)",
            size,
            binding.session_id,
            request_id[:_MAX_LOGGED] if request_id is not None else None,
        )

    def unbound(self, message: str) -> None:
        """Count and log an event that came without a session."""
        self.faults += 1
        logger.error("An event was not stored: %s", message)

    def evicted(self, binding: SessionBinding) -> None:
        """Log that a session which the SDK holds is no longer in the storage."""
        logger.warning("Session %a was evicted: events go out live only, until its next request", binding.session_id)

    def abandoned(self, binding: SessionBinding) -> None:
        """Log that another worker has given up a session of this one."""
        logger.warning(
            "Session %a was given up, since this worker showed no sign of life: its open calls are answered by nobody, "
            "and its next request begins anew",
            binding.session_id,
        )

    def superseded(self, binding: SessionBinding, current: object) -> None:
        """Log that another writer has claimed a session."""
        logger.warning(
            "Session %a is written by another worker now (generation %s): events go out live only",
            binding.session_id,
            current,
        )

    def sent_to_nobody(self, binding: SessionBinding, first_seq: int, last_seq: int) -> None:
        """Log that events of the standalone stream are gone before any client asked for them."""
        logger.info(
            "Events %d to %d of the standalone stream were sent to nobody and are gone (session %a)",
            first_seq,
            last_seq,
            binding.session_id,
        )


def _shared_metrics() -> Metrics | None:
    try:
        from mcp_resumable.metrics import shared_metrics
    except ImportError:  # OpenTelemetry is not installed, or older than the extra `otel` asks for.
        return None
    return shared_metrics()


def _fields_of(binding: SessionBinding, error: ResumptionError, stream: str | None) -> dict[str, str | None]:
    # With a prefix, since logging raises where a name is a record's own.
    return {
        "mcp_resumable_reason": error.reason,
        "mcp_resumable_outcome": error.outcome,
        "mcp_resumable_session": _escape(binding.session_id),
        "mcp_resumable_stream": stream,
        "mcp_resumable_cursor": _escape(error.event_id),  # Cut by the error already.
    }


def _escape(text: str | None) -> str | None:
    return text.encode("unicode_escape").decode() if text is not None else None


_MAX_LOGGED = 256
