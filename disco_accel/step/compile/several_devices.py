"""The one way from a captured step to the same step on several devices, with costs, ready to be planned.

``prepare``, ``disco-accel plan`` and the benchmarks go it: ``whole_step`` writes out what was captured of one part of a
batch or of one rank, ``with_costs`` (``step/compile/pipeline.py``) gives it seconds and scratch, ``on_devices`` gives
kernels their devices; then comes ``plan_step``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from disco_accel.capture.captured_step import CapturedStep, TracedStep
from disco_accel.decompose.decomposition import over_devices
from disco_accel.decompose.micro_batches import StepOnParts, on_parts
from disco_accel.decompose.tensor.propagate import of_one_rank
from disco_accel.decompose.tensor.ranks import on_ranks
from disco_accel.plan import Machine
from disco_accel.step.compile.budget_parts import BudgetFacts
from disco_accel.step.compile.pipeline import CostedStep
from disco_accel.step.compile.stages import PlanningStage, StagedStep, run_stages

_OF_EACH = {"layers": "layers", "batch": "a part of the batch", "tensor": "a part of each large weight"}


@dataclass(frozen=True)
class Sharing:
    """How ``devices`` share a step. ``parallel``: what each has, ``layers``, ``batch`` (a part of it) or ``tensor`` (a
    part of each weight of ``shards``, which says the dimension that is cut by name). ``parts`` of a batch are worked on
    one by one: each has as many rows of the tensors that are ``divided``."""

    devices: int = 1
    parallel: str = "layers"
    parts: int = 1
    divided: Collection[str] = ()
    shards: Mapping[str, int] = field(default_factory=dict)

    @property
    def cuts_weights(self) -> bool:
        """Whether devices have parts of weights."""
        return self.parallel == "tensor" and self.devices > 1

    def of_one(self, traced: TracedStep) -> TracedStep:
        """The ``Rewrite`` of the capture: ``traced`` as one device runs it. Raises CaptureError."""
        return of_one_rank(traced, self.shards, self.devices) if self.cuts_weights else traced


def whole_step(captured: CapturedStep, sharing: Sharing) -> StepOnParts:
    """``captured``, the step on one part of a batch and as ``sharing.of_one`` made it, on all parts and devices.

    ``part_of`` of the result: the part, or the device where devices have parts of weights.

    Raises:
        CaptureError: as ``on_parts``.
    """
    done = run_stages(StagedStep(captured, {}), SHARING_STAGES, sharing)
    return StepOnParts(done.captured, done.part_of)


def _parts(step: StagedStep, sharing: Sharing) -> StagedStep:
    if sharing.parts == 1:
        return step
    return _as_whole(step, on_parts(step.captured, sharing.parts, sharing.divided, _itemsize))


def _ranks(step: StagedStep, sharing: Sharing) -> StagedStep:
    if not sharing.cuts_weights:
        return step
    return _as_whole(step, on_ranks(step.captured, sharing.shards, sharing.devices, _itemsize))


def _as_whole(step: StagedStep, whole: StepOnParts) -> StagedStep:
    return replace(step, captured=whole.captured, part_of=whole.part_of)


SHARING_STAGES: tuple[PlanningStage[Sharing], ...] = (
    PlanningStage("parts", "the step on one part of a batch becomes that on all parts", _parts),
    PlanningStage("ranks", "the step of one rank, with its parts of weights, becomes that of all ranks", _ranks),
)


def on_devices(
    whole: StepOnParts,
    step: CostedStep,
    sharing: Sharing,
    facts: BudgetFacts,
    machine: Machine,
    *,
    peers: bool = True,
) -> tuple[CapturedStep, CostedStep]:
    """``whole``, which has become the costed ``step``, with a device for each kernel; each has what ``facts`` leave of
    their budget. ``peers``: copies between devices go straight. Raises CaptureError as ``over_devices``."""
    captured, graph, applied = whole.captured, step.graph, list(step.applied)
    if sharing.devices > 1:
        arena = max(facts.split(step.costs.workspaces, in_blocks=step.costs.in_blocks).arena, 0)
        part_of = None if sharing.parallel == "layers" else whole.part_of
        memory, what = [arena] * sharing.devices, _OF_EACH[sharing.parallel]
        captured, graph = over_devices(captured, graph, memory, machine, applied, part_of, what, peers=peers)
    return captured, replace(step, graph=graph, applied=tuple(applied), copies=captured.copies)


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size
