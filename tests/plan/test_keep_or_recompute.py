"""Dequantise again or keep: the plan with the smallest simulated step is taken, of a graph that anyone can name."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from disco_accel.capture.step import capture_step
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.value_numbering import clones, graph_of_plan, kept, left_out
from disco_accel.native.backend import backend_of_kind
from disco_accel.plan import Machine, make_plan
from disco_accel.plan.keep_or_recompute import decide, plan_soon
from disco_accel.plan.plan_cache import PlanCache, plan_fingerprint
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.roofline import with_estimates
from disco_accel.simulate.simulator import Link, simulate
from disco_accel.verify.static import verify
from tests.support.packed_linear import PackedLayers

MACHINE = Machine(links={TO_DEVICE: Link(2.5e10, 1e-6), TO_HOST: Link(2.5e10, 1e-6)})
SPEED = replace(backend_of_kind("cuda").speed, half=2e13, memory=1e11, kernel=1e-6)


@functools.cache
def packed_step(*, checkpointed: bool = True) -> TaskGraph:
    model = PackedLayers(512, checkpointed=checkpointed)
    graph = capture_step(model, {"x": torch.ones(64, 512, dtype=torch.bfloat16)}, forward=model.forward).graph
    return with_estimates(graph, SPEED)


def made(graph: TaskGraph, work: SearchWork) -> MemGraph:
    return make_plan(graph, planner="timed", cyclic=True, machine=MACHINE, work=work)


def needed(graph: TaskGraph) -> int:
    with pytest.raises(BudgetTooSmall) as error:
        made(with_memory(graph, lambda _: 256), SearchWork())
    return error.value.needed


@pytest.mark.long
def test_more_memory_keeps_more_and_is_never_slower() -> None:
    """From the smallest memory to memory for all: no plan is slower than that of the graph with all clones, or more
    than a twelfth slower than one in less memory, for offsets of so few buffers jump; in the largest everything is
    kept, and no kept weight is ever offloaded. The choice takes at most half a second of counted work more than the
    plan with all clones; and 1.6 times the smallest memory is enough to keep weights from recomputation to backward."""
    graph = packed_step()
    least, found = needed(graph), clones(graph)
    steps, counts = [], []
    for memory in (least, int(1.6 * least), 2 * least, 4 * least, 100 * least):
        sized = replace(graph, spaces=(Space(0, memory // 256 * 256),))
        alone, together = SearchWork(), SearchWork()
        without_choice = made(sized, alone)
        plan, passes = decide(sized, MACHINE, together)
        assert together.spent <= alone.spent + 0.5, memory
        planned = graph_of_plan(sized, plan.vertices)
        assert planned is not None
        verify(planned, plan)
        out = left_out(sized, planned)
        steps.append(simulate(plan, MACHINE).makespan)
        counts.append(len(out))
        assert steps[-1] <= simulate(without_choice, MACHINE).makespan
        constants = {producer for producer, _ in kept(sized, out)} & {c.original for c in out if c.constant}
        assert not any(swaps_out(v) and v.inputs[0][0] in constants for v in plan.vertices)
        (keep,) = [each for each in passes if each.name == "keep"]
        assert keep.run(sized) == planned
    assert all(after <= 13 / 12 * before for before, after in pairwise(steps)), steps
    assert counts[-1] == len(found) > counts[1] > 0 == counts[0] and steps[-1] < 0.9 * steps[0], (counts, steps)


def test_a_memory_that_is_too_small_says_what_would_do() -> None:
    graph = packed_step()
    with pytest.raises(BudgetTooSmall) as error:
        decide(with_memory(graph, lambda _: 4096), MACHINE, SearchWork())
    assert error.value.needed == needed(graph)


def test_the_planner_that_was_asked_for_makes_the_plan() -> None:
    """Drafts are the timed planner's, so that another one plans the chosen graph from scratch."""
    graph = with_memory(packed_step(), lambda _: 1 << 30)

    plan, _ = decide(graph, MACHINE, SearchWork(), planner="build")
    planned = graph_of_plan(graph, plan.vertices)
    assert planned is not None and plan.planner == "build" and len(planned.vertices) < len(graph.vertices)
    verify(planned, plan)


def test_a_graph_without_clones_is_planned_as_it_is() -> None:
    graph, work = with_memory(replace(packed_step(), ops={}), lambda _: 1 << 30), SearchWork()
    plan, passes = decide(graph, MACHINE, work)
    alone = SearchWork()
    assert plan == made(graph, alone) and work.spent == alone.spent
    assert "keep" not in [each.name for each in passes]


def test_searches_share_the_work_of_one() -> None:
    """Drafts and plans together are within what one graph of this size is worth, and what is left over is given on."""
    work = SearchWork()
    half = work.shared(0.5, 1000)
    assert not half.over(1000)
    half.add(1.0, 2)
    assert half.over(1000) and not work.over(1000)
    work.take(half)
    assert work.spent == 2.0 and work.shared(1.0, 1000).part == pytest.approx(1 - 2.0 / 3.4)
    assert SearchWork(0.0).shared(0.5, 1000).over(1000)


def test_a_stored_plan_says_which_clones_it_does_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded as the plan of the graph without them; one that lacks anything else is not used."""
    graph = with_memory(packed_step(), lambda _: 1 << 30)
    plan, _ = decide(graph, MACHINE, SearchWork())
    assert len(plan.vertices) < len(graph.vertices)
    key = plan_fingerprint(
        graph, planner="timed", policy="auto", cyclic=True, machine=MACHINE, environment={"torch": torch.__version__}
    )
    cache = PlanCache(tmp_path)
    cache.store(key, plan)
    assert cache.load(key, graph, cyclic=True) == plan
    last = graph.vertices[-1]
    assert last.keep
    cache.store(key, made(replace(graph, vertices=graph.vertices[:-1]), SearchWork()))
    assert cache.load(key, graph, cyclic=True) is None
    assert f"vertex {last.id} ({last.op}) of the task graph is missing from the plan" in caplog.text


def test_a_plan_that_a_step_waits_for_takes_little_work() -> None:
    """With all of its clones, and the whole search makes none that is slower."""
    graph = packed_step()
    chosen = replace(graph, ops={}, spaces=(Space(0, int(1.2 * needed(graph)) // 256 * 256),))
    work, whole = SearchWork(), SearchWork()
    plan, keeps_up = plan_soon(chosen, MACHINE, work)
    assert plan is not None and not keeps_up
    verify(chosen, plan)
    thorough, _ = decide(chosen, MACHINE, whole, recompute="decided")
    verify(chosen, thorough)
    assert simulate(thorough, MACHINE).makespan <= simulate(plan, MACHINE).makespan
    assert work.spent < whole.spent / 3
    ample, keeps_up = plan_soon(with_memory(chosen, lambda _: 1 << 30), MACHINE, SearchWork())
    assert ample is not None and keeps_up
    assert plan_soon(with_memory(chosen, lambda _: 4096), MACHINE, SearchWork()) == (None, False)
