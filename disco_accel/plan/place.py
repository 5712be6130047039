"""Addresses for everything that has bytes of a device for some time, once the times are known.

A piece is placed where it leaves the smallest gap among those that it meets in time, or above them all. Time is a ring:
what is there when the step starts has to be in the same place when it ends, so a piece may have two spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
"""Up to so many pieces, and where the lowest top is asked for, all orders are tried, else the first ``_SOME``."""

_SOME = 4

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


@dataclass(frozen=True, slots=True)
class Placed:
    """``top``: the bytes taken; ``addresses``: of each piece; ``order``: which of the ways it was found with;
    ``tried``: how many ways were tried."""

    top: int
    addresses: list[int]
    order: int
    tried: int


def place(pieces: Sequence[Piece], limit: int, order: int | None = None) -> Placed:
    """Return the lowest top that is found, or the first not above ``limit``; ``order``: try this way only."""
    always = max((piece.ticks for piece in pieces), default=0)
    small = (limit or _peak(pieces)) // _TINY
    best: Placed | None = None
    tried = 0
    few = len(pieces) <= _FEW or not limit
    ways = range(2 * len(ORDERS)) if few else range(0, 2 * _SOME, 2)
    for way in ways if order is None else (order,):
        by, tiny = ORDERS[way // 2], 0 if way % 2 else small

        def key(piece: Piece, by: _Key = by, tiny: int = tiny) -> tuple[float, ...]:
            if piece.ticks == always:
                return (0,)
            return (1, -piece.ticks) if piece.block <= tiny else (2, *by(piece))

        tried += 1
        top, addresses = _pack(pieces, key)
        if best is None or top < best.top:
            best = Placed(top, addresses, way, tried)
        if top <= limit:
            break
    assert best is not None
    return replace(best, tried=tried)


def _peak(pieces: Sequence[Piece]) -> int:
    """Return the most bytes that are taken at any time."""
    spans = np.array([(*span, piece.block) for piece in pieces for span in piece.spans], np.int64).reshape(-1, 3)
    change = np.zeros(int(spans[:, 1].max(initial=0)) + 1, np.int64)
    np.add.at(change, spans[:, 0], spans[:, 2])
    np.subtract.at(change, spans[:, 1], spans[:, 2])
    return int(change.cumsum().max(initial=0))


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
