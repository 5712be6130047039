"""A captured step with costs, devices and a plan: whole, or its large kernels in chunks where that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.config.keys import MOST_CHUNKS
from disco_accel.decompose.micro_batches import StepOnParts
from disco_accel.decompose.rows_at_home import choices_of_rows, row_readers, with_rows_at_home
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import largest_need
from disco_accel.measure.costs import Measured
from disco_accel.plan.bound.peak_kernel_cost import bound_without_peaks, usual_need
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.summary import link_bytes
from disco_accel.simulate.simulator import simulate
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
    few = _with_few_rows(whole, asked)
    if few is not None:
        return few
    if asked.chunks == 1:
        return _planned(asked, _prepared(whole, asked, None))
    if asked.chunks != "auto":
        return _told(_planned(asked, _as_asked(whole, asked, asked.chunks)))
    if _largest_need(whole.captured) <= asked.arena:
        with suppress(BudgetTooSmall, Infeasible):
            plain = _planned(asked, _prepared(whole, asked, None), names_needed=False)
            return _told(_shorter(whole, asked, plain))
    asked.say("the step does not fit whole, trying chunks of large kernels")
    return _told(_fewest(whole, asked))


def _with_few_rows(whole: StepOnParts, asked: PlanRequest) -> StagedStep | None:
    """``whole``, a forward alone whose weights do not fit, with rows of some picked on the host. None where it needs
    most rows, or where that is not shorter than with all weights loaded."""
    # The paper's planner knows no host device, and an estimate no rate of the host.
    able = asked.settings.planner == "timed" and isinstance(asked.source, Measured) and asked.sharing.devices == 1
    if not able or whole.captured.gradients or not row_readers(whole.captured.graph):
        return None
    # The arena is known when libraries have their workspaces.
    known = run_stages(_prepared(whole, asked, None), PLANNING_STAGES[:1], asked)
    made = []
    for readers in choices_of_rows(whole.captured.graph, known.budget(asked).arena):
        graph = with_rows_at_home(whole.captured.graph, readers)
        picked = whole.captured.rewritten("rows at home", "the host picks rows of large weights", graph)
        with suppress(BudgetTooSmall, Infeasible):
            prepared = _prepared(replace(whole, captured=picked), asked, None)
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
