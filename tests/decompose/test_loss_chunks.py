"""``chunks: auto`` of a step that fits: its largest kernels in chunks where a step is simulated shorter for it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from benchmarks.common.shapes import llama
from benchmarks.planner.captures import Workload, lora_outline
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.measure.costs import Estimated
from disco_accel.recipes.outline import Outline
from disco_accel.simulate.roofline import Speed
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.step.compile import stages
from disco_accel.step.compile.pipeline import PlannerSettings
from disco_accel.step.compile.planned_step import plan_in_chunks
from disco_accel.step.compile.stages import Chunks, PlanRequest, Sharing, StagedStep
from disco_accel.verify.static import verify

SPEED = Speed(name="one", half=2e13, single=2e13, memory=1e12, kernel=1e-6, machine=Machine())


@lru_cache(maxsize=1)
def outlined() -> Outline:
    """Logits of 16 MiB in float32, and weights of 1 MiB in each of four layers."""
    return lora_outline(Workload(llama(256, 768, 4, 4, 4, 8192), 2, 256, "float32"))


def planned(
    bandwidth: float, chunks: Chunks, budget: int, plan_seconds: float | None = None
) -> tuple[StagedStep, float]:
    link = Link(bandwidth, 1e-6)
    machine = Machine(links={TO_DEVICE: link, TO_HOST: link})
    speed = replace(SPEED, machine=machine)
    settings = PlannerSettings("timed", machine=machine, plan_seconds=plan_seconds)
    whole = outlined()
    given, source = whole.budget(budget), Estimated("cuda", speed)
    made = plan_in_chunks(whole.whole, PlanRequest(Sharing(1), source, given, settings, chunks, torch.device("cpu")))
    verify(made.planned.graph, made.planned.plan)
    return made, simulate(made.planned.plan, machine).makespan


def test_the_loss_of_a_step_that_fits_runs_in_chunks_where_that_is_faster() -> None:
    """In 56 MiB three logits leave a few weights room; behind a slow link these are loaded while nothing else is."""
    whole, seconds = planned(5e9, 1, 56 << 20)
    chunked, shorter = planned(5e9, "auto", 56 << 20)
    assert whole.chunked is None and chunked.chunked is not None
    assert chunked.chunked.kernels < 12 and chunked.chunked.most >= 2, "the MLPs are to stay whole"
    assert shorter < 0.85 * seconds


def test_a_step_that_does_not_wait_for_the_link_stays_whole() -> None:
    made, _ = planned(1e12, "auto", 56 << 20)
    assert made.chunked is None


def test_chunks_of_the_loss_are_tried_only_where_they_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step all of whose weights stay waits for nothing; and a time that is set for planning is for one plan."""

    def tried(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(stages, "in_chunks", tried)
    assert planned(5e9, "auto", 1 << 30)[0].chunked is None
    assert planned(5e9, "auto", 56 << 20, plan_seconds=0.0)[0].chunked is None
