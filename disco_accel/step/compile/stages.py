"""The stages of a step's way from its capture to its verified plan: one list, which one function runs.

``whole_step`` writes out all parts of a batch, or all ranks, from the capture of one of them.
``step/compile/planned_step.py`` runs the other stages, and tries chunks of several sizes. ``prepare``,
``disco-accel plan`` and the benchmarks share this way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from disco_accel.capture.captured_step import CapturedStep, TracedStep
from disco_accel.decompose.chunks.in_chunks import StepInChunks, in_chunks
from disco_accel.decompose.decomposition import over_devices
from disco_accel.decompose.micro_batches import StepOnParts, on_parts
from disco_accel.decompose.tensor.propagate import of_one_rank
from disco_accel.decompose.tensor.ranks import on_ranks
from disco_accel.graph.dequantise_again import DEQUANTISE_AGAIN
from disco_accel.graph.recompute_again import RECOMPUTE_AGAIN
from disco_accel.measure.costs import Costs, GraphCosts
from disco_accel.plan import Machine
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.compile import pipeline
from disco_accel.step.compile.budget_parts import Budget
from disco_accel.step.compile.pipeline import PlannedStep, PlannerSettings, plan_step, with_costs

_OF_EACH = {"layers": "layers", "batch": "a part of the batch", "tensor": "a part of each large weight"}

Chunks = int | Literal["auto"]


@dataclass(frozen=True)
class Sharing:
    """How ``devices`` share a step. ``parallel``: the part that each has, of the ``layers``, of the ``batch`` or, as
    ``tensor``, of each weight of ``shards``, which says the dimension that is cut by name. ``parts`` of a batch are
    worked on one by one: each has as many rows of the tensors that are ``divided``. ``peers``: copies between devices
    go straight."""

    devices: int = 1
    parallel: str = "layers"
    parts: int = 1
    divided: Collection[str] = ()
    shards: Mapping[str, int] = field(default_factory=dict)
    peers: bool = True

    @property
    def cuts_weights(self) -> bool:
        """Whether devices have parts of weights."""
        return self.parallel == "tensor" and self.devices > 1

    def of_one(self, traced: TracedStep) -> TracedStep:
        """The ``Rewrite`` of the capture: ``traced`` as one device runs it. Raises CaptureError."""
        return of_one_rank(traced, self.shards, self.devices) if self.cuts_weights else traced


@dataclass(frozen=True)
class PlanRequest:
    """How a step is planned: ``source`` of its kernels' costs, ``budget`` without workspaces. ``chunks``: of a large
    kernel, ``auto`` as few as fit. ``device``: where it runs. ``say`` hears of each stage, ``costed`` of the costs of
    each attempt. ``elsewhere``: as of ``plan_step``."""

    sharing: Sharing
    source: Costs
    budget: Budget
    settings: PlannerSettings
    chunks: Chunks
    device: torch.device
    say: Callable[[str], None] = lambda _: None
    costed: Callable[[GraphCosts], None] = lambda _: None
    elsewhere: PlanningProcess | None = None

    @property
    def machine(self) -> Machine:
        """On which plans are compared."""
        return self.settings.machine or Machine()

    @property
    def arena(self) -> int:
        """Bytes of the budget that are the plan's, but for workspaces."""
        return max(self.budget.split().arena, 1)


@dataclass(frozen=True)
class StagedStep:
    """``captured`` as the stages so far have left it. ``part_of``: kernel → the part of the batch, or the device, whose
    work it is. ``cut``: the number of chunks of large kernels, bytes that those move, and of a large value; None: all
    run whole. ``names_needed``: as of ``plan_step``. ``seconds`` that costs took."""

    captured: CapturedStep
    part_of: Mapping[int, int]
    cut: tuple[int, int, int] | None = None
    names_needed: bool = True
    chunked: StepInChunks | None = None
    costs: GraphCosts | None = None
    seconds: float = 0.0
    found: PlannedStep | None = None

    @property
    def planned(self) -> PlannedStep:
        """The result of the last stage."""
        assert self.found is not None
        return self.found

    def budget(self, asked: PlanRequest) -> Budget:
        """The parts of the budget, workspaces among them."""
        assert self.costs is not None
        return asked.budget.split(self.costs.workspaces, in_blocks=self.costs.in_blocks)


Asked = TypeVar("Asked")
Stage = tuple[str, str, Callable[[StagedStep, Asked], StagedStep]]
"""Its name, its effect in a line, and the function that gets the step and the request."""


