"""A captured step with costs, devices and a plan: whole, or its large kernels in chunks where that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.config.keys import MOST_CHUNKS
from disco_accel.decompose.chunks.in_chunks import StepInChunks, in_chunks
from disco_accel.decompose.micro_batches import StepOnParts
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import largest_need
from disco_accel.measure.costs import Costs
from disco_accel.plan import Machine
from disco_accel.plan.bound.peak_kernel_cost import bound_without_peaks, usual_need
from disco_accel.plan.infeasible import Infeasible
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile import pipeline
from disco_accel.step.compile.budget_parts import BudgetFacts
from disco_accel.step.compile.pipeline import CostedStep, PlannedStep, PlannerSettings, PlanStore, plan_step, with_costs
from disco_accel.step.compile.several_devices import SHARING_STAGES, Sharing, on_devices
from disco_accel.step.compile.stages import ChunkSizes, PlanningStage, StagedStep, run_stages

logger = logging.getLogger("disco_accel")

_LARGE = (2, 4)
"""A kernel that moves more than the arena through this runs in chunks. ``auto`` tries few kernels first: each chunk of
a run of kernels needs the weights of all of them, which may not stay from one chunk to the next. Beside kernels that
move less than a quarter there is room for what waits for later ones."""

_OF_ONE = 4
"""With the smaller of these, values of more than the bytes through this come in chunks too: every chunk of a reader
would need all of them. Simulated LoRA 7B, 8 x 1024, in 8 chunks and 1.38 GiB: 39.0 s without, 17.1 s with it."""

_WORTH_MORE = 0.97
"""More chunks, or chunks of more kernels, are taken if a step is simulated that much shorter: links wait less for
memory."""

_UNUSUAL = 2
"""Of a step that fits, kernels that need more than so many times what ninety-nine in a hundred do run in chunks: those
of the loss, not of every MLP."""

_GOES_ON = 0.995
"""Twice as many chunks of them are tried as long as a step is simulated that much shorter. Simulated LoRA of
Qwen3-30B-A3B, 1 x 4096, in 44.2 GiB: 1.764 s whole, 1.711, 1.690, 1.681, 1.663, 1.669 in 2 to 32 chunks."""

_MUCH_LESS = 0.9
"""While even the largest kernel does not fit: twice as many chunks are tried if it needs so much less for this many."""

_NAMED = 8
"""Where no number of chunks fits, a refusal names the budget of so many, of kernels that move more than the largest
through so many: of a tiny Llama 64 chunks need 8 % less than 8, and several times as long to find that."""

Chunks = int | Literal["auto"]


@dataclass(frozen=True)
class StepToPlan:
    """``whole``: the step on all parts and ranks as ``sharing`` says; ``costs`` that its kernels get; ``facts`` of its
    budget. ``chunks``: of a large kernel, ``auto`` as few as fit. ``device``: where it runs. ``peers``: its devices
    copy from each other without the host. ``say`` hears of each stage, ``costed`` of the costs of each attempt."""

    whole: StepOnParts
    sharing: Sharing
    costs: Costs
    facts: BudgetFacts
    settings: PlannerSettings
    chunks: Chunks
    device: torch.device
    store: PlanStore | None = None
    peers: bool = True
    say: Callable[[str], None] = lambda _: None
    costed: Callable[[CostedStep], None] = lambda _: None

    @property
    def machine(self) -> Machine:
        """On which plans are compared."""
        return self.settings.machine or Machine()

    @property
    def arena(self) -> int:
        """Bytes of the budget that are the plan's, but for workspaces."""
        return max(self.facts.split().arena, 1)


@dataclass(frozen=True)
class StepWithPlan:
    """``captured`` and ``costed`` are the step on all devices. ``chunks``: what of it runs in chunks, None if whole."""

    captured: CapturedStep
    costed: CostedStep
    planned: PlannedStep
    chunks: StepInChunks | None = None


