"""A search ends: by counted work, which is a function of the graph alone, or by the deadline that the user set."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from disco_accel.plan import search_work as module
from disco_accel.plan.buildmemgraph import min_memory as needed_module
from disco_accel.plan.buildmemgraph import residents
from disco_accel.plan.buildmemgraph.min_memory import working_set
from disco_accel.plan.search_work import SearchWork, enough
from disco_accel.plan.summary import cut_short
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph

GRAPH = Path(__file__).parent.parent / "data" / "graphs" / "lora_small.taskgraph.json"
TIGHT = 80 << 20
DEEP = LoraShape(layers=20, hidden=256, ffn=704, vocabulary=512, tokens=8192)
"""Several thousand vertices, and activations that leave as little room as in a step of 7B with a large batch."""


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return read_taskgraph(GRAPH)


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUILDMEMGRAPH's own search, which is bounded by vertices, is kept short."""
    monkeypatch.setattr(residents, "EFFORT", 2000)


def noisy(graph: TaskGraph, seed: int) -> TaskGraph:
    """Return ``graph`` as another measurement of the same kernels has it."""
    rng = random.Random(seed)
    changed = (
        v if v.duration is None else replace(v, duration=v.duration * rng.uniform(0.7, 1.3)) for v in graph.vertices
    )
    return replace(graph, vertices=tuple(changed))


@pytest.mark.parametrize("seed", range(3))
def test_no_noise_in_durations_makes_a_search_longer_than_its_work(
    graph: TaskGraph, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search goes over by one draft with its addresses at most; there is a plan however little work it gets."""
    spent = []
    for limit in (0.0, 0.2, 0.6):
        monkeypatch.setattr(module, "enough", lambda vertices, limit=limit: limit)
        work, measured = SearchWork(), noisy(graph, seed)
        plan = make_plan(measured, memory=TIGHT, planner="timed", cyclic=True, work=work)
        verify(replace(measured, spaces=plan.devices), plan)
        assert not work.cut
        spent.append(work.spent)
        # What the other planner tries, and what it takes to draft one step in a few ways and to place it once.
        assert work.spent <= limit + 2500 * module.WALKED + 0.4
    assert spent[0] < spent[2]


def test_auto_does_not_look_at_the_clock(graph: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that takes an hour between any two looks the plan is the same."""
    monkeypatch.setattr(module, "enough", lambda vertices: 0.3)
    plan = make_plan(graph, memory=TIGHT, planner="timed", cyclic=True)
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(hours))
    assert make_plan(graph, memory=TIGHT, planner="timed", cyclic=True) == plan


@pytest.mark.parametrize("planner", ["timed", "build"])
def test_a_deadline_that_has_passed_still_gives_a_plan_that_works(graph: TaskGraph, planner: str) -> None:
    work = SearchWork(0.0)
    plan = make_plan(graph, memory=TIGHT, planner=planner, cyclic=True, work=work)
    verify(replace(graph, spaces=plan.devices), plan)
    assert work.cut and work.drafts == 0 and plan.planner == "build"
    line = cut_short(graph, plan, work)
    assert (
        line.startswith("plan_seconds: 0: the search for a plan ended after") and "times what no plan can beat" in line
    )


def test_the_best_plan_so_far_is_taken_when_the_deadline_comes(
    graph: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later deadlines give faster plans; the clock ticks at each look, so that nothing depends on the machine."""
    seconds = []
    for limit in (0.0, 60.0, 1e9):
        ticks = itertools.count(step=1.0)
        with monkeypatch.context() as clock:
            clock.setattr(module.time, "monotonic", lambda ticks=ticks: next(ticks))
            work = SearchWork(limit)
            plan = make_plan(graph, memory=TIGHT, planner="timed", cyclic=True, work=work)
        verify(replace(graph, spaces=plan.devices), plan)
        assert work.cut == (limit < 1e9)
        seconds.append(simulate(plan).makespan)
    assert seconds[0] > seconds[1] >= seconds[2]


def test_a_refusal_of_a_large_graph_takes_few_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that it names works, and is near the working set."""
    graph = lora_graph(DEEP, 1)
    walked = 0
    real = needed_module.failing_position

    def counted(*args: object, **options: object) -> int | None:
        nonlocal walked
        at = real(*args, **options)  # type: ignore[arg-type]
        walked += len(graph.vertices) if at is None else at
        return at

    monkeypatch.setattr(needed_module, "failing_position", counted)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(graph, memory=1 << 20, planner="timed", cyclic=True)
    assert walked <= 150_000
    assert working_set(graph) <= refused.value.needed <= 1.5 * working_set(graph)
    work = SearchWork(0.0)
    plan = make_plan(graph, memory=refused.value.needed, planner="timed", cyclic=True, work=work)
    verify(replace(graph, spaces=plan.devices), plan)


def test_a_refusal_after_the_deadline_names_a_size_that_works(graph: TaskGraph) -> None:
    with pytest.raises(BudgetTooSmall) as exact:
        make_plan(graph, memory=1 << 20, planner="timed", cyclic=True)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(graph, memory=1 << 20, planner="timed", cyclic=True, work=SearchWork(0.0))
    assert working_set(graph) <= refused.value.needed <= 2 * exact.value.needed
    make_plan(graph, memory=refused.value.needed, planner="timed", cyclic=True, work=SearchWork(0.0))


def test_auto_is_bounded_for_any_graph() -> None:
    assert 2.0 <= enough(1) < enough(1000) < enough(10_000) < 20 and enough(10**9) == enough(10**8) <= 60
