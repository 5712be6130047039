"""Transitive reduction of the memory edges: those that other edges imply are removed, in time linear in the edges.

Reachability is exact within a window of positions, where sets of ancestors are bits of integers. An edge that spans
more is looked up on a few long paths through the graph: if its source reaches a path before the path reaches another
predecessor of its target, the edge is implied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from disco_accel.graph.memgraph import Edge
from disco_accel.graph.taskgraph import Vertex

_WINDOW = 1 << 13
_PATHS = 3


def remove_implied_edges(
    vertices: tuple[Vertex, ...], data_edges: Iterable[Edge], memory_edges: Iterable[Edge]
) -> tuple[Edge, ...]:
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
    predecessors = [a | b if b else a for a, b in zip(data, memory, strict=True)]
    needed, far = _reduce_in_window(data, predecessors)
    implied = _implied_by_paths(far, predecessors)
    pairs = (pair for pair in needed if pair not in implied) if implied else needed
    return tuple((vertices[source].id, vertices[target].id) for target, source in pairs)


def _reduce_in_window(
    data: Sequence[set[int]], predecessors: Sequence[set[int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (target, source) of the memory edges that no path within the window implies, and of these the far ones."""
    needed: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    # Invariant: bit b of ancestors[i] says whether position base + b reaches position base + i by a path that stays
    # at or above base. Ancestors below base are forgotten: a bit that is 0 may be wrong for these, never a 1.
    base = 0
    ancestors: list[int] = []
    for index, sources in enumerate(predecessors):
        if index - base == 2 * _WINDOW:
            base += _WINDOW
            ancestors = [reached >> _WINDOW for reached in ancestors[_WINDOW:]]
        reached = 0
        edges: list[tuple[int, int]] = []
        # From the nearest source to the farthest: a path from a far one to this vertex passes a nearer one, so when a
        # source's turn comes, reached has all that can imply its edge.
        for source in sorted(sources, reverse=True):
            bit = source - base
            if bit < 0 or source >= index:
                if source not in data[index]:
                    edges.append((index, source))
                    if source < index:
                        far.append((index, source))
                continue
            if (reached >> bit) & 1:
                continue
            reached |= ancestors[bit] | (1 << bit)
            if source not in data[index]:
                edges.append((index, source))
        ancestors.append(reached)
        needed.extend(reversed(edges))
    return needed, far


def _implied_by_paths(far: Sequence[tuple[int, int]], predecessors: Sequence[set[int]]) -> set[tuple[int, int]]:
    """Return those of ``far`` that one of the longest paths implies, together with the edges to it and from it."""
    implied: set[tuple[int, int]] = set()
    used: set[int] = set()
    for _ in range(_PATHS if far else 0):
        path = _longest_path(predecessors, used)
        used.update(path)
        earliest_reached, latest_reaching = _path_reachability(path, predecessors)
        for target, source in far:
            at = earliest_reached[source]
            others = (other for other in predecessors[target] if other != source and other < target)
            if any(latest_reaching[other] >= at for other in others):
                implied.add((target, source))
        far = [pair for pair in far if pair not in implied]
        if not far:
            break
    return implied


def _longest_path(predecessors: Sequence[set[int]], used: set[int]) -> list[int]:
    """Return the path with the most vertices that are not ``used``, in order."""
    length = [0] * len(predecessors)
    back = [-1] * len(predecessors)
    for index, sources in enumerate(predecessors):
        longest = -1
        for source in sources:
            if source < index and (length[source], -source) > (longest, -back[index]):
                longest, back[index] = length[source], source
        length[index] = max(longest, 0) + (index not in used)
    path = [max(range(len(predecessors)), key=lambda index: (length[index], -index))] if predecessors else []
    while path and back[path[-1]] >= 0:
        path.append(back[path[-1]])
    return path[::-1]


def _path_reachability(path: Sequence[int], predecessors: Sequence[set[int]]) -> tuple[list[int], list[int]]:
    """Return, by vertex, the first place on ``path`` that it reaches and the last that reaches it, itself included."""
    end = len(path)
    earliest_reached = [end] * len(predecessors)
    latest_reaching = [-1] * len(predecessors)
    for place, index in enumerate(path):
        earliest_reached[index] = latest_reaching[index] = place
    for index, sources in enumerate(predecessors):
        latest = latest_reaching[index]
        for source in sources:
            if source < index and latest_reaching[source] > latest:
                latest = latest_reaching[source]
        latest_reaching[index] = latest
    for index in range(len(predecessors) - 1, -1, -1):
        earliest = earliest_reached[index]
        if earliest == end:
            continue
        for source in predecessors[index]:
            if source < index and earliest < earliest_reached[source]:
                earliest_reached[source] = earliest
    return earliest_reached, latest_reaching
