"""The static judge: does a MemGraph compute its TaskGraph without races in any order that its edges allow?

It shares nothing with the planner but the data classes, and checks the demands of docs/schema.md. Overlaps are examined
byte range by byte range in a topological order. If all users of each occupant finish before the next one is written, so
do those of every earlier one: no pairs need to be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from disco_accel.errors import VerifyError
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import (
    arrives_at_gate,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    may_leave,
    must_survive_step,
    outlives_step,
)
from disco_accel.verify.happens_before import topological_order
from disco_accel.verify.homes import check_homes, check_written_back, writes_home
from disco_accel.verify.judged_plan import Claims, JudgedPlan
from disco_accel.verify.occupants import Occupants
from disco_accel.verify.ranges import check_range_copied, check_ranges_back, check_ranges_read
from disco_accel.verify.same_graph import check_same, named


@collector_paused()
def verify(graph: TaskGraph, memgraph: MemGraph) -> None:
    """Raise VerifyError, naming the vertices, unless ``memgraph`` is a safe plan of ``graph`` on its devices."""
    check_same(graph, memgraph)
    plan = JudgedPlan(graph, memgraph)
    _check_edges(plan)
    order = topological_order(list(plan.vertex), plan.predecessors)
    before = Claims(plan, order)
    _check_values(plan, order)
    _check_after(plan, before)
    gate = _behind_gate(plan, order)
    _check_slots(plan)
    ends = _check_memory(plan, order, before, gate)
    home_writers = check_homes(plan, order, before, gate)
    before.resolve()
    _check_kept(plan, ends, home_writers)
    check_written_back(plan, home_writers)
    if memgraph.cyclic:
        _check_cyclic(plan, ends)


def _check_edges(plan: JudgedPlan) -> None:
    data = set(plan.mem.data_edges)
    plan.predecessors = {vertex: set() for vertex in plan.vertex}
    for u, v in (*data, *plan.mem.memory_edges):
        if u not in plan.vertex or v not in plan.vertex:
            raise VerifyError(f"edge [{u}, {v}] names a vertex that does not exist")
        if plan.vertex[v].kind is VertexKind.INPUT:
            raise VerifyError(f"edge [{u}, {v}] points into an input, which exists before the step")
        if u == v:
            raise VerifyError(f"edge [{u}, {v}] makes {plan.name(v)} wait for itself")
        plan.predecessors[v].add(u)
    for vertex in plan.mem.vertices:
        for producer, _ in vertex.inputs:
            if plan.vertex[producer].kind is VertexKind.INPUT:
                plan.predecessors[vertex.id].add(producer)
            elif (producer, vertex.id) not in data:
                raise VerifyError(f"{plan.name(vertex.id)} reads {plan.name(producer)} without a data edge")


def _check_values(plan: JudgedPlan, order: Mapping[int, int]) -> None:
    for vertex in plan.graph.vertices:
        for k in range(len(vertex.sizes)):
            plan.carried[vertex.id, k] = (vertex.id, k)
    for vertex in plan.mem.vertices:
        if vertex.kind is VertexKind.INPUT and vertex.id not in plan.task:
            plan.carried[vertex.id, 0] = vertex.inputs[0]
    for vertex in sorted(plan.mem.vertices, key=lambda v: order[v.id]):
        if vertex.kind is VertexKind.INPUT:
            continue
        if vertex.id not in plan.task:
            _check_copy(plan, vertex)
            plan.carried[vertex.id, 0] = plan.carried[vertex.inputs[0]]
            continue
        wanted_inputs = plan.task[vertex.id].inputs
        check_ranges_read(plan, vertex, wanted_inputs)
        for position, (ref, wanted) in enumerate(zip(vertex.inputs, wanted_inputs, strict=False)):
            got = plan.carried[ref]
            source = plan.vertex[ref[0]]
            where = f"{plan.name(vertex.id)}: inputs[{position}]"
            if got != wanted:
                raise VerifyError(f"{where} holds value {got}, not {wanted}")
            if plan.reads_at_home(vertex.id, position):
                if plan.size(ref) and source.kind is not VertexKind.INPUT and not writes_home(plan, ref):
                    raise VerifyError(f"{where} is a copy by {plan.name(source.id)}, but is used at its home")
                continue
            if swaps_out(source) or _is_at_home(plan, ref):
                raise VerifyError(f"{where} is {_kind(source)}, which is on the host")
            nowhere = ref in plan.home_uses.written  # Without bytes, as others were refused.
            if source.space != plan.home_uses.device_of(wanted, plan.task[wanted[0]]) and not nowhere:
                raise VerifyError(f"{where} is on device {source.space}")
            _check_on_device(plan, ref, vertex.id)


def _is_at_home(plan: JudgedPlan, ref: Ref) -> bool:
    """Whether a kernel of a host device has written ``ref``, which has bytes, at a home."""
    return ref in plan.home_uses.written and plan.size(ref) > 0


def _kind(vertex: Vertex) -> str:
    return "an offload" if swaps_out(vertex) else f"written at home by vertex {vertex.id}"


def _check_on_device(plan: JudgedPlan, ref: Ref, reader: int) -> None:
    source = plan.task.get(ref[0], plan.vertex[ref[0]])
    host_only = source.kind is VertexKind.INPUT and not is_foreign(source) and ref not in plan.mem.slots
    if host_only and plan.size(ref):
        raise VerifyError(f"{plan.name(reader)} reads {plan.name(ref[0])}, which is only on the host: reload it first")


def _check_copy(plan: JudgedPlan, vertex: Vertex) -> None:
    if len(vertex.inputs) != 1 or len(vertex.sizes) != 1:
        raise VerifyError(f"{plan.name(vertex.id)} must copy exactly one value")
    ref = vertex.inputs[0]
    source = plan.vertex[ref[0]]
    is_range = vertex.begin != 0 or vertex.sizes[0] != plan.size(ref)
    if is_range and swaps_out(vertex):
        raise VerifyError(f"{plan.name(vertex.id)} copies {vertex.sizes[0]} bytes of a value of {plan.size(ref)}")
    if is_range:
        check_range_copied(plan, vertex)
    elif not plan.is_whole(ref):
        raise VerifyError(f"{plan.name(vertex.id)} copies a range of a value from its device")
    if swaps_out(vertex) and vertex.source == source.space and not _is_at_home(plan, ref):
        _check_on_device(plan, ref, vertex.id)
    if vertex.source not in _spaces_of(plan, ref):
        what = f"copies {plan.name(ref[0])} from space {vertex.source}, where it is not"
        raise VerifyError(f"{plan.name(vertex.id)} {what}")
    if swaps_out(vertex):
        state = plan.state.get(plan.carried[ref])
        if state is not None and vertex.space != plan.task[state[0]].source:
            raise VerifyError(f"{plan.name(vertex.id)} writes to space {vertex.space}, not to the home of its value")
    elif _is_at_home(plan, ref) and vertex.space != plan.home_uses.device_of(ref, source):
        raise VerifyError(f"{plan.name(vertex.id)} reloads to device {vertex.space}, where nobody reads it")


def _spaces_of(plan: JudgedPlan, ref: Ref) -> set[int]:
    """The spaces in which a copy of the plan finds the bytes of ``ref``."""
    vertex = plan.vertex[ref[0]]
    if _is_at_home(plan, ref):
        return {plan.task[plan.home_uses.homes[ref][0]].source}
    task = plan.task.get(vertex.id)
    if task is None or not host_copy_exists(task):
        return {vertex.space}
    return {task.source, vertex.space} if ref in plan.mem.slots or not plan.size(ref) else {task.source}


def _check_after(plan: JudgedPlan, before: Claims) -> None:
    for vertex in plan.graph.vertices:
        for other in vertex.after:
            if plan.vertex[other].kind is not VertexKind.INPUT or arrives_at_gate(plan.task[other]):
                before.claim(other, vertex.id, lambda: "the task graph says after")


def _behind_gate(plan: JudgedPlan, order: Mapping[int, int]) -> set[int]:
    """Return the vertices that start after a late value has arrived; no ``out`` vertex may be among them."""
    behind: set[int] = set()
    for vertex in sorted(order, key=order.__getitem__):
        task = plan.task.get(vertex)
        if (task is not None and arrives_at_gate(task)) or any(p in behind for p in plan.predecessors[vertex]):
            behind.add(vertex)
            if task is not None and handed_out_at_gate(task):
                raise VerifyError(f"{plan.name(vertex)} is out but waits for a late input: the step would never end")
    return behind


def _check_slots(plan: JudgedPlan) -> None:
    spaces = {space.id: space for space in (*plan.mem.devices, *plan.backing)}
    for ref, slot in plan.mem.slots.items():
        vertex = plan.vertex.get(ref[0])
        if vertex is None or not 0 <= ref[1] < len(vertex.sizes):
            raise VerifyError(f"there is an offset for [{ref[0]}, {ref[1]}], which does not exist")
        space = spaces[vertex.space]
        task = plan.task.get(vertex.id)
        at_home = space.is_host_device and plan.carried.get(ref) in plan.home_uses.homes
        moves_not = at_home or (task is not None and is_foreign(task))
        if moves_not or (writes_home(plan, ref) and plan.size(ref)):
            raise VerifyError(f"{plan.name(ref[0])} has an offset in a space but does not live there")
        size = plan.size(ref)
        if vertex.id in plan.task and size and not outlives_step(plan.task[vertex.id]):
            raise VerifyError(f"{plan.name(ref[0])} is resident, but the host renews it: each step has to reload it")
        if slot.space != vertex.space:
            raise VerifyError(f"{plan.name(ref[0])}: the slot of output {ref[1]} is in space {slot.space}")
        if slot.offset < 0 or slot.offset + size > space.memory:
            raise VerifyError(
                f"{plan.name(ref[0])}: [{slot.offset}, {slot.offset + size}) is outside the {space.memory} bytes"
                f" of {named(space)}"
            )
        if slot.offset % space.alignment:
            raise VerifyError(f"{plan.name(ref[0])}: offset {slot.offset} is not a multiple of {space.alignment}")
    for vertex in plan.mem.vertices:
        task = plan.task.get(vertex.id)
        if task is not None and (host_copy_exists(task) or is_foreign(task)):
            continue
        for k, size in enumerate(vertex.sizes):
            if size and (vertex.id, k) not in plan.mem.slots and not writes_home(plan, (vertex.id, k)):
                raise VerifyError(f"{plan.name(vertex.id)}: output {k} has no offset")


def _readers(plan: JudgedPlan) -> dict[Ref, list[int]]:
    """Return the readers of each copy, in memory, but for homes: a reload of an input reads the host's copy, not the
    device's."""
    readers: dict[Ref, list[int]] = defaultdict(list)
    for vertex in plan.mem.vertices:
        for position, ref in enumerate(vertex.inputs):
            if not plan.reads_at_home(vertex.id, position) and vertex.id not in readers[ref]:
                readers[ref].append(vertex.id)
    return readers


