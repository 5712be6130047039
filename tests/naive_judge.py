"""A judge of plans by definition: the whole closure, every pair of values. For small graphs; no code of verify's.

``is_safe`` is docs/schema.md's "What verify demands", line by line.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind

INPUT, KERNEL, TRANSFER, OFFLOAD, RELOAD = VertexKind


def is_safe(graph: TaskGraph, plan: MemGraph) -> bool:
    """Whether ``plan`` computes ``graph`` in any order that its edges allow, within the graph's devices."""
    own, of = {v.id: v for v in graph.vertices}, {v.id: v for v in plan.vertices}
    if not _same(graph, plan, own, of):
        return False
    before = _closure(plan, of)
    return before is not None and _Memory(plan, own, of, before).is_right()


def _same(graph: TaskGraph, plan: MemGraph, own: dict[int, Vertex], of: dict[int, Vertex]) -> bool:
    values = {(v.id, k) for v in plan.vertices for k in range(len(v.sizes))}
    devices = {d.id: d for d in graph.devices}
    reloads = [v.inputs for v in plan.vertices if v.kind == RELOAD]
    extra = [v for v in plan.vertices if v.id not in own]
    return (
        len(of) == len(plan.vertices)
        and own.keys() <= of.keys()
        and all(replace(of[i], inputs=v.inputs) == v and len(of[i].inputs) == len(v.inputs) for i, v in own.items())
        and [d.id for d in plan.devices] == list(devices)
        and all(d.memory <= devices[d.id].memory and d.alignment % devices[d.id].alignment == 0 for d in plan.devices)
        and all(v.kind in (OFFLOAD, RELOAD) and len(v.inputs) == len(v.sizes) == 1 for v in extra)
        and all(v == Vertex(v.id, v.kind, v.device, v.op, v.inputs, v.sizes, v.duration, v.clean) for v in extra)
        and all(
            v.kind == RELOAD and (of[v.inputs[0][0]].clean or reloads.count(v.inputs) > 1) for v in extra if v.clean
        )
        and all(v.device in devices and set(v.inputs) <= values for v in plan.vertices)
        and plan.slots.keys() <= values
    )


def _closure(plan: MemGraph, of: dict[int, Vertex]) -> dict[int, set[int]] | None:
    """All that has finished before each vertex starts; None if an edge is wrong or missing, or there is a cycle."""
    waits: dict[int, set[int]] = {v: {p for p, _ in of[v].inputs if of[p].kind == INPUT} for v in of}
    for u, v in (*plan.data_edges, *plan.memory_edges):
        if u not in of or v not in of or of[v].kind == INPUT:
            return None
        waits[v].add(u)
    if any(of[p].kind != INPUT and (p, v) not in plan.data_edges for v in of for p, _ in of[v].inputs):
        return None
    before = {v: set(u) for v, u in waits.items()}
    for _ in of:
        for v in of:
            before[v] |= {a for p in before[v] for a in before[p]}
    return None if any(v in before[v] for v in of) else before


