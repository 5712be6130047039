"""The LoRA recipe trains, repeats itself bit for bit, resumes as if never stopped, and refuses bad input cleanly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from disco_accel.recipes.lora import main
from disco_accel.recipes.metrics import METRICS_NAME

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path, values):
    """Run the recipe with changed keys; returns exit code and output folder."""

    def with_changes(**changes) -> tuple[int, Path]:
        merged = {**values, **changes}
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(merged))
        return main([str(file)]), Path(merged["output_dir"])

    return with_changes


def metrics(output: Path) -> dict:
    return json.loads((output / METRICS_NAME).read_text())


def losses(output: Path) -> list[str]:
    return [step["loss_hex"] for step in metrics(output)["steps"]]


def same_adapters(a: Path, b: Path) -> bool:
    left, right = load_file(a / "adapter_model.safetensors"), load_file(b / "adapter_model.safetensors")
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_training_lowers_the_loss_and_saves_adapter_tokenizer_and_metrics(run):
    code, output = run(max_steps=12, warmup_steps=1, gradient_accumulation_steps=2)
    assert code == 0
    steps = metrics(output)["steps"]
    assert [s["step"] for s in steps] == list(range(1, 13))
    assert all(float.fromhex(s["loss_hex"]) == s["loss"] and s["seconds"] > 0 for s in steps)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    adapter = load_file(output / "adapter_model.safetensors")
    assert any(bool(t.any()) for name, t in adapter.items() if "lora_B" in name), "B starts at zero and must have moved"
    assert {p.name for p in output.iterdir()} >= {"adapter_config.json", "tokenizer.json"}
    assert not list(output.rglob("*.bin"))


def test_updates_in_host_memory_are_put_off_behind_the_recipes_own_callbacks(run):
    """``update: auto`` knows the recipe's Trainer and callbacks; its steps have the bits of a run without plans."""
    keys = {"optim": "adamw_torch_fused", "max_steps": 3}
    _, output = run(**keys)
    expected = losses(output)
    shutil.rmtree(output)
    _, output = run(**keys, disco_config={"memory_budget": "64MiB", "device": "cpu", "optimizer": "host"})
    assert losses(output) == expected
    assert metrics(output)["disco"]["update"] == "deferred" and metrics(output)["disco"]["updates_planned"] == 1


def test_accumulated_micro_batches_report_the_loss_of_the_whole_step(run, tmp_path):
    _, one = run(output_dir=str(tmp_path / "one"), max_steps=1, per_device_train_batch_size=4, lora_dropout=0.0)
    _, four = run(
        output_dir=str(tmp_path / "four"),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        lora_dropout=0.0,
    )
    assert metrics(one)["steps"][0]["loss"] == pytest.approx(metrics(four)["steps"][0]["loss"], rel=1e-2)


def test_the_same_recipe_gives_the_same_bits_and_another_seed_does_not(run, tmp_path):
    _, first = run(output_dir=str(tmp_path / "1"))
    _, again = run(output_dir=str(tmp_path / "2"))
    _, other = run(output_dir=str(tmp_path / "3"), seed=7)
    assert losses(first) == losses(again)
    assert same_adapters(first, again)
    assert losses(first) != losses(other)


@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(run, tmp_path, adapter_dtype):
    _, straight = run(output_dir=str(tmp_path / "straight"), save_steps=2, adapter_dtype=adapter_dtype)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copytree(straight / "checkpoint-2", resumed / "checkpoint-2")
    (resumed / "checkpoint-3").mkdir()
    code, _ = run(output_dir=str(resumed), resume_from_checkpoint=True, adapter_dtype=adapter_dtype)
    assert code == 0, "an unfinished checkpoint-3 must not be taken"
    assert losses(resumed) == losses(straight)[2:]
    assert same_adapters(straight, resumed)
    dtypes = {str(t.dtype) for t in load_file(resumed / "adapter_model.safetensors").values()}
    assert dtypes == {f"torch.{adapter_dtype}"}


def test_a_run_that_was_killed_after_its_last_step_gains_none_when_it_is_resumed(run):
    """Its adapter is that of the last checkpoint."""
    _, output = run(max_steps=2, save_steps=1)
    before = (output / "adapter_model.safetensors").read_bytes()
    (output / "adapter_model.safetensors").unlink()
    assert run(max_steps=2, save_steps=1, resume_from_checkpoint=True)[0] == 0
    assert (output / "adapter_model.safetensors").read_bytes() == before
    assert not (output / "checkpoint-3").exists()


def test_ctrl_c_finishes_the_step_saves_and_can_be_resumed(tmp_path, values):
    recipe = {**values, "max_steps": 2000, "save_steps": 0}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, str(ROOT / "recipes" / "lora.py"), str(tmp_path / "r.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=environment, cwd=tmp_path)
        while "loss=" not in errors.read_text() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(500) == 130, errors.read_text()
    output = Path(values["output_dir"])
    written = metrics(output)
    assert written["interrupted"]
    last = written["steps"][-1]["step"]
    assert (output / f"checkpoint-{last}" / "trainer_state.json").is_file()
    resumed = main([str(tmp_path / "r.yaml"), "--resume_from_checkpoint", "--max_steps", str(last + 2)])
    assert resumed == 0
    assert [s["step"] for s in metrics(output)["steps"]] == list(range(1, last + 3)), (
        "earlier steps stay in the metrics"
    )


def damaged(checkpoint: Path, copy: Path, how: str) -> Path:
    shutil.copytree(checkpoint, copy)
    shard = sorted(copy.glob("*.safetensors"))[1]
    if how == "missing shard":
        shard.unlink()
    elif how == "cut shard":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif how == "no config":
        (copy / "config.json").unlink()
    elif how == "no weights":
        for file in [*copy.glob("*.safetensors"), copy / "model.safetensors.index.json"]:
            file.unlink()
    elif how == "unindexed tensor":
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        names = sorted({s for s in index["weight_map"].values()})
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != names[-1]}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        (copy / names[-1]).unlink()
    return copy


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing shard", "lacks model-00002"),
        ("cut shard", "model-00002"),
        ("no config", "config.json"),
        ("no weights", "safetensors"),
        ("unindexed tensor", "lacks"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(run, checkpoint, tmp_path, capsys, how, words):
    code, output = run(model_name_or_path=str(damaged(checkpoint, tmp_path / "damaged", how)))
    message = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(message) <= 2
    assert words in message[0]
    assert not output.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_name_or_path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"dataset": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"lora_target_modules": ["q_projj"]}, "q_projj"),
        ({"max_length": 4096, "dataset": str(ROOT / "recipes/data/persuasion.txt")}, "128 positions"),
        ({"resume_from_checkpoint": True}, "no checkpoint"),
        ({"resume_from_checkpoint": "/nowhere"}, "not a complete checkpoint"),
        ({"disco_config": {"memory_budgt": "1GiB"}}, "memory_budget"),
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type"),
        ({"optim": "adamm"}, "optim"),
    ],
)
def test_bad_input_is_one_or_two_lines_exit_two_and_no_output_folder(run, capsys, changes, words):
    code, output = run(**changes)
    message = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(message) <= 2, message
    assert words in message[0]
    assert not output.exists()


def test_an_empty_dataset_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    code, output = run(dataset=str(tmp_path / "empty.jsonl"))
    assert code == 2
    assert "is empty" in capsys.readouterr().err
    assert not output.exists()
