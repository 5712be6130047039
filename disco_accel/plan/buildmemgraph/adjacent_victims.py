"""Which adjacent copies leave to make one stretch of free bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes from ``begin`` to ``end``: free ones, or those of a copy that may leave. Of a copy: its ``rank`` (the
    larger, the sooner it leaves), whether it is ``kept`` (needed only at the step's end), bytes to ``offload``."""

    begin: int
    end: int
    rank: float = float("inf")
    kept: bool = False
    offload: int = 0


def adjacent_victims(extents: Sequence[Extent], size: int) -> tuple[int, int] | None:
    """Return the first of ``extents`` and the one behind the last that give ``size`` adjacent bytes; None if none do.

    ``extents`` ascend and do not overlap. Of all ranges: one without a copy that is kept, then the one whose lowest
    rank is the highest, then the fewest bytes to offload, then the lowest address. Only those that begin with an extent
    are compared: any other one, moved down to the start of its first extent, has the same copies or fewer.
    """
    kept_before, offload_before = [0], [0]
    for extent in extents:
        kept_before.append(kept_before[-1] + extent.kept)
        offload_before.append(offload_before[-1] + extent.offload)
    best: tuple[tuple[bool, float, int, int], int, int] | None = None
    lowest: deque[int] = deque()
    """Extents of the range, each with a lower rank than all that come behind it."""
    last = 0
    # A range grows by whole adjacent extents until it is large enough. None ends before that from the start before
    # does, so both ends only move up.
    for first, extent in enumerate(extents):
        while last < len(extents) and (last <= first or _grows(extents, extent.begin, last, size)):
            while lowest and extents[lowest[-1]].rank >= extents[last].rank:
                lowest.pop()
            lowest.append(last)
            last += 1
        while lowest[0] < first:
            lowest.popleft()
        if extents[last - 1].end - extent.begin < size:
            continue
        kept = kept_before[last] > kept_before[first]
        offload = offload_before[last] - offload_before[first]
        candidate = kept, -extents[lowest[0]].rank, offload, extent.begin
        if best is None or candidate < best[0]:
            best = candidate, first, last
    return None if best is None else best[1:]


def _grows(extents: Sequence[Extent], begin: int, last: int, size: int) -> bool:
    """Whether the range from ``begin`` to before extent ``last`` is too small and ``last`` is next to it: between two
    extents lies a copy that may not leave."""
    end = extents[last - 1].end
    return end - begin < size and extents[last].begin == end
