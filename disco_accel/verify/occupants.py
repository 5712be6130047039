"""The last writer of each byte of a memory, as judges replay a plan."""

from __future__ import annotations

from bisect import bisect_right

from disco_accel.graph.taskgraph import Ref


class Occupants:
    """The content written last to each byte range of one memory; ranges are sorted by address and do not overlap."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, Ref]] = []

    def replace(self, start: int, end: int, content: Ref) -> list[Ref]:
        """Make ``content`` the occupant of ``[start, end)`` and return the former ones."""
        ranges = self._ranges
        at = bisect_right(ranges, start, key=lambda r: r[0])
        first = at - 1 if at and ranges[at - 1][1] > start else at
        last = first
        remaining: list[tuple[int, int, Ref]] = []
        former: list[Ref] = []
        while last < len(ranges) and ranges[last][0] < end:
            begin, stop, occupant = ranges[last]
            former.append(occupant)
            if begin < start:
                remaining.append((begin, start, occupant))
            if stop > end:
                remaining.append((end, stop, occupant))
            last += 1
        # Ranges do not overlap, so their begins alone order them.
        ranges[first:last] = sorted([*remaining, (start, end, content)], key=lambda r: r[0])
        return list(dict.fromkeys(former))

    def at(self, start: int, end: int) -> set[Ref]:
        """Return the occupants of ``[start, end)``."""
        first = max(0, bisect_right(self._ranges, start, key=lambda r: r[0]) - 1)
        occupants: set[Ref] = set()
        for begin, stop, occupant in self._ranges[first:]:
            if begin >= end:
                break
            if stop > start:
                occupants.add(occupant)
        return occupants
