"""Training of all weights with the optimizer in host memory, 7B to 32B shapes, in simulation.

    python -m benchmarks.simulated.full [-o FILE]

No device runs anything. Each step is captured from fake tensors, kernels' durations are estimated, and both plans of a
step (updates behind it, and deferred to the head of the next) are verified and run in simulated time. What follows a
plan and is no part of it, gradients that it keeps to the end on their way to the optimizer's memory, is added at the
rates of ``Host``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.provenance import provenance
from benchmarks.common.shapes import PRESETS
from benchmarks.common.speeds import speed_as_json
from benchmarks.optimizer.study import STUDY
from benchmarks.planner.captures import Workload, full_outline
from benchmarks.planner.table import live_peak
from benchmarks.simulated.lora import H200
from benchmarks.simulated.occupancy import fullest
from benchmarks.simulated.quant import CARD
from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.capture.leaving_gradients import leaving_by
from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.final_location import FinalResidences
from disco_accel.execute.planned_states import planned_states
from disco_accel.graph.check import largest_need
from disco_accel.graph.files import write_atomically
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, tensor_args
from disco_accel.measure.costs import Estimated
from disco_accel.measure.record import OpRecord
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.summary import link_bytes, peak_bytes
from disco_accel.recipes.outline import Outline
from disco_accel.simulate.roofline import Speed
from disco_accel.simulate.simulator import Simulator
from disco_accel.sizes import format_size, parse_size
from disco_accel.step.compile.pipeline import PlannerSettings, plan_step, with_costs
from disco_accel.step.optimizer_home import TrainedBytes
from disco_accel.step.update.pending_update import AdamSettings, ParameterUpdate
from disco_accel.step.update.update_choice import Measure, UpdateChoice


@dataclass(frozen=True, slots=True)
class Host:
    """``update``: parameters/s of the fused AdamW on the processors; ``copy``: bytes/s of copies from host memory to
    host memory. ``memory``: bytes. ``why``: where the rates come from."""

    update: float
    copy: float
    memory: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device, the machine around it, and the bytes of it that training may use."""

    speed: Speed
    budget: str
    host: Host
    title: str


_DDR5 = 0.8 * 89.6e9
"""Two channels of DDR5-5600 at eight tenths of their peak, bytes/s."""
_BF16 = 14
"""Bytes that an update of a bf16 parameter moves: weight and two moments read and written, the gradient read."""
_STUDY_MEMORY = STUDY.machine.adam * 28
"""Bytes/s: fp32 weight and moments read and written, a 16-bit gradient read and a 16-bit weight written."""

DESKTOP = Device(
    CARD,
    "22GiB",
    Host(
        (_DDR5 - CARD.machine.link(TO_DEVICE).bandwidth) / _BF16,
        (_DDR5 - CARD.machine.link(TO_DEVICE).bandwidth) / 2,
        128 * 10**9,
        "assumed: two channels of DDR5-5600 at eight tenths of their peak, less what the link takes, 14 B a parameter; "
        "a copy reads and writes",
    ),
    "24 GB card, 25 GB/s, 128 GB of host memory",
)
SERVER = Device(
    H200,
    "128GiB",
    Host(
        STUDY.machine.adam,
        _STUDY_MEMORY / 2,
        None,
        "Maurya et al., 2024: Adam on the processors of an H100's host, with fp32 state of 28 B a parameter; a copy "
        "reads and writes",
    ),
    "H200, 55 GB/s",
)
DEVICES: Mapping[str, Device] = {"desktop": DESKTOP, "server": SERVER}


