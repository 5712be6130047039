"""What happens before what, for the static judge: claims are collected and then checked all at once.

A claim that spans few positions is looked up in exact sets of ancestors, kept as bits of integers within a window. One
that spans more is searched for, and the search is cut short where it meets a long path that is known to lead on.
Either way the answer is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

Claim = tuple[int, int, Callable[[], str]]
"""``(first, then, why)`` by position: ``first`` must have finished before ``then`` starts. ``why`` is for messages."""

_SPAN = 1 << 13
_LONG_PATHS = 4


def first_unfounded(predecessors: Sequence[Sequence[int]], claims: Sequence[Claim]) -> Claim | None:
    """Return a claim that does not hold, None if all do.

    ``predecessors`` by position, all of them at earlier positions.
    """
    by_target: dict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim[0] >= claim[1]:
            return claim
        by_target[claim[1]].append(claim)
    base = 0
    window: list[int] = []
    far: list[Claim] = []
    for position, waits_for in enumerate(predecessors):
        if position - base == 2 * _SPAN:
            base += _SPAN
            window = [bits >> _SPAN for bits in window[_SPAN:]]
        bits = 0
        for predecessor in waits_for:
            if predecessor >= base:
                bits |= window[predecessor - base] | (1 << (predecessor - base))
        window.append(bits)
        for claim in by_target.get(position, ()):
            if claim[0] < base:
                far.append(claim)
            elif not (bits >> (claim[0] - base)) & 1:
                return claim
    return _first_unreached(predecessors, far) if far else None


class _Path:
    """A path through the graph: where on it a position arrives at the earliest, and where it was passed at the latest.

    ``leads``: the first place on the path that can be reached from a position; ``left``: the last place from which the
    position can be reached. If ``leads[u] <= left[v]``, then v can be reached from u.
    """

    def __init__(self, places: Sequence[int], predecessors: Sequence[Sequence[int]]) -> None:
        self.leads = [len(places)] * len(predecessors)
        self.left = [-1] * len(predecessors)
        for place, position in enumerate(places):
            self.leads[position] = self.left[position] = place
        for position, waits_for in enumerate(predecessors):
            for predecessor in waits_for:
                if self.left[predecessor] > self.left[position]:
                    self.left[position] = self.left[predecessor]
        for position in range(len(predecessors) - 1, -1, -1):
            for predecessor in predecessors[position]:
                if self.leads[position] < self.leads[predecessor]:
                    self.leads[predecessor] = self.leads[position]


def _first_unreached(predecessors: Sequence[Sequence[int]], claims: Sequence[Claim]) -> Claim | None:
    paths: list[_Path] = []
    used: set[int] = set()
    while claims and len(paths) < _LONG_PATHS:
        places = _longest(predecessors, used)
        used.update(places)
        path = _Path(places, predecessors)
        paths.append(path)
        claims = [claim for claim in claims if path.leads[claim[0]] > path.left[claim[1]]]
    for claim in claims:
        if not _reaches(predecessors, paths, claim[0], claim[1]):
            return claim
    return None


def _longest(predecessors: Sequence[Sequence[int]], used: set[int]) -> list[int]:
    """Return a path with as many positions that are not ``used`` as can be."""
    count = [0] * len(predecessors)
    for position, waits_for in enumerate(predecessors):
        count[position] = max((count[p] for p in waits_for), default=0) + (position not in used)
    walk = [max(range(len(count)), key=count.__getitem__)]
    while predecessors[walk[-1]]:
        walk.append(max(predecessors[walk[-1]], key=lambda p: (count[p], p)))
    return walk[::-1]


def _reaches(predecessors: Sequence[Sequence[int]], paths: Sequence[_Path], first: int, then: int) -> bool:
    """Search backward from ``then`` for ``first`` or for a point that a path leads to from there."""
    seen = {then}
    stack = [then]
    while stack:
        position = stack.pop()
        if position == first or any(path.leads[first] <= path.left[position] for path in paths):
            return True
        for predecessor in predecessors[position]:
            if predecessor >= first and predecessor not in seen:
                seen.add(predecessor)
                stack.append(predecessor)
    return False
