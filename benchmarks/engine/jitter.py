"""What links disturbed at random cost dynamic dispatch, and a fixed order, on plans of several devices.

    python -m benchmarks.engine.jitter [--devices 1 2 4] [--jitter 0.5] [--steps 30]

The engine runs plans of a tensor-parallel prefill whose kernels take their planned time but compute nothing, so two
cores can show several devices; copies and dispatch are the engine's own. All variants run in turn, and step i of each
has the same disturbances.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.engine.core_program import build, numbers_of
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan import Machine, make_plan
from disco_accel.verify.static import verify
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill

_SHARE = 0.4
"""Memory of each device over what its weights take."""
_STEP_SECONDS = 0.3
"""How long the busiest device's kernels take in one step, once all times are stretched."""


_LANES = ("h2d", "d2h", "p2p")
"""In the order of the engine's ``Direction``."""


def subject(devices: int) -> TaskGraph:
    """A prefill of four layers on so many devices, in 40 % of what its weights take."""
    shape = PrefillShape(layers=4, devices=devices, tokens=2048)
    graph = tensor_parallel_prefill(shape, 1)
    weights = [
        sum(sum(v.sizes) for v in graph.vertices if host_copy_exists(v) and v.space == d.id) for d in graph.devices
    ]
    sized = zip(graph.devices, weights, strict=True)
    devices_of = tuple(replace(device, memory=int(_SHARE * nbytes) // 256 * 256) for device, nbytes in sized)
    return replace(graph, spaces=devices_of)


def as_text(plan: MemGraph, machine: Machine) -> str:
    """``plan`` as bench_jitter reads it, stretched to ``_STEP_SECONDS``."""
    number = {device.id: i for i, device in enumerate(plan.devices)}
    lanes = machine.lanes(plan.spaces)
    busy = [0.0] * len(number)
    for vertex in plan.vertices:
        if vertex.kind is VertexKind.KERNEL:
            busy[number[vertex.space]] += vertex.duration or 0.0
    stretch = _STEP_SECONDS / max(busy)
    index = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
    # An input is in place when a step begins, so it needs no edges.
    edges = {
        (index[u], index[v])
        for u, v in (*plan.data_edges, *plan.memory_edges)
        if plan.vertices[index[u]].kind is not VertexKind.INPUT
    }
    lines = [f"{len(number)} {len(plan.vertices)} {len(edges)}"]
    for vertex in plan.vertices:
        # A copy runs on a lane of a device: of the one that it reads, if there is one.
        copies = vertex.kind is VertexKind.COPY
        where = vertex.source if copies and vertex.source in number else vertex.space
        lane = _LANES.index(lanes.route_name(vertex.source, vertex.space)) if copies else -1
        microseconds = 0.0 if vertex.kind is VertexKind.INPUT else lanes.seconds(vertex) * stretch * 1e6
        lines.append(f"{int(vertex.kind)} {lane} {number[where]} {microseconds:.3f}")
    lines += [f"{u} {v}" for u, v in sorted(edges)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--jitter", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    machine = Machine()
    print(
        f"| devices | vertices | dynamic, ms | disturbed ±{args.jitter:.0%} | loses | fixed, ms | disturbed | loses |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        program = build("bench_jitter", Path(folder) / "build")
        for devices in args.devices:
            graph = subject(devices)
            plan = make_plan(graph, planner="build", cyclic=True, machine=machine)
            verify(graph, plan)
            file = Path(folder) / "plan.txt"
            file.write_text(as_text(plan, machine), encoding="ascii")
            command = [str(program), str(file), str(args.jitter), str(args.steps)]
            columns = zip(*numbers_of(command), strict=True)
            dynamic, disturbed, fixed, fixed_disturbed = (median(column) for column in columns)
            cells = [str(devices), str(len(plan.vertices))]
            for calm, shaken in ((dynamic, disturbed), (fixed, fixed_disturbed)):
                cells += [f"{calm:.1f}", f"{shaken:.1f}", f"{shaken / calm - 1:+.1%}"]
            print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
