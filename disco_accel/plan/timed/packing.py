"""Offsets for buffers whose lifespans are known.

A buffer goes into the smallest gap that it fits between those that are live at the same time, or above them all (best
fit). Time is a ring: a resident has to be at the same offset when a step starts and when it ends, so a buffer may have
two lifespans. Buffers with given offsets come first.

The order in which buffers get offsets decides how well they pack. Several orders are tried; then the buffers that came
to lie above the memory are packed first in the next round, again and again (squeaky wheel optimization, Joslin and
Clements 1999).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from disco_accel.plan.timed.planner_library import planner_library


@dataclass(frozen=True, slots=True)
class LivePart:
    """``size`` bytes from ``offset`` on in a buffer that are live in each of one or two ``lifespans``: from a tick up
    to, not including, another."""

    offset: int
    size: int
    lifespans: tuple[tuple[int, int], ...]

    @property
    def ticks(self) -> int:
        """How long the bytes are taken in all."""
        return sum(end - begin for begin, end in self.lifespans)


@dataclass(frozen=True)
class LiveBuffer:
    """Bytes that get one offset: one part, or several, each live on its own (the ranges of a value).

    ``at``: the offset of one that has it before packing begins (-1: none). No two of these may overlap."""

    parts: tuple[LivePart, ...]
    at: int = -1

    @functools.cached_property
    def size(self) -> int:
        """From the first byte of any part to the last."""
        return max(part.offset + part.size for part in self.parts)

    @functools.cached_property
    def begin(self) -> int:
        """The first tick."""
        return min(part.lifespans[0][0] for part in self.parts)

    @functools.cached_property
    def ticks(self) -> int:
        """How long a byte is taken, the mean over all of them."""
        if len(self.parts) == 1:
            return self.parts[0].ticks
        return sum(part.size * part.ticks for part in self.parts) // self.size

    @functools.cached_property
    def longest(self) -> int:
        """How long its longest lived byte is taken."""
        return max(part.ticks for part in self.parts)


_Key = Callable[["LiveBuffer"], tuple[float, ...]]

_FEW = 1000
"""Up to so many buffers, and where the lowest height is asked for, all orders are tried, else the first
``_ORDERS_OF_MANY``; up to so many, rounds are half as many again."""

_ORDERS_OF_MANY = 4

_TINY = 2000
"""Buffers smaller than one part in so many of the memory get the lowest offsets, longest lived first: above large ones
they would break up the gaps."""

ROUNDS = 60
"""Rounds in which buffers above the memory are packed first."""


def _by_size(power: float) -> _Key:
    """The largest first, in bytes times a power of the lifespan."""
    return lambda buffer: (-buffer.size * float(buffer.ticks) ** power, -buffer.ticks, buffer.begin)


ORDERS: tuple[_Key, ...] = (
    _by_size(0.0),
    _by_size(0.2),
    _by_size(0.1),
    _by_size(0.3),
    _by_size(0.5),
    lambda buffer: (-buffer.size, buffer.begin),
    lambda buffer: (-buffer.ticks, -buffer.size),
)
"""Orders in which buffers get offsets, most promising first; buffers that are always live precede the others."""


_LOW_ENOUGH = 200
"""The lowest packing is looked for down to this part above the bytes that are live at once. For the last 0.2 % of 22
layers 120 more rounds took half of the time for planning a step that fits."""


@dataclass(frozen=True, slots=True)
class Packed:
    """``height``: the bytes taken; ``offsets``: of each buffer; ``order``: in which the buffers got them; ``tried``:
    how many orders were tried."""

    height: int
    offsets: list[int]
    order: list[int]
    tried: int


def pack(
    buffers: Sequence[LiveBuffer],
    limit: int,
    rounds: int = ROUNDS,
) -> Packed:
    """Return the lowest packing that is found, or the first not above ``limit`` bytes.

    ``rounds``: see ``ROUNDS``."""
    best: Packed | None = None
    tried = 0
    packer = _Packer(buffers)
    for candidate in _orders(buffers, limit):
        packed = packer.pack(candidate, limit, 0)
        tried += packed.tried
        if best is None or packed.height < best.height:
            best = packed
        if best.height <= limit:
            break
    assert best is not None
    if not limit:
        peak = _live_peak(buffers)
        limit = peak + peak // _LOW_ENOUGH
    if len(buffers) <= _FEW:
        rounds += rounds // 2
    if rounds and best.height > limit:
        best = packer.pack(best.order, limit, rounds)
        tried += best.tried
    return replace(best, tried=tried)


def _orders(buffers: Sequence[LiveBuffer], limit: int) -> Iterator[list[int]]:
    always = max((buffer.longest for buffer in buffers), default=0)
    small = (limit or _live_peak(buffers)) // _TINY
    few = len(buffers) <= _FEW or not limit
    # Even ways put tiny buffers lowest, odd ones sort them with the others.
    for way in range(2 * len(ORDERS)) if few else range(0, 2 * _ORDERS_OF_MANY, 2):
        by, tiny = ORDERS[way // 2], 0 if way % 2 else small

        def key(i: int, by: _Key = by, tiny: int = tiny) -> tuple[float, ...]:
            buffer = buffers[i]
            if buffer.longest == always:
                return (0, buffer.ticks < always)
            return (1, -buffer.ticks) if buffer.size <= tiny else (2, *by(buffer))

        yield sorted(range(len(buffers)), key=key)


class _Packer:
    """Gives ``buffers`` offsets (``runtime_ext/plan/place.cpp``). Raises ExtensionError where it cannot be built."""

    def __init__(self, buffers: Sequence[LiveBuffer]) -> None:
        self._library = planner_library()
        parts = [part for buffer in buffers for part in buffer.parts]
        self._first = np.cumsum([0, *(len(buffer.parts) for buffer in buffers)], dtype=np.int64)
        """The number of each buffer's first part, and of all parts."""
        self._sizes = np.array([(part.offset, part.size) for part in parts], np.int64).reshape(-1, 2)
        self._at = np.array([buffer.at for buffer in buffers], np.int64)
        self._lifespans = np.array([_two(part.lifespans) for part in parts], np.int64).reshape(-1, 4)

    def pack(self, order: Sequence[int], limit: int, rounds: int) -> Packed:
        """Pack the buffers in ``order``; while the height is above ``limit``, and at most ``rounds`` times, once more
        with those first that lie too high. Return the lowest packing."""
        tried = ctypes.c_int32()
        # The library works on a copy: it leaves the best order there.
        best_order, offsets = np.array(order, np.int32), np.zeros(len(order), np.int64)
        height = self._library.disco_place(
            ctypes.c_int32(len(order)),
            *(ctypes.c_void_p(array.ctypes.data) for array in (self._first, self._sizes, self._lifespans, self._at)),
            ctypes.c_int64(limit),
            ctypes.c_int32(rounds),
            *(ctypes.c_void_p(array.ctypes.data) for array in (best_order, offsets)),
            ctypes.byref(tried),
        )
        return Packed(int(height), offsets.tolist(), best_order.tolist(), tried.value)


def _two(lifespans: tuple[tuple[int, int], ...]) -> tuple[int, int, int, int]:
    (begin, end), *second = lifespans
    return begin, end, *(second[0] if second else (0, 0))


def _live_peak(buffers: Sequence[LiveBuffer]) -> int:
    """Return the most bytes that are live at any time."""
    parts = (part for buffer in buffers for part in buffer.parts)
    lifespans = [(*lifespan, part.size) for part in parts for lifespan in part.lifespans]
    table = np.array(lifespans, np.int64).reshape(-1, 3)
    change = np.zeros(int(table[:, 1].max(initial=0)) + 1, np.int64)
    np.add.at(change, table[:, 0], table[:, 2])
    np.subtract.at(change, table[:, 1], table[:, 2])
    return int(change.cumsum().max(initial=0))
