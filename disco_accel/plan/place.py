"""Addresses for everything that has bytes of a device for some time, once the times are known.

A piece is placed where it leaves the smallest gap among those that it meets in time, or above them all. Time is a ring:
what is there when the step starts has to be in the same place when it ends, so a piece may have two spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_Key = Callable[["Piece"], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """``block`` bytes that are taken in each of one or two ``spans``, from a tick up to, not including, another."""

    block: int
    spans: tuple[tuple[int, int], ...]

    @property
    def ticks(self) -> int:
        """How long the bytes are taken in all."""
        return sum(end - begin for begin, end in self.spans)


ORDERS: dict[str, _Key] = {
    "size": lambda piece: (-piece.block, -piece.ticks, piece.spans[0][0]),
    "begin of size": lambda piece: (-piece.block, piece.spans[0][0]),
    "area": lambda piece: (-piece.block * piece.ticks, piece.spans[0][0]),
    "life": lambda piece: (-piece.ticks, -piece.block),
}
"""In which order pieces get a place, by promise."""


def place(pieces: Sequence[Piece], limit: int) -> tuple[int, list[int]]:
    """Return the lowest top that is found, or the first not above ``limit``, and the address of each piece."""
    best: tuple[int, list[int]] | None = None
    for key in ORDERS.values():
        found = _pack(pieces, key)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] <= limit:
            break
    assert best is not None
    return best


def _pack(pieces: Sequence[Piece], key: _Key) -> tuple[int, list[int]]:
    order = sorted(range(len(pieces)), key=lambda i: key(pieces[i]))
    addresses = [0] * len(pieces)
    top = 0
    begins, ends, lows, highs = (np.zeros(2 * len(pieces), np.int64) for _ in range(4))
    count = 0
    for i in order:
        block, spans = pieces[i].block, pieces[i].spans
        meets = np.zeros(count, np.bool_)
        for begin, end in spans:
            meets |= (begins[:count] < end) & (ends[:count] > begin)
        low = lows[:count][meets]
        ascending = np.argsort(low, kind="stable")
        tops = np.maximum.accumulate(np.concatenate(([0], highs[:count][meets][ascending])))
        gaps = low[ascending] - tops[:-1]
        fitting = np.flatnonzero(gaps >= block)
        address = int(tops[fitting[np.argmin(gaps[fitting])]]) if len(fitting) else int(tops[-1])
        addresses[i] = address
        top = max(top, address + block)
        for begin, end in spans:
            begins[count], ends[count], lows[count], highs[count] = begin, end, address, address + block
            count += 1
    return top, addresses
