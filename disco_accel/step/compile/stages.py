"""Stages between a captured step and its verified plan: what one is, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.decompose.chunks.in_chunks import StepInChunks
from disco_accel.step.compile.pipeline import CostedStep, PlannedStep

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class ChunkSizes:
    """Kernels that move more than ``large`` bytes, or make a value of more than ``value``, run in ``count`` chunks."""

    count: int
    large: int
    value: int


@dataclass(frozen=True)
class StagedStep:
    """``captured`` as the stages so far have left it. ``part_of``: kernel → the part of the batch, or the device, whose
    work it is. ``cut``: as what it shall run in chunks, None: whole. ``names_needed``: as of ``plan_step``."""

    captured: CapturedStep
    part_of: Mapping[int, int]
    cut: ChunkSizes | None = None
    names_needed: bool = True
    chunked: StepInChunks | None = None
    costed: CostedStep | None = None
    planned: PlannedStep | None = None


@dataclass(frozen=True)
class PlanningStage(Generic[Asked]):
    """``run`` gets the step and what is asked of it. ``effect``: what it does, in a line."""

    name: str
    effect: str
    run: Callable[[StagedStep, Asked], StagedStep]


def run_stages(step: StagedStep, stages: Iterable[PlanningStage[Asked]], asked: Asked) -> StagedStep:
    """Run ``stages`` in their order, each on the result of the one before."""
    for stage in stages:
        step = stage.run(step, asked)
    return step


def stages_text(stages: Iterable[PlanningStage[Any]]) -> str:
    """For people: a line for each."""
    return "".join(f"{stage.name}: {stage.effect}\n" for stage in stages)
