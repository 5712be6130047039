"""Offsets found in Python: what ``runtime_ext/plan/place.cpp`` does in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from disco_accel.plan.timed.packing import LiveBuffer, Packed

_Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]
_NO_GAP = 1 << 62

_QUARTERS = 4
"""Round by round, buffers count as too high from no quarter, one, two, three quarters of the overflow on."""


class NaivePacker:
    """As ``_Packer``."""

    def __init__(self, buffers: Sequence[LiveBuffer]) -> None:
        self._buffers = buffers

    def pack(self, order: Sequence[int], limit: int, rounds: int) -> Packed:
        """See ``_Packer``."""
        best: Packed | None = None
        current = list(order)
        for turn in range(rounds + 1):
            height, offsets = _best_fit(self._buffers, current)
            if best is None or height < best.height:
                best = Packed(height, offsets, current, turn + 1)
            best = replace(best, tried=turn + 1)
            if height <= limit:
                break
            # The next order depends on this one alone: with one and the same threshold rounds go in circles.
            threshold = limit + (height - limit) * (turn % _QUARTERS) // _QUARTERS
            tops = [offset + buffer.size for offset, buffer in zip(offsets, self._buffers, strict=True)]
            # Stable: among those that lie too high, and among the others, the order stays as it was.
            current = sorted(current, key=lambda i: tops[i] <= threshold)
        assert best is not None
        return best


def _best_fit(buffers: Sequence[LiveBuffer], order: Sequence[int]) -> tuple[int, list[int]]:
    """Return the height and the offsets when buffers are packed in ``order``, each into its smallest gap. Those that
    have an offset are there before all others."""
    offsets = [0] * len(buffers)
    height = 0
    # Invariant: the first ``count`` columns are the lifespans packed so far, sorted by offset. Rows: where each begins
    # and ends in bytes, and in ticks.
    packed = np.zeros((4, 2 * sum(len(buffer.parts) for buffer in buffers)), np.int64)
    lows, highs, begins, ends = packed
    count = 0
    for i in sorted(order, key=lambda i: buffers[i].at < 0):
        # Offsets that would put a part over a neighbour: from ``taken[0]`` up to, not including, ``taken[1]``.
        taken = []
        # What takes no bytes is in nobody's way, and lies at the bottom.
        parts = [part for part in buffers[i].parts if part.size]
        if not parts:
            offsets[i] = max(0, buffers[i].at)
            height = max(height, offsets[i])
            continue
        for part in parts:
            (begin, end), *second = part.lifespans
            live = (begins[:count] < end) & (ends[:count] > begin)
            for begin, end in second:
                live |= (begins[:count] < end) & (ends[:count] > begin)
            neighbours = live.nonzero()[0]
            taken.append((lows[neighbours] - part.offset - part.size, highs[neighbours] - part.offset))
        sides = [np.concatenate(side) for side in zip(*taken, strict=True)]
        offset = buffers[i].at if buffers[i].at >= 0 else _smallest_gap(*sides, sort=len(taken) > 1)
        offsets[i] = offset
        height = max(height, offset + buffers[i].size)
        for part in parts:
            at = int(lows[:count].searchsorted(offset + part.offset))
            wide = len(part.lifespans)
            packed[:, at + wide : count + wide] = packed[:, at:count]
            for begin, end in part.lifespans:
                packed[:, at] = offset + part.offset, offset + part.offset + part.size, begin, end
                at += 1
            count += wide
    return height, offsets


def _smallest_gap(below: _Offsets, above: _Offsets, *, sort: bool) -> int:
    """Return the lowest offset of the smallest gap between offsets that are taken, or above them all."""
    if sort:
        order = below.argsort(kind="stable")
        below, above = below[order], above[order]
    # What is taken may overlap, so a gap begins above the highest of all that begin below it.
    tops = np.zeros(len(above) + 1, np.int64)
    np.maximum.accumulate(above, out=tops[1:])
    np.maximum(tops, 0, out=tops)
    gaps = below - tops[:-1]
    gaps[gaps < 0] = _NO_GAP
    smallest = int(gaps.argmin()) if len(gaps) else -1
    return int(tops[smallest] if smallest >= 0 and gaps[smallest] < _NO_GAP else tops[-1])
