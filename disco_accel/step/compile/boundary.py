"""Weights at the same offsets when steps of several plans begin: a change of plan then copies the others alone.

Plans of one model share an arena. A cyclic plan ends as it began, so that weights which are resident at its boundary
lie at fixed offsets between two steps. The model's first plan chooses them; later ones are asked to begin with these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed.search import build_at_boundary
from disco_accel.simulate.simulator import Machine, simulate

_AS_FAST = 1.01
"""A plan from another plan's boundary may take so many times as long as the one without that condition."""

_PART = 0.5
"""Of the work that a search without the condition may take, the part that each of two with it may."""

Boundary = Mapping[tuple[str, int], int]
"""Name and bytes of a weight → its offset when a step begins."""


def residents_of(captured: CapturedStep, plan: MemGraph) -> dict[tuple[str, int], tuple[int, Slot]]:
    """Name and bytes of each frozen weight or buffer that lies on the one device, as a whole, when a step of ``plan``
    begins: its INPUT, and its place. Empty for several devices, whose weights may be cut."""
    if not plan.cyclic or not _on_one_device(plan.devices):
        return {}
    on_host = {device.id for device in plan.devices if device.is_host_device}
    names = _named(captured)
    inputs = ((v, plan.slots.get((v.id, 0))) for v in plan.vertices if v.id in names and sum(v.sizes) > 0)
    return {
        (names[v.id], v.sizes[0]): (v.id, slot) for v, slot in inputs if slot is not None and slot.space not in on_host
    }


def boundary_of(captured: CapturedStep, plan: MemGraph) -> Boundary:
    """The boundary of ``plan``."""
    return {weight: slot.offset for weight, (_, slot) in residents_of(captured, plan).items()}


@dataclass(frozen=True)
class _SharedBoundary:
    """Offsets of ``inputs`` of a graph, when a step begins, as another plan has them."""

    inputs: Mapping[int, int]

    @property
    def text(self) -> str:
        """All of it, for the key of a plan."""
        return json.dumps(sorted(self.inputs.items()))

    def plan(self, graph: TaskGraph, without: MemGraph, machine: Machine, seconds: float | None) -> MemGraph:
        """A plan of ``graph`` from this boundary, or else one that shares a part of it, found within ``seconds`` if
        they are given; ``without``, which has its own boundary, where that is faster. It is not verified."""
        good = _AS_FAST * simulate(without, machine).makespan
        for alone in (True, False):
            work = SearchWork(None if seconds is None else seconds / 2, part=_PART)
            with suppress(Infeasible):
                made = build_at_boundary(graph, machine, self.inputs, good=good, work=work, alone=alone)
                if simulate(made, machine).makespan <= good:
                    return replace(made, planner="timed")
        return without


def _on_one_device(devices: Sequence[Space]) -> bool:
    return sum(not device.is_host_device for device in devices) == 1


def _named(captured: CapturedStep) -> dict[int, str]:
    """By INPUT, the names of weights and buffers that are loaded whole."""
    return {b.vertex: b.name for b in captured.lasting_weights if b.parts == 1}


def shared_boundary(boundary: Boundary, captured: CapturedStep, graph: TaskGraph) -> _SharedBoundary | None:
    """Those of ``boundary`` that ``graph``, of ``captured``, reads; None if there are none."""
    if not boundary or not _on_one_device(graph.devices):
        return None
    sizes = {vertex.id: vertex.sizes[0] for vertex in graph.vertices if vertex.sizes}
    wanted = {vertex: (name, sizes.get(vertex, -1)) for vertex, name in _named(captured).items()}
    inputs = {vertex: boundary[weight] for vertex, weight in wanted.items() if weight in boundary}
    return _SharedBoundary(inputs) if inputs else None
