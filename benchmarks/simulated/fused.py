"""Kernels of an 8B LoRA step with and without fused ones: numbers, bytes of pointwise kernels, estimated seconds.

    python -m benchmarks.simulated.fused [--no-checkpointing]

No device runs anything: the step is captured from fake tensors, everything is resident, and a kernel's seconds are the
longer of its arithmetic and its traffic. A fused kernel reads each of its inputs once, and writes its results.
"""

from __future__ import annotations

import argparse

from benchmarks.common.shapes import PRESETS
from benchmarks.planner.captures import Workload, lora_outline
from benchmarks.simulated.recompute import SPEEDS
from disco_accel.fuse.fused_runs import fused_runs
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind, is_fused
from disco_accel.simulate.roofline import Speed, estimates
from disco_accel.step.compile.pipeline import STEP_PASSES

HEADER = "| speeds | kernels | joined | pointwise bytes | joined | seconds, joined / apart |\n" + "|---" * 6 + "|"


def rows(graph: TaskGraph) -> list[str]:
    """A line of Markdown for each of ``SPEEDS``."""
    lines = []
    for name, speed in SPEEDS.items():
        apart = estimates(speed).run(graph)
        joined = fused_runs(apart, lambda call: (0.0, ()))
        before, after = (_seconds(each, speed) for each in (apart, joined))
        moved = [_pointwise_bytes(each) / 1e9 for each in (apart, joined)]
        kernels = f"{len(apart.ops)} | {len(joined.ops)}"
        lines.append(f"| {name} | {kernels} | {moved[0]:.0f} GB | {moved[1]:.0f} GB | {after / before:.2f} |")
    return lines


def _traffic(vertex: Vertex, by_id: dict[int, Vertex]) -> int:
    return sum(by_id[producer].sizes[output] for producer, output in set(vertex.inputs)) + sum(vertex.sizes)


def _seconds(graph: TaskGraph, speed: Speed) -> float:
    by_id, total = {vertex.id: vertex for vertex in graph.vertices}, 0.0
    for vertex in graph.vertices:
        if vertex.id in graph.ops and is_fused(graph.ops[vertex.id]):
            total += max(speed.kernel, _traffic(vertex, by_id) / speed.memory)
        elif vertex.kind is VertexKind.KERNEL:
            total += vertex.duration or 0.0
    return total


def _pointwise_bytes(graph: TaskGraph) -> int:
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    found = [by_id[id_] for id_, call in graph.ops.items() if is_fused(call) or op_traits(call.name).fuses]
    return sum(_traffic(vertex, by_id) for vertex in found)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated.fused", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(PRESETS), default="8b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--no-checkpointing", action="store_true", help="of activations, by the script")
    args = parser.parse_args(argv)
    work = Workload(PRESETS[args.shape], args.batch, args.tokens)
    outline = lora_outline(work, checkpointed=not args.no_checkpointing)
    print("\n".join([HEADER, *rows(outline.captured.through(STEP_PASSES).graph)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