def _check_memory(plan: JudgedPlan, order: Mapping[int, int], before: Claims, gate: set[int]) -> dict[int, Occupants]:
    readers = _readers(plan)
    has_gate = any(arrives_at_gate(vertex) for vertex in plan.graph.vertices)
    memory: dict[int, Occupants] = defaultdict(Occupants)
    # An output written over a late input lies in that input's reserved bytes.
    reserved = {(vertex.id, 0) for vertex in plan.graph.vertices if arrives_at_gate(vertex)}

    def turn(ref: Ref) -> tuple[bool, int, int]:
        return plan.vertex[ref[0]].kind is not VertexKind.INPUT, order[ref[0]], ref[1]

    # Invariant: memory has the last occupant of each byte, in the order of writing. For each two consecutive occupants
    # of a byte, claims say that all users of the first finish before the second is written.
    for ref in sorted((ref for ref in plan.mem.slots if plan.size(ref)), key=turn):
        slot = plan.mem.slots[ref]
        for former in memory[slot.space].replace(slot.offset, slot.offset + plan.size(ref), ref):
            _check_overwrite(plan, former, ref, readers[former], before)
            if former in reserved:
                if ref[0] not in readers[former]:
                    raise VerifyError(f"{plan.name(ref[0])} is put where a late input has its place for the whole step")
                reserved.add(ref)
            task = plan.task.get(former[0])
            if task is not None and handed_out_at_gate(task) and has_gate and ref[0] not in gate:
                raise VerifyError(f"{plan.name(ref[0])} overwrites {plan.name(former[0])} before it is handed out")
        _check_inplace(plan, ref, slot)
    return memory


