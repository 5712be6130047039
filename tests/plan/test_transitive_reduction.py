"""Pruning changes nothing that any vertex waits for, and leaves nothing that the other edges imply.

With windows so small that the branches for long spans are taken.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from disco_accel.graph.memgraph import Edge
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.plan.common import transitive_reduction as module
from disco_accel.plan.common.transitive_reduction import remove_implied_edges
from tests.verify.test_verify_order import closure, random_predecessors

GRAPHS = 150


def random_edges(rng: random.Random) -> tuple[tuple[Vertex, ...], list[Edge], list[Edge]]:
    """Vertices whose ids are no positions, with data and memory edges; some edges are of both sorts or there twice."""
    predecessors = random_predecessors(rng)
    ids = rng.sample(range(1000), len(predecessors))
    data: list[Edge] = []
    memory: list[Edge] = []
    for position, waits_for in enumerate(predecessors):
        for p in waits_for:
            (data if rng.random() < 0.4 else memory).append((ids[p], ids[position]))
    for _ in range(rng.randrange(40)):
        u, v = sorted(rng.sample(range(len(ids)), 2))
        memory.append((ids[u], ids[v]))
    memory += rng.sample(data, len(data) // 4) + rng.sample(memory, len(memory) // 4)
    rng.shuffle(memory)
    return tuple(Vertex(id, VertexKind.KERNEL, 0) for id in ids), data, memory


def ancestors(vertices: tuple[Vertex, ...], edges: list[Edge]) -> list[set[int]]:
    position = {vertex.id: index for index, vertex in enumerate(vertices)}
    waits: list[list[int]] = [[] for _ in vertices]
    for u, v in edges:
        waits[position[v]].append(position[u])
    return closure(waits)


def redundant(vertices: tuple[Vertex, ...], data: list[Edge], needed: tuple[Edge, ...]) -> list[Edge]:
    """Memory edges without which everything waits for the same."""
    whole = ancestors(vertices, [*data, *needed])
    position = {vertex.id: index for index, vertex in enumerate(vertices)}
    extra = []
    for edge in needed:
        others = {position[u] for u, v in (*data, *needed) if v == edge[1] and (u, v) != edge}
        if position[edge[0]] in others or any(position[edge[0]] in whole[p] for p in others):
            extra.append(edge)
    return extra


@pytest.mark.parametrize(("window", "paths"), [*product((1, 2, 5), (0, 1, 3)), (1 << 13, 3)])
def test_what_is_left_implies_what_was_there(window: int, paths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", window)
    monkeypatch.setattr(module, "_PATHS", paths)
    rng = random.Random(100 * window + paths)
    left = dropped = 0
    for _ in range(GRAPHS):
        vertices, data, memory = random_edges(rng)
        needed = remove_implied_edges(vertices, data, memory)
        assert set(needed) <= set(memory) and len(set(needed)) == len(needed)
        assert ancestors(vertices, [*data, *needed]) == ancestors(vertices, [*data, *memory])
        position = {vertex.id: index for index, vertex in enumerate(vertices)}
        assert list(needed) == sorted(needed, key=lambda edge: (position[edge[1]], position[edge[0]]))
        extra = redundant(vertices, data, needed)
        assert all(position[v] - position[u] > window for u, v in extra), "implied within the window, yet returned"
        left, dropped = left + len(extra), dropped + len(set(memory)) - len(needed)
    assert dropped > 500
    # Beyond the window the paths find most of what is implied, and without them none is found.
    assert (left == 0) if window > 100 else (left > 0.5 * dropped) if paths == 0 else (left < 0.25 * dropped)


def test_an_edge_that_goes_backward_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", 1)
    vertices = tuple(Vertex(id, VertexKind.KERNEL, 0) for id in range(6))
    chain = [(v, v + 1) for v in range(5)]
    assert remove_implied_edges(vertices, chain, [(4, 2), (0, 3), (0, 5)]) == ((4, 2),)
