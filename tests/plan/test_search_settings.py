"""Settings of the timed planner: each switch switches, no combination makes a plan unsafe, and policy is none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.ablation import WITHOUT
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import with_memory
from disco_accel.plan import POLICIES, make_plan
from disco_accel.plan.buildmemgraph import residents
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed import search
from disco_accel.plan.timed.drafts import DraftOptions
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.plan.timed.step_buffers import StepRequirements
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.oracles.adversary import run_reference

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"


def test_any_combination_of_moves_gives_plans_that_pass_both_judges() -> None:
    planned, different = 0, 0
    for seed in range(150):
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng, Shape(vertices=24)), rng.choice((1.2, 1.5, 2.0, 3.0)))
        link = Link(rng.choice((1e7, 1e9)), 1e-6)
        machine = Machine(links={TO_DEVICE: link, TO_HOST: link})
        settings = replace(TimedSettings(), program_gaps_from=rng.choice((0, 1000)))
        for move in rng.sample(sorted(WITHOUT), 6):
            settings = replace(settings, **{move: getattr(WITHOUT[move], move)})
        try:
            plan = build_timed(graph, machine, cyclic=True, settings=settings)
        except Infeasible:
            continue
        planned += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
        different += plan != build_timed(graph, machine, cyclic=True)
    assert planned > 50 and different


def options_drafted(monkeypatch: pytest.MonkeyPatch, settings: TimedSettings) -> list[DraftOptions]:
    """Plan a small graph in little memory; return the options that were asked for."""
    asked: list[DraftOptions] = []
    real = search.permanent_buffers

    def noted(requirements: StepRequirements, capacity: Mapping[int, int], options: DraftOptions) -> Iterable[int]:
        asked.append(options)
        return real(requirements, capacity, options)

    graph = with_memory(read_taskgraph(GRAPHS / "chain8.taskgraph.json"), lambda device: 24 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(search, "permanent_buffers", noted)
        build_timed(graph, Machine(), cyclic=True, settings=settings)
    return asked


def test_an_option_that_is_switched_off_is_never_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TimedSettings()
    everything = options_drafted(monkeypatch, settings)
    everything += options_drafted(monkeypatch, replace(settings, program_gaps_from=0))
    chosen: dict[str, Callable[[DraftOptions], bool]] = {
        "min_gap_ratios": lambda options: options.min_gap_ratio is not None,
        "resident_shares": lambda options: options.resident_share in settings.resident_shares[1:],
        "outliers_permanent": lambda options: options.outliers_permanent,
        "program_gaps_from": lambda options: options.program_gaps,
    }
    for move, uses in chosen.items():
        assert any(uses(options) for options in everything), f"{move} is not drafted here: find another graph"
        without = options_drafted(monkeypatch, WITHOUT[move])
        assert without and not any(uses(options) for options in without), move


def test_no_policy_changes_what_the_timed_planner_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it falls back on BUILDMEMGRAPH neither, whose plans do differ by policy."""
    monkeypatch.setattr(residents, "EFFORT", 0)
    graph = with_memory(read_taskgraph(GRAPHS / "lora_small.taskgraph.json"), lambda device: 80 << 20)

    def plans(planner: str) -> list[MemGraph]:
        return [make_plan(graph, planner=planner, policy=name, cyclic=True, work=SearchWork(0.0)) for name in POLICIES]

    timed, built = plans("timed"), plans("build")
    assert all(plan.planner == "build" and plan == timed[0] for plan in timed)
    assert any(plan != built[0] for plan in built)
