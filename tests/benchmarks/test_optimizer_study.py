"""The published study's machine: its own schedule, simulated, gives the table that its authors measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.shapes import PRESETS
from benchmarks.optimizer.step_graph import UPDATE, StepOptions, kernels_named, pieces_of, step_graph
from benchmarks.optimizer.study import GRADIENT, STUDY, Model, Study
from benchmarks.optimizer.study_schedule import Phases, deviations, simulated_phases, study_schedule
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import lasting_versions

TINY = replace(STUDY, model=Model(shape=PRESETS["tiny"], batch=1, length=32))


def test_the_studys_schedule_is_within_a_tenth_of_its_table() -> None:
    phases, _ = simulated_phases(STUDY)
    figures = list(deviations(STUDY, phases))
    assert [name for name, _, _ in figures] == [
        *("forward", "backward", "backward with flush", "update", "step", "TFLOPS"),
    ]
    for name, simulated, measured in figures:
        assert simulated == pytest.approx(measured, rel=0.1), name


def test_the_page_has_these_figures() -> None:
    """Name, unit and explanation may be in the first cell; figures are in the others."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    table = page.partition("| of the study's schedule |")[2].partition("\n\n")[0].splitlines()[2:]
    phases, _ = simulated_phases(STUDY)
    for row, (name, simulated, measured) in zip(table, deviations(STUDY, phases), strict=True):
        shown = [float(cell) for cell in row.strip("| ").split(" | ")[1:]]
        assert shown == [pytest.approx(simulated, abs=0.03), measured], name


def test_a_flush_of_half_a_second_misses_the_table() -> None:
    """The agreement is not there whatever the rate."""
    fast = replace(STUDY.measured, flushing_backward=STUDY.measured.backward + 0.5)
    phases, _ = simulated_phases(Study(measured=fast))
    assert phases.step < 0.9 * STUDY.measured.step


def test_phases_are_all_of_the_step_and_every_gradient_is_flushed_once() -> None:
    plan, _ = study_schedule(STUDY)
    phases, run = simulated_phases(STUDY)
    assert isinstance(phases, Phases)
    parts = 2 * phases.forward + phases.backward + phases.flushing_backward + phases.update
    assert parts == pytest.approx(phases.step)
    assert sum(run.busy.values()) == pytest.approx(run.makespan), "one after the other: nothing overlaps"
    flushed = sum(v.sizes[0] for v in plan.vertices if swaps_out(v))
    assert flushed == GRADIENT * STUDY.model.parameters


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_makes_sense_and_updates_every_piece_once(clip: bool, deferred: bool) -> None:
    pieces = pieces_of(TINY, 2)
    later = range(len(pieces)) if deferred else ()
    options = StepOptions(pieces=2, clip=clip, deferred=later, on_host=(0, 3) if deferred else ())
    graph = check_taskgraph(step_graph(TINY, options))
    assert sum(piece.parameters for piece in pieces) == TINY.model.parameters
    updates = list(kernels_named(graph, UPDATE))
    assert len(updates) == len(pieces)
    assert sum(update.sizes[0] for update in updates) == 2 * TINY.model.parameters
    versions = lasting_versions(graph.vertices)
    weights = [v.id for v in graph.vertices if v.op == "weight"]
    assert all(len(versions[weight, 0]) == 2 for weight in weights)
    assert all((len(update.inputs) == 4) == clip for update in updates)
    kernels = [v for v in graph.vertices if v.kind is VertexKind.KERNEL]
    assert (kernels[0].op == UPDATE) == deferred


def test_seconds_of_kernels_are_the_studys() -> None:
    graph = step_graph(STUDY, StepOptions())
    seconds = sum(v.duration or 0.0 for v in graph.vertices if v.op != UPDATE)
    assert seconds == pytest.approx(2 * (STUDY.measured.forward + STUDY.measured.backward))
