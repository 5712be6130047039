"""The figures that describe a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from disco_accel.graph.carried_values import inputs_held
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.machine import copy_kind
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
        "offload_bytes": copied_bytes(plan, VertexKind.OFFLOAD),
        "reload_bytes": copied_bytes(plan, VertexKind.RELOAD),
        "peak_bytes": peak_bytes(plan),
        "resident_bytes": resident_bytes(plan),
        "bound": lower_bound(plan, machine),
        "makespan": simulate(plan, machine).makespan,
        "planner": plan.planner,
    }


def cut_short(graph: TaskGraph, plan: MemGraph, work: SearchWork, machine: Machine | None = None) -> str:
    """Return one line about a search that the user's deadline ended with ``plan`` of ``graph``."""
    makespan, bound = simulate(plan, machine).makespan, bound_of(replace(graph, devices=plan.devices), machine).bound
    over = f"{makespan / bound:.3f} times what no plan can beat" if bound else "which nothing can beat"
    return (
        f"plan_seconds: {work.limit:g}: the search for a plan ended after {work.ended:.1f} s and {work.drafts} drafts "
        f"with a step of {makespan:.3g} s, {over}; with more seconds, or auto, it may find a faster one"
    )


def peak_bytes(plan: MemGraph) -> int:
    """Return the bytes that the plan takes of the device that it takes most of, the host's apart."""
    hosts = host_devices(plan.devices)
    return max((slot.addr + slot.size for slot in plan.slots.values() if slot.device not in hosts), default=0)


def copied_bytes(plan: MemGraph, kind: VertexKind) -> int:
    """Return the bytes of all copies of ``kind`` (OFFLOAD or RELOAD) in one step."""
    return sum(vertex.sizes[0] for vertex in plan.vertices if vertex.kind is kind)


def link_bytes(plan: MemGraph, of: int | None = None) -> tuple[int, int]:
    """Return the bytes that one step takes from the host to devices, and from these to the host: transfers too. ``of``:
    of this device alone."""
    hosts, device = host_devices(plan.devices), {vertex.id: vertex.device for vertex in plan.vertices}
    moved = {VertexKind.RELOAD: 0, VertexKind.OFFLOAD: 0}
    for vertex in plan.vertices:
        source = device[vertex.inputs[0][0]] if vertex.inputs else -1
        kind = copy_kind(vertex, source, hosts)
        # A transfer to the host takes the link of the device that it comes from.
        near = source if vertex.device in hosts else vertex.device
        if kind in moved and of in (None, near):
            moved[kind] += vertex.sizes[0]
    return moved[VertexKind.RELOAD], moved[VertexKind.OFFLOAD]


def resident_bytes(plan: MemGraph) -> int:
    """Return the bytes of inputs which the host has too that are on a device when the step starts."""
    clean = {vertex.id for vertex in plan.vertices if host_copy_exists(vertex)}
    return sum(slot.size for (vertex, _), slot in plan.slots.items() if vertex in clean)


def staying(plan: MemGraph) -> frozenset[int]:
    """Return the inputs which the host has too that never leave their device: residents not reloaded, whose bytes no
    other value shares; kernels may change them there.

    Other residents make room during the step and are reloaded for the next one.
    """
    input_of = inputs_held(plan)
    clean = set(input_of.values())
    reloaded = {input_of.get((v.id, 0)) for v in plan.vertices if v.kind is VertexKind.RELOAD}
    shared: set[int] = set()
    device, end, last = -1, 0, -1
    for ref, slot in sorted(plan.slots.items(), key=lambda item: (item[1].device, item[1].addr, item[0])):
        vertex = input_of.get(ref, ref[0])
        changed_in_place = ref != (vertex, 0) and plan.slots.get((vertex, 0)) == slot
        if slot.size == 0 or (ref in input_of and changed_in_place):
            continue
        if slot.device != device:
            device, end = slot.device, 0
        if slot.addr < end:
            shared |= {vertex, last}
        if slot.addr + slot.size > end:
            end, last = slot.addr + slot.size, vertex
    there: Counter[int] = Counter()
    """Bytes of each input that are on its device when the step starts, in ranges or as a whole."""
    for each in plan.vertices:
        if each.kind is VertexKind.INPUT and (each.id, 0) in plan.slots and (each.id, 0) in input_of:
            there[input_of[each.id, 0]] += each.sizes[0]
    size = {vertex.id: vertex.sizes[0] for vertex in plan.vertices if vertex.id in clean}
    on_device = {ref[0] for ref in plan.slots}
    return frozenset(v for v in clean - reloaded - shared if there[v] == size[v] and (there[v] or v in on_device))


def staying_bytes(plan: MemGraph) -> int:
    """Return the bytes of the inputs which the host has too that never leave their device."""
    inputs = staying(plan)
    return sum(vertex.sizes[0] for vertex in plan.vertices if vertex.id in inputs)