LEAST = "least"


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of ``shape``. ``budget``: None for what the device has, or ``least`` for the smallest one with a plan."""

    shape: str
    batch: int
    tokens: int
    device: str
    budget: str | None = None


CELLS = (
    Cell("7b", 1, 2048, "desktop"),
    Cell("7b", 1, 2048, "desktop", "8GiB"),
    Cell("7b", 1, 2048, "desktop", LEAST),
    Cell("7b", 4, 2048, "desktop"),
    Cell("8b", 1, 2048, "server"),
    Cell("8b", 8, 2048, "server"),
    Cell("14b", 1, 2048, "server"),
    Cell("14b", 8, 2048, "server"),
    Cell("32b", 1, 2048, "server"),
)


@dataclass(frozen=True, slots=True)
class Mode:
    """One plan of a step; ``needed``: the smallest budget where there is none, and nothing else is known then.

    ``seconds``: of a steady step, from its parts: ``plan``, in simulated time; ``leave``: gradients to the optimizer's
    memory when the plan has ended; ``update``: behind it, 0 where it is in the plan. ``bound``: no step is faster, the
    gradients' leaving not counted. ``busy``: seconds of each resource; ``limit``: the busiest. ``loaded``, ``saved``:
    bytes over the link each way, leaving gradients too. ``device``: bytes where the most is alive, by part, which is
    when kernel ``fullest`` runs or what it reads arrives. ``offloaded``: bytes of host memory for what the plan saves.
    ``on_device``: parameters that the device updates.
    """

    needed: int | None = None
    seconds: float = 0.0
    plan: float = 0.0
    leave: float = 0.0
    update: float = 0.0
    bound: float = 0.0
    limit: str = ""
    busy: Mapping[str, float] | None = None
    loaded: int = 0
    saved: int = 0
    used: int = 0
    device: Mapping[str, int] | None = None
    fullest: str = ""
    offloaded: int = 0
    on_device: int = 0
    plan_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes and seconds. ``peak``: the most bytes that are alive at once if nothing leaves; ``resident``: the kernels
    of a step one after the other; ``host``: bytes of host memory by part, the larger of both modes', of ``host_given``
    (None: as much as it takes); ``largest``: the kernel that needs most bytes by itself, and how many."""

    shape: str
    batch: int
    tokens: int
    on: str
    parameters: int
    budget: int
    peak: int
    resident: float
    largest: tuple[str, int]
    host: Mapping[str, int]
    host_given: int | None
    step: Mode
    deferred: Mode
    auto: Mode


def rows(cells: Sequence[Cell]) -> Iterator[Row]:
    """Simulate every cell; neighbours of one shape, batch and device are captured once."""
    last: tuple[Any, ...] = ()
    for cell in cells:
        key = (cell.shape, cell.batch, cell.tokens, cell.device)
        if last[:1] != (key,):
            outlined = full_outline(Workload(PRESETS[cell.shape], cell.batch, cell.tokens))
            last = (key, outlined, with_costs(outlined.captured, Estimated("cuda", DEVICES[cell.device].speed))[0])
        yield _row(cell, last[1], last[2])


def _row(cell: Cell, outlined: Outline, step: CapturedStep) -> Row:
    device = DEVICES[cell.device]
    budget = _least(outlined, step, device) if cell.budget == LEAST else parse_size(cell.budget or device.budget)
    parts = TrainedBytes.of(outlined.model)
    behind, deferred, auto = _modes(outlined, step, budget, device)
    need, kernel = largest_need(step.graph, step.graph.devices[0].id)
    host = {
        "weights": parts.weights + parts.frozen,
        "gradients": parts.gradients,
        "moments": parts.moments,
        "offloaded": max(behind.offloaded, deferred.offloaded, auto.offloaded),
    }
    return Row(
        shape=cell.shape,
        batch=cell.batch,
        tokens=cell.tokens,
        on=cell.device,
        parameters=sum(p.numel() for p in outlined.model.parameters()),
        budget=budget,
        peak=outlined.budget(0).outside + sum(live_peak(step.graph)),
        resident=sum(v.duration or 0.0 for v in step.graph.vertices),
        largest=("" if kernel is None else kernel.op, need),
        host=host,
        host_given=device.host.memory,
        step=behind,
        deferred=deferred,
        auto=auto,
    )


def _least(outlined: Outline, step: CapturedStep, device: Device) -> int:
    """The smallest budget in which the step has a plan, updates behind it."""
    try:
        plan_step(step, outlined.budget(1), PlannerSettings("timed", machine=device.speed.machine))
    except BudgetTooSmall as error:
        return error.needed
    raise AssertionError("no step fits a byte")


