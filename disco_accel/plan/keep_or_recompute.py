"""Dequantise again, or keep: how many of a graph's equal kernels a plan does without, by simulated step time.

A dequantised weight is several times as large as the packed one, and made anew in microseconds to milliseconds; kept
from its first maker to the readers of the next it takes memory in between. Clones are put in a row, short gaps first:
those between recomputation and backward of one layer, then those between forward and backward, the last layer's first.
Some first part of the row is left out of the graph. Its length is searched for with drafts, among those that the bytes
allow. The most promising draft gets offsets. Only where it finds none, or no draft betters the graph with all clones,
graphs are planned from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from disco_accel.eviction import AUTO
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import GraphPass, run_passes
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.value_numbering import Clone, clones, kept, without
from disco_accel.plan.duplicates import kept_bytes_of, ordered_duplicates
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork, enough
from disco_accel.plan.select import Planned, planned_with, planning_passes
from disco_accel.plan.timed.search import DraftedGraph, drafted
from disco_accel.plan.timed.smallest_memory import FRUGAL
from disco_accel.simulate.simulator import Machine, simulate

_DRAFTS = 0.3
"""Share of the work for drafts that find how long a part of the row to leave out."""

_OFFSETS = 0.1
"""Share of the work for the offsets of one graph's drafts."""

_OFFERED = 3
"""Drafts that get offsets, one after the other, until one has them."""

_ASIDE = 2
"""A part of the row that is planned from scratch gets at most so many times the work of the graph with all clones."""

_FINEST = 32
"""The search ends at parts that differ by one in so many clones."""

_RESERVES = (0.05, 0.12)
"""Shares of the memory that drafts leave free: values as large as dequantised weights leave gaps between them. The
second is tried where drafts wait for the link with the first: by a small difference a step may begin with too many of
the largest weights."""

_AS_PROMISED = 1.005
"""A plan that takes at most so many times the fastest draft needs no other one beside it."""

_SETTINGS = replace(FRUGAL, low_peak_order=False, repacking_rounds=12, redrafts=0)
"""One draft for each graph, whose offsets are looked for once: where they are not found, there are other graphs."""


@collector_paused()
def decide(
    graph: TaskGraph, machine: Machine, work: SearchWork, *, planner: str = "timed", policy: str = AUTO
) -> Planned:
    """Return the fastest plan found of ``graph`` without some of its clones, which is run step after step, and its
    passes.

    ``graph_of_plan`` says which graph the plan is one of. A graph without clones is planned as it is. ``planner`` and
    ``policy``: as in ``make_plan``. Raises BudgetTooSmall if the graph does not fit, without clones neither.
    """
    plan_with = partial(planned_with, planner=planner, policy=policy, cyclic=True, machine=machine)
    found = clones(graph)
    if not found:
        return plan_with(graph, (), work=work)
    drafts = planner == "timed"
    return _Choice(graph, ordered_duplicates(graph, found, machine), plan_with, machine, work, drafts).run()


def keep_dequantised(left_out: Sequence[Clone]) -> GraphPass:
    """The pass that leaves clones out."""
    return GraphPass(
        "keep dequantised", "weights kept where others would dequantise them again", partial(without, chosen=left_out)
    )


