"""A captured step on one device becomes the same step on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.decompose.fastest_way import fastest_plan, fastest_with_room
from disco_accel.decompose.layers import placements, way_fits
from disco_accel.decompose.neighbours import from_neighbours, weights_fit
from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.graph.passes import AppliedPass, applied_pass
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.common.serial_orders import unlimited_run
from disco_accel.plan.quick_plan import quick_seconds
from disco_accel.simulate.machine import Machine

_GAIN = 0.98
"""Weights come from neighbours where that is simulated to take less than so many times what loads of each device do."""


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
    make room for loads, and takes twice as long for what the timed planner does faster."""
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
