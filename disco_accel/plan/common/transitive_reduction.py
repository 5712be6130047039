"""Removing memory edges that other edges imply, in time that grows with the edges.

Reachability is exact within a window of positions, where sets of ancestors are bits of integers. An edge that spans
more is looked up on a few long paths through the graph: if its source reaches a path before the path reaches another
predecessor of its target, it is implied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from disco_accel.graph.memgraph import Edge
from disco_accel.graph.taskgraph import Vertex

_WINDOW = 1 << 13
_PATHS = 3


def prune(vertices: tuple[Vertex, ...], data_edges: Iterable[Edge], memory_edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Return the memory edges that are needed, given the data edges, sorted by the position of target, then source.

    ``vertices`` must be in a topological order of all edges; an edge that goes backward is returned as it is. Of edges
    that span more than 2^13 positions some that are implied may be returned too.
    """
    position = {vertex.id: index for index, vertex in enumerate(vertices)}
    data: list[set[int]] = [set() for _ in vertices]
    for u, v in data_edges:
        data[position[v]].add(position[u])
    memory: list[set[int]] = [set() for _ in vertices]
    for u, v in memory_edges:
        memory[position[v]].add(position[u])
    before = [a | b if b else a for a, b in zip(data, memory, strict=True)]
    needed, far = _near(data, memory, before)
    dropped = _implied(far, before)
    pairs = (pair for pair in needed if pair not in dropped) if dropped else needed
    return tuple((vertices[source].id, vertices[target].id) for target, source in pairs)


def _near(
    data: Sequence[set[int]], memory: Sequence[set[int]], before: Sequence[set[int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (target, source) of the memory edges that no path within the window implies, and which of them are far."""
    needed: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    base = 0
    ancestors: list[int] = []
    for index, sources in enumerate(before):
        if index - base == 2 * _WINDOW:
            base += _WINDOW
            ancestors = [reached >> _WINDOW for reached in ancestors[_WINDOW:]]
        reached = 0
        mine: list[tuple[int, int]] = []
        for source in sorted(sources, reverse=True):
            bit = source - base
            if bit < 0 or source >= index:
                if source not in data[index]:
                    mine.append((index, source))
                    if source < index:
                        far.append((index, source))
                continue
            if (reached >> bit) & 1:
                continue
            reached |= ancestors[bit] | (1 << bit)
            if source not in data[index]:
                mine.append((index, source))
        ancestors.append(reached)
        needed.extend(reversed(mine))
    return needed, far


def _implied(far: Sequence[tuple[int, int]], before: Sequence[set[int]]) -> set[tuple[int, int]]:
    """Return those of ``far`` that a path through one of the longest paths implies."""
    dropped: set[tuple[int, int]] = set()
    used: set[int] = set()
    for _ in range(_PATHS if far else 0):
        path = _longest_path(before, used)
        used.update(path)
        reaches, reached = _along(path, before)
        for target, source in far:
            at = reaches[source]
            if any(reached[other] >= at for other in before[target] if other != source and other < target):
                dropped.add((target, source))
        far = [pair for pair in far if pair not in dropped]
        if not far:
            break
    return dropped


def _longest_path(before: Sequence[set[int]], used: set[int]) -> list[int]:
    """Return the path with the most vertices that are not ``used``, in order."""
    length = [0] * len(before)
    back = [-1] * len(before)
    for index, sources in enumerate(before):
        longest = -1
        for source in sources:
            if source < index and (length[source], -source) > (longest, -back[index]):
                longest, back[index] = length[source], source
        length[index] = max(longest, 0) + (index not in used)
    walk = [max(range(len(before)), key=lambda index: (length[index], -index))] if before else []
    while walk and back[walk[-1]] >= 0:
        walk.append(back[walk[-1]])
    return walk[::-1]


def _along(path: Sequence[int], before: Sequence[set[int]]) -> tuple[list[int], list[int]]:
    """Return, by vertex, the first place on ``path`` that it reaches and the last that reaches it, itself included."""
    end = len(path)
    reaches = [end] * len(before)
    reached = [-1] * len(before)
    for place, index in enumerate(path):
        reaches[index] = reached[index] = place
    for index, sources in enumerate(before):
        last = reached[index]
        for source in sources:
            if source < index and reached[source] > last:
                last = reached[source]
        reached[index] = last
    for index in range(len(before) - 1, -1, -1):
        first = reaches[index]
        if first == end:
            continue
        for source in before[index]:
            if source < index and first < reaches[source]:
                reaches[source] = first
    return reaches, reached
