"""Seconds before and behind each vertex of a part of a step, of streams and links that take one vertex at a time.

All rest on one fact. Vertices S run on a lane that takes ``width`` of them at a time; none starts before second ``r``
and all have ended ``q`` seconds before the end T. In the T - q - r seconds between, the lane can do ``width`` times as
many seconds of work, and the work is the sum of their seconds p. So T >= r + sum(p) / width + q in any order.

- Sets S of a vertex's ancestors, which must have ended when it starts, give its ``head``. With q = 0 it is the largest
  r + sum(p) / width over the sets S of those with a head of at least r.
- The same in time reversed, among its descendants, gives its ``tail``.
- The largest of all S of a lane is found without looking at each. It is the time of a lane that may interrupt vertices,
  and always runs the one with the longest tail of those that can have started (Horn 1974; heads and tails: Carlier
  1982).

Any subset of the ancestors gives a valid head, so only those at most ``_WINDOW`` places before are looked at, and only
where ways join. A vertex with one predecessor starts when that has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_WINDOW = 512
"""Places. In a depth-first order a layer of a captured step with adapters takes about 200."""

_MASK = (1 << _WINDOW) - 1


def heads(
    before: Sequence[Sequence[int]], lane: Sequence[int], seconds: Sequence[float], share: Sequence[float]
) -> list[float]:
    """Return the seconds after which each vertex starts at the earliest.

    Vertices go by their place in a topological order; ``before``: those that each waits for. ``seconds``: of each;
    ``share``: of its lane's time that it takes, which is ``seconds`` over the lane's width.
    """
    lanes, shares, found = np.array(lane), np.array(share), np.zeros(len(before))
    # Bit k: the vertex k + 1 places before is an ancestor.
    ancestors = [0] * len(before)
    for at, sources in enumerate(before):
        if not sources:
            continue
        bits = 0
        for each in sources:
            if at - each <= _WINDOW:
                bits |= (ancestors[each] << 1 | 1) << (at - each - 1)
        ancestors[at] = bits & _MASK
        head = max(float(found[each]) + seconds[each] for each in sources)
        if _joins(sources, ancestors):
            near = at - 1 - _places(ancestors[at])
            head = max(head, _all_done(found[near], shares[near], lanes[near]))
        found[at] = head
    return [float(each) for each in found]


def _joins(sources: Sequence[int], ancestors: Sequence[int]) -> bool:
    """Whether ``sources`` are not all known to come before the last of them."""
    last = max(sources)
    known = ancestors[last]
    return not all(each == last or (last - each <= _WINDOW and known >> (last - each - 1) & 1) for each in sources)


def _places(bits: int) -> NDArray[np.int64]:
    """Return the places of the bits that are set, in numpy."""
    octets = np.frombuffer(bits.to_bytes(_WINDOW // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


def _all_done(heads: NDArray[np.float64], shares: NDArray[np.float64], lanes: NDArray[np.int64]) -> float:
    """Return when vertices can have run at the earliest on the busiest of ``lanes``; 0 without any."""
    if len(heads) < 2:
        return 0.0
    order = np.lexsort((-heads, lanes))
    heads, shares, lanes = heads[order], shares[order], lanes[order]
    work = np.cumsum(shares)
    first = np.flatnonzero(np.diff(lanes, prepend=lanes[0] - 1))
    # Work of the lanes before is not this lane's.
    others = np.repeat(work[first] - shares[first], np.diff(first, append=len(lanes)))
    return float(np.max(heads + work - others))


def near_heads(
    before: Sequence[Sequence[int]], lane: Sequence[int], seconds: Sequence[float], share: Sequence[float]
) -> list[float]:
    """Return heads by the vertices right before each alone: lower ones than ``heads``, in a tenth of the time."""
    found: list[float] = []
    for sources in before:
        if len(sources) < 2:
            found.append(found[sources[0]] + seconds[sources[0]] if sources else 0.0)
            continue
        head, done = 0.0, dict[int, float]()
        for each in sorted(sources, key=found.__getitem__):
            head = max(head, found[each] + seconds[each])
            done[lane[each]] = max(done.get(lane[each], 0.0), found[each]) + share[each]
        found.append(max(head, *done.values()))
    return found


def least_span(vertices: Iterable[tuple[float, float, float]]) -> float:
    """Return the largest r + sum(p) + q over all sets of a lane's ``vertices``, each a head, a share and a tail. It is
    the time of a lane that may interrupt vertices, and always runs the one with the longest tail."""
    coming = sorted(vertices, reverse=True)
    ready: list[tuple[float, float]] = []
    now = longest = 0.0
    while coming or ready:
        if not ready:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, share, tail = coming.pop()
            heapq.heappush(ready, (-tail, share))
        tail, left = ready[0]
        if coming and coming[-1][0] - now < left:
            heapq.heapreplace(ready, (tail, left - (coming[-1][0] - now)))
            now = coming[-1][0]
        else:
            heapq.heappop(ready)
            now += left
            longest = max(longest, now - tail)
    return longest
