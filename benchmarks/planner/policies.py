"""Eviction policies side by side, on BUILDMEMGRAPH: step over the bound, bytes loaded over the linear program's.

    python -m benchmarks.planner.policies [--graph TASK.json ...] [--captures] [--shares 0.25 0.5 0.85]
                                  [--bandwidth BYTES_PER_S] [--output out/policies.json]

Without ``--graph``: the graphs of the tests and generated LoRA steps and prefills; ``--captures`` adds captured LoRA
steps and prefills of Llama shape. Budgets are shares of what the graph's weights take, for a graph without weights of
what it needs in all. Every plan is verified.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from benchmarks.planner.table import ROOT, graphs, weights
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import read_taskgraph, write_atomically
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.plan import POLICIES, make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.summary import swapped_bytes
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.sizes import format_size
from disco_accel.verify.static import verify

SHARES = (0.25, 0.5, 0.85)


@dataclass(frozen=True, slots=True)
class Row:
    """One graph within one budget. By policy: ``ratios``, step over bound; ``loads``, bytes loaded over the linear
    program's; ``offloads`` in bytes; ``seconds`` of CPU to plan. Infinite: no plan, or nothing that must be loaded."""

    graph: str
    vertices: int
    memory: int
    share: float
    bound: float
    ratios: dict[str, float]
    loads: dict[str, float]
    offloads: dict[str, int]
    seconds: dict[str, float]


def measure(graph: TaskGraph, share: float, machine: Machine) -> Row:
    """Plan ``graph`` with each policy, verify and simulate."""
    everything = sum(sum(vertex.sizes) for vertex in graph.vertices)
    memory = int(share * (weights(graph) or everything))
    bound = bound_of(graph, machine, memory)
    row = Row(graph.name, len(graph.vertices), memory, share, bound.bound, {}, {}, {}, {})
    for policy in sorted(POLICIES):
        began = time.process_time()
        row.ratios[policy] = row.loads[policy] = float("inf")
        try:
            plan = make_plan(graph, memory=memory, planner="build", policy=policy, cyclic=True, machine=machine)
        except BudgetTooSmall:
            continue
        finally:
            row.seconds[policy] = time.process_time() - began
        verify(with_memory(graph, lambda device: memory), plan)
        row.ratios[policy] = simulate(plan, machine).makespan / bound.bound if bound.bound else 1.0
        loaded = swapped_bytes(plan, swaps_in)
        row.loads[policy] = loaded / bound.lp_reload_bytes if bound.lp_reload_bytes else float("inf")
        row.offloads[policy] = swapped_bytes(plan, swaps_out)
    return row


def show(row: Row) -> str:
    """Return ``row`` as two lines of the table: steps and loads."""
    head = f"{row.graph:<20} {row.vertices:>6} {format_size(row.memory):>9} {row.share:5.2f}"
    lines = [f"{head} {'step':<5} {_cells(row.ratios)}", f"{'':<{len(head)}} {'loads':<5} {_cells(row.loads)}"]
    return "\n".join(lines)


def _cells(figures: Mapping[str, float]) -> str:
    return " ".join(f"{figures[name]:>13.3f}" if figures[name] < 1e9 else f"{'-':>13}" for name in sorted(POLICIES))


HEADER = (
    f"{'graph':<20} {'vert.':>6} {'memory':>9} {'share':>5} {'over':<5} "
    f"{' '.join(f'{name:>13}' for name in sorted(POLICIES))}"
)


def summary(rows: Sequence[Row]) -> str:
    """Return the geometric means over the rows in which every policy has a plan, and how often each is the fastest."""
    whole = [row for row in rows if max(row.ratios.values()) < 1e9]
    if not whole:
        return "no row in which every policy has a plan"
    means = {name: geometric_mean(row.ratios[name] for row in whole) for name in sorted(POLICIES)}
    least = {name: sum(row.ratios[name] <= min(row.ratios.values()) * 1.001 for row in whole) for name in POLICIES}
    worst = {name: max(row.ratios[name] / min(row.ratios.values()) for row in whole) for name in POLICIES}
    lines = [("geometric mean", means), (f"fastest, of {len(whole)}", least), ("worst, over the fastest", worst)]
    width = len(HEADER) - 14 * len(POLICIES)
    return "\n".join(f"{title:<{width}} {_cells(figures)}" for title, figures in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it to ``--output`` as JSON; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", nargs="*", default=[])
    parser.add_argument("--captures", action="store_true")
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--bandwidth", type=float, default=2.0e10)
    parser.add_argument("--output", default=str(ROOT / "out" / "policies.json"))
    options = parser.parse_args(argv)
    link = Link(options.bandwidth, 1e-5)
    machine = Machine(links={TO_DEVICE: link, TO_HOST: link})
    rows: list[Row] = []
    print(HEADER)
    for graph in _subjects(options.graph, options.captures):
        for share in options.shares:
            rows.append(measure(graph, share, machine))
            print(show(rows[-1]), flush=True)
    print(summary(rows))
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    written = json.dumps([asdict(row) for row in rows], indent=1).replace("Infinity", "null")
    write_atomically(options.output, (written + "\n").encode())
    return 0


def _subjects(files: Sequence[str], captured: bool) -> Iterator[TaskGraph]:
    if files:
        yield from (replace(read_taskgraph(file), name=Path(file).name.split(".")[0]) for file in files)
    else:
        yield from graphs([])
    if captured:
        from benchmarks.planner.captures import captures

        yield from captures()


if __name__ == "__main__":
    sys.exit(main())
