"""Plans of one graph by several planners, in several serial orders, and the fastest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.plan.common.justified_runs import shortest_run
from disco_accel.plan.common.serial_orders import start_order, unlimited_run
from disco_accel.plan.common.streamed_run import streamed_starts
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork, enough
from disco_accel.simulate.simulator import Machine, simulate

_BOTH_UP_TO = 200_000
"""Vertices of a graph for which more than one plan is made."""

_JUSTIFIED = "vertices as they start in a step planned forwards and backwards with memory for everything"
_STREAMED = "vertices as they start where those of weights that are there go first"


def order_choices(graph: TaskGraph, machine: Machine) -> tuple[tuple[GraphPass, ...], float]:
    """Return serial orders to plan ``graph`` in, the most promising first, and the seconds of the shortest step with
    memory for everything. A graph on one device has none.

    They are the orders of a step as it runs with memory for everything, shorter ones first, and of one in which weights
    are loaded, if those of a device do not fit it. Beside a host device, one device has the first alone.
    """
    hosts = host_devices(graph.devices)
    work = [vertex for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT]
    devices = {vertex.space for vertex in work if vertex.space not in hosts}
    on_host = any(vertex.kind is VertexKind.KERNEL and vertex.space in hosts for vertex in work)
    if len(devices) + on_host < 2:
        return (), 0.0
    run = unlimited_run(graph, machine)
    if len(devices) < 2:
        return (start_order(run.starts),), run.makespan
    orders, fastest = [start_order(run.starts)], run.makespan
    shorter = shortest_run(graph, machine)
    if shorter.makespan < fastest:
        orders.insert(0, start_order(shorter.starts, "justified order", _JUSTIFIED))
        fastest = shorter.makespan
    streamed = streamed_starts(orders[0].run(graph), machine)
    if streamed is not None:
        orders.append(start_order(streamed, "streamed order", _STREAMED))
    return tuple(orders), fastest


@dataclass
class Candidates:
    """The plan that is fastest in simulation on ``machine``, and its ``order`` (None: the graph's). No more are made
    once one takes ``enough`` seconds or less."""

    machine: Machine
    enough: float
    work: SearchWork
    best: MemGraph | None = None
    order: GraphPass | None = None
    makespan: float = float("inf")
    seconds: dict[int, float] = field(default_factory=dict)
    """Of the fastest plan in each order, by its ``id``."""
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.spent = self.work.spent

    def add(
        self, planner: Callable[[TaskGraph, SearchWork], MemGraph], graph: TaskGraph, order: GraphPass | None = None
    ) -> None:
        """Plan ``graph`` in ``order``, unless that can gain nothing, or would take too long."""
        late = self.best is not None and (len(graph.vertices) > _BOTH_UP_TO or self.work.late())
        if late or self.makespan <= self.enough:
            return
        own = self.work
        if order is not None and own.limit is None:
            # Each order has a search of its own, or a later one would have what work the first has left.
            own = SearchWork(part=max(0.0, own.part - self.spent / enough(len(graph.vertices))))
        with suppress(Infeasible):
            plan = planner(graph if order is None else order.run(graph), own)
            makespan = simulate(plan, self.machine).makespan
            self.seconds[id(order)] = min(makespan, self.seconds.get(id(order), makespan))
            if makespan < self.makespan:
                self.best, self.order, self.makespan = plan, order, makespan
        if own is not self.work:
            self.work.take(own)

    def fastest_first(self, orders: Sequence[GraphPass]) -> list[GraphPass]:
        """Return ``orders``, those with the faster plans first."""
        return sorted(orders, key=lambda order: self.seconds.get(id(order), float("inf")))
