"""By definition: does a plan read what it should, in any order that it allows? (a), (b), (e), (f) of docs/schema.md.

The whole closure, every pair of values. A home of a value that changes over steps is one more arena.
"""

from __future__ import annotations

from itertools import pairwise

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from tests.support.oracles.naive_bounds import (
    HOST,
    before_step,
    carried,
    comes_back,
    device_of,
    foreign,
    goes_out,
    homes,
    on_host,
    on_host_device,
    places,
    written_at_home,
)

INPUT, KERNEL, COPY = VertexKind


class Orders:
    """All orders of a plan. ``before``: the ancestors of each vertex, once ``a`` has closed them."""

    def __init__(self, graph: TaskGraph, plan: MemGraph) -> None:
        self.graph, self.plan, self.at = graph, plan, places(graph, plan)
        self.value = carried(graph, plan)
        self.own, self.of = {v.id: v for v in graph.vertices}, {v.id: v for v in plan.vertices}
        self.size = {(v.id, k): size for v in plan.vertices for k, size in enumerate(v.sizes)}
        self.homes, self.at_home = homes(graph), written_at_home(graph)
        self.late = {v.id for v in graph.vertices if v.traits.arrival == "gate"}
        self.before: dict[int, set[int]] = {
            v: {p for p, _ in self.of[v].inputs if INPUT == self.of[p].kind != self.of[v].kind} for v in self.of
        }

    def are_safe(self) -> bool:
        return self.a() and self.b() and self.e()

    def a(self) -> bool:
        for u, v in (*self.plan.data_edges, *self.plan.memory_edges):
            self.before[v].add(self.of[u].id)
        for k in self.of:
            for v in self.of:
                self.before[v] |= self.before[k] if k in self.before[v] else set()
        never = [v.id for v in self.of.values() if v.id in self.before[v.id] or (v.out and self.behind(v.id))]
        return not never and not any(self.before[v.id] for v in self.of.values() if v.kind == INPUT)

    def behind(self, v: int) -> bool:
        return v in self.late or bool(self.late & self.before[v])

    def done(self, u: int, v: int) -> bool:
        return u in self.before[v] or (self.of[u].kind == INPUT and u not in self.late)

    def b(self) -> bool:
        after = all(self.done(u, v.id) for v in self.graph.vertices for u in v.after)
        reads = all(self.reads(v, p) for v in self.plan.vertices for p in range(len(v.inputs)) if v.kind != INPUT)
        return after and reads and all(self.reads_all_bytes(v) for v in self.plan.vertices if v.id in self.own)

    def is_whole(self, ref: Ref) -> bool:
        return self.size[ref] == self.size[self.value[ref]]

    def origin(self, ref: Ref) -> tuple[int, int]:
        """Arena and address at which the value begins of which ``ref`` has bytes."""
        return self.at[ref][0], self.at[ref][1] - self.of[ref[0]].begin

    def reads_all_bytes(self, v: Vertex) -> bool:
        """Whether the ranges of each value that ``v`` reads lie side by side and are all of it."""
        named = [ref for p, ref in enumerate(v.inputs) if not self.uses_home(v, p)]
        further = v.inputs[len(self.own[v.id].inputs) :]
        for value in {self.value[ref] for ref in named}:
            refs = {ref for ref in named if self.value[ref] == value}
            if all(self.is_whole(ref) for ref in refs) and not refs & set(further):
                continue
            parts = sorted((self.of[ref[0]].begin, self.of[ref[0]].begin + self.size[ref]) for ref in refs)
            ends = [0, *(end for _, end in parts)]
            joined = [begin for begin, _ in parts] == ends[:-1] and ends[-1] == self.size[value]
            if not joined or not refs <= self.at.keys() or len({self.origin(ref) for ref in refs}) > 1:
                return False
        return True

    def reads(self, v: Vertex, p: int) -> bool:
        ref, source = v.inputs[p], self.of[v.inputs[p][0]]
        placed = ref in self.at or foreign(source) or not self.size[ref]
        on_device = not goes_out(source) and ref not in self.at_home and placed
        if v.id in self.own:
            first = p < len(self.own[v.id].inputs)
            if first == bool(source.begin) or (not first and not (comes_back(source) or source.kind == INPUT)):
                return False
            if v.kind != KERNEL and not self.is_whole(ref):
                return False
            wanted = self.own[v.id].inputs[p] if first else self.value[ref]
            nothing = not self.size[ref] and on_host_device(self.graph, source.space) and ref in self.homes
            there = on_device and (nothing or source.space == device_of(self.graph, wanted))
            if self.uses_home(v, p):
                # An INPUT, a version that was written at home, or an offload that went there: homes are below HOST.
                there = on_host(source) or not self.size[ref] or (ref in self.at and self.at[ref][0] < HOST)
            right = there and self.value[ref] == wanted
        elif goes_out(v):
            right = on_device and source.space == v.source and v.space == HOST and self.size[ref] == v.sizes[0]
            right = right and self.is_whole(ref) and not v.begin
        else:
            home = on_host(source) and source.id in self.own
            right = v.source == HOST and self.is_all_or_range(v, ref)
            right = right and (goes_out(source) or home or ref in self.at_home)
            right = right and (ref not in self.at_home or v.space == device_of(self.graph, self.value[ref]))
        return right and (source.kind == INPUT or (source.id, v.id) in self.plan.data_edges)

    def is_all_or_range(self, v: Vertex, ref: Ref) -> bool:
        """Whether the reload ``v`` copies all of ``ref``, or some of the bytes of what does not change over steps."""
        if not v.begin and self.size[ref] == v.sizes[0]:
            return True
        chain = self.value[ref] in self.homes and self.own[self.homes[self.value[ref]][0]].traits.access != "read"
        return not chain and v.begin >= 0 and 0 < v.sizes[0] <= self.size[ref] - v.begin

    def uses_home(self, v: Vertex, p: int) -> bool:
        """Whether ``v`` is a kernel of a host device that reads its input ``p`` at a home."""
        kernel = v.id in self.own and v.kind == KERNEL and on_host_device(self.graph, v.space)
        return kernel and p < len(self.own[v.id].inputs) and self.own[v.id].inputs[p] in self.homes

    def overlap(self, a: Ref, b: Ref) -> bool:
        (arena, start, end), (other, begin, stop) = self.at.get(a, (0, 0, 0)), self.at.get(b, (0, 0, 0))
        return a != b and arena == other and max(start, begin) < min(end, stop)

    def read(self, v: Vertex) -> list[Ref]:
        """What ``v`` reads, in memory: a reload of an input, or a kernel of a host device, its home."""
        inputs = [(ref, self.of[ref[0]].kind == INPUT) for ref in v.inputs]
        at_home = comes_back(v) or v.kind == INPUT
        homes = [(at_home or self.uses_home(v, p)) and known for p, (_, known) in enumerate(inputs)]
        return [before_step(ref) if home else ref for (ref, _), home in zip(inputs, homes, strict=True)]

    def written_over(self, a: Ref, b: Ref) -> bool:
        """Whether ``b`` is written when all users of ``a`` have finished, or over it by a reader that may."""
        writer, users = self.of[b[0]], {v.id for v in self.of.values() if a in self.read(v)} | {a[0]}
        may = [self.read(writer)[p] for p in (() if b[1] else writer.may_inplace)]
        may += [self.read(writer)[p] for k, p in writer.inplace if k == b[1]]
        exact = a in may and self.at[a][1] == self.at[b][1] and self.at[b][2] <= self.at[a][2]
        if writer.kind == INPUT or a[0] == b[0] or (writer.id in users and not exact):
            return False
        held_for_gate = self.late and self.of[a[0]].out and not self.behind(writer.id)
        return not held_for_gate and all(self.done(u, writer.id) for u in users - {writer.id})

    def in_late_place(self, ref: Ref) -> bool:
        """Whether ``ref`` is a late input or written over one, or over an output that was written so."""
        return ref[0] in self.late or any(self.in_late_place(o) for o in self.of[ref[0]].inputs if self.overlap(o, ref))

    def e(self) -> bool:  # and (f): the host is one more arena, as each home is
        pairs = [(a, b) for a in self.at for b in self.at if self.overlap(a, b)]
        reserved = all(self.in_late_place(b) for a, b in pairs if a[0] in self.late)
        forced = [(self.read(v)[p], (v.id, k)) for v in self.of.values() for k, p in v.inplace if v.sizes[k]]
        inplace = all(self.at[over][:2] == self.at[ref][:2] for over, ref in forced)
        return reserved and inplace and all(self.written_over(a, b) or self.written_over(b, a) for a, b in pairs)

    def holds_at_end(self, ref: Ref) -> bool:
        """Whether each byte of the place of ``ref`` has at the end the byte of the value that it has at the start."""
        _, start, end = self.at[ref]
        bounds = sorted({min(max(b, start), end) for other in self.at for b in self.at[other][1:]})
        copies = [c for c in self.at if self.value.get(c) == self.value[ref] and self.origin(c) == self.origin(ref)]
        return all(
            any(self.at[c][1] <= begin and stop <= self.at[c][2] and self.unwritten(c, begin, stop) for c in copies)
            for begin, stop in pairwise(bounds)
        )

    def unwritten(self, copy: Ref, begin: int, stop: int) -> bool:
        """Whether what ``copy`` wrote from ``begin`` up to ``stop`` is still there when all has run."""
        arena = self.at[copy][0]
        others = [o for o in self.at if o != copy and self.at[o][0] == arena]
        return all(self.written_over(o, copy) for o in others if max(self.at[o][1], begin) < min(self.at[o][2], stop))

    def intact(self, copy: Ref) -> bool:
        """Whether ``copy`` is still there when all has run."""
        return copy in self.at and all(self.written_over(o, copy) for o in self.at if self.overlap(o, copy))
