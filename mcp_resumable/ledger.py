"""What happened, in numbers and in the log: the one place that counts and logs decisions and faults.

Whatever a client presented is logged escaped and cut, and a row of faults is logged once.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from mcp_resumable.errors import DuplicateRequestIdError, ResumptionError
from mcp_resumable.session import SessionBinding

__all__ = ["Ledger", "StoreStats"]

logger = logging.getLogger("mcp_resumable")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What this store has done since it was made, for people and probes.

    Attributes:
        decisions: Number of decisions by reason; `resume` counts those that were honoured.
        appends: Events stored.
        oversized: Events larger than `retention.max_bytes`: delivered live, a hole in their stream.
        faults: Events that could not be stored, and tails that broke, because the storage failed.
        refused_requests: POSTs whose request id was still unanswered.
        evicted_events: Events that retention has evicted.
        stalled_readers: Connections closed because their client did not read for `send_timeout`.
        open_tails: Connections that are being served from the storage now.
        sessions: Sessions that live in this process now.
    """

    decisions: dict[str, int]
    appends: int
    oversized: int
    faults: int
    refused_requests: int
    stalled_readers: int
    evicted_events: int
    open_tails: int
    sessions: int

    def __str__(self) -> str:
        """Return one line."""
        decisions = ", ".join(f"{reason} {count}" for reason, count in sorted(self.decisions.items())) or "none"
        return (
            f"{self.sessions} sessions, {self.open_tails} open tails; {self.appends} events stored, "
            f"{self.evicted_events} evicted, {self.oversized} oversized, {self.faults} faults, "
            f"{self.refused_requests} requests refused, {self.stalled_readers} stalled readers; decisions: {decisions}"
        )


class Ledger:
    """Counts since the store was made, and logs."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()
        self.appends = 0
        self.oversized = 0
        self.faults = 0
        self.refused_requests = 0
        self.stalled_readers = 0
        self.open_tails = 0

    def resumed(self) -> None:
        """Count a claim that is honoured."""
        self.decisions["resume"] += 1

    def refused(self, binding: SessionBinding, error: ResumptionError) -> None:
        """Count and log a refused claim: a reset is news, an invalid claim a warning."""
        self.decisions[error.reason] += 1
        logger.log(
            logging.WARNING if error.outcome == "invalid" else logging.INFO,
            "Refused to resume: %s (session %a, Last-Event-ID %a)",
            error.reason,
            binding.session_id,
            error.event_id,
        )

    def refused_request(self, binding: SessionBinding, error: DuplicateRequestIdError) -> None:
        """Count and log a POST whose request id is still unanswered."""
        self.refused_requests += 1
        request_id = str(error.request_id)[:_MAX_LOGGED]
        logger.warning("Refused a request: id %a is still unanswered (session %a)", request_id, binding.session_id)

    def stalled(self, binding: SessionBinding, seconds: float) -> None:
        """Count and log a client that was given up because it does not read."""
        self.stalled_readers += 1
        logger.warning(
            "A client did not read for %g seconds: its connection is given up, and it can resume (session %a)",
            seconds,
            binding.session_id,
        )

    def stored(self, binding: SessionBinding, event: bytes | None) -> None:
        """Count an event that is stored (None: its hole); the next fault of this session is news again."""
        self.appends += event is not None
        binding.is_fault_logged = False

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


_MAX_LOGGED = 256
