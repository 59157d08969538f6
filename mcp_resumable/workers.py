"""What several workers over one `SharedStorage` do for each other, seen from one of them.

A session of another worker is visited: it is read here, and nothing of it is written but the numbers of its consumers.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from mcp_resumable.ledger import Ledger
from mcp_resumable.session import SessionBinding
from mcp_resumable.shared import digest_of
from mcp_resumable.writer import Writer

__all__ = ["WorkerLink"]


class WorkerLink:
    """Follows what other workers do to sessions that this one serves or visits. See `Worker`."""

    def __init__(self, bindings: Mapping[str, SessionBinding], writer: Writer, ledger: Ledger) -> None:
        self._bindings = bindings
        self._writer = writer
        self._ledger = ledger
        # By session, and by credential: a visitor who turns out to have a wrong one shares nothing with the right one.
        self._visits: WeakValueDictionary[str, _Visits] = WeakValueDictionary()

    def visit(self, session_id: str, credential: object, *, store: object, layer: object) -> SessionBinding:
        """Return the binding for a session that this worker does not serve, if anybody does."""
        visits = self._visits.setdefault(session_id, _Visits())
        digest = digest_of(credential)
        binding = visits.get(digest)
        if binding is None:
            binding = visits[digest] = SessionBinding(
                store=store,
                layer=layer,
                credential=credential,
                nonce="",
                session_id=session_id,
                status="visiting",
                visits=visits,
            )
        return binding

    async def on_recovered(self) -> None:
        """See `Worker`."""
        for binding in list(self._bindings.values()):
            if binding.unsettled:
                try:
                    await self._writer.settle(binding)
                except Exception as exc:
                    self._ledger.fault(binding, exc)

    async def on_pulse(self) -> None:
        """See `Worker`."""
        try:
            await self._writer.end_what_is_over()
        except Exception:
            return  # It stays to be done; the storage has said why.

    async def on_moved(self, session_id: str, *, is_ended: bool) -> bool:
        """See `Worker`."""
        binding = self._bindings.get(session_id)
        if binding is None or binding.status == "unclaimed":
            return False  # It is about an earlier session with this id, if any.
        if is_ended:
            binding.end()
        else:
            await self._writer.catch_up(binding)
        return True

    def on_taken_over(self, session_id: str, stream: str, number: int) -> None:
        """See `Worker`."""
        own = self._bindings.get(session_id)
        if own is not None:
            own.taken_over(stream, number)
        for binding in list(self._visits.get(session_id, _Visits()).values()):
            binding.taken_over(stream, number)


class _Visits(WeakValueDictionary[str, SessionBinding]):
    """The bindings of one session that is visited; each of them keeps it."""
