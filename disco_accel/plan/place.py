"""Addresses for everything that has bytes of a device for some time, once the times are known.

A piece is placed where it leaves the smallest gap among those that it meets in time, or above them all. Time is a ring:
what is there when the step starts has to be in the same place when it ends, so a piece may have two spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Piece:
    """``block`` bytes that are taken in each of one or two ``spans``, from a tick up to, not including, another."""

    block: int
    spans: tuple[tuple[int, int], ...]

    @property
    def ticks(self) -> int:
        """How long the bytes are taken in all."""
        return sum(end - begin for begin, end in self.spans)


_Key = Callable[["Piece"], tuple[float, ...]]

_FEW = 1000
"""Up to so many pieces all orders are tried, beyond only the first."""

_TINY = 2000
"""Pieces smaller than one part in so many of all lie lowest, by time: above large ones they would be in the way."""


def _by_size(power: float) -> _Key:
    """The largest first, in bytes times a power of the time that they take."""
    return lambda piece: (-piece.block * float(piece.ticks) ** power, -piece.ticks, piece.spans[0][0])


_NONE = 1 << 62


ORDERS: tuple[_Key, ...] = (
    _by_size(0.0),
    _by_size(0.2),
    _by_size(0.1),
    _by_size(0.3),
    _by_size(0.5),
    lambda piece: (-piece.block, piece.spans[0][0]),
    lambda piece: (-piece.ticks, -piece.block),
)
"""In which order pieces get a place, by promise; those that are always there come first."""


def place(pieces: Sequence[Piece], limit: int) -> tuple[int, list[int], int]:
    """Return the lowest top that is found, or the first not above ``limit``, the address of each piece, and how many
    orders were tried."""
    always = max((piece.ticks for piece in pieces), default=0)
    best: tuple[int, list[int]] | None = None
    tried = 0
    for order in ORDERS if len(pieces) <= _FEW else ORDERS[:1]:
        for tiny in (limit // _TINY, 0):

            def key(piece: Piece, order: _Key = order, tiny: int = tiny) -> tuple[float, ...]:
                if piece.ticks == always:
                    return (0,)
                return (1, -piece.ticks) if piece.block <= tiny else (2, *order(piece))

            tried += 1
            found = _pack(pieces, key)
            if best is None or found[0] < best[0]:
                best = found
            if best[0] <= limit:
                return *best, tried
    assert best is not None
    return *best, tried


def _pack(pieces: Sequence[Piece], key: _Key) -> tuple[int, list[int]]:
    order = sorted(range(len(pieces)), key=lambda i: key(pieces[i]))
    addresses = [0] * len(pieces)
    top = 0
    # By address: where each span placed so far begins and ends, in bytes and in ticks.
    placed = np.zeros((4, 2 * len(pieces)), np.int64)
    lows, highs, begins, ends = placed
    count = 0
    for i in order:
        block, spans = pieces[i].block, pieces[i].spans
        (begin, end), *more = spans
        meets = (begins[:count] < end) & (ends[:count] > begin)
        for begin, end in more:
            meets |= (begins[:count] < end) & (ends[:count] > begin)
        met = meets.nonzero()[0]
        tops = np.zeros(len(met) + 1, np.int64)
        np.maximum.accumulate(highs[met], out=tops[1:])
        gaps = lows[met] - tops[:-1]
        gaps[gaps < block] = _NONE
        best = int(gaps.argmin()) if len(met) else -1
        address = int(tops[best] if best >= 0 and gaps[best] < _NONE else tops[-1])
        addresses[i] = address
        top = max(top, address + block)
        at = int(lows[:count].searchsorted(address))
        wide = len(spans)
        placed[:, at + wide : count + wide] = placed[:, at:count]
        for begin, end in spans:
            placed[:, at] = address, address + block, begin, end
            at += 1
        count += wide
    return top, addresses
