"""How planning grows with the graph: CPU seconds of each stage, peak memory, the fitted exponent.

    python -m benchmarks.planner.scale [--vertices 10000 100000 1000000] [--graph tensor-parallel|lora] [--share 0.4]
                               [--planner build] [--output out/scale.json]

Each size runs in a process of its own, so that its peak memory is its own. ``--share``: bytes of each device's arena
over those of its weights. ``--memory`` instead gives every size the same arena.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.files import write_atomically
from disco_accel.graph.order import data_edges
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.plan.common.transitive_reduction import remove_implied_edges
from disco_accel.sizes import format_size, parse_size
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.graphs.tensor_parallel import PrefillShape, layers_for, tensor_parallel_prefill

ROOT = Path(__file__).resolve().parents[2]
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
GRAPHS = ("tensor-parallel", "lora")
_LORA_VERTICES_PER_LAYER = 143


@dataclass(frozen=True, slots=True)
class Point:
    """One plan. Seconds are CPU time; ``plan`` includes ``check`` and ``prune``, which are also measured alone."""

    graph: str
    vertices: int
    dependencies: int
    memory: int
    check: float
    plan: float
    prune: float
    verify: float
    memory_edges: int
    peak_rss: int

    @property
    def total(self) -> float:
        """Seconds to plan, prune and verify."""
        return self.plan + self.verify


def graph_of(kind: str, vertices: int) -> TaskGraph:
    """Return a graph of about ``vertices`` vertices: deeper, not wider, where there are more."""
    if kind == "lora":
        return lora_graph(LoraShape(layers=max(1, vertices // _LORA_VERTICES_PER_LAYER)), 1)
    return tensor_parallel_prefill(PrefillShape(layers=layers_for(vertices)), 1)


def measure(graph: TaskGraph, memory: int, planner: str) -> Point:
    """Plan ``graph`` and verify the plan."""
    started = time.process_time()
    check_taskgraph(graph)
    checked = time.process_time()
    plan = make_plan(graph, memory=memory, planner=planner, cyclic=True)
    planned = time.process_time()
    verify(with_memory(graph, lambda device: memory), plan)
    verified = time.process_time()
    remove_implied_edges(plan.vertices, data_edges(plan.vertices), plan.memory_edges)
    pruned = time.process_time()
    return Point(
        graph=graph.name,
        vertices=len(graph.vertices),
        dependencies=sum(len(set(v.inputs)) + len(v.after) for v in graph.vertices),
        memory=memory,
        check=checked - started,
        plan=planned - checked,
        prune=pruned - verified,
        verify=verified - planned,
        memory_edges=len(plan.memory_edges),
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def exponent(points: Sequence[Point]) -> float:
    """Return the slope of the least-squares line through log(total) over log(vertices)."""
    x = [math.log(point.vertices) for point in points]
    y = [math.log(point.total) for point in points]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


HEADER = (
    f"{'graph':<24} {'vertices':>9} {'deps':>9} {'memory':>10} {'check s':>8} {'plan s':>8} {'prune s':>8} "
    f"{'verify s':>8} {'sum s':>8} {'us/vert.':>8} {'peak RSS':>9}"
)


def show(point: Point) -> str:
    """Return ``point`` as a line of the table."""
    return (
        f"{point.graph:<24} {point.vertices:>9} {point.dependencies:>9} {format_size(point.memory):>10} "
        f"{point.check:8.2f} {point.plan:8.2f} {point.prune:8.2f} {point.verify:8.2f} {point.total:8.2f} "
        f"{point.total / point.vertices * 1e6:8.1f} {format_size(point.peak_rss):>9}"
    )


def _alone(kind: str, vertices: int, options: argparse.Namespace) -> Point:
    """Measure in a process of its own."""
    words = ["--one", "--vertices", str(vertices), "--graph", kind, "--planner", options.planner]
    words += ["--share", str(options.share)] + (["--memory", options.memory] if options.memory else [])
    command = [sys.executable, "-m", "benchmarks.planner.scale", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return Point(**json.loads(done.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it to ``--output`` as JSON; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--graph", nargs="*", choices=GRAPHS, default=["tensor-parallel"])
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--memory", help="bytes of each device's arena, such as 640MiB")
    parser.add_argument("--planner", default="build")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", default=str(ROOT / "out" / "scale.json"))
    options = parser.parse_args(argv)
    if options.one:
        graph = graph_of(options.graph[0], options.vertices[0])
        weights = sum(v.sizes[0] for v in graph.vertices if host_copy_exists(v) and v.space == 0)
        memory = parse_size(options.memory) if options.memory else int(options.share * weights)
        print(json.dumps(asdict(measure(graph, memory, options.planner))))
        return 0
    found: list[Point] = []
    print(HEADER)
    for kind in options.graph:
        points = []
        for vertices in options.vertices:
            points.append(_alone(kind, vertices, options))
            print(show(points[-1]), flush=True)
        if len(points) > 1:
            print(f"{points[0].graph}: seconds grow with vertices to the power of {exponent(points):.2f}")
        found += points
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, (json.dumps([asdict(point) for point in found], indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
