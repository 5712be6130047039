"""The requirements of one graph that a search drafts with, by kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.common.serial_orders import lower_order
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.step_buffers import StepRequirements
from disco_accel.simulate.simulator import Machine

_Kind = tuple[bool, float | None, int | None]
"""Whether in the order with a lower peak; the gap ratio; bytes of a range (None: weights are whole)."""


class _RequirementKinds:
    """Requirements of ``graph`` by kind, each collected once, in ``made`` (None: no draft of the kind can be)."""

    def __init__(
        self, graph: TaskGraph, machine: Machine, not_offloaded: Collection[int], boundary: Mapping[int, int]
    ) -> None:
        """``boundary``: offsets that inputs should have when a step starts, if they are on a device then."""
        self.graph = graph
        self.made: dict[_Kind, StepRequirements | None] = {}
        self.wished_alone = False
        """Whether a step begins with no inputs but those of ``boundary``."""
        self._machine = machine
        self._not_offloaded = not_offloaded
        memory = {device.id: device.memory for device in graph.devices}
        self._boundary = {
            vertex.id: boundary[vertex.id]
            for vertex in graph.vertices
            if vertex.id in boundary and boundary[vertex.id] + vertex.sizes[0] <= memory[vertex.space]
        }

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
            requirements = requirements_of(
                graph, self._machine, ratio, self._not_offloaded, range_bytes, whole=self._boundary
            )
        except Infeasible:
            return None
        for buffer in requirements.swappable:
            if buffer.may_be_resident:
                buffer.at = self._boundary.get(buffer.ref[0], -1)
        return requirements

    @cached_property
    def low_peak_graph(self) -> TaskGraph | None:
        """The graph in an order with a lower peak, if there is one."""
        return lower_order(self.graph)
