"""The clones of a graph in the order in which a plan does without them, and the memory that each part of them needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disco_accel.graph.check import after_gate
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.value_numbering import Clone
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements
from disco_accel.simulate.machine import Machine


def ordered_duplicates(graph: TaskGraph, found: Sequence[Clone], machine: Machine) -> tuple[list[Clone], int]:
    """Return the clones, those of kernels behind the gate first, each kind by the seconds that a value would be kept
    longer; and the number of the first kind."""
    behind = after_gate(graph.vertices)
    names = {clone.original for clone in found} | {clone.vertex for clone in found}
    start: dict[int, float] = {}
    used: dict[int, float] = {}
    clock = 0.0
    for vertex in graph.vertices:
        start[vertex.id] = clock
        clock += (vertex.duration or 0.0) if vertex.kind is VertexKind.KERNEL else 0.0
        for producer, _ in vertex.inputs:
            if producer in names:
                used[producer] = clock

    def gap(clone: Clone) -> tuple[bool, float, int]:
        if not clone.nbytes:
            return False, 0.0, clone.vertex
        return (
            clone.original not in behind,
            start[clone.vertex] - used.get(clone.original, start[clone.original]),
            clone.vertex,
        )

    row = sorted(found, key=gap)
    return row, sum(not gap(clone)[0] for clone in row)


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a step needs at each position if it keeps first parts of a ``row``, by device.

    ``needed``: bytes that cannot leave with all clones in the graph, and those that the vertex at the position reads.
    ``gaps``: for each clone of the row, the positions between the last reader of its original and its own."""

    row: Sequence[Clone]
    needed: Mapping[int, Profile]
    device: Mapping[int, int]
    gaps: Sequence[tuple[int, int]]

    def longest(self, memory: Mapping[int, int]) -> int:
        """Return how many of the row may be left out at most if nothing is to need more than ``memory`` by device; -1
        if even with all clones something does."""
        return bisect_right(range(len(self.row) + 1), False, key=lambda count: not self._fits(count, memory)) - 1

    def _fits(self, count: int, memory: Mapping[int, int]) -> bool:
        change = {device: np.zeros(len(profile) + 1, np.int64) for device, profile in self.needed.items()}
        for clone, (begin, end) in zip(self.row[:count], self.gaps, strict=False):
            added = change[self.device[clone.vertex]]
            added[begin] += clone.nbytes
            added[end] -= clone.nbytes
        return all(
            int((profile + change[device].cumsum()[:-1]).max()) <= memory[device]
            for device, profile in self.needed.items()
        )


def kept_bytes_of(
    graph: TaskGraph, row: Sequence[Clone], machine: Machine, min_gap_ratio: float | None
) -> KeptBytes | None:
    """Return the bytes of steps of ``graph`` that offload activations from ``min_gap_ratio`` on, which has no effect on
    the values of clones. None if the timed planner has no rule for the graph."""
    values = {clone.original for clone in row} | {clone.vertex for clone in row}
    try:
        requirements = requirements_of(graph, machine, min_gap_ratio, values)
    except Infeasible:
        return None
    position = {vertex.id: p for p, vertex in enumerate(requirements.order)}
    last = {v: position[v] for v in values}
    for p, vertex in enumerate(requirements.order):
        last.update((producer, p) for producer, _ in vertex.inputs if producer in values)
    # An original may be freed right behind its last reader, and a clone takes its bytes at its own position.
    gaps = [(begin := last[clone.original] + 1, max(begin, position[clone.vertex])) for clone in row]
    device = {vertex.id: vertex.space for vertex in requirements.order}
    return KeptBytes(row, _needed(requirements), device, gaps)


def _needed(requirements: StepRequirements) -> dict[int, Profile]:
    needed = {d: pinned + requirements.unevictable_bytes[d] for d, pinned in requirements.pinned_bytes.items()}
    for position, read in enumerate(requirements.reads):
        for i in read:
            buffer = requirements.swappable[i]
            if not buffer.starts_on_host and position < buffer.evictable_from:
                continue
            needed[buffer.device][position] += buffer.block
    return needed
