"""Dequantise again, or keep: how many of a graph's equal kernels a plan does without, by simulated step time.

A dequantised weight is several times as large as the packed one, and made anew in microseconds to milliseconds; kept
from its first maker to the readers of the next it takes memory in between. Clones are put in a row, short gaps first:
those between recomputation and backward of one layer, then those between forward and backward, the last layer's first.
Some first part of the row is left out of the graph; how long a part is searched for with drafts, and the graphs that
promise most are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from disco_accel.graph.check import after_gate
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import AppliedPass, GraphPass, run_passes
from disco_accel.graph.taskgraph import TaskGraph, VertexKind, with_memory
from disco_accel.graph.value_numbering import Clone, clones, kept, without
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import Work
from disco_accel.plan.timed.search import drafted_seconds
from disco_accel.plan.timed.smallest_memory import FRUGAL
from disco_accel.simulate.simulator import Machine, simulate

Make = Callable[[TaskGraph, Work, list[AppliedPass], Collection[int]], MemGraph]
"""``make_plan`` with all else that it is told; last the kernels whose outputs are not to be offloaded. Raises
BudgetTooSmall or Infeasible."""

_JUDGED = 0.3
"""Share of the work for drafts that find how long a part of the row to leave out."""

_PLANNED = 0.6
"""Share of what is left then for the plan of the graph that promises most; the next ones get as much of the rest."""

_FINEST = 16
"""The search ends at parts that differ by one in so many clones."""

_LESS = 8
"""Where a part has no plan as fast as its drafts, the next one to be planned is shorter by one in so many clones."""

_ROOM = 0.96
"""Share of the memory that drafts are made for: values as large as dequantised weights leave gaps between them."""

_GOOD = 1.003
"""A draft that takes at most so many times what its kernels take is not bettered by keeping less."""

_AS_PROMISED = 1.005
"""A plan that takes at most so many times its draft needs no other one beside it."""


def decide(graph: TaskGraph, make: Make, machine: Machine, work: Work, applied: list[AppliedPass]) -> MemGraph:
    """Return the fastest plan found of ``graph`` without some of its clones, which is run step after step.

    ``graph_of_plan`` says which graph the plan is one of. A graph without clones is planned as it is. ``applied`` gets
    the passes of the plan that is returned. Raises BudgetTooSmall if the graph does not fit, without clones neither.
    """
    found = clones(graph)
    if not found:
        return make(graph, work, applied, ())
    return _Choice(graph, _in_a_row(graph, found, machine), make, machine, work, applied).run()


def keep_dequantised(left_out: Sequence[Clone]) -> GraphPass:
    """The pass that leaves clones out."""
    return GraphPass(
        "keep dequantised", "weights kept where others would dequantise them again", partial(without, chosen=left_out)
    )


def _in_a_row(graph: TaskGraph, found: Sequence[Clone], machine: Machine) -> tuple[list[Clone], int]:
    """Return the clones, those of kernels behind the gate first, each kind by the seconds that a value would be kept
    longer; and the number of the first kind."""
    behind = after_gate(graph.vertices)
    names = {clone.original for clone in found} | {clone.vertex for clone in found}
    start: dict[int, float] = {}
    used: dict[int, float] = {}
    clock = 0.0
    for vertex in graph.vertices:
        start[vertex.id] = clock
        clock += machine.seconds(vertex) if vertex.kind is VertexKind.KERNEL else 0.0
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


class _Choice:
    """``row`` of clones, ``short`` of which come first; ``judged``: clones left out → seconds of a draft."""

    def __init__(
        self,
        graph: TaskGraph,
        row: tuple[list[Clone], int],
        make: Make,
        machine: Machine,
        work: Work,
        applied: list[AppliedPass],
    ) -> None:
        self.graph = graph
        self.row, self.short = row
        self.make = make
        self.machine = machine
        self.work = work
        self.applied = applied
        self.judged: dict[int, float] = {}
        self.drafting = work.shared(_JUDGED, len(graph.vertices))

    def run(self) -> MemGraph:
        if not self.work.late():
            self._search()
        self.work.take(self.drafting)
        best: MemGraph | None = None
        makespan = float("inf")
        passes_of_best = list[AppliedPass]()
        for count in self._promising():
            if best is not None and (self.work.late() or self._compute(count) >= makespan):
                continue
            if count and makespan <= _AS_PROMISED * self.fastest_draft:
                continue
            passes = list[AppliedPass]()
            try:
                plan = self._planned(count, _PLANNED if count else 1.0, passes, answer=not count and best is None)
            except Infeasible:
                continue
            seconds = simulate(plan, self.machine).makespan
            if seconds < makespan and not self._offloads_kept(plan, count):
                best, makespan, passes_of_best = plan, seconds, passes
        self.applied += passes_of_best
        assert best is not None, "the graph with all clones has a plan, or BudgetTooSmall was raised"
        return best

    def _planned(self, count: int, share: float, passes: list[AppliedPass], *, answer: bool) -> MemGraph:
        graph = run_passes(self.graph, [keep_dequantised(self.row[:count])], passes)
        own = self.work.shared(share, len(graph.vertices), finds_needed=answer)
        try:
            return self.make(graph, own, passes, kept(self.row[:count]))
        finally:
            self.work.take(own)

    def _promising(self) -> list[int]:
        """The parts to plan: that with the fastest draft, the fastest of those that are shorter by more than a little,
        the short gaps; last none of the row."""
        feasible = [count for count, seconds in self.judged.items() if seconds < float("inf")]
        chosen = list[int]()
        for _ in range(2):
            if feasible:
                chosen.append(min(feasible, key=lambda count: (self.judged[count], count)))
                feasible = [count for count in feasible if count <= chosen[-1] - max(1, len(self.row) // _LESS)]
        if self.short in feasible or (self.judged and self.short not in self.judged):
            chosen.append(self.short)
        return [*dict.fromkeys(count for count in chosen if count), 0]

    def _search(self) -> None:
        """Judge the whole row, its short gaps, nothing, and around the best of them ever finer parts.

        Leaving out more saves seconds as long as there is memory, and costs reloads from there on, so that there is
        one best part; where drafts say otherwise, the search ends at a part that its neighbours do not better."""
        whole = len(self.row)
        if self._judge(whole) <= _GOOD * self._compute(whole):
            return
        for count in (self.short, 0):
            self._judge(count)
        while not self.drafting.over(len(self.graph.vertices)):
            best = min(self.judged, key=lambda count: (self.judged[count], count))
            below = max((count for count in self.judged if count < best), default=best)
            above = min((count for count in self.judged if count > best), default=best)
            gaps = [(best - below, (below + best) // 2), (above - best, (best + above + 1) // 2)]
            width, middle = max(gaps)
            if width <= max(1, whole // _FINEST) or middle in self.judged:
                return
            self._judge(middle)

    def _judge(self, count: int) -> float:
        if count not in self.judged:
            graph = without(self.graph, self.row[:count])
            self.judged[count] = drafted_seconds(
                with_memory(graph, lambda device: int(_ROOM * device.memory)),
                self.machine,
                cyclic=True,
                work=self.drafting,
                settings=FRUGAL,
                not_offloaded=kept(self.row[:count]),
            )
        return self.judged[count]

    def _offloads_kept(self, plan: MemGraph, count: int) -> bool:
        """Whether values are offloaded that were to be kept, as BUILDMEMGRAPH may do: to dequantise them again takes
        less than to copy them, and no host memory."""
        values = kept(self.row[:count])
        return any(v.kind is VertexKind.OFFLOAD and v.inputs[0][0] in values for v in plan.vertices)

    @property
    def fastest_draft(self) -> float:
        """Seconds of the fastest draft."""
        return min(self.judged.values(), default=float("inf"))

    def _compute(self, count: int) -> float:
        """Seconds that no plan of the graph without so many clones goes below: the busiest device's kernels."""
        busy: dict[int, float] = {}
        for vertex in without(self.graph, self.row[:count]).vertices:
            if vertex.kind is VertexKind.KERNEL:
                busy[vertex.device] = busy.get(vertex.device, 0.0) + self.machine.seconds(vertex)
        return max(busy.values(), default=0.0) / self.machine.compute_streams
