"""Weight offloading of layered models: greedy choices against L2L and the lower bound, over depth and bandwidth.

    python -m benchmarks.planner.weights [SECONDS for each bound]
    python -m benchmarks.planner.weights --graph TASK.json ... --memory SIZE ... [--bandwidth BYTES_PER_S ...]

With ``--graph``: what the choice of layers is worth as residents of a captured training step, beside our own. All times
are over the bound of the graph; ``layers`` and ``layers' bound`` are of the chain, where a layer comes and goes as a
whole.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence

from benchmarks.planner.chain import chain_of, residents_of
from disco_accel.errors import ConfigError, PlanError
from disco_accel.eviction import policy_named
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.observe.report import table
from disco_accel.plan import make_plan
from disco_accel.plan.beaumont.selection import Instance, Layer
from disco_accel.plan.beaumont.solve import solve
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.infeasible import Infeasible
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.sizes import format_size, parse_size
from disco_accel.verify.static import verify

MIB = float(1 << 20)
GIB = float(1 << 30)
FLOPS = 1.2e13
"""Of a V100 in float32, about."""


def gpt2(depth: int, *, memory: float = 16 * GIB, bandwidth: float = 12000 * MIB, frozen: bool = False) -> Instance:
    """``depth - 2`` blocks of h = 3072 and an embedding without compute, in float32; 4096 tokens a step."""
    h, tokens = 3072, 4096
    parameters = 12 * h * h + 13 * h
    forward = 2 * parameters * tokens / FLOPS
    block = Layer(forward, 2 * forward, 4.0 * parameters, 4.0 * tokens * h)
    embedding = Layer(0.0, 0.0, 601 * MIB, 4.0 * tokens * h)
    return Instance(memory, bandwidth, GIB, (embedding, *[block] * (depth - 2)), frozen)


def bert(depth: int) -> Instance:
    """``depth`` blocks of 41.97 M parameters and an embedding, in float32, on 16 GiB; 4096 tokens a step."""
    parameters = 41.97e6
    forward = 2 * parameters * 4096 / FLOPS
    block = Layer(forward, 2 * forward, 4 * parameters, 29 * MIB)
    embedding = Layer(0.0, 0.0, 218 * MIB, 29 * MIB)
    return Instance(16 * GIB, 12000 * MIB, GIB, (embedding, *[block] * depth))


def row(name: str, instance: Instance, seconds: float) -> list[str]:
    """Times over the bound: L2L, greedy without the discount, greedy; and how the bound compares with the ops' time."""
    began = time.perf_counter()
    found = solve(instance, seconds)
    took = time.perf_counter() - began
    bound = min(found.bound, found.greedy.period)
    times = [instance.l2l, found.star.period, found.greedy.period]
    return [
        name,
        f"{sum(layer.w for layer in instance.layers) / instance.memory:.2f}",
        f"{instance.sum_u:.3f}",
        f"{bound / instance.sum_u:.3f}{'' if found.optimal else ' *'}",
        *(f"{seconds / bound:.3f}" for seconds in times),
        str(len(found.greedy.chosen)),
        f"{took:.1f}",
    ]


HEADER = ["instance", "w/M", "sum u, s", "bound/sum u", "L2L", "greedy*", "greedy", "gaps", "took, s"]


def plans(graph: TaskGraph, memory: int, bandwidth: float, seconds: float) -> list[str]:
    """Times over the bound of ``graph``: both planners', BUILDMEMGRAPH's with the residents that greedy chooses, and
    what the chain of layers promises."""
    link = Link(bandwidth, 1e-5)
    machine = Machine(links={TO_DEVICE: link, TO_HOST: link})
    graph = with_memory(graph, lambda device: memory)
    bound = bound_of(graph, machine, memory).bound
    cells = [graph.name, format_size(memory), f"{bandwidth / 1e9:g}"]
    for planner in ("timed", "build"):
        plan = make_plan(graph, planner=planner, cyclic=True, machine=machine)
        cells.append(f"{simulate(plan, machine).makespan / bound:.3f}")
    try:
        chain = chain_of(graph, machine)
        found = solve(chain.instance, seconds)
        residents = residents_of(chain, found.greedy.chosen)
        plan = build(graph, policy_named("belady"), residents=residents, cyclic=True)
    except (PlanError, ConfigError, Infeasible):
        return [*cells, "-", "-", "-"]
    verify(graph, plan)
    times = [simulate(plan, machine).makespan, found.greedy.period, found.bound]
    return [*cells, *(f"{seconds / bound:.3f}" for seconds in times)]


PLANS = ["graph", "memory", "GB/s", "timed", "build", "build, residents of layers", "layers", "layers' bound"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables; times are ratios to the bound. A star: HiGHS ran out of time, the bound holds all the same."""
    parser = argparse.ArgumentParser(description="chains of layers at several depths and bandwidths")
    parser.add_argument("seconds", type=float, nargs="?", default=20.0, help="for each bound")
    parser.add_argument("--graph", nargs="*", default=[])
    parser.add_argument("--memory", nargs="*", default=[])
    parser.add_argument("--bandwidth", nargs="*", type=float, default=[2.0e10])
    options = parser.parse_args(argv)
    seconds = options.seconds
    if options.graph:
        subjects = [check_taskgraph(read_taskgraph(file)) for file in options.graph]
        each = itertools.product(subjects, map(parse_size, options.memory), options.bandwidth)
        print(table(PLANS, [plans(*subject, seconds) for subject in each]))
        return 0
    rows = [row(f"GPT-2 {depth}", gpt2(depth), seconds) for depth in (26, 34, 42, 50, 58, 66)]
    rows += [row(f"BERT {depth}", bert(depth), seconds) for depth in (64, 80, 96, 112, 128)]
    print(table(HEADER, rows), flush=True)
    rows = []
    for frozen in (False, True):
        for gigabytes in (0.5, 1, 2, 3, 4, 6, 8, 12):
            instance = gpt2(26, memory=6 * GIB, bandwidth=gigabytes * 1e9, frozen=frozen)
            rows.append(row(f"{'frozen' if frozen else 'trained'}, {gigabytes} GB/s", instance, seconds))
    print("\n" + table(HEADER, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