def _modes(outlined: Outline, step: CapturedStep, budget: int, device: Device) -> tuple[Mode, Mode, Mode]:
    machine, captured = device.speed.machine, outlined.captured
    settings = PlannerSettings("timed", machine=machine)
    given = outlined.budget(budget)
    outside = given.outside
    try:
        planned = plan_step(step, given, settings)
    except BudgetTooSmall as error:
        return (Mode(needed=error.needed),) * 3
    behind = _mode(planned.graph, planned.plan, captured, device, outside)
    update = sum(p.numel() for p in outlined.model.parameters() if p.requires_grad) / device.host.update
    behind = replace(_with_update(behind, update), plan_seconds=round(planned.seconds["plan"], 1))
    updates = UpdateChoice(planned.graph, *updates_on_meta(outlined), "float32", _measure(device))
    choices = updates.choices("auto", machine)
    updates = replace(updates, graph=step.graph)
    made: list[Mode] = []
    for on_device, arena in choices:
        updated = replace(step, graph=updates.timed(on_device))
        try:
            planned = plan_step(updated, given.with_arena(arena), settings)
        except BudgetTooSmall as error:
            made.append(Mode(needed=error.needed))
            continue
        mode = _mode(planned.graph, planned.plan, captured, device, outside)
        parameters = sum(updates.parts[part].parameter.numel() for part in on_device)
        made.append(replace(mode, on_device=parameters, plan_seconds=round(planned.seconds["plan"], 1)))
    # The last is without updates on the device.
    return behind, made[-1], min(made, key=lambda mode: mode.seconds or float("inf"))


def updates_on_meta(outlined: Outline) -> tuple[list[int], list[ParameterUpdate]]:
    """The INPUT of each trained weight and AdamW's update of it, in tensors without memory."""
    named = dict(outlined.model.named_parameters())
    settings = AdamSettings(True, 0.9, 0.999, 0.01, 1e-8, False)
    lr = torch.empty((), dtype=torch.float64, device="meta")
    weights, parts = [], []
    for binding in outlined.captured.bindings:
        if binding.source is InputSource.TRAINABLE:
            parameter = named[binding.name].detach()
            gradient, exp_avg, exp_avg_sq = (torch.empty_like(parameter) for _ in range(3))
            steps = torch.empty((), dtype=torch.float32, device="meta")
            weights.append(binding.vertex)
            parts.append(ParameterUpdate(parameter, gradient, exp_avg, exp_avg_sq, steps, lr, settings))
    return weights, parts


_MOVED = 7
"""Tensors that an update moves: weight and moments both ways, and the gradient."""


def _measure(device: Device) -> Measure:
    """Kernels of updates at the rates of ``device`` and its host."""

    def measure(graph: TaskGraph, only: frozenset[int]) -> dict[int, OpRecord]:
        hosts = host_devices(graph.devices)
        found = {}
        for vertex in graph.vertices:
            if vertex.id in only:
                spec = next(tensor_args(graph.ops[vertex.id].args)).spec
                count = math.prod(spec.shape)
                moved = _MOVED * count * getattr(torch, spec.dtype).itemsize
                own = device.speed.kernel + moved / device.speed.memory
                seconds = count / device.host.update if vertex.space in hosts else own
                found[vertex.id] = OpRecord(native_out=False, allocations=(), scratch_bytes=0, seconds=seconds)
        return found

    return measure


def _mode(graph: TaskGraph, plan: MemGraph, captured: CapturedStep, device: Device, outside: int) -> Mode:
    machine = device.speed.machine
    run = Simulator(plan, machine).run()
    staying, moved = _leaving(plan, captured)
    link = machine.link(TO_HOST)
    from_device = sum(staying) / link.bandwidth + len(staying) * link.latency
    # The device copies while the processors do; the backward returns when all gradients are there.
    leave = max(from_device, sum(moved) / device.host.copy)
    near = graph.devices[0].id
    parts, position = fullest(plan, near, {gradient.ref for gradient in captured.gradients})
    calls = (graph.ops.get(vertex.id) for vertex in plan.vertices[position:] if vertex.space == near)
    busiest_memory = next((f"{call.name} of {call.module or 'the loss'}" for call in calls if call is not None), "")
    busy = {
        "kernels": run.busy.get(f"compute{near}", 0.0),
        "to the device": run.busy.get(f"h2d{near}", 0.0),
        "from the device": run.busy.get(f"d2h{near}", 0.0) + from_device,
        "processors": sum(s for lane, s in run.busy.items() if lane.startswith("compute") and lane != f"compute{near}")
        + sum(moved) / device.host.copy,
    }
    return Mode(
        seconds=run.makespan + leave,
        plan=run.makespan,
        leave=leave,
        bound=bound_of(graph, machine).bound,
        limit=max(busy, key=lambda name: busy[name]),
        busy=busy,
        loaded=link_bytes(plan)[0],
        saved=link_bytes(plan)[1] + sum(staying),
        used=outside + peak_bytes(plan),
        device={"batch": outside} | parts,
        fullest=busiest_memory,
        offloaded=plan.host.memory,
    )


