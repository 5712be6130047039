"""Where a kept value, or a version of a state, lies when a step of a plan has ended."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from disco_accel.errors import ExecutionError
from disco_accel.execute.planned_states import PlannedStates
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind


class _Residence(NamedTuple):
    """``size`` bytes at ``offset`` of the arena of ``device``, or of the host arena if that is None. ``home``: of the
    home of that state instead."""

    device: int | None
    offset: int
    size: int
    home: int | None = None


class FinalResidences:
    """The places that still hold values at the end of a step of ``graph``. Any valid execution ends with the same
    contents, so the serial order tells: from its end backwards, a place holds its value if no later vertex writes to
    its bytes. One pass finds that for all values."""

    def __init__(self, graph: MemGraph, states: PlannedStates) -> None:
        self._graph, self._states = graph, states
        self._vertices = {vertex.id: vertex for vertex in graph.vertices}
        self._offloads = defaultdict[Ref, list[Vertex]](list)
        self._reloads = defaultdict[Ref, list[Vertex]](list)
        offloaded = {v.id: v.inputs[0] for v in graph.vertices if swaps_out(v)}
        for vertex in graph.vertices:
            if swaps_out(vertex):
                self._offloads[vertex.inputs[0]].append(vertex)
            elif swaps_in(vertex):
                # A state's version may come from its home, and keeps its name through any number of copies.
                copied = states.version.get((vertex.id, 0)), offloaded.get(vertex.inputs[0][0])
                for value in dict.fromkeys(ref for ref in copied if ref is not None):
                    self._reloads[value].append(vertex)
        self._find_last_writes()

    def _find_last_writes(self) -> None:
        """Fill ``_kept`` with values whose slots are not written to after them."""
        self._kept = set[Ref]()
        written = defaultdict[int, _Written](_Written)
        for vertex in reversed(self._graph.vertices):
            refs = [(vertex.id, k) for k in range(len(vertex.sizes))]
            slots = [
                (ref, slot.space, slot.offset, slot.offset + size)
                for ref, size in zip(refs, vertex.sizes, strict=True)
                if (slot := self._graph.slots.get(ref)) is not None
            ]
            self._kept.update(ref for ref, space, begin, end in slots if not written[space].reaches(begin, end))
            # What is there when a step begins is no write.
            if vertex.kind is not VertexKind.INPUT:
                for _, space, begin, end in slots:
                    written[space].add(begin, end)

    def of(self, ref: Ref) -> _Residence:
        """The place that still holds ``ref`` at the end: on the device if one does, else at home or in the host arena.
        A version that a kernel has written at home is taken from there. Raises ExecutionError when the plan keeps no
        copy."""
        states, size = self._states, self._vertices[ref[0]].sizes[ref[1]]
        state = states.state.get(ref)
        home = None if state is None or states.at_home[state] != ref else _Residence(None, 0, size, state)
        if home is not None and ref in states.written:
            return home
        copies: Sequence[Vertex] = self._reloads.get(ref, ())
        for place in (ref, *((v.id, 0) for v in reversed(copies) if v.sizes[0] == size)):
            slot = self._graph.slots.get(place)
            if slot is not None and place in self._kept:
                return _Residence(slot.space, slot.offset, size)
        if home is not None:
            return home
        for offload in self._offloads.get(ref, ()):
            if (offload.id, 0) in self._kept:
                return _Residence(None, self._graph.slots[offload.id, 0].offset, offload.sizes[0])
        raise ExecutionError(f"value {ref[1]} of vertex {ref[0]} is not kept by the plan")


class _Written:
    """Bytes as sorted ranges that neither touch nor overlap."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def reaches(self, begin: int, end: int) -> bool:
        """Whether some of the bytes from ``begin`` to ``end`` are among them."""
        at = bisect_right(self._ends, begin)
        return at < len(self._begins) and self._begins[at] < end

    def add(self, begin: int, end: int) -> None:
        """The bytes from ``begin`` to ``end`` too."""
        low, high = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if low < high:
            begin, end = min(begin, self._begins[low]), max(end, self._ends[high - 1])
        self._begins[low:high], self._ends[low:high] = [begin], [end]
