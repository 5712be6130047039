"""Chains of kernels over frozen weights in little memory: what a plan does with weights decides their time."""

from __future__ import annotations

import random
from dataclasses import replace

from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN
from tests.support.graphs.strategies import with_room


def tight_chain(rng: random.Random) -> TaskGraph:
    """A chain of kernels over weights, some of them used again, with results that stay for a while."""
    count = rng.randint(3, 16)
    align = 64
    vertices = [
        Vertex(i, VertexKind.INPUT, 0, "w", sizes=(rng.randint(1, 40) * align,), traits=FROZEN) for i in range(count)
    ]
    made: list[tuple[int, int]] = []
    for i in range(count + rng.randint(0, count)):
        last = made[-1:] if not made or rng.random() < 0.8 else [rng.choice(made)]
        reads = ((rng.randrange(count) if i >= count else i, 0), *last)
        seconds = rng.choice((1e-6, 1e-4, 3e-4))
        vertices.append(Vertex(len(vertices), VertexKind.KERNEL, 0, "k", reads, (rng.randint(0, 8) * align,), seconds))
        made.append((vertices[-1].id, 0))
    vertices[-1] = replace(vertices[-1], keep=True)
    graph = TaskGraph("chain", (Space(0, 1, align),), tuple(vertices))
    return with_room(graph, rng.choice((0.5, 0.65, 0.8, 1.0, 1.5)))