def _with_update(mode: Mode, seconds: float) -> Mode:
    """``mode`` with an update behind it, while the device waits."""
    busy = dict(mode.busy or {})
    busy["processors"] += seconds
    limit = max(busy, key=lambda name: busy[name])
    return replace(
        mode, seconds=mode.seconds + seconds, update=seconds, bound=mode.bound + seconds, busy=busy, limit=limit
    )


def _leaving(plan: MemGraph, captured: CapturedStep) -> tuple[list[int], list[int]]:
    """Bytes of each gradient that is still on the device when the plan has ended, and of each that it has offloaded;
    without those that the plan takes to their place."""
    states, done = planned_states(plan), leaving_by(captured.graph)
    left = [gradient.ref for gradient in captured.gradients if gradient.ref not in done]
    final = FinalResidences(plan, states)
    places = [final.of(ref) for ref in left]
    on_device = [place.size for place in places if place.device is not None]
    return on_device, [place.size for place in places if place.device is None]


HEADER = (
    "| step of all weights, bf16 | on | device memory: budget, used (weights, gradients, activations) "
    "| host memory: weights, gradients, moments, saved | kernels, s | updates | s per step "
    "(plan, gradients, update) | step / kernels | tokens/s | step / lower bound | busiest | loaded, saved |\n|"
    + "---|"
    * 12
)
_TITLES = {"step": "behind the step", "deferred": "deferred", "auto": "deferred, auto"}


def lines(row: Mapping[str, Any]) -> str:
    """One row as Markdown: a line for each place of the updates."""
    host = row["host"]
    given = "" if row["host_given"] is None else f" of {format_size(row['host_given'])}"
    head = [f"{row['shape']}, {row['batch']} x {row['tokens']}", DEVICES[row["on"]].title]
    shown = []
    for name, title in _TITLES.items():
        mode = row[name]
        if mode["needed"] is not None:
            memory = f"{format_size(row['budget'])}, needs {format_size(mode['needed'])}"
            shown.append("| " + " | ".join([*head, memory, "—", f"{row['resident']:.2f}", title, *["—"] * 6]) + " |")
            continue
        parts = mode["device"]
        device = ", ".join(format_size(parts[part]) for part in ("weights", "gradients", "activations"))
        host_parts = [*(host[part] for part in ("weights", "gradients", "moments")), mode["offloaded"]]
        tokens = row["batch"] * row["tokens"] / mode["seconds"]
        cells = [
            *head,
            f"{format_size(row['budget'])}, {format_size(mode['used'])} ({device})",
            f"{format_size(sum(host_parts))}{given} ({', '.join(map(format_size, host_parts))})",
            f"{row['resident']:.2f}",
            title + (f", {mode['on_device'] / row['parameters']:.0%} on the device" if mode["on_device"] else ""),
            f"{mode['seconds']:.2f} ({mode['plan']:.2f}, {mode['leave']:.2f}, {mode['update']:.2f})",
            f"{mode['seconds'] / row['resident']:.2f}",
            f"{tokens:.0f}",
            f"{mode['seconds'] / mode['bound']:.2f}",
            f"{mode['limit']}, {mode['busy'][mode['limit']]:.2f} s",
            f"{format_size(mode['loaded'])}, {format_size(mode['saved'])}",
        ]
        shown.append("| " + " | ".join(cells) + " |")
    return "\n".join(shown)


def table(result: Mapping[str, Any]) -> str:
    """Everything in ``result``."""
    return "\n".join([HEADER, *(lines(row) for row in result["rows"])])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. A budget that is too small for its step is a row that says what it needs."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated.full", description=__doc__.split("\n")[0])
    shapes = list(dict.fromkeys(cell.shape for cell in CELLS))
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=shapes, help="only cells of these")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    print(HEADER, flush=True)
    made = []
    for row in rows([cell for cell in CELLS if cell.shape in args.shapes]):
        made.append(asdict(row))
        print(lines(made[-1]), flush=True)
        if args.output is not None:
            write(args.output, made, words)
    return 0


def write(path: Path, made: Sequence[Mapping[str, Any]], words: Sequence[str]) -> None:
    """Write ``made`` with its origin: simulated, no device."""
    device = "simulated: " + "; ".join(each.title for each in DEVICES.values())
    head = provenance("python -m benchmarks.simulated.full", words, device)
    result = {"benchmark": "simulated-full", **head, "speeds": _speeds(), "rows": list(made)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1).encode())


def _speeds() -> dict[str, Any]:
    return {name: {"speed": speed_as_json(each.speed), "host": asdict(each.host)} for name, each in DEVICES.items()}


if __name__ == "__main__":
    raise SystemExit(main())
