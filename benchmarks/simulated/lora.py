"""LoRA steps of 7B to 70B shapes on an H200, in simulation: ``python -m benchmarks.simulated [-o FILE]``.

No device runs anything. Each step is captured from fake tensors, its kernels' durations are estimated (the longer of
arithmetic and memory traffic), it is planned and verified as a real one is, and the plan runs in simulated time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.provenance import provenance
from benchmarks.common.shapes import PRESETS
from benchmarks.common.speeds import speed_as_json
from benchmarks.planner.captures import Workload, lora_outline
from benchmarks.planner.table import limit, live_peak, weights
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import write_atomically
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.value_numbering import without_recomputation
from disco_accel.measure.costs import Estimated
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.summary import swapped_bytes
from disco_accel.recipes.outline import Outline
from disco_accel.simulate.roofline import Speed
from disco_accel.simulate.simulator import Link, Machine, Simulator
from disco_accel.sizes import format_size, parse_size
from disco_accel.step.compile.pipeline import PlannerSettings, with_costs
from disco_accel.step.compile.planned_step import plan_in_chunks
from disco_accel.step.compile.stages import Chunks, PlanRequest, Sharing

H200 = Speed(
    name="an H200",
    half=5.9e14,
    single=4.0e13,
    memory=3.8e12,
    kernel=5e-6,
    machine=Machine(links={TO_DEVICE: Link(5.5e10, 1e-5), TO_HOST: Link(5.5e10, 1e-5)}),
)
"""Six tenths of the arithmetic peaks of an H200's data sheet, eight tenths of its memory bandwidth, PCIe 5 x16 in each
direction, 10 us a copy."""

_STEPS = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """A step to plan. ``budget``: a size, or a share of what the step takes with everything resident. ``quant``: form
    of the frozen weights, as of ``disco-accel plan``. ``checkpointed``: by the script. ``recompute`` and ``chunks``: as
    in a config."""

    shape: str
    batch: int
    tokens: int
    budget: str | float
    quant: str = "none"
    checkpointed: bool = True
    recompute: str = "auto"
    chunks: Chunks = 1


CELLS = (
    Cell("7b", 8, 1024, 0.25),
    Cell("7b", 8, 1024, "8GiB"),
    Cell("7b", 8, 1024, "16GiB"),
    Cell("7b", 1, 1024, "8GiB"),
    Cell("7b", 1, 2048, "8GiB"),
    Cell("13b", 8, 1024, 0.25),
    Cell("32b", 8, 1024, 0.25),
    Cell("32b", 8, 1024, "24GiB"),
    Cell("32b", 1, 1024, "24GiB"),
    Cell("70b", 8, 1024, 0.25),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes and seconds. ``resident``: the kernels of a step one after the other, nothing copied; ``peak``: the most
    bytes that are alive at once then; ``period``: a
    step of the plan among others; ``busy``: seconds of each lane in it; ``host``: bytes of host memory, for all frozen
    weights and what is offloaded; ``needed``: the smallest budget where ``budget`` is too small, and nothing else is
    known then. ``dropped``: share of the recomputation that the plan leaves out."""

    shape: str
    batch: int
    tokens: int
    weights: int
    peak: int
    resident: float
    budget: int
    needed: int | None = None
    period: float | None = None
    bound: float | None = None
    limit: str | None = None
    busy: dict[str, float] | None = None
    reload: int | None = None
    offload: int | None = None
    plan_seconds: float | None = None
    quant: str = "none"
    host: int | None = None
    checkpointed: bool = True
    recompute: str = "auto"
    dropped: float | None = None


def rows(cells: Sequence[Cell], speed: Speed = H200) -> Iterator[Row]:
    """Simulate every cell on a device of ``speed``; neighbours of one shape, batch and form are captured once."""
    last: tuple[Any, ...] = ()
    for cell in cells:
        work = Workload(PRESETS[cell.shape], cell.batch, cell.tokens)
        key = (cell.shape, cell.batch, cell.tokens, cell.quant, cell.checkpointed)
        if last[:1] != (key,):
            outlined = lora_outline(work, cell.quant, checkpointed=cell.checkpointed)
            last = (key, outlined, with_costs(outlined.captured, Estimated("cuda", speed))[0].graph)
        yield _row(cell, last[1], last[2], speed)


