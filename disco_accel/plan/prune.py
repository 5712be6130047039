"""Removing memory edges that other edges imply."""

from __future__ import annotations

from collections.abc import Iterable

from disco_accel.memgraph import Edge
from disco_accel.taskgraph import Vertex

_EXACT_UP_TO = 60_000
"""Ancestor sets take a bit for every pair of vertices, which is 450 MB here; beyond, only duplicates are removed."""


def prune(vertices: tuple[Vertex, ...], data_edges: Iterable[Edge], memory_edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Return the memory edges that are needed, given the data edges, sorted by the position of target, then source.

    ``vertices`` must be in a topological order of all edges; an edge that goes backward is returned as it is.
    """
    position = {vertex.id: index for index, vertex in enumerate(vertices)}
    data: list[set[int]] = [set() for _ in vertices]
    memory: list[set[int]] = [set() for _ in vertices]
    for u, v in data_edges:
        data[position[v]].add(position[u])
    for u, v in memory_edges:
        memory[position[v]].add(position[u])
    exact = len(vertices) <= _EXACT_UP_TO
    ancestors: list[int] = []
    kept: list[Edge] = []
    for index, vertex in enumerate(vertices):
        reached = 0
        needed = []
        for source in sorted(data[index] | memory[index], reverse=True):
            implied = (reached >> source) & 1 or source in data[index]
            if source >= index or not implied:
                needed.append((vertices[source].id, vertex.id))
            if exact and source < index and not (reached >> source) & 1:
                reached |= ancestors[source] | (1 << source)
        ancestors.append(reached)
        kept.extend(reversed(needed))
    return tuple(kept)