def _check_overwrite(plan: JudgedPlan, former: Ref, ref: Ref, readers: Sequence[int], before: Claims) -> None:
    writer = ref[0]

    def both() -> str:
        names = (f"{plan.name(vertex)} output {output}" for vertex, output in (former, ref))
        return f"{' and '.join(names)} share memory"

    if plan.vertex[writer].kind is VertexKind.INPUT:
        raise VerifyError(f"{both()} and both are there at the start")
    if former[0] == writer:
        raise VerifyError(both())
    if writer in readers:
        _check_reuse(plan, former, ref, both)
    if not readers and plan.vertex[former[0]].kind is not VertexKind.INPUT:
        before.claim(former[0], writer, both)
    # The producer need not be claimed: each reader has a data edge from it.
    for reader in readers:
        if reader != writer:
            before.claim(reader, writer, both)


def _check_reuse(plan: JudgedPlan, former: Ref, ref: Ref, both: Callable[[], str]) -> None:
    """Allow ``ref`` to be written over an input of its own vertex only as ``inplace`` or ``may_inplace`` says."""
    writer = plan.task.get(ref[0])
    allowed: set[int] = set()
    if writer is not None:
        allowed = {position for output, position in writer.inplace if output == ref[1]}
        if ref[1] == 0:
            allowed |= set(writer.may_inplace)
    named = any(plan.vertex[ref[0]].inputs[position] == former for position in allowed)
    if not named:
        raise VerifyError(f"{both()}, but the second reads the first and may not be written over it")
    if plan.mem.slots[former].offset != plan.mem.slots[ref].offset or plan.size(ref) > plan.size(former):
        raise VerifyError(f"{both()}: writing over an input needs the same offset and no larger an output")


