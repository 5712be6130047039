"""A captured step on one device becomes the same step on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.decompose.layers import devices_of_layers
from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.graph.passes import AppliedPass, GraphPass, run_passes
from disco_accel.graph.taskgraph import Device, TaskGraph
from disco_accel.simulate.machine import Machine


def over_devices(
    captured: CapturedStep,
    graph: TaskGraph,
    memory: Sequence[int],
    machine: Machine,
    applied: list[AppliedPass],
    part_of: Mapping[int, int] | None = None,
) -> tuple[CapturedStep, TaskGraph]:
    """``captured`` and its ``graph`` with costs on as many devices as ``memory`` has sizes, in bytes.

    A part of the batch on each, where ``part_of`` says which kernel works on which; else layers in a row. ``applied``
    gets the pass. Raises as ``spread``.
    """
    devices = _devices(graph, len(memory))
    place = devices_of_layers(graph, memory, machine) if part_of is None else part_of
    what = "a run of layers" if part_of is None else "a part of the batch"
    effect = f"{what} on each of {len(devices)} devices"
    ids = {vertex: devices[position].id for vertex, position in place.items()}
    # What is written to the user's memory is written from where that is.
    outside = {binding.vertex for binding in captured.bindings if binding.source is InputSource.OUTSIDE}
    ids |= {v.id: devices[0].id for v in graph.vertices if any(producer in outside for producer, _ in v.inputs)}
    done = spread(graph, ids, devices, [value.ref for value in (*captured.outputs, *captured.gradients)])
    graph = run_passes(graph, [GraphPass("devices", effect, lambda _: done.graph)], applied)
    return _followed(captured, done), graph


def _devices(graph: TaskGraph, count: int) -> list[Device]:
    """The device of ``graph`` and as many more like it as make ``count``."""
    own = next(device for device in graph.devices if not device.host)
    fresh = max(device.id for device in graph.devices) + 1
    return [own, *(replace(own, id=fresh + k) for k in range(count - 1))]


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