def _row(cell: Cell, outlined: Outline, graph: TaskGraph, speed: Speed) -> Row:
    # Budgets are of the tensors alone: what a driver and an allocator take besides is not simulated.
    peak, machine = outlined.budget(0).outside + sum(live_peak(graph)), speed.machine
    budget = int(cell.budget * peak) if isinstance(cell.budget, float) else parse_size(cell.budget)
    row = Row(
        shape=cell.shape,
        batch=cell.batch,
        tokens=cell.tokens,
        weights=weights(graph),
        peak=peak,
        resident=sum(v.duration or 0.0 for v in graph.vertices),
        budget=budget,
        quant=cell.quant,
        checkpointed=cell.checkpointed,
        recompute=cell.recompute,
    )
    settings = PlannerSettings("timed", machine=machine, recompute=cell.recompute)
    device = torch.device("cpu")
    asked = PlanRequest(Sharing(), Estimated("cuda", speed), outlined.budget(budget), settings, cell.chunks, device)
    began = time.process_time()
    try:
        planned = plan_in_chunks(outlined.whole, asked).planned
    except BudgetTooSmall as error:
        return replace(row, needed=error.needed)
    seconds, repeated = time.process_time() - began, planned.recomputation
    plan, bound = planned.plan, bound_of(without_recomputation(planned.whole), machine)
    return replace(
        row,
        period=_period(plan, machine),
        bound=bound.bound,
        limit=limit(bound),
        busy=dict(Simulator(plan, machine).run().busy),
        reload=swapped_bytes(plan, swaps_in),
        offload=swapped_bytes(plan, swaps_out),
        plan_seconds=round(seconds, 1),
        dropped=None if repeated is None else repeated.dropped / repeated.seconds,
        host=row.weights + plan.host.memory,
    )


def _period(plan: MemGraph, machine: Machine) -> float:
    simulator = Simulator(plan, machine)
    return (simulator.run(steps=_STEPS).makespan - simulator.run().makespan) / (_STEPS - 1)


HEADER = (
    "| LoRA step, bf16 | weights | all resident: peak, s | budget | s per step | step / all resident "
    "| step / lower bound | limit | link in use | loaded | saved |\n|" + "---|" * 11
)


def line(row: dict[str, Any]) -> str:
    """One row as Markdown."""
    cells = [
        f"{row['shape']}, {row['batch']} x {row['tokens']}",
        format_size(row["weights"]),
        f"{format_size(row['peak'])}, {row['resident']:.3f}",
        format_size(row["budget"]),
    ]
    if row["period"] is None:
        return "| " + " | ".join([*cells, f"needs {format_size(row['needed'])}", *["—"] * 6]) + " |"
    copying = max((s for lane, s in row["busy"].items() if not lane.startswith("compute")), default=0.0)
    cells += [
        f"{row['period']:.3f}",
        f"{row['period'] / row['resident']:.3f}",
        f"{row['period'] / row['bound']:.3f}",
        row["limit"].replace("_", " "),
        f"{copying / row['period']:.0%}",
        format_size(row["reload"]),
        format_size(row["offload"]),
    ]
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit 1 if a budget is too small for its step."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=list(PRESETS), help="only cells of these")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    print(HEADER, flush=True)
    made = []
    for row in rows([cell for cell in CELLS if cell.shape in args.shapes]):
        made.append(row)
        print(line(asdict(row)), flush=True)
    if args.output is not None:
        device = "simulated: H200 behind 55 GB/s each way"
        head = provenance("python -m benchmarks.simulated", words, device)
        result = {"benchmark": "simulated", **head, "speed": speed_as_json(H200), "rows": [asdict(row) for row in made]}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps(result, indent=1).encode())
    return 1 if any(row.needed is not None for row in made) else 0


if __name__ == "__main__":
    raise SystemExit(main())
