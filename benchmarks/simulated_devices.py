"""LoRA steps on one to eight GPUs, in simulation: ``python -m benchmarks.simulated_devices [-o FILE]``.

No device runs anything. A step is captured once for each number of parts of its batch, spread over devices, planned and
verified as a real one is, and the plan runs in simulated time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.captures import Workload, lora_outline
from benchmarks.planner.table import limit
from benchmarks.provenance import provenance
from benchmarks.shapes import PRESETS
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.files import write_atomically
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.measure.costs import Estimated
from disco_accel.plan.bound import bound_of
from disco_accel.plan.summary import copied_bytes
from disco_accel.recipes.outline import Outline
from disco_accel.simulate.roofline import Speed
from disco_accel.simulate.simulator import Link, Machine, Simulator
from disco_accel.sizes import format_size
from disco_accel.step.pipeline import CostedStep, PlannerSettings, plan_step, with_costs
from disco_accel.step.several_devices import Sharing, on_devices

A100 = Speed(
    name="A100s with 40 GB",
    half=1.8e14,
    single=1.2e13,
    memory=1.2e12,
    kernel=5e-6,
    machine=Machine(h2d=Link(2.5e10, 1e-5), d2h=Link(2.5e10, 1e-5), p2p=Link(2.0e11, 5e-6)),
)
"""Six tenths of the peaks of an A100, PCIe 4 x16 for each, NVLink between them."""
P100 = Speed(
    name="P100s with 16 GB",
    half=1.2e13,
    single=6.0e12,
    memory=5.5e11,
    kernel=5e-6,
    machine=Machine(h2d=Link(1.2e10, 1e-5), d2h=Link(1.2e10, 1e-5), p2p=Link(1.0e10, 1e-5)),
)
"""Six tenths of the peaks of a P100, PCIe 3 x16 for each, by which copies between them go too."""
SPEEDS = {"a100": A100, "p100": P100}
MEMORY = {"a100": 37 << 30, "p100": 15 << 30}
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """A step to plan: ``parts`` of its batch are micro-batches with ``layers``, one for each device with ``batch``."""

    shape: str
    batch: int
    gpu: str
    devices: int
    parallel: str
    parts: int = 1


def cells(shapes: Sequence[str], gpus: Sequence[str]) -> Iterator[Cell]:
    """Steps on batches of eight rows; one device with the whole batch, more with either way."""
    for shape in shapes:
        for gpu in gpus:
            yield Cell(shape, 8, gpu, 1, "layers")
            for devices in (2, 4, 8):
                yield Cell(shape, 8, gpu, devices, "layers", 8)
                yield Cell(shape, 8, gpu, devices, "batch", devices)


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes and seconds. ``budget`` of each device; ``period``: a step of the plan among others; ``needed``: the
    smallest budget where that is too small, and nothing else is known then."""

    shape: str
    batch: int
    tokens: int
    gpu: str
    devices: int
    parallel: str
    parts: int
    weights: int
    budget: int
    needed: int | None = None
    period: float | None = None
    bound: float | None = None
    limit: str | None = None
    reload: int | None = None
    offload: int | None = None
    vertices: int | None = None
    plan_seconds: float | None = None


@cache
def _captured(shape: str, batch: int, gpu: str, parts: int) -> tuple[Outline, CostedStep]:
    outlined = lora_outline(Workload(PRESETS[shape], batch, 1024), parts=parts)
    step = with_costs(outlined.captured.graph, Estimated("cuda", SPEEDS[gpu]))
    # Of the tensors alone: what a driver and an allocator take besides is not simulated.
    return outlined, replace(step, costs=replace(step.costs, workspaces=0, in_blocks=False))


def row(cell: Cell) -> Row:
    """Plan and simulate ``cell``."""
    outlined, step = _captured(cell.shape, cell.batch, cell.gpu, cell.parts)
    machine, budget = SPEEDS[cell.gpu].machine, MEMORY[cell.gpu]
    facts = outlined.facts(budget)
    _, step = on_devices(outlined.whole, step, Sharing(cell.devices, cell.parallel), facts, machine)
    whole = sum(v.sizes[0] for v in step.graph.vertices if v.id not in step.copies and v.traits.host_has_it)
    made = Row(
        **{"shape": cell.shape, "batch": cell.batch, "tokens": 1024, "gpu": SPEEDS[cell.gpu].name},
        **{"devices": cell.devices, "parallel": cell.parallel, "parts": cell.parts},
        weights=whole,
        budget=budget,
    )
    try:
        planned = plan_step(step, facts, PlannerSettings("timed", machine=machine))
    except BudgetTooSmall as error:
        return replace(made, needed=error.needed)
    simulator, bound = Simulator(planned.plan, machine), bound_of(planned.graph, machine)
    return replace(
        made,
        period=(simulator.run(steps=_STEPS).makespan - simulator.run().makespan) / (_STEPS - 1),
        bound=bound.bound,
        limit=limit(bound),
        reload=copied_bytes(planned.plan, VertexKind.RELOAD),
        offload=copied_bytes(planned.plan, VertexKind.OFFLOAD),
        vertices=len(planned.plan.vertices),
        plan_seconds=round(planned.seconds["plan"], 1),
    )


HEADER = (
    "| LoRA step, bf16 | on | devices | parallel | parts | s per step | step / lower bound | limit | loaded | saved |"
    "\n|" + "---|" * 10
)


def line(made: dict[str, Any]) -> str:
    """One row as Markdown."""
    cells = [f"{made['shape']}, {made['batch']} x {made['tokens']}", made["gpu"], made["devices"], made["parallel"]]
    cells.append(made["parts"])
    if made["period"] is None:
        cells += [f"needs {format_size(made['needed'])}", *["—"] * 4]
    else:
        cells += [f"{made['period']:.3f}", f"{made['period'] / made['bound']:.2f}", made["limit"].replace("_", " ")]
        cells += [format_size(made["reload"]), format_size(made["offload"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_devices", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=["7b", "13b"], help="of benchmarks/shapes.py")
    parser.add_argument("--gpus", type=lambda t: t.split(","), default=list(SPEEDS), help=", ".join(SPEEDS))
    parser.add_argument("--most", type=int, default=8, help="devices")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    print(HEADER, flush=True)
    made = []
    for cell in cells(args.shapes, args.gpus):
        if cell.devices <= args.most:
            made.append(row(cell))
            print(line(asdict(made[-1])), flush=True)
    if args.output is not None:
        device = f"simulated: {', '.join(SPEEDS[gpu].name for gpu in args.gpus)}"
        head = provenance("python -m benchmarks.simulated_devices", words, device)
        speeds = {gpu: asdict(SPEEDS[gpu]) for gpu in args.gpus}
        result = {"benchmark": "simulated-devices", **head, "speeds": speeds, "rows": [asdict(each) for each in made]}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps(result, indent=1).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