def plan_in_chunks(step: StepToPlan) -> StepWithPlan:
    """Plan ``step``, in as many chunks as it asks for.

    Raises:
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets; where several numbers of chunks were tried, of
            some that are enough.
    """
    if step.chunks == 1:
        return _planned(step, _prepared(step, None))
    if step.chunks != "auto":
        return _told(_planned(step, _as_asked(step, step.chunks)))
    if _largest_need(step.whole.captured) <= step.arena:
        with suppress(BudgetTooSmall, Infeasible):
            return _told(_shorter(step, _planned(step, _prepared(step, None), names_needed=False)))
    step.say("the step does not fit whole, trying chunks of large kernels")
    return _told(_fewest(step))


def _fewest(step: StepToPlan) -> StepWithPlan:
    """In the fewest chunks of the fewest kernels that fit, or in the next more as long as that is shorter."""
    best: StepWithPlan | None = None
    for prepared in _attempts(step):
        try:
            made = _planned(step, prepared, names_needed=False)
        except (BudgetTooSmall, Infeasible):
            if best is not None:
                break
            continue
        if best is not None and _seconds(made, step) >= _WORTH_MORE * _seconds(best, step):
            break
        best = made
    if best is not None:
        return best
    # The same kernels whatever the budget: one that a refusal names is enough for them the next time.
    large = _largest_need(step.whole.captured) // _NAMED
    return _planned(step, _prepared(step, ChunkSizes(_NAMED, large, large // _OF_ONE)))


def _shorter(step: StepToPlan, whole: StepWithPlan) -> StepWithPlan:
    """``whole``, or the step with its few largest kernels in chunks where it is simulated that much shorter: while they
    run, most often those of the loss, there is room for few weights beside them, and the link stands still.

    The bound of a step without such kernels says beforehand whether that can be. Nothing is tried where the user has
    set a time for planning: each try would take that time again.
    """
    if step.settings.plan_seconds is not None:
        return whole
    graph, seconds = whole.planned.graph, _seconds(whole, step)
    least = bound_without_peaks(graph, step.machine)
    if least > _WORTH_MORE * seconds:
        return whole
    step.say(f"the largest kernels make a step up to {seconds / least - 1:.0%} longer, trying chunks of them")
    large = _UNUSUAL * usual_need(graph, step.machine)
    best, fastest, count = whole, seconds, 2
    while count <= MOST_CHUNKS:
        prepared = _prepared(step, ChunkSizes(count, large, large))
        chunked = prepared.chunked
        if chunked is None or chunked.most < count:
            break
        step.say(f"trying {chunked.kernels} kernels in {count} chunks")
        try:
            made = _planned(step, prepared, names_needed=False)
        except (BudgetTooSmall, Infeasible):
            break
        if (shorter := _seconds(made, step)) > _GOES_ON * fastest:
            break
        best, fastest, count = made, shorter, 2 * count
    return best if fastest <= _WORTH_MORE * seconds else whole


def _as_asked(step: StepToPlan, count: int) -> StagedStep:
    """In ``count`` chunks: the same kernels, and bits, whatever the budget."""
    large = _largest_need(step.whole.captured) // _LARGE[-1]
    return _prepared(step, ChunkSizes(count, large, large // _OF_ONE))


def _largest_need(captured: CapturedStep) -> int:
    """Bytes that one kernel needs by itself: no plan of this graph has less."""
    graph = captured.graph
    return max(largest_need(graph, device.id)[0] for device in graph.devices if not device.is_host_device)


def _attempts(step: StepToPlan) -> Iterator[StagedStep]:
    """The largest kernels in 2 chunks, then more kernels, then in 4, 8 and so on, as long as that makes kernels
    smaller. Those of which one kernel alone does not fit are left out."""
    count, tried, least = 2, (0, 1), _largest_need(step.whole.captured)
    while count <= MOST_CHUNKS:
        most, before = tried[1], least
        for share in _LARGE:
            large = step.arena // share
            prepared = _prepared(step, ChunkSizes(count, large, large if share == _LARGE[0] else large // _OF_ONE))
            chunked = prepared.chunked
            if chunked is None or not chunked.kernels or (chunked.kernels, chunked.most) == tried:
                continue
            tried, need = (chunked.kernels, chunked.most), _largest_need(prepared.captured)
            least = min(least, need)
            if need <= step.arena:
                step.say(f"trying {chunked.kernels} kernels in up to {chunked.most} chunks")
                yield prepared
        if tried[1] <= most or step.arena < least > _MUCH_LESS * before:
            return
        count *= 2


def _prepared(step: StepToPlan, cut: ChunkSizes | None) -> StagedStep:
    """The step with packed weights unpacked once for all readers, and then cut."""
    return run_stages(StagedStep(step.whole.captured, step.whole.part_of, cut), PREPARING_STAGES, step)


def _planned(step: StepToPlan, prepared: StagedStep, *, names_needed: bool = True) -> StepWithPlan:
    done = run_stages(replace(prepared, names_needed=names_needed), PLANNING_STAGES, step)
    assert done.costed is not None and done.planned is not None
    return StepWithPlan(done.captured, done.costed, done.planned, done.chunked)


def _dequantise(step: StagedStep, asked: StepToPlan) -> StagedStep:
    return replace(step, captured=step.captured.through(pipeline.STEP_PASSES))


def _cut(step: StagedStep, asked: StepToPlan) -> StagedStep:
    if step.cut is None:
        return step
    chunked = in_chunks(step.captured, step.cut.count, step.cut.large, asked.device, step.cut.value)
    part_of = {new: step.part_of[old] for new, old in chunked.of.items() if old in step.part_of}
    return replace(step, captured=chunked.captured, part_of=part_of, chunked=chunked)


def _cost(step: StagedStep, asked: StepToPlan) -> StagedStep:
    asked.say(f"measuring {len(step.captured.graph.ops)} kernels")
    costed = with_costs(step.captured.graph, asked.costs, step.captured.passes, ())
    asked.costed(costed)
    return replace(step, costed=costed)


def _spread(step: StagedStep, asked: StepToPlan) -> StagedStep:
    assert step.costed is not None
    whole = StepOnParts(step.captured, step.part_of)
    captured, costed = on_devices(whole, step.costed, asked.sharing, asked.facts, asked.machine, peers=asked.peers)
    return replace(step, captured=captured, costed=costed)


def _plan(step: StagedStep, asked: StepToPlan) -> StagedStep:
    assert step.costed is not None
    planned = plan_step(
        step.costed, asked.facts, asked.settings, store=asked.store, say=asked.say, names_needed=step.names_needed
    )
    return replace(step, planned=planned)


PREPARING_STAGES: tuple[PlanningStage[StepToPlan], ...] = (
    PlanningStage("dequantise", "each reader of a packed weight gets kernels of its own that unpack it", _dequantise),
    PlanningStage("chunks", "large kernels run in chunks, where that is asked for or nothing else fits", _cut),
)
PLANNING_STAGES: tuple[PlanningStage[StepToPlan], ...] = (
    PlanningStage("costs", "kernels get seconds and scratch memory", _cost),
    PlanningStage("devices", "kernels get their devices", _spread),
    PlanningStage("plan", "kept weights, order, copies and addresses in the budget's arena; verified", _plan),
)
STAGES: tuple[PlanningStage[Any], ...] = (*SHARING_STAGES, *PREPARING_STAGES, *PLANNING_STAGES)
"""All, in their order. Chunks of several sizes are tried, each from there on."""


def _seconds(made: StepWithPlan, step: StepToPlan) -> float:
    return simulate(made.planned.plan, step.machine).makespan


def _told(made: StepWithPlan) -> StepWithPlan:
    chunked = made.chunks
    if chunked is not None and chunked.kernels:
        sums = f"; {chunked.sums} of them add up sums in chunks, which rounds otherwise" if chunked.sums else ""
        logger.info("chunks: %d kernels in up to %d chunks%s", chunked.kernels, chunked.most, sums)
    return made