class _Choice:
    """``row`` of clones, ``short`` of which come first; ``judged``: clones left out → drafts of the graph without them.
    ``best``: the plan so far and its passes, with its ``makespan``. ``offers_drafts``: drafts get offsets."""

    def __init__(
        self,
        graph: TaskGraph,
        row: tuple[list[Clone], int],
        plan_with: Callable[..., Planned],
        machine: Machine,
        work: SearchWork,
        offers_drafts: bool,
    ) -> None:
        self.graph = graph
        self.row, self.short = row
        self.plan_with = plan_with
        self.machine = machine
        self.work = work
        self.offers_drafts = offers_drafts
        self.judged: dict[int, DraftedGraph] = {}
        self.drafting = work.shared(_DRAFTS, len(graph.vertices))
        self.reserve = _RESERVES[0]
        self.ratio: float | None = None
        self.best: Planned | None = None
        self.makespan = float("inf")

    def run(self) -> Planned:
        if not self.work.late():
            self._search()
        self.work.take(self.drafting)
        # The timed planner has its own way where there are several devices.
        kernels = (vertex for vertex in self.graph.vertices if vertex.kind is VertexKind.KERNEL)
        if self.offers_drafts and len({vertex.space for vertex in kernels}) == 1:
            self._give_offsets()
        self._plan_from_scratch()
        assert self.best is not None, "the graph with all clones has a plan, or BudgetTooSmall was raised"
        return self.best

    def _search(self) -> None:
        """Judge the whole row, else its short gaps, and parts between the longest that fits and the best so far.

        Invariant: no part longer than ``above`` has a draft as fast as ``best``'s, as far as is known. Leaving out more
        saves seconds as long as there is memory, and costs reloads from there on."""
        above = self._longest()
        if above == len(self.row) and self._judge(above).keeps_up:
            return
        best = self.short if above >= self.short else 0
        if best:
            self._judge(best)
            if not self.judged[best].keeps_up:
                self._judge_with_more_room(best)
            if not self.judged[best].keeps_up:
                return
        while above - best > max(1, len(self.row) // _FINEST) and not self.drafting.over(len(self.graph.vertices)):
            middle = (best + above + 1) // 2
            if self._judge(middle).seconds < self._seconds(best):
                best = middle
            else:
                above = middle

    def _longest(self) -> int:
        """The longest part of the row that can be left out by its bytes, 0 if none can. Activations are offloaded where
        the gaps within a layer are kept only so, or a step has no room without."""
        memory = {d.id: d.memory - int(self.reserve * d.memory) for d in self.graph.devices}
        longest = dict[float | None, int]()
        for ratio in _SETTINGS.min_gap_ratios:
            kept_bytes = kept_bytes_of(self.graph, self.row, self.machine, ratio)
            longest[ratio] = -1 if kept_bytes is None else kept_bytes.longest(memory)
            if longest[ratio] >= max(1, self.short):
                break
        self.ratio = max(longest, key=lambda ratio: longest[ratio])
        return max(0, longest[self.ratio])

    def _judge(self, count: int) -> DraftedGraph:
        if count not in self.judged:
            self.judged[count] = drafted(
                run_passes(self.graph, self._passes(count)),
                self.machine,
                cyclic=True,
                work=self.drafting,
                settings=replace(_SETTINGS, min_gap_ratios=(self.ratio,)),
                reserve=self.reserve,
                not_offloaded=kept(self.row[:count]),
                any_plan=True,
            )
        return self.judged[count]

    def _passes(self, count: int) -> tuple[GraphPass, ...]:
        return planning_passes(keep_dequantised(self.row[:count]))

    def _judge_with_more_room(self, count: int) -> None:
        """Judge once more with the other reserve, and go on with whichever is better."""
        before = self.judged.pop(count)
        self.reserve = _RESERVES[1]
        if self._judge(count).seconds >= before.seconds:
            self.judged[count], self.reserve = before, _RESERVES[0]

    def _seconds(self, count: int) -> float:
        return self.judged[count].seconds if count in self.judged else float("inf")

    def _fastest(self) -> list[int]:
        """The parts that have drafts, the fastest first."""
        feasible = [count for count in self.judged if self._seconds(count) < float("inf")]
        return sorted(feasible, key=lambda count: (self._seconds(count), count))

    def _give_offsets(self) -> None:
        """Give drafts offsets, the fastest first, until one has them."""
        for count in self._fastest()[:_OFFERED]:
            own = self.work.shared(_OFFSETS, len(self.graph.vertices))
            try:
                plan = replace(self.judged[count].plan(own), planner="timed")
            except Infeasible:
                continue
            finally:
                self.work.take(own)
            if plan.host.memory <= self.graph.host.memory:
                self._keep_if_faster(plan, self._passes(count))
                return

    def _plan_from_scratch(self) -> None:
        """Plan the graph with all clones unless its kernels take longer than the best plan; and the fastest draft's,
        where it promises more than there is. The graph with all clones gets the work of a graph that
        has none, so that no step is slower for this choice."""
        spent = 0.0
        if self.best is None or self._compute() < self.makespan:
            own = SearchWork(part=self.work.part) if self.work.limit is None else self.work.shared(1.0, 0)
            own.finds_needed = self.best is None
            spent = self._plan(0, own)
        for count in self._fastest():
            promised = self._seconds(count)
            if self.makespan <= _AS_PROMISED * promised or self.work.late():
                return
            own = self.work.shared(1.0, len(self.graph.vertices), finds_needed=False)
            own.part = min(own.part, _ASIDE * spent / enough(len(self.graph.vertices))) if spent else own.part
            if not own.over(len(self.graph.vertices)):
                self._plan(count, own)

    def _plan(self, count: int, own: SearchWork) -> float:
        """Plan the graph without so many of the row; return the work that it took."""
        left_out = self.row[:count]
        try:
            plan, passes = self.plan_with(
                self.graph, (keep_dequantised(left_out),), work=own, not_offloaded=kept(left_out)
            )
        except Infeasible:
            return own.spent
        finally:
            self.work.take(own)
        if not self._offloads_kept(plan, count):
            self._keep_if_faster(plan, passes)
        return own.spent

    def _keep_if_faster(self, plan: MemGraph, passes: tuple[GraphPass, ...]) -> None:
        makespan = simulate(plan, self.machine).makespan
        if makespan < self.makespan:
            self.best, self.makespan = (plan, passes), makespan

    def _offloads_kept(self, plan: MemGraph, count: int) -> bool:
        """Whether values are offloaded that were to be kept, as BUILDMEMGRAPH may do: to dequantise them again takes
        less than to copy them, and no host memory."""
        values = kept(self.row[:count])
        return any(swaps_out(v) and v.inputs[0][0] in values for v in plan.vertices)

    def _compute(self) -> float:
        """Seconds that no plan of the graph with all clones goes below: the busiest device's kernels."""
        busy: dict[int, float] = {}
        for vertex in self.graph.vertices:
            if vertex.kind is VertexKind.KERNEL:
                busy[vertex.space] = busy.get(vertex.space, 0.0) + (vertex.duration or 0.0)
        return max(busy.values(), default=0.0) / self.machine.compute_streams
