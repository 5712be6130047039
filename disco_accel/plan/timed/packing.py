"""Addresses for everything that has bytes of a device for some time, once the times are known.

A piece is placed where it leaves the smallest gap among those that it meets in time, or above them all. Time is a ring:
what is there when the step starts has to be in the same place when it ends, so a piece may have two spans.

In which order pieces get a place decides how well they pack. Several orders are tried; then those that came to lie too
high are placed first the next time, again and again (squeaky wheel optimization, Joslin and Clements 1999).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from disco_accel.native.plain_library import ExtensionError, load_plain

logger = logging.getLogger("disco_accel")


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

_ROUNDS = 60
_ROUNDS_FEW = 120
"""How often the pieces that lie too high are placed first; the latter up to ``_FEW`` pieces."""

_WITHIN = 1.08
"""What takes more than so many times the memory hardly comes down to it by that."""

_NEARLY = 1.03
"""The same for a given order, where many such attempts follow each other."""

_ALMOST = 1.005
"""Within so many times the memory it is worth as many rounds again."""

_SHARES = 4
"""Round by round no quarter, the first, half, and three quarters of the overflow are not too high yet."""


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
    """``top``: the bytes taken; ``addresses``: of each piece; ``order``: in which the pieces got them; ``tried``: how
    many orders were tried."""

    top: int
    addresses: list[int]
    order: list[int]
    tried: int


def place(pieces: Sequence[Piece], limit: int, order: list[int] | None = None) -> Placed:
    """Return the lowest top that is found, or the first not above ``limit``; ``order``: start with this one alone."""
    best: Placed | None = None
    tried = 0
    packing = packing_of(pieces)
    for each in _orders(pieces, limit) if order is None else (order,):
        found = packing.place(each, limit, 0)
        tried += found.tried
        if best is None or found.top < best.top:
            best = found
        if best.top <= limit:
            break
    assert best is not None
    limit = limit or _peak(pieces)
    for within in (_WITHIN if order is None else _NEARLY, _ALMOST):
        if limit < best.top <= within * limit:
            best = packing.place(best.order, limit, _ROUNDS_FEW if len(pieces) <= _FEW else _ROUNDS)
            tried += best.tried
    return replace(best, tried=tried)


def _orders(pieces: Sequence[Piece], limit: int) -> Iterator[list[int]]:
    always = max((piece.ticks for piece in pieces), default=0)
    small = (limit or _peak(pieces)) // _TINY
    few = len(pieces) <= _FEW or not limit
    for way in range(2 * len(ORDERS)) if few else range(0, 2 * _SOME, 2):
        by, tiny = ORDERS[way // 2], 0 if way % 2 else small

        def key(i: int, by: _Key = by, tiny: int = tiny) -> tuple[float, ...]:
            piece = pieces[i]
            if piece.ticks == always:
                return (0,)
            return (1, -piece.ticks) if piece.block <= tiny else (2, *by(piece))

        yield sorted(range(len(pieces)), key=key)


class Packing(Protocol):
    """Gives pieces addresses."""

    def place(self, order: Sequence[int], limit: int, rounds: int) -> Placed:
        """Place the pieces in ``order``; while the top is above ``limit``, and at most ``rounds`` times, again with
        those first that lie too high. Return the lowest."""
        ...


def packing_of(pieces: Sequence[Piece]) -> Packing:
    """Return the compiled packing of ``pieces``, or the slow one where there is no compiler. They find the same."""
    compiled = _compiled()
    return SlowPacking(pieces) if compiled is None else CompiledPacking(pieces, compiled)


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    try:
        library = load_plain("disco_place", "plan/place.cpp")
    except ExtensionError as error:
        logger.warning("planning takes several times longer than it has to: %s", str(error).splitlines()[0])
        return None
    library.disco_place.restype = ctypes.c_int64
    return library


class CompiledPacking:
    """``runtime_ext/plan/place.cpp``."""

    def __init__(self, pieces: Sequence[Piece], library: ctypes.CDLL) -> None:
        self._library = library
        self._blocks = np.array([piece.block for piece in pieces], np.int64)
        self._spans = np.array([_two(piece.spans) for piece in pieces], np.int64).reshape(-1, 4)

    def place(self, order: Sequence[int], limit: int, rounds: int) -> Placed:
        """See ``Packing``."""
        tried = ctypes.c_int32()
        found, addresses = np.array(order, np.int32), np.zeros(len(order), np.int64)
        top = self._library.disco_place(
            ctypes.c_int32(len(order)),
            *(ctypes.c_void_p(array.ctypes.data) for array in (self._blocks, self._spans)),
            ctypes.c_int64(limit),
            ctypes.c_int32(rounds),
            *(ctypes.c_void_p(array.ctypes.data) for array in (found, addresses)),
            ctypes.byref(tried),
        )
        return Placed(int(top), addresses.tolist(), found.tolist(), tried.value)


def _two(spans: tuple[tuple[int, int], ...]) -> tuple[int, int, int, int]:
    (begin, end), *more = spans
    again = more[0] if more else (0, 0)
    return begin, end, *again


class SlowPacking:
    """The same without a compiler."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def place(self, order: Sequence[int], limit: int, rounds: int) -> Placed:
        """See ``Packing``."""
        best: Placed | None = None
        now = list(order)
        for turn in range(rounds + 1):
            top, addresses = _pack(self._pieces, now)
            if best is None or top < best.top:
                best = Placed(top, addresses, now, turn + 1)
            best = replace(best, tried=turn + 1)
            if top <= limit:
                break
            # With one share alone rounds go in circles.
            high = limit + (top - limit) * (turn % _SHARES) // _SHARES
            tops = [address + piece.block for address, piece in zip(addresses, self._pieces, strict=True)]
            now = sorted(now, key=lambda i: tops[i] <= high)
        assert best is not None
        return best


def _peak(pieces: Sequence[Piece]) -> int:
    """Return the most bytes that are taken at any time."""
    spans = np.array([(*span, piece.block) for piece in pieces for span in piece.spans], np.int64).reshape(-1, 3)
    change = np.zeros(int(spans[:, 1].max(initial=0)) + 1, np.int64)
    np.add.at(change, spans[:, 0], spans[:, 2])
    np.subtract.at(change, spans[:, 1], spans[:, 2])
    return int(change.cumsum().max(initial=0))


def _pack(pieces: Sequence[Piece], order: Sequence[int]) -> tuple[int, list[int]]:
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
