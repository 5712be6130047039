"""The forecast of a plan before anything has run: sizes, seconds in simulation, distance from the bound, a picture."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError
from disco_accel.graph.files import write_atomically, write_memgraph, write_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import AppliedPass
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.value_numbering import without_recomputation
from disco_accel.graph.values import host_copy_exists, outlives_step
from disco_accel.observe.report import table
from disco_accel.observe.step_facts import step_facts
from disco_accel.observe.step_folder import _Step, figures_of
from disco_accel.observe.step_page import write_step_page
from disco_accel.observe.timeline import _StepEvent, write_chrome_trace
from disco_accel.plan.bound.larger_memory import Joined
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.summary import link_bytes, peak_bytes, staying
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.sizes import format_size


@dataclass(frozen=True)
class _Forecast:
    """``figures`` are ready for JSON: bytes and seconds. ``resident`` and ``streamed``: by name, tensors that the host
    has and no kernel changes."""

    graph: TaskGraph
    plan: MemGraph
    figures: Mapping[str, Any]
    events: tuple[_StepEvent, ...]
    resident: tuple[str, ...]
    streamed: tuple[str, ...]
    names: Mapping[int, str] = field(default_factory=dict)


def _events(plan: MemGraph, machine: Machine, starts: Mapping[int, float]) -> Iterator[_StepEvent]:
    lanes = machine.lanes(plan.spaces)
    for vertex in plan.vertices:
        if vertex.kind is VertexKind.INPUT:
            continue
        copies = vertex.kind is VertexKind.COPY
        lane = lanes.route_name(vertex.source, vertex.space) if copies else "compute0"
        start = starts[vertex.id]
        end = start + lanes.seconds(vertex)
        yield _StepEvent(vertex.id, lane, start, start, end, vertex.sizes[0] if copies else 0)


def forecast(
    graph: TaskGraph,
    plan: MemGraph,
    machine: Machine,
    budget: Mapping[str, int],
    names: Mapping[int, str],
    estimated_for: str,
    copies: Collection[int] = (),
    whole: TaskGraph | None = None,
    joined: Joined | None = None,
) -> _Forecast:
    """Simulate one step of ``plan``, a plan of ``graph``.

    ``budget``: the parts of the whole in bytes, with ``total`` and ``arena``. ``names``: INPUT vertex → tensor.
    ``estimated_for``: the device of the kernels' durations and the link, in words. ``copies``: inputs that have the
    bytes of another one, for another device. ``whole``: ``graph`` with the kernels that the planner left out, whose
    bound no choice of these can beat. ``joined``: as of ``larger_memory``.
    """
    run = simulate(plan, machine)
    events = tuple(_events(plan, machine, run.starts))
    clean = [v for v in graph.vertices if host_copy_exists(v) and v.sizes[0]]
    stays = staying(plan)
    least = without_recomputation(whole or graph)
    bound = bound_of(least if joined is None else joined(least), machine)
    used, (loaded, saved) = peak_bytes(plan), link_bytes(plan)
    figures = {
        "fits": True,
        "estimated_for": estimated_for,
        "budget_bytes": budget["total"],
        "peak_bytes": budget["total"] - budget["arena"] + used,
        "budget": dict(budget),
        "frozen_bytes": sum(v.sizes[0] for v in clean if outlives_step(v) and v.id not in copies),
        "host_updated_bytes": sum(v.sizes[0] for v in clean if not outlives_step(v) and v.id not in copies),
        "resident_bytes": sum(v.sizes[0] for v in clean if v.id in stays),
        "resident_tensors": sum(v.id in stays for v in clean),
        "streamed_tensors": sum(v.id not in stays for v in clean),
        "reload_bytes": loaded,
        "offload_bytes": saved,
        "kernels": sum(v.kind is VertexKind.KERNEL for v in plan.vertices),
        "step_seconds": run.makespan,
        "bound_seconds": bound.bound,
        "ratio": run.makespan / bound.bound if bound.bound else 1.0,
        "compute_seconds": bound.compute,
        "link_seconds": bound.link,
        "kernel_seconds": max((s for lane, s in run.busy.items() if lane.startswith("compute")), default=0.0),
        "copy_seconds": max((s for lane, s in run.busy.items() if not lane.startswith("compute")), default=0.0),
    }

    def named(stay: bool) -> tuple[str, ...]:
        return tuple(names.get(v.id, f"constant {v.id}") for v in clean if (v.id in stays) == stay)

    return _Forecast(graph, plan, figures, events, named(True), named(False), names)


def forecast_text(figures: Mapping[str, Any]) -> str:
    """For people: bytes that stay, bytes that are streamed, and seconds of a step."""
    sizes = {
        "frozen weights": "frozen_bytes",
        "of which stay on the device": "resident_bytes",
        "loaded each step": "reload_bytes",
        "saved each step": "offload_bytes",
        "peak on the device": "peak_bytes",
        "budget": "budget_bytes",
    }
    rows = [[name, format_size(figures[key])] for name, key in sizes.items()]
    if figures["host_updated_bytes"]:
        rows.insert(2, ["updated by the host for each step", format_size(figures["host_updated_bytes"])])
    if quant := figures.get("quant"):
        packed = f"of which {quant['weights']} packed as {quant['form']}"
        rows.insert(1, [packed, f"{format_size(quant['packed_bytes'])}, before {format_size(quant['bytes_before'])}"])
    return (
        f"{table(['', 'size'], rows)}\n"
        f"{figures['kernels']} kernels; step {figures['step_seconds']:.3f} s by estimate for "
        f"{figures['estimated_for']}, bound "
        f"{figures['bound_seconds']:.3f} s (compute {figures['compute_seconds']:.3f} s, link "
        f"{figures['link_seconds']:.3f} s); ratio {figures['ratio']:.2f}\n"
    )


def passes_text(passes: Sequence[AppliedPass]) -> str:
    """For people: a row for each pass, with the graph behind it and its changes."""
    rows = [
        [
            f"{each.name}: {each.effect}",
            each.after.vertices,
            format_size(each.after.value_bytes),
            f"{each.after.seconds:.3g} s",
            ", ".join(f"{name} {count}" for name, count in each.changed.items()) or "nothing",
        ]
        for each in passes
    ]
    return table(["pass", "vertices", "values", "kernels", "changed"], rows) + "\n"


def write_forecast(folder: str | os.PathLike[str], forecast: _Forecast) -> list[Path]:
    """Write task.json, plan.json, forecast.json, report.txt, trace.json, report.html and, with matplotlib, step.png.

    Raises:
        ConfigError: the folder cannot be written.
    """
    target = Path(folder)
    names = ["task.json", "plan.json", "forecast.json", "report.txt", "trace.json", "report.html"]
    whole = {**forecast.figures, "resident": list(forecast.resident), "streamed": list(forecast.streamed)}
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_taskgraph(forecast.graph, target / names[0])
        write_memgraph(forecast.plan, target / names[1])
        write_atomically(target / names[2], json.dumps(whole, indent=1).encode() + b"\n")
        write_atomically(target / names[3], forecast_text(forecast.figures).encode())
        facts = step_facts(forecast.graph, forecast.names)
        write_chrome_trace(target / names[4], forecast.plan, forecast.events, facts, "simulated")
        step = _Step(forecast.plan, forecast.events, facts, "simulated", figures_of(forecast.figures))
        write_step_page(target / names[5], step)
        if importlib.util.find_spec("matplotlib") is not None:
            _draw(target / "step.png", forecast)
            names.append("step.png")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    return [target / name for name in names]


def _draw(path: Path, forecast: _Forecast) -> None:
    from disco_accel.observe.plots import draw_step

    budget = forecast.figures["budget"]
    outside = budget["total"] - budget["arena"]
    title = f"One training step as planned, times estimated for {forecast.figures['estimated_for']}"
    draw_step(path, forecast.plan, forecast.events, budget=budget["total"], outside=outside, title=title)