def run_stages(step: StagedStep, stages: Iterable[Stage[Asked]], asked: Asked) -> StagedStep:
    """Run ``stages`` in their order, each on the result of the one before."""
    for _, _, run in stages:
        step = run(step, asked)
    return step


def stages_text() -> str:
    """For people: a line for each."""
    return "".join(f"{name}: {effect}\n" for name, effect, _ in STAGES)


def whole_step(captured: CapturedStep, sharing: Sharing) -> StepOnParts:
    """``captured``, the step on one part of a batch and as ``sharing.of_one`` made it, on all parts and devices.

    ``part_of`` of the result: the part, or the device where devices have parts of weights.

    Raises:
        CaptureError: as ``on_parts``.
    """
    done = run_stages(StagedStep(captured, {}), SHARING_STAGES, sharing)
    return StepOnParts(done.captured, done.part_of)


def on_devices(
    captured: CapturedStep, part_of: Mapping[int, int], sharing: Sharing, budget: Budget, machine: Machine
) -> CapturedStep:
    """``captured``, which has its costs, with a device for each kernel; each has the arena of ``budget``. ``part_of``:
    as of ``whole_step``. Raises CaptureError as ``over_devices``."""
    if sharing.devices == 1:
        return captured
    applied = list(captured.passes)
    parts = None if sharing.parallel == "layers" else part_of
    memory, what = [max(budget.arena, 0)] * sharing.devices, _OF_EACH[sharing.parallel]
    captured, graph = over_devices(captured, captured.graph, memory, machine, applied, parts, what, peers=sharing.peers)
    return replace(captured, graph=graph, passes=tuple(applied))


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


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _dequantise(step: StagedStep, asked: PlanRequest) -> StagedStep:
    return replace(step, captured=step.captured.through(pipeline.STEP_PASSES))


def _cut(step: StagedStep, asked: PlanRequest) -> StagedStep:
    if step.cut is None:
        return step
    count, large, value = step.cut
    chunked = in_chunks(step.captured, count, large, asked.device, value)
    part_of = {new: step.part_of[old] for new, old in chunked.of.items() if old in step.part_of}
    return replace(step, captured=chunked.captured, part_of=part_of, chunked=chunked)


def _recompute(step: StagedStep, asked: PlanRequest) -> StagedStep:
    if asked.settings.recompute != "auto" or asked.sharing.devices > 1:
        return step
    before = step.captured.graph.ops.keys()
    captured = step.captured.through((RECOMPUTE_AGAIN,))
    offered = frozenset(captured.graph.ops.keys() - before)
    # A kernel that runs again behind the gate is one more reader of its packed weight.
    return replace(step, captured=replace(captured.through((DEQUANTISE_AGAIN,)), offered=offered))


def _cost(step: StagedStep, asked: PlanRequest) -> StagedStep:
    asked.say(f"measuring {len(step.captured.graph.ops)} kernels")
    began = time.perf_counter()
    captured, costs = with_costs(step.captured, asked.source, ())
    asked.costed(costs)
    return replace(step, captured=captured, costs=costs, seconds=time.perf_counter() - began)


def _spread(step: StagedStep, asked: PlanRequest) -> StagedStep:
    captured = on_devices(step.captured, step.part_of, asked.sharing, step.budget(asked), asked.machine)
    return replace(step, captured=captured)


def _plan(step: StagedStep, asked: PlanRequest) -> StagedStep:
    how: dict[str, Any] = {"say": asked.say, "names_needed": step.names_needed, "elsewhere": asked.elsewhere}
    return replace(step, found=plan_step(step.captured, step.budget(asked), asked.settings, **how))


SHARING_STAGES: tuple[Stage[Sharing], ...] = (
    ("parts", "the step on one part of a batch becomes that on all parts", _parts),
    ("ranks", "the step of one rank, with its parts of weights, becomes that of all ranks", _ranks),
)
PREPARING_STAGES: tuple[Stage[PlanRequest], ...] = (
    ("dequantise", "each reader of a packed weight gets kernels of its own that unpack it", _dequantise),
    ("chunks", "large kernels run in chunks, where that is asked for or nothing else fits", _cut),
    ("recompute", "activations of a layer may be computed again for its backward", _recompute),
)
PLANNING_STAGES: tuple[Stage[PlanRequest], ...] = (
    ("costs", "kernels get seconds and scratch memory", _cost),
    ("devices", "kernels get their devices", _spread),
    ("plan", "kept weights, order, copies and addresses in the budget's arena; verified", _plan),
)
STAGES: tuple[Stage[Any], ...] = (*SHARING_STAGES, *PREPARING_STAGES, *PLANNING_STAGES)
"""All, in their order. Chunks of several sizes are tried, each from there on."""
