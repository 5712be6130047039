"""``bench optimizer``: our schedules of the study's step are planned, verified, and labelled as simulated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.common.provenance import provenance
from benchmarks.optimizer.__main__ import DEVICE, main
from benchmarks.optimizer.ours import Schedule, builder, planned
from benchmarks.optimizer.pictures import draw
from benchmarks.optimizer.step_graph import UPDATE, StepOptions, kernels_named, pieces_of
from benchmarks.optimizer.study import GRADIENT, STUDY, WEIGHT, Model
from benchmarks.optimizer.study_schedule import study_schedule
from benchmarks.optimizer.suite import HEADER, line, our_row, shared, study_rows, table
from benchmarks.optimizer.trace import FROM_DEVICE, TO_DEVICE, copies_by_phase, held_bytes, link_rates, trace
from benchmarks.report import pages as report
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.values import lasting_versions
from disco_accel.plan.update_estimate import estimated
from tests.support.oracles.adversary import run_reference

LAYERS = {**STUDY.model.shape, "num_hidden_layers": 4}
SMALL = replace(STUDY, model=Model(shape=LAYERS), machine=replace(STUDY.machine, memory=16 << 30))
"""Four layers of the study's model: its kernels take the study's seconds, and the state of all does not fit."""


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_plans_with_places_chosen_are_right_and_faster_than_a_fixed_one(clip: bool, deferred: bool) -> None:
    """Verified where they are made; here an adversary runs one in the worst order."""
    chosen = planned(SMALL, Schedule("chosen", clip, deferred, pieces=2))
    run_reference(chosen.graph, chosen.plan, seed=1)
    host = planned(SMALL, Schedule("host", clip, deferred, pieces=2))
    assert chosen.period <= host.period * 1.001
    assert host.on_host == frozenset(piece.number for piece in pieces_of(SMALL, 2))
    assert host.share_on_device == 0.0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_processors_take_the_gradients_alone_and_give_the_weights(clip: bool, deferred: bool) -> None:
    graph = builder(SMALL, Schedule("host", clip, deferred))(frozenset(range(len(pieces_of(SMALL, 3)))))
    sent = sum(v.sizes[0] for v in graph.vertices if is_transfer(v))
    assert sent == GRADIENT * SMALL.model.parameters + (4 if clip else 0)
    updates = list(kernels_named(graph, UPDATE))
    assert all(update.space != 0 for update in updates)
    assert sum(update.duration or 0.0 for update in updates) == pytest.approx(
        SMALL.machine.host_seconds(SMALL.model.parameters)
    )
    assert all(len(lasting_versions(graph.vertices)[update.inputs[0]]) == 2 for update in updates)


def test_the_whole_step_is_three_times_as_fast_as_the_study_without_a_plan_s_details() -> None:
    """By the list schedule, which takes a moment; the plans' figures are in benchmarks/results."""
    machine = STUDY.machine.pinned_links()
    everywhere = frozenset(range(len(pieces_of(STUDY, StepOptions().pieces))))
    seconds = {
        (clip, deferred): estimated(builder(STUDY, Schedule("host", clip, deferred))(everywhere), machine).makespan
        for clip in (False, True)
        for deferred in (False, True)
    }
    assert all(each < STUDY.measured.step / 2.9 for each in seconds.values())
    assert seconds[False, False] < seconds[True, True] < seconds[True, False], (
        "clipping is a barrier; the head hides it"
    )


def test_a_slow_link_moves_updates_to_the_processors() -> None:
    fast = planned(SMALL, Schedule("chosen", clip=True, deferred=True, pieces=2))
    slow = planned(
        replace(SMALL, machine=replace(SMALL.machine, pinned=5e9)),
        Schedule("chosen", clip=True, deferred=True, pieces=2),
    )
    assert len(slow.on_host) > len(fast.on_host)
    assert shared(SMALL).machine.pinned == pytest.approx(24.75e9)


def test_rows_and_pictures_say_that_they_are_simulated(tmp_path: Path) -> None:
    measured, simulated = study_rows(STUDY)
    assert measured.measured and not simulated.measured
    row, made = our_row(SMALL, Schedule("half", clip=False, pieces=2))
    assert row.bound is not None and row.bound <= row.seconds
    assert row.peak is not None and row.peak <= SMALL.machine.memory
    rows = [asdict(each) for each in (measured, simulated, row)]
    assert {line(each).count("|") for each in rows} == {HEADER.splitlines()[0].count("|")}
    head = provenance("disco-accel bench optimizer", [], DEVICE)
    (tmp_path / "a.json").write_text(json.dumps({"benchmark": "simulated-optimizer", **head, "rows": rows}))
    shown = report.section(tmp_path)
    assert "no device ran it" in shown and line(rows[2]) in shown
    columns = [("the study", trace(*study_schedule(SMALL))), ("ours", trace(made.plan, made.machine))]
    draw(tmp_path / "a.png", columns, SMALL.machine.memory)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_the_trace_of_the_studys_schedule_is_what_its_authors_drew() -> None:
    """Memory grows in the first backward and falls in the flush; each phase copies in one direction."""
    traced = trace(*study_schedule(STUDY))
    sizes = {key: sum(each) for key, each in copies_by_phase(traced).items()}
    total = STUDY.model.parameters
    assert {key: size for key, size in sizes.items() if size} == {
        ("backward", FROM_DEVICE): GRADIENT * total,
        ("update", TO_DEVICE): WEIGHT * total,
    }
    times, held = held_bytes(traced)
    assert held[0] >= WEIGHT * total and held[-1] == WEIGHT * total
    assert (WEIGHT + GRADIENT) * total <= max(held) < STUDY.machine.memory
    assert times[held.index(max(held))] < 2.0
    width = traced.seconds / 200
    for direction, rate in ((TO_DEVICE, STUDY.machine.pinned), (FROM_DEVICE, 2.6e9)):
        rates = link_rates(traced, direction)
        assert sum(rates) * width == pytest.approx(2 * total) and max(rates) <= rate


def test_the_command_agrees_with_the_study_and_prints_what_the_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With updates on the processors alone, the whole model: nothing is searched there."""
    assert main(["--places", "host", "-o", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["simulated"] and len(result["rows"]) == 2 + 4
    assert "no device ran it" in printed and table(result) in printed
    ours = result["rows"][2:]
    assert all(row["faster"] > 2.9 and row["to_device"] == WEIGHT * STUDY.model.parameters for row in ours)


def test_an_unknown_place_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--places", "host,moon"])
    assert "--places: moon unknown" in capsys.readouterr().err
