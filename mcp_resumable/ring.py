"""A contiguous, bounded buffer of one stream's events.

Every seq from 1 up to the high-water mark was assigned exactly once, in order. Those up to the replay floor have been
evicted; each of the others holds the event's bytes, or None where the event could not be kept (a hole).

    seq:       1   2   3 | 4     5     6     7
               evicted   | b"…"  None  b"…"  b"…"
                 floor = 3      hole     high-water mark = 7

Every operation is O(1), or O(events returned or evicted).
"""

from __future__ import annotations

__all__ = ["RingBuffer"]

# Evicted slots are given back once there are this many and they outnumber the others: O(1) amortized.
_MIN_SHIFT = 64


class RingBuffer:
    """Events of one stream, by seq.

    Not safe for use from several threads; every method is synchronous, so tasks of one event loop see each whole.

    Attributes:
        high_water_mark: Highest seq ever assigned, 0 when none.
        replay_floor: Highest seq that was evicted, 0 when none.
        retained_bytes: Sum of the lengths of the retained events.
        last_hole: Highest seq that could not be kept, 0 where there is none.
    """

    __slots__ = ("_items", "_start", "high_water_mark", "last_hole", "replay_floor", "retained_bytes")

    def __init__(self) -> None:
        self._items: list[bytes | None] = []
        # Invariant: _items[_start + i] holds seq replay_floor + 1 + i, and the last of them high_water_mark.
        self._start = 0
        self.replay_floor = 0
        self.high_water_mark = 0
        self.retained_bytes = 0
        self.last_hole = 0

    def __len__(self) -> int:
        """Return the number of places that are not evicted, holes included."""
        return self.high_water_mark - self.replay_floor

    def append(self, event: bytes | None) -> int:
        """Assign the next seq to `event` (None: to a hole) and return it."""
        self._items.append(event)
        self.high_water_mark = seq = self.high_water_mark + 1
        if event is None:
            self.last_hole = seq
        else:
            self.retained_bytes += len(event)
        return seq

    def evict_oldest(self) -> int:
        """Evict the oldest place and return the number of bytes that this frees (0 for a hole).

        Raises:
            IndexError: When nothing is retained.
        """
        start = self._start
        event = self._items[start]
        self._items[start] = None
        self._start = start = start + 1
        self.replay_floor += 1
        if start >= _MIN_SHIFT and start * 2 >= len(self._items):
            del self._items[:start]
            self._start = 0
        if event is None:
            return 0
        self.retained_bytes -= len(event)
        return len(event)

    def after(self, seq: int, limit: int) -> list[bytes | None]:
        """Return up to `limit` places that follow `seq`, in ascending seq, without a break; None is a hole.

        Args:
            seq: From the replay floor to the high-water mark.
            limit: At least 1.

        Raises:
            IndexError: When `seq` is below the replay floor or above the high-water mark.
        """
        if not self.replay_floor <= seq <= self.high_water_mark:
            raise IndexError(seq)
        first = self._start + seq - self.replay_floor
        return self._items[first : first + limit]

    def has_hole_after(self, seq: int) -> bool:
        """Tell whether a place above `seq` could not be kept."""
        return self.last_hole > seq
