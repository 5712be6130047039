"""Addresses for stays whose time is decided: two stays share bytes only if they never meet.

A stay that the next step finds again is an arc over the border of the step: its two parts have one address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from disco_accel.plan.stays import FOREVER, Occupancy

_Key = Callable[[Occupancy], tuple[float, ...]]

ORDERS: tuple[_Key, ...] = (
    lambda stay: (-stay.block, stay.begin),
    lambda stay: (-stay.block * (min(stay.end, 1 << 40) - stay.begin), stay.begin),
    lambda stay: (stay.begin, -stay.block),
)
"""In which order stays get a place: large ones, those that take most bytes for longest, early ones first."""


def live_peak(stays: Sequence[Occupancy]) -> int:
    """Return the bytes that are taken at once at most."""
    changes = sorted([(stay.begin, stay.block) for stay in stays] + [(stay.end, -stay.block) for stay in stays])
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak


def place(stays: Sequence[Occupancy], limit: int) -> int:
    """Give every stay of one device an address in the lowest arena that is found; return its height.

    The search ends with the first order that keeps within ``limit`` bytes.
    """
    best: tuple[int, list[int]] | None = None
    for key in ORDERS:
        height, addresses = _pack(stays, key)
        if best is None or height < best[0]:
            best = height, addresses
        if best[0] <= limit:
            break
    assert best is not None
    for stay, address in zip(stays, best[1], strict=True):
        stay.addr = address
    return best[0]


def _pack(stays: Sequence[Occupancy], key: _Key) -> tuple[int, list[int]]:
    parts: list[list[int]] = []
    index = {id(stay): i for i, stay in enumerate(stays)}
    groups = []
    for i, stay in enumerate(stays):
        if not stay.is_back:
            groups.append([i] if stay.back is None else [i, index[id(stay.back)]])
    always = [g for g in groups if stays[g[0]].begin == 0 and stays[g[0]].end == FOREVER]
    arcs = sorted((g for g in groups if len(g) > 1), key=lambda g: (stays[g[0]].end, stays[g[0]].begin))
    rest = [g for g in groups if len(g) == 1 and not (stays[g[0]].begin == 0 and stays[g[0]].end == FOREVER)]
    rest.sort(key=lambda g: key(stays[g[0]]))
    addresses = [0] * len(stays)
    bottom = 0
    for group in always:
        addresses[group[0]] = bottom
        bottom += stays[group[0]].block
    count = len(stays)
    begins, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    lows, highs = np.zeros(count, np.int64), np.zeros(count, np.int64)
    placed = 0
    height = bottom
    del parts
    for group in (*arcs, *rest):
        block = stays[group[0]].block
        b, e = begins[:placed], ends[:placed]
        meets = np.zeros(placed, np.bool_)
        for i in group:
            meets |= (b < stays[i].end) & (e > stays[i].begin)
        low = lows[:placed][meets]
        order = np.argsort(low, kind="stable")
        starts = low[order]
        tops = np.maximum.accumulate(np.concatenate(([bottom], highs[:placed][meets][order])))
        gaps = starts - tops[:-1]
        fitting = np.flatnonzero(gaps >= block)
        address = int(tops[fitting[np.argmin(gaps[fitting])]]) if len(fitting) else int(tops[-1])
        for i in group:
            addresses[i] = address
            begins[placed], ends[placed] = stays[i].begin, stays[i].end
            lows[placed], highs[placed] = address, address + block
            placed += 1
        height = max(height, address + block)
    return height, addresses
