"""Tight plans of random graphs, on which judges are tried."""

from __future__ import annotations

import random

from disco_accel.eviction import belady
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.infeasible import Infeasible
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets


def tight_plans(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """Return ``count`` graphs with plans that have no in-place writes, so that every memory edge is needed."""
    found: list[tuple[TaskGraph, MemGraph]] = []
    seed = first_seed
    while len(found) < count:
        seed += 1
        rng = random.Random(seed)
        shape = Shape(inplace=0.0, may_inplace=0.0, keep=0.2)
        graph = with_working_sets(random_taskgraph(rng, shape), rng.choice((1.2, 1.5, 2.0)))
        clean = tuple(v.id for v in graph.vertices if host_copy_exists(v) and rng.random() < 0.3)
        try:
            found.append((graph, build(graph, belady, residents=Residents((), clean), cyclic=rng.random() < 0.5)))
        except Infeasible:
            continue
    return found
