"""A captured step with costs, devices and a plan: whole, or its large kernels in chunks where that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.config.keys import MOST_CHUNKS
from disco_accel.decompose.cache_at_home import frugal_loads
from disco_accel.decompose.micro_batches import StepOnParts
from disco_accel.decompose.rows_at_home import _RowReader, choices_of_rows, readers_worth_it, with_rows_at_home
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import largest_need
from disco_accel.measure.costs import Measured, _MeasuredBefore
from disco_accel.plan.bound.peak_kernel_cost import bound_without_peaks, usual_need
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.plan.summary import link_bytes
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile.budget_parts import Budget
from disco_accel.step.compile.pipeline import PlannerSettings, at_boundary, with_fused_kernels
from disco_accel.step.compile.stages import PLANNING_STAGES, PREPARING_STAGES, PlanRequest, StagedStep, run_stages

logger = logging.getLogger("disco_accel")

_LARGE = (2, 4)
"""A kernel that moves more than the arena through this runs in chunks. ``auto`` tries few kernels first: each chunk of
a run of kernels needs the weights of all of them, which may not stay from one chunk to the next. Beside kernels that
move less than a quarter there is room for values of later ones."""

_OF_ONE = 4
"""With the smaller of these, values of more than the bytes through this come in chunks too: every chunk of a reader
would need all of them. Simulated LoRA 7B, 8 x 1024, in 8 chunks and 1.38 GiB: 39.0 s without, 17.1 s with it."""

_WORTH_MORE = 0.97
"""More chunks, or chunks of more kernels, are taken if a step is simulated that much shorter: links wait less for
memory."""

_UNUSUAL = 2
"""Kernels of a step that fits run in chunks if they need more than so many times as many bytes as ninety-nine in a
hundred: those of the loss, not of every MLP."""

_GOES_ON = 0.995
"""Twice as many chunks of them are tried as long as a step is simulated that much shorter. Simulated LoRA of
Qwen3-30B-A3B, 1 x 4096, in 44.2 GiB: 1.764 s whole, 1.711, 1.690, 1.681, 1.663, 1.669 in 2 to 32 chunks."""

_MUCH_LESS = 0.9
"""While even the largest kernel does not fit: twice as many chunks are tried if it needs so much less for this many."""

_NAMED = 8
"""Where no number of chunks fits, a refusal names the budget of so many, of kernels that move more than the largest
through so many. Of a tiny Llama 64 chunks need 8 % less than 8, and the search takes several times as long."""


def plan_in_chunks(whole: StepOnParts, asked: PlanRequest) -> StagedStep:
    """Plan ``whole``, the step on all parts and ranks, in as many chunks as ``asked``. Of a forward alone it may need
    few rows of a weight, such as the experts of a token, in the place of the weight.

    Raises:
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets; where several numbers of chunks were tried, of
            some that are enough.
    """
    frugal = frugal_loads(whole.captured.graph)
    if frugal is None:
        return _in_chunks(whole, asked)
    with suppress(BudgetTooSmall, Infeasible):
        return _in_chunks(whole, asked)
    return _in_chunks(replace(whole, captured=replace(whole.captured, graph=frugal)), asked)


def _in_chunks(whole: StepOnParts, asked: PlanRequest) -> StagedStep:
    few = _with_few_rows(whole, asked)
    if few is not None:
        return few
    if asked.chunks == 1:
        return _whole(whole, asked)
    if asked.chunks != "auto":
        return _told(_planned(asked, _as_asked(whole, asked, asked.chunks)))
    if _largest_need(whole.captured) <= asked.arena:
        with suppress(BudgetTooSmall, Infeasible):
            plain = _planned(asked, _prepared(whole, asked, None), names_needed=False)
            return _told(_shorter(whole, asked, plain))
    asked.say("the step does not fit whole, trying chunks of large kernels")
    return _told(_fewest(whole, asked))


@dataclass(frozen=True)
class _ChoiceOfRows:
    """``whole``, a forward alone that needs few rows of some weights, of which the host may pick these."""

    whole: StepOnParts
    asked: PlanRequest
    readers: Collection[_RowReader]

    def measure(self) -> None:
        """Measure the kernels of either way that are not measured yet: then ``within`` touches no tensor."""
        for captured in (self.whole.captured, _picked(self.whole.captured, self.readers)):
            prepared = _prepared(replace(self.whole, captured=captured), self.asked, None)
            run_stages(prepared, PLANNING_STAGES[:1], self.asked)

    def within(self, budget: Budget, settings: PlannerSettings, elsewhere: PlanningProcess | None) -> StagedStep:
        """The plan within ``budget``, which knows its workspaces, with the rows that are picked for it as
        ``plan_in_chunks`` chooses them. Raises as ``plan_step``."""
        source = self.asked.source
        assert isinstance(source, Measured)
        # As at first: compared without fused kernels, which follow.
        plain, known = replace(settings, fusing=None, boundary={}), _MeasuredBefore(source, budget.workspaces)
        asked = replace(self.asked, source=known, budget=budget, settings=plain, elsewhere=elsewhere)
        made = plan_in_chunks(self.whole, asked)
        planned = at_boundary(made.captured, made.planned, settings, elsewhere)
        return replace(made, found=with_fused_kernels(made.captured, planned, settings, elsewhere))


def choice_of_rows(whole: StepOnParts, asked: PlanRequest, made: StagedStep) -> _ChoiceOfRows | None:
    """The choice behind ``made``, a result of ``plan_in_chunks``, for other budgets; None where there is none, or where
    kernels run in chunks, which have bits of their own."""
    readers = _readers(whole, asked) if made.chunked is None or not made.chunked.kernels else []
    quiet = PlanRequest(asked.sharing, asked.source, asked.budget, asked.settings, 1, asked.device)
    return _ChoiceOfRows(whole, quiet, readers) if readers else None


def _readers(whole: StepOnParts, asked: PlanRequest) -> list[_RowReader]:
    """Kernels whose rows the host may pick."""
    # The paper's planner knows no host device.
    able = asked.settings.planner == "timed" and asked.sharing.devices == 1
    return readers_worth_it(whole.captured.graph) if able and not whole.captured.gradients else []


def _picked(captured: CapturedStep, readers: Collection[_RowReader]) -> CapturedStep:
    graph = with_rows_at_home(captured.graph, readers)
    return captured.rewritten("rows at home", "the host picks rows of large weights", graph)


def _whole(whole: StepOnParts, asked: PlanRequest) -> StagedStep:
    """``whole`` as it is. A refusal names the smallest budget of all ways to pick rows."""
    try:
        return _planned(asked, _prepared(whole, asked, None))
    except BudgetTooSmall as error:
        readers = _readers(whole, asked)
        if not readers:
            raise
        try:
            return _planned(asked, _prepared(replace(whole, captured=_picked(whole.captured, readers)), asked, None))
        except BudgetTooSmall as other:
            raise min(error, other, key=lambda each: each.needed) from None


def _with_few_rows(whole: StepOnParts, asked: PlanRequest) -> StagedStep | None:
    """``whole``, a forward alone whose weights do not fit, with rows of some picked on the host. None where it needs
    most rows, or where that is not shorter than with all weights loaded."""
    if not _readers(whole, asked):
        return None
    # The arena is known when libraries have their workspaces.
    known = run_stages(_prepared(whole, asked, None), PLANNING_STAGES[:1], asked)
    choices, made = choices_of_rows(whole.captured.graph, known.budget(asked).arena), []
    asked = _in_turn(asked, len(choices) + 1)
    for readers in choices:
        with suppress(BudgetTooSmall, Infeasible):
            prepared = _prepared(replace(whole, captured=_picked(whole.captured, readers)), asked, None)
            made.append(_planned(asked, prepared, names_needed=False))
    if not made:
        return None
    plain = None
    with suppress(BudgetTooSmall, Infeasible):
        plain = _planned(asked, _prepared(whole, asked, None), names_needed=False)
        made.append(plain)
    fastest = min(_seconds(each, asked) for each in made)
    # Of those that are about as fast the one that leaves the link alone.
    alike = [each for each in made if _GOES_ON * _seconds(each, asked) <= fastest]
    best = min(alike, key=lambda each: link_bytes(each.planned.plan))
    return None if best is plain and asked.chunks != 1 else best


def _in_turn(asked: PlanRequest, count: int) -> PlanRequest:
    """Each of ``count`` such searches takes its part of the time for one."""
    limit = asked.settings.plan_seconds
    return asked if limit is None else replace(asked, settings=replace(asked.settings, plan_seconds=limit / count))


def _fewest(whole: StepOnParts, asked: PlanRequest) -> StagedStep:
    """In the fewest chunks of the fewest kernels that fit, or in the next more as long as that is shorter."""
    best: StagedStep | None = None
    for prepared in _attempts(whole, asked):
        try:
            made = _planned(asked, prepared, names_needed=False)
        except (BudgetTooSmall, Infeasible):
            if best is not None:
                break
            continue
        if best is not None and _seconds(made, asked) >= _WORTH_MORE * _seconds(best, asked):
            break
        best = made
    if best is not None:
        return best
    # The same kernels whatever the budget: one that a refusal names is enough for them the next time.
    large = _largest_need(whole.captured) // _NAMED
    return _planned(asked, _prepared(whole, asked, (_NAMED, large, large // _OF_ONE)))


def _shorter(whole: StepOnParts, asked: PlanRequest, plain: StagedStep) -> StagedStep:
    """Return ``plain``, which runs whole, or the step with its few largest kernels in chunks where that is simulated to
    be so much shorter.

    While such kernels run, most often those of the loss, there is room for few weights beside them, and the link stands
    still. The bound of a step without them says beforehand whether chunks can help. Nothing is tried where the user has
    set a time for planning: each try would take that time again.
    """
    if asked.settings.plan_seconds is not None:
        return plain
    graph, seconds = plain.planned.graph, _seconds(plain, asked)
    least = bound_without_peaks(graph, asked.machine)
    if least > _WORTH_MORE * seconds:
        return plain
    asked.say(f"the largest kernels make a step up to {seconds / least - 1:.0%} longer, trying chunks of them")
    large = _UNUSUAL * usual_need(graph, asked.machine)
    best, fastest, count = plain, seconds, 2
    while count <= MOST_CHUNKS:
        prepared = _prepared(whole, asked, (count, large, large))
        chunked = prepared.chunked
        if chunked is None or chunked.most < count:
            break
        asked.say(f"trying {chunked.kernels} kernels in {count} chunks")
        try:
            made = _planned(asked, prepared, names_needed=False)
        except (BudgetTooSmall, Infeasible):
            break
        if (shorter := _seconds(made, asked)) > _GOES_ON * fastest:
            break
        best, fastest, count = made, shorter, 2 * count
    return best if fastest <= _WORTH_MORE * seconds else plain


def _as_asked(whole: StepOnParts, asked: PlanRequest, count: int) -> StagedStep:
    """In ``count`` chunks: the same kernels, and bits, in every budget."""
    large = _largest_need(whole.captured) // _LARGE[-1]
    return _prepared(whole, asked, (count, large, large // _OF_ONE))


def _largest_need(captured: CapturedStep) -> int:
    """Bytes that one kernel needs by itself: no plan of this graph has less."""
    graph = captured.graph
    return max(largest_need(graph, device.id)[0] for device in graph.devices if not device.is_host_device)


def _attempts(whole: StepOnParts, asked: PlanRequest) -> Iterator[StagedStep]:
    """The largest kernels in 2 chunks, then more kernels, then in 4, 8 and so on, as long as that makes kernels
    smaller. Those of which one kernel alone does not fit are left out."""
    count, tried, least = 2, (0, 1), _largest_need(whole.captured)
    while count <= MOST_CHUNKS:
        most, before = tried[1], least
        for share in _LARGE:
            large = asked.arena // share
            prepared = _prepared(whole, asked, (count, large, large if share == _LARGE[0] else large // _OF_ONE))
            chunked = prepared.chunked
            if chunked is None or not chunked.kernels or (chunked.kernels, chunked.most) == tried:
                continue
            tried, need = (chunked.kernels, chunked.most), _largest_need(prepared.captured)
            least = min(least, need)
            if need <= asked.arena:
                asked.say(f"trying {chunked.kernels} kernels in up to {chunked.most} chunks")
                yield prepared
        if tried[1] <= most or asked.arena < least > _MUCH_LESS * before:
            return
        count *= 2


def _prepared(whole: StepOnParts, asked: PlanRequest, cut: tuple[int, int, int] | None) -> StagedStep:
    """The step with packed weights unpacked once for all readers, and then cut."""
    return run_stages(StagedStep(whole.captured, whole.part_of, cut), PREPARING_STAGES, asked)


def _planned(asked: PlanRequest, prepared: StagedStep, *, names_needed: bool = True) -> StagedStep:
    return run_stages(replace(prepared, names_needed=names_needed), PLANNING_STAGES, asked)


def _seconds(made: StagedStep, asked: PlanRequest) -> float:
    return simulate(made.planned.plan, asked.machine).makespan


def _told(made: StagedStep) -> StagedStep:
    chunked = made.chunked
    if chunked is not None and chunked.kernels:
        sums = f"; {chunked.sums} of them add up sums in chunks, which rounds otherwise" if chunked.sums else ""
        logger.info("chunks: %d kernels in up to %d chunks%s", chunked.kernels, chunked.most, sums)
    return made
