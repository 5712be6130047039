"""Values of a plan that live over steps and change (*states*): the version in each copy, the place of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_accel.errors import ExecutionError
from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.taskgraph import Ref, Vertex
from disco_accel.graph.values import changes_over_steps, lasting_versions, outlives_step, overwrites


@dataclass(frozen=True, slots=True)
class PlannedStates:
    """States by the id of their INPUT; empty for a plan without any.

    ``version``: value of the plan, copies included → version of a state that it holds. ``state``: version → its state.
    ``last``: state → its last version. ``at_home``: state → the version that its home holds when a step ends.
    ``unstored``: state → slot of the resident whose home does not hold the last version when a step ends.
    ``written``: versions that kernels of host devices write at home. ``host_updated``: states that the host uses
    between two steps and kernels of other devices change.
    """

    version: Mapping[Ref, Ref] = field(default_factory=dict)
    state: Mapping[Ref, int] = field(default_factory=dict)
    last: Mapping[int, Ref] = field(default_factory=dict)
    at_home: Mapping[int, Ref] = field(default_factory=dict)
    unstored: Mapping[int, Slot] = field(default_factory=dict)
    written: frozenset[Ref] = frozenset()
    host_updated: frozenset[int] = frozenset()

    def state_of(self, ref: Ref) -> int | None:
        """The state of which ``ref`` holds a version, None for another value."""
        version = self.version.get(ref)
        return None if version is None else self.state[version]

    def changed(self) -> list[int]:
        """States that a step writes."""
        return [state for state, last in self.last.items() if last != (state, 0)]

    def stores(self, vertex: Vertex) -> bool:
        """Whether the vertex copies a version of a state home."""
        return swaps_out(vertex) and (vertex.id, 0) in self.version

    def changes(self, vertex: Vertex) -> bool:
        """Whether the vertex writes a version of a state, or its home."""
        return self.stores(vertex) or any(ref in self.version for _, ref in overwrites(vertex))


def planned_states(plan: MemGraph) -> PlannedStates:
    """Raises ExecutionError naming a state whose last version is nowhere when a step of ``plan`` ends."""
    if not any(changes_over_steps(vertex) for vertex in plan.vertices):
        return PlannedStates()
    graph = taskgraph_of(plan)
    written = HomeUses.of(graph).written
    versions = lasting_versions(graph.vertices)
    state = {version: first[0] for first, each in versions.items() for version in each}
    last = {first[0]: each[-1] for first, each in versions.items()}
    version = {ref: value for ref, value in carried_values(plan).items() if value in state}
    # Any valid execution ends with the same contents, so the serial order tells.
    at_home = {first: (first, 0) for first in last}
    for vertex in plan.vertices:
        for ref in ((vertex.id, k) for k in range(len(vertex.sizes))):
            if ref in written or (swaps_out(vertex) and ref in version):
                at_home[state[version[ref]]] = version[ref]
    unstored = {}
    for each, newest in last.items():
        if at_home[each] == newest:
            continue
        if not plan.cyclic or (each, 0) not in plan.slots:
            raise ExecutionError(
                f"the plan changes input {each}, which is not resident, and does not write the last version of it home"
            )
        unstored[each] = plan.slots[each, 0]
    host_updated = {v.id for v in plan.vertices if changes_over_steps(v) and not outlives_step(v)}
    by_device = {s for s in host_updated if last[s] != (s, 0) and last[s] not in written}
    return PlannedStates(version, state, last, at_home, unstored, written, frozenset(by_device))
