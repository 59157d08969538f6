"""Which stream holds the oldest event? Two of these tell it, one for a session and one for the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

__all__ = ["EvictionOrder"]

# An order is tidied once this many of its entries are stale and they outnumber the others: O(1) amortized.
_MIN_STALE = 64

_S = TypeVar("_S", bound=Hashable)


class EvictionOrder(deque[_S]):
    """Streams in the order in which their events were appended: one entry for each place that is not evicted.

    A stream's places always go oldest first, so when some go on another ground (its own limits, its end) it is enough
    to count how many of its oldest entries are stale.
    """

    __slots__ = ("_stale", "_stale_count")

    def __init__(self) -> None:
        super().__init__()
        self._stale: dict[_S, int] = {}
        self._stale_count = 0

    def oldest(self) -> _S | None:
        """Return the stream that holds the oldest place, None where there is none; its entry is then the first."""
        while self:
            if not self._is_stale(self[0]):
                return self[0]
            self.popleft()
        return None

    def forget(self, stream: _S, places: int) -> None:
        """Take the `places` oldest entries of `stream` as stale."""
        if not places:
            return
        self._stale[stream] = self._stale.get(stream, 0) + places
        self._stale_count += places
        if self._stale_count >= _MIN_STALE and self._stale_count * 2 > len(self):
            entries = [entry for entry in self if not self._is_stale(entry)]
            self.clear()
            self.extend(entries)

    def _is_stale(self, stream: _S) -> bool:
        """Tell whether the oldest entry of `stream` is stale, and count it off if so."""
        stale = self._stale.get(stream)
        if stale is None:
            return False
        if stale == 1:
            del self._stale[stream]
        else:
            self._stale[stream] = stale - 1
        self._stale_count -= 1
        return True
