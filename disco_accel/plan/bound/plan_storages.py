"""The storages of a plan on its devices: the vertex that makes each, its users, and which stay to the step's end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from disco_accel.graph.carried_values import inputs_held
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, VertexKind
from disco_accel.graph.values import is_handed_out


@dataclass(slots=True)
class Storage:
    """``size`` bytes on ``device`` from the start of vertex ``maker`` to the end of all ``users``, or to the end of the
    step if it ``stays``. Vertices by their number in the plan."""

    device: int
    size: int
    maker: int
    users: set[int]
    stays: bool = False


def storages_of(plan: MemGraph) -> list[Storage]:
    """Return each storage once: what a kernel writes over an input, at the same offset, is no further one."""
    number = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
    # A kept result may end the step on the host alone.
    offloaded = {vertex.inputs[0] for vertex in plan.vertices if swaps_out(vertex)}
    of: dict[Ref, Storage] = {}
    made: list[Storage] = []
    for i, vertex in enumerate(plan.vertices):
        read: dict[tuple[int, int], Storage] = {}
        for ref in vertex.inputs:
            # A reload of an input reads the host's copy.
            from_host = swaps_in(vertex) and plan.vertices[number[ref[0]]].kind is VertexKind.INPUT
            if ref in of and not from_host:
                of[ref].users.add(i)
                read[plan.slots[ref].space, plan.slots[ref].offset] = of[ref]
        for k in range(len(vertex.sizes)):
            slot = plan.slots.get((vertex.id, k)) if not swaps_out(vertex) else None
            if slot is None or not vertex.sizes[k]:
                continue
            over = read.get((slot.space, slot.offset))
            if over is None:
                over = Storage(slot.space, vertex.sizes[k], i, {i})
                made.append(over)
            over.stays |= is_handed_out(vertex) and (vertex.id, k) not in offloaded
            over.users.add(i)
            of[vertex.id, k] = over
    for ref in at_the_end(plan).values():
        of[ref].stays = True
    return made


def at_the_end(plan: MemGraph) -> dict[Ref, Ref]:
    """Return for each input, and resident range of one, that is on its device when a step starts what holds it there
    when the step ends."""
    held = inputs_held(plan)
    size = {(vertex.id, k): nbytes for vertex in plan.vertices for k, nbytes in enumerate(vertex.sizes)}
    begin = {(vertex.id, k): vertex.begin for vertex in plan.vertices for k in range(len(vertex.sizes))}
    residents: dict[int, list[Ref]] = defaultdict(list)
    for vertex in plan.vertices:
        if vertex.kind is VertexKind.INPUT and (vertex.id, 0) in held and (vertex.id, 0) in plan.slots:
            residents[held[vertex.id, 0]].append((vertex.id, 0))
    found: dict[Ref, Ref] = {}
    # The last in the order of the plan is what the step ends with.
    for ref in (ref for ref in begin if ref in plan.slots):
        slot = plan.slots[ref]
        for first in residents.get(held.get(ref, -1), ()):
            there = plan.slots[first]
            same_place = there.offset - begin[first] == slot.offset - begin[ref]
            covers = there.offset + size[first] <= slot.offset + size[ref]
            if same_place and slot.offset <= there.offset and covers:
                found[first] = ref
    return found
