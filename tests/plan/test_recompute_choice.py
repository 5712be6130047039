"""Recomputation as a choice: over a ladder of budgets, with a script's checkpointing or without, never slower."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.capture.step import capture_step
from disco_accel.graph.recompute_again import RECOMPUTE_AGAIN
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.value_numbering import clones, graph_of_plan, without, without_recomputation
from disco_accel.native.backend import backend_of_kind
from disco_accel.plan import Machine
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.keep_or_recompute import Recomputation, decide
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.plan.recompute_cut import cut_at_price
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.roofline import with_estimates
from disco_accel.simulate.simulator import Link, simulate
from disco_accel.verify.static import verify
from tests.step.moving_budgets import answer_here
from tests.support.models import family_lora, random_batch

MACHINE = Machine(links={TO_DEVICE: Link(1e10, 1e-6), TO_HOST: Link(1e10, 1e-6)})
SPEED = replace(backend_of_kind("cuda").speed, single=2e12, memory=1e11, kernel=1e-6)


@functools.cache
def step(checkpointing: bool) -> CapturedStep:
    """LoRA of a Llama of 4 layers on 2 x 64 tokens, by estimate; with what a plan may compute again."""
    options = {"preserve_rng_state": False} if checkpointing else None
    model = family_lora(
        "llama",
        checkpointing=checkpointing,
        checkpoint_options=options,
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=256,
        vocab_size=64,
    )
    captured = capture_step(model, random_batch(64, batch=2, length=64), forward=model.forward)
    ids = captured.graph.ops.keys()
    captured = captured.through((RECOMPUTE_AGAIN,))
    graph = with_estimates(captured.graph, SPEED)
    return replace(captured, graph=graph, offered=frozenset(graph.ops.keys() - ids))


def everything(graph: TaskGraph) -> int:
    return sum(-(-size // 256) * 256 for vertex in graph.vertices for size in vertex.sizes)


def seconds(captured: CapturedStep, memory: int, recompute: str = "auto") -> tuple[float, Recomputation]:
    """Of a verified step, no shorter than the bound of any choice."""
    graph = with_memory(captured.graph, lambda _: memory // 256 * 256)
    if recompute == "as-written":
        offered = [clone for clone in clones(graph) if clone.vertex in captured.offered]
        graph = without(graph, offered)
        plan, _ = decide(graph, MACHINE, SearchWork(), recompute=recompute)
    else:
        plan, _ = decide(graph, MACHINE, SearchWork(), offered=captured.offered)
    planned = graph_of_plan(graph, plan.vertices)
    assert planned is not None
    verify(planned, plan)
    took = simulate(plan, MACHINE).makespan
    assert took >= 0.999999 * bound_of(without_recomputation(graph), MACHINE).bound
    found = Recomputation.of(graph, planned, plan)
    assert found is not None
    return took, found


def test_another_process_decides_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no calls, but what tells which kernels compute the same."""
    monkeypatch.setattr(PlanningProcess, "_answer", answer_here)
    captured = step(False)
    graph = with_memory(captured.graph, lambda _: everything(captured.graph) // 256 // 4 * 256)
    asked: dict[str, Any] = {"planner": "timed", "policy": "auto", "recompute": "auto", "offered": captured.offered}
    asked |= {"host_memory": 1 << 20}
    here, _ = decide(graph, MACHINE, SearchWork(), **asked)
    there = PlanningProcess().plan(graph, machine=MACHINE, work=SearchWork(), **asked)
    assert here.vertices == there.vertices and here.slots == there.slots
    assert len(here.vertices) < len(graph.vertices)


def test_what_is_offered_is_what_checkpoints_of_layers_compute() -> None:
    saved, recomputed = step(False), step(True)
    assert saved.offered and not recomputed.offered
    assert len(saved.graph.ops) == pytest.approx(len(recomputed.graph.ops), rel=0.02)


def test_more_memory_is_never_slower_nor_is_what_is_written() -> None:
    """A ladder from a tenth of all bytes to all; with checkpointing in the script and without a step takes as long."""
    total = everything(without_recomputation(step(True).graph))
    ladder = [int(share * total) for share in (0.1, 0.2, 0.4, 0.7, 1.1)]
    times = {on: [seconds(step(on), memory) for memory in ladder] for on in (False, True)}
    for on, rows in times.items():
        assert all(after <= 1.005 * before for (before, _), (after, _) in pairwise(rows)), rows
        for memory, (took, _) in zip(ladder, rows, strict=True):
            assert took <= 1.0001 * seconds(step(on), memory, "as-written")[0]
        assert rows[-1][1].dropped == rows[-1][1].seconds
    for (saved, _), (recomputed, _) in zip(times[False], times[True], strict=True):
        assert saved == pytest.approx(recomputed, rel=0.02)


@pytest.mark.parametrize("part", [6, 10, 14])
def test_behind_a_slow_link_a_step_without_checkpoints_computes_again_what_does_not_fit(part: int) -> None:
    """To offload all that the script saves takes twice as long here, and drafts for comparison find little."""
    captured, slow = step(False), Machine(links=dict.fromkeys((TO_DEVICE, TO_HOST), Link(2e8, 1e-6)))
    total = everything(without_recomputation(captured.graph))
    graph = with_memory(captured.graph, lambda _: total // part // 256 * 256)
    bare, _ = decide(graph, slow, SearchWork(), recompute="as-written")
    plan, _ = decide(graph, slow, SearchWork(), offered=captured.offered)
    assert simulate(plan, slow).makespan <= 1.01 * simulate(bare, slow).makespan


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
def test_values_that_leave_take_no_more_of_the_host_than_there_is(checkpointing: bool) -> None:
    """With less room there more is computed again. With none the step still runs, and offloads nothing."""
    captured = step(checkpointing)
    total = everything(without_recomputation(captured.graph))
    graph = with_memory(captured.graph, lambda _: total // 10 // 256 * 256)

    def planned(room: int) -> tuple[int, float, float]:
        plan, _ = decide(graph, MACHINE, SearchWork(), offered=captured.offered, host_memory=room)
        chosen = graph_of_plan(graph, plan.vertices)
        assert chosen is not None
        verify(chosen, plan)
        found = Recomputation.of(graph, chosen, plan, captured.offered)
        assert found is not None and plan.host.memory <= room
        return plan.host.memory, found.dropped, simulate(plan, MACHINE).makespan

    most, dropped, fastest = planned(1 << 40)
    assert most > 0
    rows = [planned(most - 1), planned(most // 4), planned(0)]
    assert all(took >= 0.995 * fastest for _, _, took in rows)
    assert rows[-1][1] < dropped


def test_a_lower_price_leaves_out_what_a_higher_one_does_and_more() -> None:
    graph = with_memory(step(True).graph, lambda _: 1 << 20)
    found = clones(graph)
    cut = cut_at_price(graph, found)
    sets = [set(cut(2.0**-k)) for k in range(-8, 14)]
    assert all(smaller <= larger for smaller, larger in pairwise(sets))
    assert len(sets[0]) < 0.2 * len(found) and len(sets[-1]) > 0.9 * len(found)
