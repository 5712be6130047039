"""Happens-before for the static judge: claims are collected and then checked all at once.

A claim that spans few positions is looked up in exact sets of ancestors, kept as bits of integers within a window. For
one that spans more, the graph is searched backward, and the search ends early where it meets a long path that the first
vertex is known to reach. Either way the answer is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from disco_accel.errors import VerifyError

Claim = tuple[int, int, Callable[[], str]]
"""``(first, then, why)`` by position: ``first`` must have finished before ``then`` starts. ``why`` is for messages."""

_SPAN = 1 << 13
_LONG_PATHS = 4


def topological_order(ids: Sequence[int], waits: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Return id → position in an order in which each of ``ids`` comes after all that it ``waits`` for: the given one if
    it is such an order. Raises VerifyError if there is none."""
    order: dict[int, int] = {}
    for number in ids:
        if any(other not in order for other in waits[number]):
            return _some_order(ids, waits)
        order[number] = len(order)
    return order


def _some_order(ids: Sequence[int], waits: Mapping[int, Collection[int]]) -> dict[int, int]:
    successors: dict[int, list[int]] = defaultdict(list)
    waiting = {}
    for number in ids:
        waiting[number] = len(waits[number])
        for predecessor in waits[number]:
            successors[predecessor].append(number)
    queue = [number for number in ids if waiting[number] == 0]
    for number in queue:
        for successor in successors[number]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                queue.append(successor)
    if len(queue) < len(ids):
        stuck = sorted(set(ids) - set(queue))[:8]
        raise VerifyError(f"the edges form a cycle; among the vertices that could never start: {stuck}")
    return {number: position for position, number in enumerate(queue)}


def first_violated(predecessors: Sequence[Sequence[int]], claims: Sequence[Claim]) -> Claim | None:
    """Return a claim that does not hold, None if all do. ``predecessors`` by position, all of them at earlier
    positions."""
    by_target: dict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim[0] >= claim[1]:
            return claim
        by_target[claim[1]].append(claim)
    # Invariant: bit b of ancestors[i] says whether position base + b reaches position base + i. It is exact: every path
    # from one to the other stays between them, so none goes below base.
    base = 0
    ancestors: list[int] = []
    far: list[Claim] = []
    for position, waits_for in enumerate(predecessors):
        if position - base == 2 * _SPAN:
            base += _SPAN
            ancestors = [bits >> _SPAN for bits in ancestors[_SPAN:]]
        bits = 0
        for predecessor in waits_for:
            if predecessor >= base:
                bits |= ancestors[predecessor - base] | (1 << (predecessor - base))
        ancestors.append(bits)
        for claim in by_target.get(position, ()):
            if claim[0] < base:
                far.append(claim)
            elif not (bits >> (claim[0] - base)) & 1:
                return claim
    return _first_unreached(predecessors, far) if far else None


class _Path:
    """A path through the graph, and the reachability that follows from it. ``earliest_reached``: by position, the first
    place on the path that can be reached from it; ``latest_reaching``: the last place on the path from which it can be
    reached. If ``earliest_reached[u] <= latest_reaching[v]``, u reaches v."""

    def __init__(self, places: Sequence[int], predecessors: Sequence[Sequence[int]]) -> None:
        self.earliest_reached = [len(places)] * len(predecessors)
        self.latest_reaching = [-1] * len(predecessors)
        for place, position in enumerate(places):
            self.earliest_reached[position] = self.latest_reaching[position] = place
        # Forward, each position takes the maximum over its predecessors; backward, it gives them its minimum.
        for position, waits_for in enumerate(predecessors):
            for predecessor in waits_for:
                if self.latest_reaching[predecessor] > self.latest_reaching[position]:
                    self.latest_reaching[position] = self.latest_reaching[predecessor]
        for position in range(len(predecessors) - 1, -1, -1):
            for predecessor in predecessors[position]:
                if self.earliest_reached[position] < self.earliest_reached[predecessor]:
                    self.earliest_reached[predecessor] = self.earliest_reached[position]


def _first_unreached(predecessors: Sequence[Sequence[int]], claims: Sequence[Claim]) -> Claim | None:
    """Return a claim of a long span that does not hold. Paths settle most of those that hold, a search the others."""
    paths: list[_Path] = []
    used: set[int] = set()
    while claims and len(paths) < _LONG_PATHS:
        places = _longest(predecessors, used)
        used.update(places)
        path = _Path(places, predecessors)
        paths.append(path)
        claims = [claim for claim in claims if path.earliest_reached[claim[0]] > path.latest_reaching[claim[1]]]
    for claim in claims:
        if not _reaches(predecessors, paths, claim[0], claim[1]):
            return claim
    return None


def _longest(predecessors: Sequence[Sequence[int]], used: set[int]) -> list[int]:
    """Return a path with the most positions that are not ``used``."""
    count = [0] * len(predecessors)
    for position, waits_for in enumerate(predecessors):
        count[position] = max((count[p] for p in waits_for), default=0) + (position not in used)
    path = [max(range(len(count)), key=count.__getitem__)]
    while predecessors[path[-1]]:
        path.append(max(predecessors[path[-1]], key=lambda p: (count[p], p)))
    return path[::-1]


def _reaches(predecessors: Sequence[Sequence[int]], paths: Sequence[_Path], first: int, then: int) -> bool:
    """Whether ``first`` reaches ``then``: a search backward from ``then`` for it, or for a path that it reaches before.
    Positions before ``first`` cannot lie between the two and are left out."""
    seen = {then}
    stack = [then]
    while stack:
        position = stack.pop()
        if position == first or any(path.earliest_reached[first] <= path.latest_reaching[position] for path in paths):
            return True
        for predecessor in predecessors[position]:
            if predecessor >= first and predecessor not in seen:
                seen.add(predecessor)
                stack.append(predecessor)
    return False
