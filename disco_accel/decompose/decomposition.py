"""A captured step on one device becomes the same step on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.decompose.layers import placements
from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.graph.passes import AppliedPass, GraphPass, run_passes
from disco_accel.graph.taskgraph import Device, TaskGraph
from disco_accel.plan import make_plan
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import Work
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import simulate


def over_devices(
    captured: CapturedStep,
    graph: TaskGraph,
    memory: Sequence[int],
    machine: Machine,
    applied: list[AppliedPass],
    part_of: Mapping[int, int] | None = None,
    what: str = "a part of the batch",
) -> tuple[CapturedStep, TaskGraph]:
    """``captured`` and its ``graph`` with costs on as many devices as ``memory`` has sizes, in bytes.

    Part ``what`` on each, where ``part_of`` says which kernel works on which; else layers, in the way that is
    simulated fastest. ``applied`` gets the pass. Raises as ``spread``.
    """
    devices = _devices(graph, memory)
    what = "layers" if part_of is None else what
    ways = placements(graph, memory, machine) if part_of is None else [part_of]
    handed_out = [value.ref for value in (*captured.outputs, *captured.gradients)]
    # What is written to the user's memory is written from where that is.
    outside = {binding.vertex for binding in captured.bindings if binding.source is InputSource.OUTSIDE}
    first = {v.id: devices[0].id for v in graph.vertices if any(producer in outside for producer, _ in v.inputs)}
    results = [
        spread(graph, {vertex: devices[k].id for vertex, k in way.items()} | first, devices, handed_out) for way in ways
    ]
    done = results[0] if len(results) == 1 else _fastest(results, machine)
    effect = f"{what} on each of {len(devices)} devices"
    graph = run_passes(graph, [GraphPass("devices", effect, lambda _: done.graph)], applied)
    return _followed(captured, done), graph


def _fastest(results: Sequence[SpreadGraph], machine: Machine) -> SpreadGraph:
    """The one with the fastest plan of BUILDMEMGRAPH, which takes a tenth of the time that the timed planner does; the
    last, whose links have the most to do at once, where that has no plans."""
    best, fastest = results[-1], float("inf")
    for result in results:
        with suppress(BudgetTooSmall, ConfigError, Infeasible):
            plan = make_plan(result.graph, planner="build", cyclic=True, machine=machine, work=Work(names_needed=False))
            seconds = simulate(plan, machine).makespan
            if seconds < fastest:
                best, fastest = result, seconds
    return best


def _devices(graph: TaskGraph, memory: Sequence[int]) -> list[Device]:
    """The device of ``graph`` and more like it, with as many bytes as ``memory`` says."""
    own = next(device for device in graph.devices if not device.host)
    fresh = max(device.id for device in graph.devices) + 1
    ids = [own.id, *range(fresh, fresh + len(memory) - 1)]
    return [replace(own, id=id_, memory=max(size, own.alignment)) for id_, size in zip(ids, memory, strict=True)]


def _followed(captured: CapturedStep, done: SpreadGraph) -> CapturedStep:
    """``captured`` with the inputs and handed out values of the graph that it has become."""
    by_vertex = {binding.vertex: binding for binding in captured.bindings}

    def at_home(values: Sequence[ValueBinding]) -> tuple[ValueBinding, ...]:
        return tuple(replace(value, ref=done.home[value.ref]) for value in values)

    return replace(
        captured,
        graph=done.graph,
        bindings=(*captured.bindings, *(replace(by_vertex[of], vertex=copy) for copy, of in done.copies.items())),
        outputs=at_home(captured.outputs),
        gradients=at_home(captured.gradients),
    )
