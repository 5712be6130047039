"""Recompute, or keep: the kernels of a graph that a plan leaves out, since others compute the same, by step time.

A checkpointed forward runs twice, and a dequantised weight is made anew for each reader. A value that is kept from its
first kernel to the readers of the second takes memory in between, or its way to the host and back. Minimum cuts at
several prices of memory (``recompute_cut.py``) give sets of kernels to leave out, each larger than the one before.
Leaving out more saves seconds as long as there is memory, and costs copies from there on: drafts find the set with the
shortest step. Its drafts become the plan where they have offsets. Otherwise it is planned from scratch. The graph as it
was written is planned too, unless its kernels or its drafts take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from disco_accel.eviction import AUTO
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import GraphPass, run_passes
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.value_numbering import Clone, clones, kept, without
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.recompute_cut import cut_at_price
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.select import Planned, planned_with, planning_passes
from disco_accel.plan.summary import swapped_bytes
from disco_accel.plan.timed.search import DraftedGraph, build_timed, drafted
from disco_accel.plan.timed.smallest_memory import FRUGAL
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.sizes import MAX_SIZE, format_size

_DRAFTS = 0.3
"""Share of the work for drafts that find a set to leave out."""

_OFFSETS = 0.1
"""Share of the work for the offsets of one graph's drafts."""

_OFFERED = 3
"""Drafts that get offsets, one after the other, until one has them."""

_RESERVES = (0.3, 0.15, 0.08, 0.04)
"""Shares of the memory beside the largest kernel that drafts leave free: values as large as kept activations leave gaps
between them."""

_RESERVE = _RESERVES[1]
"""Of the drafts that sets are compared by."""

_HALVINGS = (-4.0, 8.0)
"""Prices of memory that are tried: 1 halved so many times. At 16 next to nothing is kept, at 1/256 nearly all."""

_UNDRAFTED = (-2.0, 3.0, 8.0)
"""Prices, as ``_HALVINGS``, whose sets are planned from scratch where no set has drafts."""

_GOLDEN = (5**0.5 - 1) / 2

_FINEST = 0.2
"""The search ends at prices that differ by so many halvings."""

_FAR = 1.03
"""A graph whose drafts, in all of the memory, take so many times as long as the best plan is not planned beside it."""

_AS_FAST = 1.0001
"""Of plans whose times differ by less the one that swaps less is taken."""

_AS_PROMISED = 1.005
"""A plan that takes at most so many times the fastest draft needs no other one beside it."""

_SOON = 0.25
"""Share of the work for a plan that a step waits for, where drafts have made none."""

_KEEPS_UP = 1.003
"""A step that takes at most so many times as long as its kernels has little to gain."""

_SETTINGS = replace(
    FRUGAL,
    min_gap_ratios=(None, 2.0),
    low_peak_order=False,
    program_gaps_from=float("inf"),
    repacking_rounds=12,
    redrafts=0,
)
"""Two drafts for each graph, whose offsets are looked for once: where they are not found, there are other graphs."""


@collector_paused()
def decide(
    graph: TaskGraph,
    machine: Machine,
    work: SearchWork,
    *,
    planner: str = "timed",
    policy: str = AUTO,
    recompute: str = "auto",
    offered: Collection[int] = (),
    host_memory: int = MAX_SIZE,
) -> Planned:
    """Return the fastest plan found of ``graph`` without some of its clones, which is run step after step, and its
    passes.

    ``graph_of_plan`` says which graph the plan is one of. A graph without clones is planned as it is. ``planner`` and
    ``policy``: as in ``make_plan``. ``recompute``: ``auto``, or ``as-written``, where only values that are the same in
    every step, as dequantised weights are, may be kept. ``decided`` is the same for a graph that was chosen so before:
    drafts make plans of it even where nothing is left to choose. ``offered``: clones that the script does not run.
    ``host_memory``: bytes for values that leave the device; where no plan takes so few, the one that takes the fewest
    is returned. Raises BudgetTooSmall if the graph does not fit, without clones neither.
    """
    plan_with = partial(planned_with, planner=planner, policy=policy, cyclic=True, machine=machine)
    found = tuple(clone for clone in clones(graph) if recompute == "auto" or clone.constant)
    if not found and recompute != "decided":
        return plan_with(graph, (), work=work)
    room = min(host_memory, graph.host.memory)
    return _Choice(graph, found, offered, plan_with, machine, work, room, planner == "timed").run()


