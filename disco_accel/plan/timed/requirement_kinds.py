"""What a step needs, for drafts of different kinds: each is collected once."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.common.serial_orders import lower_order
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.step_buffers import StepRequirements
from disco_accel.simulate.machine import Machine

Kind = tuple[bool, float | None, int | None]
"""Whether in the order with a lower peak; the gap ratio; bytes of a range (None: weights are whole)."""


class RequirementKinds:
    """``made``: by kind, what ``graph`` needs (None: no draft of the kind can be)."""

    def __init__(
        self,
        graph: TaskGraph,
        machine: Machine,
        not_offloaded: Collection[int],
    ) -> None:
        self.graph = graph
        self.made: dict[Kind, StepRequirements | None] = {}
        self._machine = machine
        self._not_offloaded = not_offloaded

    def get(self, low_peak_order: bool, ratio: float | None, range_bytes: int | None) -> StepRequirements | None:
        """Return the requirements of a kind."""
        kind = low_peak_order, ratio, range_bytes
        if kind not in self.made:
            self.made[kind] = self._collected(*kind)
        return self.made[kind]

    def _collected(self, low_peak_order: bool, ratio: float | None, range_bytes: int | None) -> StepRequirements | None:
        graph = self.low_peak_graph if low_peak_order else self.graph
        if graph is None:
            return None
        try:
            return requirements_of(graph, self._machine, ratio, self._not_offloaded, range_bytes)
        except Infeasible:
            return None

    @cached_property
    def low_peak_graph(self) -> TaskGraph | None:
        """The graph in an order with a lower peak, if there is one."""
        return lower_order(self.graph)
