"""Addresses for values that never leave: each lies in the lowest arena found, and as low in it as it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from disco_accel.plan.demand import Profile, Storage

_Key = Callable[[Storage], tuple[float, ...]]

ORDERS: dict[str, _Key] = {
    "life": lambda storage: (storage.first - storage.last, storage.first),
    "size": lambda storage: (-storage.block, storage.first),
    "begin": lambda storage: (storage.first, -storage.block),
}
"""In which order storages get a place. Those that live longest first keeps the height low at each position, and thus
leaves most room to others; large ones first keeps the greatest height low."""


def place(storages: Sequence[Storage], end: int, order: str) -> tuple[Profile, list[int]]:
    """Return the height of the storages of one device by position up to ``end``, and their addresses."""
    return _pack(storages, ORDERS[order], end)


def _pack(storages: Sequence[Storage], key: _Key, end: int) -> tuple[Profile, list[int]]:
    order = sorted(range(len(storages)), key=lambda i: key(storages[i]))
    height = np.zeros(end + 1, np.int64)
    addresses = [0] * len(storages)
    count = len(storages)
    firsts, lasts, lows, highs = (np.zeros(count, np.int64) for _ in range(4))
    for placed, i in enumerate(order):
        storage = storages[i]
        first, last, block = max(0, storage.first), storage.last, storage.block
        meets = (firsts[:placed] <= last) & (lasts[:placed] >= first)
        low = lows[:placed][meets]
        ascending = np.argsort(low, kind="stable")
        tops = np.maximum.accumulate(np.concatenate(([0], highs[:placed][meets][ascending])))
        gaps = low[ascending] - tops[:-1]
        fitting = np.flatnonzero(gaps >= block)
        address = int(tops[fitting[np.argmin(gaps[fitting])]]) if len(fitting) else int(tops[-1])
        addresses[i] = address
        firsts[placed], lasts[placed], lows[placed], highs[placed] = first, last, address, address + block
        np.maximum(height[first : last + 1], address + block, out=height[first : last + 1])
    return height, addresses
