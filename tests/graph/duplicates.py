"""Random graphs with duplicates, without some of them: ``python -m tests.graph.duplicates --graphs 100000``.

Each is compared value by value with the whole graph, planned in a random memory, judged by definition, and run in
hostile orders. The vertices of a plan have to say which graph it is one of.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

import torch

from disco_accel.errors import PlanError
from disco_accel.graph.check import after_gate, check_taskgraph
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.value_numbering import Clone, clones, graph_of_plan, without, without_recomputation
from disco_accel.plan import Machine, make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.recompute_cut import cut_at_price
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.graph.test_value_numbering import random_graph, values_of
from tests.support.oracles.adversary import run_reference
from tests.support.oracles.naive_judge import is_safe


def chosen_of(graph: TaskGraph, found: tuple[Clone, ...], rng: random.Random) -> tuple[Clone, ...]:
    """Some of them: any, or those of a cut at some price."""
    if rng.random() < 0.5:
        return tuple(clone for clone in found if rng.random() < 0.5)
    return cut_at_price(graph, found)(2.0 ** rng.uniform(-8, 12))


def fault_of(graph: TaskGraph, chosen: tuple[Clone, ...], rng: random.Random, counts: Counter[str]) -> str:
    """What is wrong with ``graph`` without ``chosen``; "" if nothing is."""
    smaller = check_taskgraph(without(graph, chosen))
    ids = {vertex.id for vertex in smaller.vertices}
    if after_gate(smaller.vertices) != after_gate(graph.vertices) & ids:
        return "the gate"
    before, after = values_of(graph), values_of(smaller)
    if not all(torch.equal(before[ref], after[ref]) for ref in after):
        return "values"
    memory = rng.choice((96, 128, 256, 4096))
    try:
        plan = make_plan(smaller, memory=memory, planner=rng.choice(("build", "timed")), cyclic=True)
    except PlanError:
        counts["refused"] += 1
        return ""
    counts["plans"] += 1
    sized = with_memory(smaller, lambda _: memory)
    verify(sized, plan)
    if graph_of_plan(graph, plan.vertices) != smaller:
        return "the plan's graph"
    if not is_safe(sized, plan):
        return "the judge"
    run_reference(smaller, plan, rng.randrange(1000))
    bound = bound_of(without_recomputation(with_memory(graph, lambda _: memory)), Machine()).bound
    return "the bound" if simulate(plan, Machine()).makespan < 0.999999 * bound else ""


def main() -> None:
    """Print counts, and each graph that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(asked.seed, asked.seed + asked.graphs):
        rng = random.Random(seed)
        graph = random_graph(rng)
        found = clones(graph)
        counts["graphs"] += 1
        if not found:
            continue
        counts["with duplicates"] += 1
        fault = fault_of(graph, chosen_of(graph, found, rng), rng, counts)
        if fault:
            counts["wrong"] += 1
            print(f"seed {seed}: {fault}", flush=True)
        if counts["graphs"] % 10_000 == 0:
            print(dict(counts), flush=True)
    print(dict(counts), f"wrong: {counts['wrong']}")


if __name__ == "__main__":
    main()
