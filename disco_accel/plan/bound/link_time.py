"""The time of each link that loads in a plan's simulated step: bytes, latencies, and idle time by its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import Simulation, Simulator

IDLE = {
    "no_room": "idle: the next load waits for kernels that use the bytes it goes to",
    "offload": "idle: the next load waits for an offload",
    "source": "idle: the next load waits for a kernel that makes what it loads, or for the gate",
    "done": "idle: nothing is left to load",
}
"""Why a link idles, in words."""


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds, which together are the step: ``bytes`` in which bytes move, ``latency`` of copies, ``other`` copies than
    loads on the same link, ``idle`` by the names of ``IDLE``."""

    link: str
    copies: int
    bytes: float
    latency: float
    other: float
    idle: dict[str, float]


def link_times(plan: MemGraph, machine: Machine, run: Simulation) -> list[LinkTime]:
    """Return the time of each link that ``plan`` loads over in ``run``."""
    simulator = Simulator(plan, machine)
    loads: dict[int, list[int]] = {}
    for i, vertex in enumerate(plan.vertices):
        if swaps_in(vertex):
            loads.setdefault(simulator.lanes[i], []).append(i)
    return [_link_time(simulator, machine, run, lane, own) for lane, own in sorted(loads.items())]


def _link_time(simulator: Simulator, machine: Machine, run: Simulation, lane: int, loads: Sequence[int]) -> LinkTime:
    plan = simulator.memgraph
    begin = [run.starts.get(vertex, 0.0) for vertex in simulator.ids]
    number = {vertex: i for i, vertex in enumerate(simulator.ids)}
    waits: dict[int, list[tuple[int, bool]]] = {i: [] for i in loads}
    for edges, through_memory in ((plan.data_edges, False), (plan.memory_edges, True)):
        for u, v in edges:
            if number[v] in waits:
                waits[number[v]].append((number[u], through_memory))
    idle = dict.fromkeys(IDLE, 0.0)
    on_lane = sorted((i for i, of in enumerate(simulator.lanes) if of == lane), key=lambda i: (begin[i], i))
    now = other = 0.0
    wanted = set(loads)
    for i in on_lane:
        gap = begin[i] - now
        if gap > 0:
            idle[_reason(simulator, waits[i], begin) if i in wanted else "offload"] += gap
        now = max(now, begin[i] + simulator.seconds[i])
        other += 0.0 if i in wanted else simulator.seconds[i]
    idle["done"] += run.makespan - now
    moved = [i for i in loads if simulator.seconds[i]]
    routes = machine.lanes(plan.spaces)
    latency = sum(machine.link(routes.route(v.source, v.space)).latency for v in (plan.vertices[i] for i in moved))
    in_all = sum(simulator.seconds[i] for i in moved)
    return LinkTime(simulator.lane_names[lane], len(moved), in_all - latency, latency, other, idle)


def _reason(simulator: Simulator, waits: Sequence[tuple[int, bool]], begin: Sequence[float]) -> str:
    """Return the reason of the load's last wait."""
    if not waits:
        return "source"
    last, through_memory = max(waits, key=lambda wait: begin[wait[0]] + simulator.seconds[wait[0]])
    if swaps_out(simulator.memgraph.vertices[last]):
        return "offload"
    return "no_room" if through_memory else "source"
