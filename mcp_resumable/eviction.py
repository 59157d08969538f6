"""What goes first? An order of events and an order of empty streams tell it, two each: a session's and the store's."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import TypeVar

__all__ = ["EmptyStreams", "EvictionOrder"]

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


class EmptyStreams(OrderedDict[_S, int]):
    """Unfinished streams that retain no event, in the order in which they became empty, and what each is charged.

    Attributes:
        charged_bytes: The sum of these charges.
    """

    def __init__(self) -> None:
        super().__init__()
        self.charged_bytes = 0

    def add(self, stream: _S, charge: int) -> None:
        """Take in a stream that has become empty."""
        self[stream] = charge
        self.charged_bytes += charge

    def discard(self, stream: _S) -> None:
        """Forget a stream that is empty no more, or no more at all."""
        self.charged_bytes -= self.pop(stream, 0)

    def oldest_above(self, limit: float) -> _S | None:
        """Return the stream that has been empty for longest, None unless all together are charged more than `limit`."""
        return next(iter(self)) if self.charged_bytes > limit else None
