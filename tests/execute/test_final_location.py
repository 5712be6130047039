"""Where kept values lie at a step's end: as a run in serial order leaves them, found in one pass of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from disco_accel.errors import ExecutionError
from disco_accel.execute.final_location import FinalResidences
from disco_accel.execute.planned_states import PlannedStates
from disco_accel.graph.copies import swaps
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, VertexKind
from disco_accel.plan import make_plan
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.plans.plans import tight_plans

Byte = tuple[int | None, int]
"""Of the arena of a device, or of the host's (None)."""


def _left(plan: MemGraph) -> dict[Byte, Ref]:
    """What each byte holds once the vertices have written in serial order; copies count as what they copy."""
    held: dict[Byte, Ref] = {}
    value: dict[Ref, Ref] = {}
    for vertex in sorted(plan.vertices, key=lambda vertex: vertex.kind is not VertexKind.INPUT):
        for ref in ((vertex.id, k) for k in range(len(vertex.sizes))):
            copied = swaps(vertex)
            value[ref] = value[vertex.inputs[0]] if copied else ref
            slot = plan.slots.get(ref)
            if slot is not None:
                space = None if slot.space == HOST else slot.space
                held.update(((space, slot.offset + i), value[ref]) for i in range(vertex.sizes[ref[1]]))
    return held


def test_a_place_that_is_found_holds_the_value_after_a_run() -> None:
    found = lost = 0
    for _, plan in tight_plans(12):
        left, final = _left(plan), FinalResidences(plan, PlannedStates())
        for vertex in plan.vertices:
            if vertex.kind is not VertexKind.KERNEL:
                continue
            for ref in ((vertex.id, k) for k in range(len(vertex.sizes)) if vertex.sizes[k]):
                try:
                    place = final.of(ref)
                except ExecutionError:
                    slot = plan.slots[ref]
                    assert {left[slot.space, slot.offset + i] for i in range(vertex.sizes[ref[1]])} != {ref}
                    lost += 1
                    continue
                assert {left[place.device, place.offset + i] for i in range(place.size)} == {ref}
                found += 1
    assert found > 20 and lost > 20


class _Counted(dict[Ref, Slot]):
    looks = 0

    def get(self, key: Ref, default: object = None) -> object:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)  # type: ignore[arg-type]

    def items(self) -> Iterator[tuple[Ref, Slot]]:  # type: ignore[override]
        for item in super().items():
            self.looks += 1
            yield item


@pytest.mark.parametrize("layers", [2, 8])
def test_all_kept_values_take_looks_in_proportion_to_the_plan(layers: int) -> None:
    plan = make_plan(lora_graph(LoraShape(layers=layers), 1), memory=1 << 40, planner="build", cyclic=True)
    slots = _Counted(plan.slots)
    final = FinalResidences(replace(plan, slots=slots), PlannedStates())
    kept = [(vertex.id, 0) for vertex in plan.vertices if vertex.keep and (vertex.id, 0) in plan.slots]
    assert len(kept) >= 4 * layers
    for ref in kept:
        final.of(ref)
    assert slots.looks <= 2 * sum(len(vertex.sizes) for vertex in plan.vertices)
