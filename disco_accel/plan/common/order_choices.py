"""Serial orders to plan a graph on several devices in: as its vertices start in simulated steps."""

from __future__ import annotations

from dataclasses import dataclass

from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.passes import GraphPass, run_passes
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.plan.common.justified_runs import shortest_run
from disco_accel.plan.common.serial_orders import start_order, unlimited_run
from disco_accel.plan.common.streamed_run import streamed_starts
from disco_accel.simulate.machine import Machine

_JUSTIFIED = "vertices as they start in a step planned forwards and backwards with memory for everything"
_STREAMED = "vertices as they start where those of weights that are there go first"


@dataclass(frozen=True)
class OrderChoices:
    """``passes``: each leads to an order, the most promising first; none for a graph on one device. ``fastest``:
    seconds of the shortest step with memory for everything."""

    passes: tuple[GraphPass, ...]
    fastest: float

    @classmethod
    def of(cls, graph: TaskGraph, machine: Machine) -> OrderChoices:
        """Return the orders of a step as it runs with memory for everything, shorter ones first, and of one in which
        weights are loaded, if those of a device do not fit it. Beside a host device, one device has the first alone."""
        hosts = host_devices(graph.devices)
        work = [vertex for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT]
        devices = {vertex.space for vertex in work if vertex.space not in hosts}
        on_host = any(vertex.kind is VertexKind.KERNEL and vertex.space in hosts for vertex in work)
        if len(devices) + on_host < 2:
            return cls((), 0.0)
        run = unlimited_run(graph, machine)
        if len(devices) < 2:
            return cls((start_order(run.starts),), run.makespan)
        passes, fastest = [start_order(run.starts)], run.makespan
        shorter = shortest_run(graph, machine)
        if shorter.makespan < fastest:
            passes.insert(0, start_order(shorter.starts, "justified order", _JUSTIFIED))
            fastest = shorter.makespan
        streamed = streamed_starts(run_passes(graph, passes[:1]), machine)
        if streamed is not None:
            passes.append(start_order(streamed, "streamed order", _STREAMED))
        return cls(tuple(passes), fastest)
