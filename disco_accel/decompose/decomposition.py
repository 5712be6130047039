"""A captured step on one device becomes the same step on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.decompose.layers import placements, way_fits
from disco_accel.decompose.neighbours import from_neighbours, weights_fit
from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.graph.passes import AppliedPass, applied_pass
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from disco_accel.plan.common.justified_runs import shortest_run
from disco_accel.plan.common.serial_orders import unlimited_run
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.quick_plan import quick_seconds
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import simulate

_GAIN = 0.98
"""Weights come from neighbours where that step is simulated to take less than this share of one with own loads."""
_AT_ONCE = 1.1
"""Seconds of all devices' kernels over those of the step, below which devices work one after the other."""
_SHORTER = 0.99
"""A step with layers in turn must take less than this share of one in a row: more values go from device to device."""

Ways = Sequence[Callable[[], SpreadGraph]]
"""Layers in a row first, then in shorter and shorter runs in turn."""


def over_devices(
    captured: CapturedStep,
    graph: TaskGraph,
    memory: Sequence[int],
    machine: Machine,
    applied: list[AppliedPass],
    part_of: Mapping[int, int] | None = None,
    what: str = "a part of the batch",
    *,
    peers: bool = True,
) -> tuple[CapturedStep, TaskGraph]:
    """``captured`` and its ``graph`` with costs on as many devices as ``memory`` has sizes, in bytes.

    Part ``what`` on each, where ``part_of`` says which kernel works on which; else layers, in the way that is
    simulated fastest. ``applied`` gets the pass. ``peers``: copies between devices go straight, so that weights may
    come that way where they do not fit and that is simulated faster. Raises as ``spread``.
    """
    devices = _devices(graph, memory)
    what = "layers" if part_of is None else what
    handed_out = [value.ref for value in (*captured.outputs, *captured.gradients)]
    # What is written to the user's memory is written from where that is.
    outside = {binding.vertex for binding in captured.bindings if binding.source is InputSource.OUTSIDE}
    first = {v.id: devices[0].id for v in graph.vertices if any(producer in outside for producer, _ in v.inputs)}

    def spread_in(way: Mapping[int, int]) -> SpreadGraph:
        return spread(graph, {vertex: devices[k].id for vertex, k in way.items()} | first, devices, handed_out)

    if part_of is not None:
        done = spread_in(part_of)
    else:
        ways = placements(graph, memory, machine)
        choose = fastest_with_room if way_fits(graph, ways[0], memory) else fastest_plan
        done = choose([partial(spread_in, way) for way in ways], machine)
    effect = f"{what} on each of {len(devices)} devices"
    sent = _faster_neighbours(done, machine) if peers and not weights_fit(done.graph) else None
    if sent is not None:
        done, effect = sent, f"{effect}, weights from neighbours"
    applied.append(applied_pass("devices", effect, graph, done.graph))
    return _followed(captured, done), done.graph


def _faster_neighbours(done: SpreadGraph, machine: Machine) -> SpreadGraph | None:
    """``done`` with weights from neighbours, if that is faster. BUILDMEMGRAPH cannot say: it offloads such copies to
    make room for loads, and its step takes twice as long where the timed planner's is faster."""
    sent = from_neighbours(done, machine)
    if sent is None:
        return None
    own = quick_seconds(done.graph, machine)
    if unlimited_run(done.graph, machine).makespan >= _GAIN * own:
        return None
    return sent if quick_seconds(sent.graph, machine) < _GAIN * own else None


def _devices(graph: TaskGraph, memory: Sequence[int]) -> list[Space]:
    """The device of ``graph`` and more like it, with as many bytes as ``memory`` says."""
    own = next(device for device in graph.devices if not device.is_host_device)
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


def fastest_with_room(ways: Ways, machine: Machine) -> SpreadGraph:
    """Return the step with the shortest runs if it is faster with memory for everything than that in a row, or the next
    that is. A step with one device at work at a time stays in a row: nothing is faster then."""
    row = ways[0]()
    run = unlimited_run(row.graph, machine)
    at_work = sum(seconds for lane, seconds in run.busy.items() if lane.startswith("compute"))
    if at_work < _AT_ONCE * run.makespan or len(ways) == 1:
        return row
    in_a_row = shortest_run(row.graph, machine).makespan
    for way in reversed(ways[1:]):
        dealt = way()
        if shortest_run(dealt.graph, machine).makespan < _SHORTER * in_a_row:
            return dealt
    return row


def fastest_plan(ways: Ways, machine: Machine) -> SpreadGraph:
    """Return the step with the fastest plan of BUILDMEMGRAPH, which plans in a tenth of the timed planner's time. Where
    it has no plans, the step with the shortest runs, which uses most links at once."""
    spreads = [way() for way in ways]
    best, fastest = spreads[-1], float("inf")
    for each in spreads:
        with suppress(BudgetTooSmall, ConfigError, Infeasible):
            plan = make_plan(
                each.graph, planner="build", cyclic=True, machine=machine, work=SearchWork(names_needed=False)
            )
            seconds = simulate(plan, machine).makespan
            if seconds < fastest:
                best, fastest = each, seconds
    return best