def _check_inplace(plan: JudgedPlan, ref: Ref, slot: Slot) -> None:
    task = plan.task.get(ref[0])
    position = None if task is None else dict(task.inplace).get(ref[1])
    if position is None:
        return
    target = plan.mem.slots.get(plan.vertex[ref[0]].inputs[position])
    if target != slot:
        raise VerifyError(f"{plan.name(ref[0])}: output {ref[1]} must be written over inputs[{position}]")


def _copies(plan: JudgedPlan) -> dict[Ref, list[Ref]]:
    copies: dict[Ref, list[Ref]] = defaultdict(list)
    for copy, value in plan.carried.items():
        copies[value].append(copy)
    return copies


def _intact(plan: JudgedPlan, copy: Ref, ends: Mapping[int, Occupants], home_writers: Mapping[Ref, Ref]) -> bool:
    """Whether the bytes of ``copy`` are still there when everything has run."""
    if writes_home(plan, copy):
        return home_writers[plan.state[plan.carried[copy]]] == copy
    slot = plan.mem.slots.get(copy)
    return slot is not None and ends[slot.space].at(slot.offset, slot.offset + plan.size(copy)) == {copy}


def _check_kept(plan: JudgedPlan, ends: Mapping[int, Occupants], home_writers: Mapping[Ref, Ref]) -> None:
    copies = _copies(plan)
    has_gate = any(arrives_at_gate(vertex) for vertex in plan.graph.vertices)
    for vertex in plan.graph.vertices:
        if (
            not (must_survive_step(vertex) or (handed_out_at_gate(vertex) and not has_gate))
            or (host_copy_exists(vertex) and plan.last_version((vertex.id, 0)) == (vertex.id, 0))
            or is_foreign(vertex)
        ):
            continue
        for k, size in enumerate(vertex.sizes):
            whole = (copy for copy in copies[vertex.id, k] if plan.is_whole(copy))
            if size and not any(_intact(plan, copy, ends, home_writers) for copy in whole):
                raise VerifyError(f"{plan.name(vertex.id)}: output {k} must be kept but is overwritten")


def _check_cyclic(plan: JudgedPlan, ends: Mapping[int, Occupants]) -> None:
    for vertex in plan.mem.vertices:
        if swaps_in(vertex):
            value = plan.carried[vertex.id, 0]
            loaded = plan.task[plan.state.get(value, value)[0]]
            if not may_leave(loaded):
                raise VerifyError(f"{plan.name(vertex.id)} loads {plan.name(loaded.id)}, which has to stay")
    check_ranges_back(plan, ends)
    for vertex in plan.graph.vertices:
        slot = plan.mem.slots.get((vertex.id, 0))
        if vertex.kind is not VertexKind.INPUT or not host_copy_exists(vertex) or slot is None or not vertex.sizes[0]:
            continue
        holders = ends[slot.space].at(slot.offset, slot.offset + vertex.sizes[0])
        last = plan.last_version((vertex.id, 0))
        back = all(plan.carried[holder] == last and plan.origin(holder) == slot.offset for holder in holders)
        if not back or (last != (vertex.id, 0) and len(holders) > 1):
            raise VerifyError(f"{plan.name(vertex.id)} is resident but not back at its offset when the step ends")
