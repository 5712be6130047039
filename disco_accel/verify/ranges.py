"""The static judge's demands of values that a plan has on a device in several ranges of bytes.

Only the host's copy of a value that no kernel changes is loaded in ranges. Each range is a content of memory like any
other; a kernel reads those that lie side by side and are together all of the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disco_accel.errors import VerifyError
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.verify.judged_plan import JudgedPlan
from disco_accel.verify.occupants import Occupants


def check_ranges_read(plan: JudgedPlan, vertex: Vertex, wanted: Sequence[Ref]) -> None:
    """Raise VerifyError unless the ranges that ``vertex`` reads of a value lie one behind the other and are all of it.
    The first of them takes the place of the value among the inputs; nothing else stands behind the inputs."""
    ranges: dict[Ref, list[Ref]] = {}
    for position, ref in enumerate(vertex.inputs):
        further = position >= len(wanted)
        if further or (not plan.reads_at_home(vertex.id, position) and not plan.is_whole(ref)):
            ranges.setdefault(plan.carried[ref], []).append(ref)
        source = plan.vertex[ref[0]]
        if further and (not (swaps_in(source) or source.kind is VertexKind.INPUT) or not source.begin):
            raise VerifyError(f"{plan.name(vertex.id)}: inputs[{position}] is no further range of a value")
        if not further and source.begin:
            raise VerifyError(f"{plan.name(vertex.id)}: inputs[{position}] is not the first range of its value")
    for value, refs in ranges.items():
        ordered = sorted(dict.fromkeys(refs), key=lambda ref: plan.vertex[ref[0]].begin)
        end = 0
        for ref in ordered:
            source = plan.vertex[ref[0]]
            if source.begin != end:
                raise VerifyError(f"{plan.name(vertex.id)} reads value {value} without its bytes from {end} on")
            if ref not in plan.mem.slots or source.space != plan.vertex[ordered[0][0]].space:
                raise VerifyError(f"{plan.name(vertex.id)} reads {plan.name(ref[0])}, which is not on its device")
            if plan.origin(ref) != plan.origin(ordered[0]):
                raise VerifyError(f"{plan.name(vertex.id)}: the ranges of value {value} do not lie side by side")
            end += source.sizes[0]
        if end != plan.size(value):
            raise VerifyError(f"{plan.name(vertex.id)} reads value {value} without its bytes from {end} on")


def check_range_copied(plan: JudgedPlan, reload: Vertex) -> None:
    """Raise VerifyError unless ``reload`` copies a range of a value that no kernel changes."""
    ref = reload.inputs[0]
    if reload.begin < 0 or not 0 < reload.sizes[0] <= plan.size(ref) - reload.begin:
        raise VerifyError(
            f"{plan.name(reload.id)} copies {reload.sizes[0]} bytes from {reload.begin} on of a value of "
            f"{plan.size(ref)}"
        )
    if plan.carried[ref] in plan.state:
        raise VerifyError(f"{plan.name(reload.id)} copies a range of a value that changes over steps")


def check_ranges_back(plan: JudgedPlan, spaces: Mapping[int, Occupants]) -> None:
    """Raise VerifyError unless the next step finds each resident range where this one did, whole or in other ranges."""
    for vertex in plan.mem.vertices:
        if vertex.kind is not VertexKind.INPUT or vertex.id in plan.task:
            continue
        ref = (vertex.id, 0)
        slot = plan.mem.slots[ref]
        for holder in spaces[slot.space].at(slot.offset, slot.offset + vertex.sizes[0]):
            if plan.carried[holder] != plan.carried[ref] or plan.origin(holder) != plan.origin(ref):
                raise VerifyError(f"{plan.name(vertex.id)} is resident but not back at its offset when the step ends")
