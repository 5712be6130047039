"""What lies on a device when a plan, run in its own order, holds the most."""

from __future__ import annotations

from collections.abc import Collection

from disco_accel.graph.carried_values import carried_values, inputs_held
from disco_accel.graph.copies import is_transfer, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref


def fullest(plan: MemGraph, device: int, gradients: Collection[Ref]) -> tuple[dict[str, int], int]:
    """Bytes on ``device`` where the most are alive: of ``weights``, of ``gradients`` (values of the task graph), and of
    ``activations``, which stands for all else, scratch too; and the position in the plan at which that is.

    A value is there from its writer to its last reader, a gradient that does not leave to the end.
    """
    carried, inputs = carried_values(plan), inputs_held(plan)
    place = {vertex.id: position for position, vertex in enumerate(plan.vertices)}
    last: dict[Ref, int] = {}
    for position, vertex in enumerate(plan.vertices):
        for ref in vertex.inputs:
            last[ref] = position
    leaves = {v.inputs[0] for v in plan.vertices if swaps_out(v) or is_transfer(v)}
    sizes = {(v.id, k): size for v in plan.vertices for k, size in enumerate(v.sizes)}
    end = len(plan.vertices)
    changes: list[tuple[int, int, str, tuple[int, int]]] = []
    for ref, slot in plan.slots.items():
        size = sizes[ref]
        if slot.space != device or not size:
            continue
        kept = carried[ref] in gradients
        kind = "weights" if ref in inputs else "gradients" if kept else "activations"
        begin, stop = place[ref[0]], last.get(ref, place[ref[0]])
        if kept and ref not in leaves:
            stop = end
        changes += [(begin, 1, kind, (slot.offset, size)), (stop + 1, -1, kind, (slot.offset, size))]
    holders: dict[tuple[int, int], int] = {}
    now = dict.fromkeys(("weights", "gradients", "activations"), 0)
    most, where = dict(now), 0
    for position, step, kind, block in sorted(changes):
        # Versions of one value share a block.
        holders[block] = holders.get(block, 0) + step
        if (step > 0 and holders[block] == 1) or (step < 0 and not holders[block]):
            now[kind] += step * block[1]
        if sum(now.values()) > sum(most.values()):
            most, where = dict(now), position
    return most, where
