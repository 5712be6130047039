"""Under a memory budget the recipe trains to the same bits, stops and resumes the same, and refuses what cannot fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.common.compare import compare_runs
from disco_accel.recipes.lora import main
from disco_accel.sizes import parse_size


@pytest.fixture
def run(tmp_path, values):
    """Run the recipe into a named folder, under a budget if one is given; returns exit code and folder."""

    def into(name: str, budget: str | None = None, arguments: tuple[str, ...] = (), **changes) -> tuple[int, Path]:
        merged = {**values, "lora_dropout": 0.0, "output_dir": str(tmp_path / name), **changes}
        if budget is not None:
            merged["disco_config"] = {"memory_budget": budget, "compute_threads": 1, "device": "cpu"}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(merged))
        return main([str(file), *arguments]), Path(merged["output_dir"])

    return into


def planned(output: Path) -> dict:
    return json.loads((output / "metrics.json").read_text())["disco"]


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": False}])
def test_losses_and_adapter_have_the_bits_of_training_without_a_budget(run, changes):
    _, plain = run("plain", **changes)
    code, output = run("planned", "4MiB", **changes)
    assert code == 0
    same = compare_runs(plain, output)
    assert same.same_losses
    assert same.same_adapters
    steps = planned(output)
    assert steps["steps_eager"] == 0
    assert steps["steps_compiled"] == 4 * changes.get("gradient_accumulation_steps", 1)
    assert steps["peak_bytes"] <= parse_size("4MiB")


def test_the_user_is_told_once_what_the_budget_is_made_of(run, capsys):
    run("planned", "4MiB")
    printed = capsys.readouterr().err
    assert printed.count("memory on the device") == 1
    assert "optimizer state" in printed
    assert "captured" in printed


def test_a_planned_run_resumes_to_the_bits_of_one_that_never_stopped(run):
    _, straight = run("straight", "4MiB", save_steps=2)
    _, resumed = run("resumed", "4MiB", ("--resume_from_checkpoint", str(straight / "checkpoint-2")))
    a, b = (load_file(o / "adapter_model.safetensors") for o in (straight, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert planned(resumed)["steps_compiled"] == 2


@pytest.mark.parametrize(
    ("budget", "word"),
    [("20KiB", "needs at least"), ("100KiB", "needs at least"), ("12 parsecs", "memory_budget"), ("900TiB", "machine")],
)
def test_a_budget_that_cannot_work_is_one_line_exit_two_and_no_folder(run, capsys, budget, word):
    code, output = run("out", budget)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert code == 2
    assert len(lines) == 1
    assert word in lines[0]
    assert not output.exists()


def test_the_least_budget_that_an_error_names_does_work(run, capsys):
    code, _ = run("out", "30KiB")
    assert code == 2
    message = next(line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    budget = message.split("at least ")[1].split(" ")[0]
    code, output = run("out", budget)
    assert code == 0
    assert planned(output)["peak_bytes"] <= int(budget)


def test_reentrant_checkpointing_has_the_bits_of_training_without_a_budget(run):
    changes = {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "lora_dropout": 0.1}
    _, plain = run("plain", **changes)
    code, output = run("planned", "4MiB", **changes)
    assert (code, planned(output)["steps_eager"]) == (0, 0)
    same = compare_runs(plain, output)
    assert same.same_losses and same.same_adapters