@collector_paused()
def plan_soon(
    graph: TaskGraph, machine: Machine, work: SearchWork, host_memory: int = MAX_SIZE
) -> tuple[MemGraph | None, bool]:
    """Return a plan of ``graph``, with all of its clones, that the timed planner makes of drafts, or else in a part of
    its work; None where neither has one. The second value: whether the step takes little longer than its kernels."""
    room, plan_with = min(host_memory, graph.host.memory), partial(planned_with, planner="timed")
    choice = _Choice(graph, (), (), plan_with, machine, work, room, offers_drafts=True)
    choice.draft()
    if choice.best is None:
        passes, own = planning_passes(), work.shared(_SOON, len(graph.vertices))
        with suppress(Infeasible):
            made = build_timed(run_passes(graph, passes), machine, cyclic=True, work=own)
            choice.keep_if_faster(replace(made, planner="timed"), passes)
    if choice.best is None:
        return None, False
    return choice.best[0], choice.makespan <= _KEEPS_UP * choice.compute(())


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Of a plan: ``seconds`` of all kernels whose values a step has made before. ``written``: of those that the script
    runs. ``dropped``: of those that the plan leaves out, with the number of these ``kernels``. ``kept_bytes``: of
    values that are kept for it, of which ``offloaded_bytes`` leave the device meanwhile."""

    seconds: float
    written: float
    dropped: float
    kernels: int
    kept_bytes: int
    offloaded_bytes: int

    @property
    def text(self) -> str:
        """For the user, behind the bytes that are copied."""
        if not self.dropped:
            return "; all recomputation stays"
        if not self.written:
            again = self.seconds - self.dropped
            return f"; {again / self.seconds:.0%} of the layers computed again for their backward" if again else ""
        away = f", {format_size(self.offloaded_bytes)} of it offloaded" if self.offloaded_bytes else ""
        share = self.dropped / self.seconds if self.seconds else 1.0
        return f"; {share:.0%} of the recomputation dropped for {format_size(self.kept_bytes)} of kept values{away}"

    @classmethod
    def of(
        cls, graph: TaskGraph, planned: TaskGraph, plan: MemGraph, offered: Collection[int] = ()
    ) -> Recomputation | None:
        """Of ``plan``, a plan of ``planned``, which is ``graph`` without some clones. ``offered``: those that the
        script does not run. None: a step repeats nothing."""
        found = clones(graph)
        if not found:
            return None
        there = {vertex.id for vertex in planned.vertices}
        all_out = {vertex.id for vertex in without(graph, found).vertices}
        seconds = {vertex.id: vertex.duration or 0.0 for vertex in graph.vertices}
        values = kept(graph, [clone for clone in found if clone.vertex not in there])
        out = [vertex.inputs[0] for vertex in plan.vertices if swaps_out(vertex)]
        return cls(
            sum(seconds[vertex] for vertex in seconds.keys() - all_out),
            sum(seconds[vertex] for vertex in seconds.keys() - all_out - frozenset(offered)),
            sum(seconds[vertex] for vertex in seconds.keys() - there),
            len(seconds) - len(there),
            sum(values.values()),
            sum(values.get(ref, 0) for ref in out),
        )


def keep_values(left_out: Sequence[Clone]) -> GraphPass:
    """The pass that leaves clones out."""
    return GraphPass("keep", "values kept where others would compute them again", partial(without, chosen=left_out))


class _Choice:
    """``written``: clones without which the graph is as the script wrote it. ``judged``: clones that are left out →
    drafts of the graph without them. ``planned``: of which a search has come to its end. ``best``: the plan so far and
    its passes, with its ``makespan``; ``too_much``: the one that takes the fewest bytes on the host of those that take
    more than ``host_memory``. ``offers_drafts``: drafts get offsets. ``reserve``: share of the memory that they leave
    free."""

    def __init__(
        self,
        graph: TaskGraph,
        found: tuple[Clone, ...],
        offered: Collection[int],
        plan_with: Callable[..., Planned],
        machine: Machine,
        work: SearchWork,
        host_memory: int,
        offers_drafts: bool,
    ) -> None:
        self.graph = graph
        self.found = found
        self.written = tuple(clone for clone in found if clone.vertex in offered)
        self.plan_with = plan_with
        self.machine = machine
        self.work = work
        self.offers_drafts = offers_drafts
        self.judged: dict[tuple[Clone, ...], DraftedGraph] = {}
        self.planned: set[tuple[Clone, ...]] = set()
        self.drafting = work.shared(_DRAFTS, len(graph.vertices))
        self.host_memory = host_memory
        self.best: Planned | None = None
        self.too_much: Planned | None = None
        self.makespan = float("inf")
        self.reserve = _RESERVE

    def run(self) -> Planned:
        self.draft()
        self._plan_from_scratch()
        found = self.best or self.too_much
        assert found is not None, "the graph with all clones has a plan, or a refusal was raised"
        return found

    def draft(self) -> None:
        """Judge sets of clones by drafts, and make plans of the best."""
        if not self.work.late():
            self._search()
        self.work.take(self.drafting)
        # The timed planner has its own way where there are several devices.
        kernels = (vertex for vertex in self.graph.vertices if vertex.kind is VertexKind.KERNEL)
        if self.offers_drafts and len({vertex.space for vertex in kernels}) == 1:
            self._give_offsets()

    def _search(self) -> None:
        """Judge the graph without all clones, and if that does not keep up, cuts at prices around the best.

        A golden section: the shortest step is between ``low`` and ``high``, as far as is known. From the best price on,
        a lower one leaves out more, and the step waits for copies longer than it saves."""
        if self._judge(self.found).keeps_up:
            return
        if self.judged[self.found].seconds == float("inf"):
            # Near the least memory there are drafts in all of it alone.
            drafts = self._drafted(self.found, 0.0)
            if drafts.seconds < float("inf"):
                self.reserve, self.judged[self.found] = 0.0, drafts
        if not self.found:
            return

        def judged(halvings: float) -> DraftedGraph:
            return self._judge(self.cut(2.0**-halvings))

        low, high = _HALVINGS
        while high - low > _FINEST and not self.drafting.over(len(self.graph.vertices)):
            first, second = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            more = judged(second)
            if more.keeps_up or judged(first).seconds >= more.seconds < float("inf"):
                low = first
            else:
                high = second

    @cached_property
    def cut(self) -> Callable[[float], tuple[Clone, ...]]:
        """The function from a price of memory to clones that are left out at it."""
        return cut_at_price(self.graph, self.found)

    def _judge(self, chosen: tuple[Clone, ...]) -> DraftedGraph:
        if chosen not in self.judged:
            self.judged[chosen] = self._drafted(chosen, self.reserve)
        return self.judged[chosen]

    def _drafted(self, chosen: tuple[Clone, ...], reserve: float) -> DraftedGraph:
        return drafted(
            run_passes(self.graph, planning_passes(keep_values(chosen))),
            self.machine,
            cyclic=True,
            work=self.drafting,
            settings=_SETTINGS,
            reserve=reserve,
            not_offloaded=_constants(self.graph, chosen),
            host_memory=self.host_memory,
        )

    def _fastest(self) -> list[tuple[Clone, ...]]:
        """The sets of clones whose graphs have drafts, the fastest first, and of equally fast ones the smaller."""
        feasible = [chosen for chosen, drafts in self.judged.items() if drafts.seconds < float("inf")]
        return sorted(feasible, key=lambda chosen: (self.judged[chosen].seconds, len(chosen)))

    def _give_offsets(self) -> None:
        """Give drafts offsets, the fastest first, until one has them. Then draft its graph in more of the memory while
        that makes a better plan; where none has them, in less."""
        fastest = self._fastest()[:_OFFERED]
        chosen = next((chosen for chosen in fastest if self._have_offsets(self.judged[chosen], chosen)), None)
        if chosen is None and fastest:
            self._have_offsets(self._drafted(fastest[0], _RESERVES[0]), fastest[0])
        if chosen is None or not self._swapped():
            return
        for reserve in _RESERVES[2:]:
            before, drafts = self.best, self._drafted(chosen, reserve)
            if drafts.seconds > self.makespan or not self._have_offsets(drafts, chosen) or self.best is before:
                return

    def _have_offsets(self, drafts: DraftedGraph, chosen: tuple[Clone, ...]) -> bool:
        """Whether there are offsets for the ``drafts`` of the graph without ``chosen``: they are a plan then."""
        own = self.work.shared(_OFFSETS, len(self.graph.vertices))
        try:
            plan = replace(drafts.plan(own), planner="timed")
        except Infeasible:
            return False
        finally:
            self.work.take(own)
        return self.keep_if_faster(plan, planning_passes(keep_values(chosen)))

    def _plan_from_scratch(self) -> None:
        """Plan the fastest drafts' graphs while they promise more than there is. Then plan the graph as it was written,
        and with all clones, unless the kernels alone take longer than the best plan: no step is slower for this choice.
        Where nothing fits, the graph with all clones says how much would."""
        for chosen in self._fastest()[:_OFFERED]:
            if self.makespan <= _AS_PROMISED * self.judged[chosen].seconds or self.work.late():
                break
            own = self.work.shared(1.0, len(self.graph.vertices), finds_needed=False)
            if chosen and not own.over(len(self.graph.vertices)):
                self._plan(chosen, own)
        for halvings in () if self._fastest() else _UNDRAFTED:
            # Drafts are modest, do with less memory, and know no plans of BUILDMEMGRAPH's.
            own = self.work.shared(1.0, len(self.graph.vertices), finds_needed=False)
            if not own.over(len(self.graph.vertices)):
                self._plan(self.cut(2.0**-halvings), own)
        for chosen in dict.fromkeys((self.written, ())):
            may_gain = self.compute(chosen) < self.makespan and not self._is_slow(chosen)
            if chosen not in self.planned and (self.best is None or may_gain):
                self._plan(chosen, self._whole_work(finds_needed=self._has_no_plan and not chosen))

    @property
    def _has_no_plan(self) -> bool:
        """Whether there is no plan yet."""
        return self.best is None and self.too_much is None

    def _is_slow(self, chosen: tuple[Clone, ...]) -> bool:
        """Whether drafts of the graph without ``chosen`` are far slower than the best plan. Of a script that has all
        clones nobody asks."""
        return bool(self.written) and _FAR * self.makespan < self._drafted(chosen, 0.0).seconds < float("inf")

    def _whole_work(self, *, finds_needed: bool) -> SearchWork:
        own = SearchWork(part=self.work.part) if self.work.limit is None else self.work.shared(1.0, 0)
        own.finds_needed, own.names_needed = finds_needed, self.work.names_needed
        return own

    def _plan(self, chosen: tuple[Clone, ...], own: SearchWork) -> None:
        """Plan the graph without ``chosen``."""
        constants = _constants(self.graph, chosen)
        try:
            plan, passes = self.plan_with(self.graph, (keep_values(chosen),), work=own, not_offloaded=constants)
        except Infeasible:
            if own.finds_needed:
                raise
            return
        finally:
            self.work.take(own)
        if not own.over(len(self.graph.vertices)):
            self.planned.add(chosen)
        # BUILDMEMGRAPH may offload any value.
        if not any(swaps_out(v) and v.inputs[0][0] in constants for v in plan.vertices):
            self.keep_if_faster(plan, passes)

    def keep_if_faster(self, plan: MemGraph, passes: tuple[GraphPass, ...]) -> bool:
        """Whether the host has room for ``plan``; then it is the best so far if it is the fastest, or as fast and swaps
        less."""
        if plan.host.memory > self.host_memory:
            if self.too_much is None or plan.host.memory < self.too_much[0].host.memory:
                self.too_much = plan, passes
            return False
        makespan = simulate(plan, self.machine).makespan
        as_fast = makespan <= _AS_FAST * self.makespan
        if makespan < self.makespan or (as_fast and _swapped(plan) < self._swapped()):
            self.best, self.makespan = (plan, passes), makespan
        return True

    def _swapped(self) -> int:
        """Bytes that the best plan swaps in and out."""
        return _swapped(self.best[0]) if self.best else 0

    def compute(self, chosen: tuple[Clone, ...]) -> float:
        """Seconds that no plan of the graph without ``chosen`` goes below: the busiest device's kernels."""
        busy: dict[int, float] = {}
        for vertex in without(self.graph, chosen).vertices:
            if vertex.kind is VertexKind.KERNEL:
                busy[vertex.space] = busy.get(vertex.space, 0.0) + (vertex.duration or 0.0)
        return max(busy.values(), default=0.0) / self.machine.compute_streams


def _swapped(plan: MemGraph) -> int:
    return swapped_bytes(plan, lambda vertex: swaps_in(vertex) or swaps_out(vertex))


def _constants(graph: TaskGraph, chosen: Sequence[Clone]) -> frozenset[int]:
    """Kernels whose values are kept without ``chosen`` and are the same in every step, as dequantised weights are: to
    make them again takes less than to copy them, and no host memory."""
    constant = {clone.original for clone in chosen if clone.constant}
    return frozenset(producer for producer, _ in kept(graph, chosen)) & constant