class _Memory:
    """Where values are and who must have finished with them."""

    def __init__(self, plan: MemGraph, own: dict[int, Vertex], of: dict[int, Vertex], before: dict[int, set[int]]):
        self.plan, self.own, self.of, self.before = plan, own, of, before
        self.late = {v.id for v in own.values() if v.late}
        self.behind = {v for v in of if v in self.late or before[v] & self.late}
        self.value: dict[Ref, Ref] = {}
        self.places: dict[Ref, tuple[str, int, int]] = {
            ref: (f"device {s.device}", s.addr, s.addr + s.size) for ref, s in plan.slots.items() if s.size
        }
        self.places |= {(o, 0): ("host", a, a + of[o].sizes[0]) for o, a in plan.host_offsets.items() if of[o].sizes[0]}

    def is_right(self) -> bool:
        values = self._values_are_right() and self._places_are_right()
        outs = all(not v.out or v.id not in self.behind for v in self.own.values())
        after = all(self._is_before(u, v.id) for v in self.own.values() for u in v.after)
        pairs = [(a, b) for a, b in combinations(self.places, 2) if self._overlap(a, b)]
        return values and outs and after and all(self._ordered(a, b) for a, b in pairs) and self._end_is_right()

    def _overlap(self, a: Ref, b: Ref) -> bool:
        (here, start, end), (there, begin, stop) = self.places[a], self.places[b]
        return here == there and start < stop and begin < end

    def _is_before(self, u: int, v: int) -> bool:
        return u in self.before[v] or (self.of[u].kind == INPUT and u not in self.late)

    def _values_are_right(self) -> bool:
        for v in sorted(self.of, key=lambda v: len(self.before[v])):
            vertex = self.of[v]
            self.value |= {(v, k): (v, k) for k in range(len(vertex.sizes))}
            for position, ref in enumerate(vertex.inputs):
                source = self.of[ref[0]]
                size = source.sizes[ref[1]]
                on_device = source.kind != OFFLOAD and (ref in self.plan.slots or source.external or not size)
                if v in self.own:
                    wanted = self.own[v].inputs[position]
                    right = on_device and self.value[ref] == wanted and source.device == self.own[wanted[0]].device
                elif vertex.kind == OFFLOAD:
                    right = on_device and source.device == vertex.device and size == vertex.sizes[0]
                else:
                    right = (source.kind == OFFLOAD or source.clean) and size == vertex.sizes[0]
                if not right:
                    return False
                if v not in self.own:
                    self.value[v, 0] = self.value[ref]
        return True

    def _places_are_right(self) -> bool:
        plan, devices = self.plan, {d.id: d for d in self.plan.devices}
        for ref, slot in plan.slots.items():
            vertex, device = self.of[ref[0]], devices[self.of[ref[0]].device]
            inside = 0 <= slot.addr <= device.memory - slot.size and slot.addr % device.alignment == 0
            fits = slot.device == device.id and slot.size == vertex.sizes[ref[1]]
            if not inside or not fits or vertex.kind == OFFLOAD or vertex.external:
                return False
        for offload, start in plan.host_offsets.items():
            inside = 0 <= start <= plan.host_memory - sum(self.of[offload].sizes)
            if self.of[offload].kind != OFFLOAD or not inside or start % plan.host_alignment:
                return False
        homeless = (
            v for v in plan.vertices if v.kind != OFFLOAD and not (v.id in self.own and (v.clean or v.external))
        )
        return all((v.id, k) in plan.slots for v in homeless for k, size in enumerate(v.sizes) if size)

    def _readers(self, ref: Ref) -> set[int]:
        from_host = self.of[ref[0]].kind == INPUT
        return {v.id for v in self.plan.vertices if ref in v.inputs and not (v.kind == RELOAD and from_host)}

    def _ordered(self, a: Ref, b: Ref) -> bool:
        return a[0] != b[0] and (self._done_before(a, b) or self._done_before(b, a))

    def _done_before(self, a: Ref, b: Ref) -> bool:
        """Whether all who use ``a`` have finished when ``b`` is written, or ``b`` is written over it with leave."""
        writer, readers = b[0], self._readers(a)
        if self.of[writer].kind == INPUT:
            return False
        task = self.own.get(writer)
        if writer in readers:
            over = () if task is None else (*task.may_inplace, *(() if task.inplace is None else (task.inplace,)))
            named = any(self.of[writer].inputs[position] == a for position in over) and b[1] == 0
            (_, start, end), (_, begin, stop) = self.places[a], self.places[b]
            if not named or start != begin or stop > end:
                return False
        handed_out = a[0] in self.own and self.own[a[0]].out and bool(self.late)
        if handed_out and writer not in self.behind:
            return False
        return all(self._is_before(user, writer) for user in {a[0], *readers} - {writer})

    def _intact(self, ref: Ref) -> bool:
        if self.of[ref[0]].kind == OFFLOAD and ref[0] not in self.plan.host_offsets:
            return True
        others = (other for other in self.places if other != ref and self._overlap(other, ref))
        return ref in self.places and all(self._done_before(other, ref) for other in others)

    def _end_is_right(self) -> bool:
        for v in self.own.values():
            forced = self.places.get((v.id, 0)) if v.inplace is not None else None
            target = None if forced is None else self.places.get(self.of[v.id].inputs[v.inplace or 0])
            if forced is not None and (target is None or target[:2] != forced[:2]):
                return False
            must_stay = (v.keep or (v.out and not self.late)) and not v.clean and not v.external
            for k, size in enumerate(v.sizes):
                copies = [ref for ref, value in self.value.items() if value == (v.id, k)]
                if must_stay and size and not any(self._intact(ref) for ref in copies):
                    return False
                home = self.places.get((v.id, k)) if self.plan.cyclic and v.clean else None
                if home and not any(self.places.get(ref) == home and self._intact(ref) for ref in copies):
                    return False
        return self._late_places_stay()

    def _late_places_stay(self) -> bool:
        """What is written where a late input has its place is written over it, as it is itself over the next."""
        held = {(v, 0) for v in self.late}
        for ref in sorted(self.places, key=lambda ref: len(self.before[ref[0]])):
            below = [other for other in held if other in self.places and ref != other and self._overlap(other, ref)]
            if any(not any(ref[0] in self._readers(o) for o in below) for _ in below[:1]):
                return False
            held |= {ref} if below else set()
        return True
