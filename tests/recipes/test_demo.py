"""The demo's judge notices a single changed bit and every limit that does not hold."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.compare import compare_runs, same_bits
from benchmarks.demo import suite as demo
from benchmarks.demo.report import BudgetRun, first_comparison, limits, print_report, ratios

MIB = 1 << 20


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        steps = [{"step": i + 1, "loss_hex": (8.0 - i / 3).hex()} for i in range(5)]
        (folder / "metrics.json").write_text(json.dumps({"steps": steps}))
        save_file({"x": torch.arange(4.0), "y": torch.zeros(2)}, folder / "adapter_model.safetensors")
    return tmp_path / "a", tmp_path / "b"


def change(run, edit):
    metrics = json.loads((run / "metrics.json").read_text())
    edit(metrics["steps"])
    (run / "metrics.json").write_text(json.dumps(metrics))


def test_equal_runs_are_equal(runs):
    same = compare_runs(*runs)
    assert same.same_losses
    assert same.same_adapters


def test_one_bit_of_one_loss_is_a_difference(runs):
    nudged = math.nextafter(8.0, 9.0).hex()
    change(runs[1], lambda steps: steps[0].update(loss_hex=nudged))
    same = compare_runs(*runs)
    assert (same.losses_equal, same.losses) == (4, 5)
    assert not same.same_losses


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_missing_step_is_a_difference(runs, shorter):
    change(runs[shorter], lambda steps: steps.pop())
    assert not compare_runs(*runs).same_losses


def test_runs_without_steps_prove_nothing(runs):
    for run in runs:
        change(run, lambda steps: steps.clear())
    assert not compare_runs(*runs).same_losses


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": torch.arange(4.0), "y": torch.tensor([0.0, -0.0])},
        {"x": torch.arange(4.0)},
        {"x": torch.arange(4.0), "y": torch.zeros(2), "z": torch.zeros(1)},
        {"x": torch.arange(4.0).double(), "y": torch.zeros(2)},
    ],
)
def test_a_changed_missing_or_added_tensor_is_a_difference(runs, tensors):
    save_file(tensors, runs[1] / "adapter_model.safetensors")
    assert not compare_runs(*runs).same_adapters
    assert load_file(runs[0] / "adapter_model.safetensors").keys() == {"x", "y"}


def test_bits_of_nan_equal_themselves():
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


MEMORY = {"in_memory_peak": 220 * MIB, "weights": 147 * MIB}


def good_run(runs, name="half", **changes) -> BudgetRun:
    """A run for which everything holds, with some statistics replaced."""
    planned = {
        "steps_compiled": 5,
        "steps_eager": 0,
        "peak_bytes": 90 * MIB,
        "arena_bytes": 70 * MIB,
        "resident_weight_bytes": 30 * MIB,
        "reload_bytes": 0 if name == "all" else 200 * MIB,
        "offload_bytes": 0,
        "budget": {"total": 96 * MIB, "arena": 76 * MIB},
        "compile_seconds": {"capture": 3.0, "record": 2.0, "plan": 1.0, "verify": 0.5, "load": 0.5},
    } | {
        k: v
        for k, v in changes.items()
        if k in ("steps_eager", "steps_compiled", "peak_bytes", "arena_bytes", "reload_bytes")
    }
    seconds = {"eager": [1.0, 1.1], "planned": [1.0, 1.1], "synchronous": [1.5, 1.6], "compute_alone": [1.0, 1.0]}
    steps = {
        "seconds": seconds | {k: v for k, v in changes.items() if k in seconds},
        "link_seconds": 0.4,
        "same_bits": changes.get("same_bits", True),
        "large_allocations": changes.get("large_allocations", 0),
        "engine_seconds_per_vertex": [5e-7],
        "load_average": 1.0,
        "counters": {"c10_allocations": changes.get("c10_allocations", 0), "vertices": 3000},
    }
    budget = changes.get("budget", 96 * MIB)
    return BudgetRun(name, budget, {"disco": planned}, compare_runs(*runs), changes.get("taken", 50.0), steps)


@pytest.mark.parametrize("name", ["half", "least", "all"])
def test_a_good_run_passes_every_check(runs, name):
    assert [c.what for c in limits(good_run(runs, name), MEMORY, 5) if not c.holds] == []


@pytest.mark.parametrize(
    ("changes", "what", "timed"),
    [
        ({"steps_eager": 1}, "from the plan", False),
        ({"steps_compiled": 4}, "from the plan", False),
        ({"peak_bytes": 97 * MIB}, "touched", False),
        ({"arena_bytes": 77 * MIB}, "arena", False),
        ({"c10_allocations": 1}, "allocates", False),
        ({"large_allocations": 1}, "4 KiB", False),
        ({"same_bits": False}, "eager", False),
        ({"budget": 111 * MIB}, "at most half", False),
        ({"budget": 148 * MIB}, "less than the weights", False),
        ({"planned": [1.2, 1.2]}, "over bound", True),
        ({"synchronous": [1.1, 1.2]}, "one vertex after another", True),
        ({"taken": 121.0}, "training took", True),
    ],
)
def test_each_limit_that_does_not_hold_is_found(runs, changes, what, timed):
    failed = [c for c in limits(good_run(runs, **changes), MEMORY, 5) if not c.holds]
    assert any(what in c.what and c.timed is timed for c in failed)


def test_a_full_budget_must_not_use_the_link(runs):
    failed = [c.what for c in limits(good_run(runs, "all", reload_bytes=1), MEMORY, 5) if not c.holds]
    assert any("link" in what for what in failed)


def test_too_few_steps_are_found(runs):
    assert any("all 30 steps" in c.what for c in limits(good_run(runs), MEMORY, 30) if not c.holds)


def test_the_bound_is_the_slower_of_compute_and_link(runs):
    steps = good_run(runs).steps
    assert ratios(steps).bound == 1.0
    assert ratios({**steps, "link_seconds": 2.0}).bound == 2.0


def test_the_short_demo_trains_under_half_and_the_full_one_under_all_budgets():
    short, full, own = (
        demo._options(words) for words in ([], ["--full"], ["--full", "--budgets", "all", "--steps", "3"])
    )
    assert (short.budgets, short.steps, short.rounds) == (["half"], 3, 2)
    assert (full.budgets, full.steps, full.rounds) == (["half", "least", "all"], 30, 5)
    assert (own.budgets, own.steps) == (["all"], 3)


@pytest.mark.parametrize("words", [["--budgets", "twice"], ["--steps", "1"]])
def test_budgets_and_steps_that_make_no_demo_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        demo._options(words)
    assert words[0] in capsys.readouterr().err


def test_the_first_comparison_names_what_was_equal_and_what_ran_from_the_plan(runs):
    change(runs[1], lambda steps: steps[0].update(loss_hex=math.nextafter(8.0, 9.0).hex()))
    text = first_comparison(good_run(runs, steps_eager=1, steps_compiled=4))
    assert "4 of 5 losses and 2 of 2 adapter tensors" in text
    assert "4 steps ran from the plan, 1 did not" in text and "90MiB of 96MiB" in text


def test_the_table_shows_every_run_and_what_failed(runs, capsys):
    chosen = [good_run(runs), good_run(runs, "all")]
    bad = good_run(runs, "least", c10_allocations=3)
    checks = [c for r in [*chosen, bad] for c in limits(r, MEMORY, 5)]
    print_report([*chosen, bad], MEMORY, checks)
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if line.startswith("budget "))
    assert header.split() == ["budget", "half", "all", "least"]
    assert "DOES NOT HOLD  least: a steady step allocates no tensor memory" in printed
    assert "5/5" in printed
