"""The least seconds of the study's step, which no plan beats; and the choice of places and times that comes near."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.optimizer.least import Least, least_seconds
from benchmarks.optimizer.linear_program import LinearProgram
from benchmarks.optimizer.ours import BEST, Schedule, planned, timed_graph
from benchmarks.optimizer.step_graph import UPDATE, kernels_named, pieces_of
from benchmarks.optimizer.study import GRADIENT, STATE, STUDY, WEIGHT, Model, Study
from benchmarks.optimizer.suite import name_of, our_row
from benchmarks.optimizer.timing import Mix, first_mix, neighbours, options_of
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import lasting_versions
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.oracles.adversary import run_reference

LAYERS = {**STUDY.model.shape, "num_hidden_layers": 4}
KERNELS = 2 * (STUDY.measured.forward + STUDY.measured.backward)


def small(memory: int = 16 << 30, pinned: float = 55e9, adam: float = 4.5e9, accumulation: int = 2) -> Study:
    """Four layers of the study's model: its kernels take the study's seconds."""
    machine = replace(STUDY.machine, memory=memory, pinned=pinned, adam=adam)
    return replace(STUDY, model=Model(shape=LAYERS, accumulation=accumulation), machine=machine)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "study",
    [small(), small(memory=20 << 30, pinned=8e9, adam=3e8), small(pinned=6e9, accumulation=1), small(accumulation=3)],
    ids=["balanced", "slow processors", "slow link", "three micro-batches"],
)
def test_no_plan_is_faster_than_the_least(study: Study, clip: bool) -> None:
    """Of those with updates at the end, at the head, and with places and times chosen."""
    least = least_seconds(study, clip=clip)
    kinds = (("timed", clip), ("chosen", False), ("chosen", True), ("half", clip))
    seconds = [planned(study, Schedule(places, clip, head, pieces=2), least).period for places, head in kinds]
    assert min(seconds) >= least.seconds * (1 - 1e-6)
    assert min(seconds) <= 1.12 * least.seconds, "and it is near what can be had"
    own = our_row(study, Schedule("half", clip, pieces=2))[0].bound
    row = our_row(study, Schedule("half", clip, pieces=2), least)[0]
    assert own is not None and row.bound == max(own, least.seconds), "a row has the tighter of the two bounds"


def test_with_memory_for_everything_a_step_is_its_kernels_and_the_devices_updates() -> None:
    study = small(memory=1 << 40, adam=1e3)
    for clip in (False, True):
        least = least_seconds(study, clip=clip)
        assert least.seconds == pytest.approx(KERNELS + study.machine.device_seconds(study.model.parameters), rel=1e-5)
        assert least.on_host == pytest.approx(0, abs=1e-4)


def test_states_that_do_not_fit_move_both_ways_in_a_step() -> None:
    """By arithmetic; and with clipping all that was not there at the barrier comes before the last forward."""
    study = small(memory=12 << 30, pinned=2e9, adam=1e3)
    parameters = study.model.parameters
    # Weights are there with them; gradients have gone by then.
    moved = (STATE + WEIGHT) * parameters - study.machine.memory
    assert moved > 0
    assert least_seconds(study, clip=False).seconds >= moved / study.machine.pinned
    barrier = (STATE + WEIGHT + GRADIENT) * parameters - study.machine.memory
    before_turn = KERNELS - study.measured.forward
    assert least_seconds(study, clip=True).seconds >= before_turn + barrier / study.machine.pinned


def test_slow_processors_and_a_slow_link_raise_the_least_and_move_the_share() -> None:
    least, processors, link = (
        least_seconds(study, clip=True) for study in (small(), small(adam=1e9), small(pinned=5e9))
    )
    assert processors.seconds > least.seconds and processors.on_host < least.on_host
    assert link.seconds > least.seconds
    assert least_seconds(small(), clip=False).seconds <= least.seconds, "clipping takes choices away"


def test_a_program_without_a_solution_says_so() -> None:
    program = LinearProgram()
    x = program.variable(most=1.0, cost=1.0)
    program.equal([(1.0, x)], 2.0)
    with pytest.raises(ValueError, match="no solution"):
        program.solve()


@pytest.mark.parametrize("clip", [False, True])
def test_a_mix_has_each_piece_in_its_place_and_its_plan_is_right(clip: bool) -> None:
    study = small()
    mix = Mix(4, 2) if clip else Mix(4, 2, late_on_host=2, late_on_device=1)
    options = options_of(study, 2, mix, clip=clip)
    pieces = {piece.number for piece in pieces_of(study, 2)}
    assert options.stays is not None
    kinds = [set(options.on_host), set(options.stays), set(options.deferred)]
    assert [len(kind) for kind in kinds] == [4, 2, len(pieces) if clip else 3]
    assert not kinds[0] & kinds[1] and all(kind <= pieces for kind in kinds)
    graph = timed_graph(study, options)
    updates = list(kernels_named(graph, UPDATE))
    assert len(updates) == len(pieces) and sum(update.space != 0 for update in updates) == 4
    inputs = {v.id: v for v in graph.vertices if v.kind is VertexKind.INPUT}
    kept = [v for v in inputs.values() if v.op == "state" and v.traits.stays]
    assert len(kept) == 2 and all(len(lasting_versions(graph.vertices)[v.id, 0]) == 2 for v in kept)
    assert sum(update.inputs[2][0] in inputs for update in updates if not update.space) == (
        len(pieces) - 4 if clip else 1
    )
    plan = make_plan(graph, planner="timed", cyclic=True, machine=study.machine.pinned_links())
    verify(graph, plan)
    run_reference(graph, plan, seed=2)


@pytest.mark.parametrize("clip", [False, True])
def test_mixes_around_the_first_make_sense(clip: bool) -> None:
    least = Least(2.75, 0.49)
    first = first_mix(STUDY, 3, least, clip=clip)
    count = len(pieces_of(STUDY, 3))
    near = list(neighbours(first, count, clip=clip))
    assert len(set(near)) == len(near) == (4 if clip else 8) and first not in near
    assert all(0 <= each.late_on_host <= each.on_host and each.on_host + each.stays <= count for each in near)
    assert first.on_host == round(0.49 * count)
    assert bool(first.late_on_host) != clip


def test_the_kept_results_are_within_a_twentieth_of_the_least() -> None:
    """Places and times chosen; the file says that nothing ran on a device."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    result = json.loads((folder / "simulated-optimizer.json").read_text())
    best = {name_of(schedule) for schedule in BEST}
    rows = [row for row in result["rows"] if row["name"].removesuffix(", host memory shared") in best]
    assert result["simulated"] and len(rows) == 4
    assert all(row["bound"] <= row["seconds"] <= 1.05 * row["bound"] for row in rows)
