"""The figures that describe a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from disco_accel.graph.carried_values import inputs_held
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, routes, with_devices
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.simulator import Machine, lower_bound, simulate


def summary(plan: MemGraph, machine: Machine | None = None) -> dict[str, int | float | str]:
    """Return counts, bytes and seconds of ``plan``.

    ``peak_bytes``: the highest address in use on a device, the host's apart. ``bound``: a lower bound in seconds of
    every execution of this plan on ``machine``; ``makespan``: its simulated seconds. ``planner``: the planner that made
    it, "" if unknown; asked for a plan, the timed planner returns BUILDMEMGRAPH's where that is faster.
    """
    memory_edges = len(set(plan.memory_edges))
    return {
        "vertices": len(plan.vertices),
        "data_edges": len(set(plan.data_edges)),
        "memory_edges": memory_edges,
        # The planner has removed the edges that others imply.
        "essential_memory_edges": memory_edges,
        "offload_bytes": swapped_bytes(plan, swaps_out),
        "reload_bytes": swapped_bytes(plan, swaps_in),
        "peak_bytes": peak_bytes(plan),
        "resident_bytes": resident_bytes(plan),
        "bound": lower_bound(plan, machine),
        "makespan": simulate(plan, machine).makespan,
        "planner": plan.planner,
    }


def cut_short(graph: TaskGraph, plan: MemGraph, work: SearchWork, machine: Machine | None = None) -> str:
    """Return one line about a search that the user's deadline ended with ``plan`` of ``graph``."""
    planned_for = replace(graph, spaces=with_devices(graph.spaces, plan.devices))
    makespan, bound = simulate(plan, machine).makespan, bound_of(planned_for, machine).bound
    over = f"{makespan / bound:.3f} times what no plan can beat" if bound else "which nothing can beat"
    return (
        f"plan_seconds: {work.limit:g}: the search for a plan ended after {work.ended:.1f} s and {work.drafts} drafts "
        f"with a step of {makespan:.3g} s, {over}; with more seconds, or auto, it may find a faster one"
    )


def peak_bytes(plan: MemGraph) -> int:
    """Return the bytes that the plan takes of the device that it takes most of, the host's apart."""
    devices = {device.id for device in plan.devices if not device.is_host_device}
    return max(
        (slot.offset + size for slot, size in _sized(plan) if slot.space in devices),
        default=0,
    )


def _sized(plan: MemGraph) -> Iterator[tuple[Slot, int]]:
    """The slots of ``plan``, each with the bytes that it holds."""
    for vertex in plan.vertices:
        for k, size in enumerate(vertex.sizes):
            if (slot := plan.slots.get((vertex.id, k))) is not None:
                yield slot, size


def swapped_bytes(plan: MemGraph, counts: Callable[[Vertex], bool]) -> int:
    """Return the bytes of all copies in one step that ``counts`` (``swaps_in`` or ``swaps_out``)."""
    return sum(vertex.sizes[0] for vertex in plan.vertices if counts(vertex))


def link_bytes(plan: MemGraph, of: int | None = None) -> tuple[int, int]:
    """Return the bytes that one step takes from the host to devices, and from these to the host: transfers too. ``of``:
    of this device alone."""
    route_of = routes(plan.spaces)
    moved = {TO_DEVICE: 0, TO_HOST: 0}
    for vertex in plan.vertices:
        route = route_of(vertex.source, vertex.space)
        # A copy to the host takes the link of the device that it comes from.
        near = vertex.source if route == TO_HOST else vertex.space
        if vertex.kind is VertexKind.COPY and route in moved and of in (None, near):
            moved[route] += vertex.sizes[0]
    return moved[TO_DEVICE], moved[TO_HOST]


def resident_bytes(plan: MemGraph) -> int:
    """Return the bytes of inputs which the host has too that are on a device when the step starts."""
    clean = {vertex.id for vertex in plan.vertices if host_copy_exists(vertex)}
    return sum(vertex.sizes[0] for vertex in plan.vertices if vertex.id in clean and (vertex.id, 0) in plan.slots)


def staying(plan: MemGraph) -> frozenset[int]:
    """Return the inputs which the host has too that never leave their device: residents not reloaded, whose bytes no
    other value shares; kernels may change them there.

    Other residents make room during the step and are reloaded for the next one.
    """
    input_of = inputs_held(plan)
    clean = set(input_of.values())
    reloaded = {input_of.get((v.id, 0)) for v in plan.vertices if swaps_in(v)}
    sizes = {vertex.id: vertex.sizes for vertex in plan.vertices}
    shared: set[int] = set()
    device, end, last = -1, 0, -1
    for ref, slot in sorted(plan.slots.items(), key=lambda item: (item[1].space, item[1].offset, item[0])):
        vertex = input_of.get(ref, ref[0])
        changed_in_place = ref != (vertex, 0) and plan.slots.get((vertex, 0)) == slot
        size = sizes[ref[0]][ref[1]]
        if size == 0 or (ref in input_of and changed_in_place):
            continue
        if slot.space != device:
            device, end = slot.space, 0
        if slot.offset < end:
            shared |= {vertex, last}
        if slot.offset + size > end:
            end, last = slot.offset + size, vertex
    there: Counter[int] = Counter()
    """Bytes of each input that are on its device when the step starts, in ranges or as a whole."""
    for each in plan.vertices:
        if each.kind is VertexKind.INPUT and (each.id, 0) in plan.slots and (each.id, 0) in input_of:
            there[input_of[each.id, 0]] += each.sizes[0]
    on_device = {ref[0] for ref in plan.slots}
    return frozenset(v for v in clean - reloaded - shared if there[v] == sizes[v][0] and (there[v] or v in on_device))


def staying_bytes(plan: MemGraph) -> int:
    """Return the bytes of the inputs which the host has too that never leave their device."""
    inputs = staying(plan)
    return sum(vertex.sizes[0] for vertex in plan.vertices if vertex.id in inputs)
