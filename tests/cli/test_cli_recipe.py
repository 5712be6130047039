"""``capture`` and ``plan``: a recipe is judged from the model's config alone; no weights are there to be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main
from disco_accel.graph.files import read_memgraph, read_taskgraph
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import arrives_at_gate, is_foreign
from disco_accel.verify.static import verify

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def write_recipe(folder: Path, disco: str = "", *, layers: int = 2, **keys: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    recipe = {
        "model_name_or_path": str(folder),
        "dataset": "train.jsonl",
        "output_dir": "out",
        "max_steps": 1,
        "lora_r": 4,
        "max_length": 32,
    } | keys
    lines = [f"{key}: {json.dumps(value)}" for key, value in recipe.items()]
    file = folder / "recipe.yaml"
    file.write_text("\n".join(lines) + "\n" + (f"disco_config:\n  {disco}\n" if disco else ""))
    return str(file)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("model"), "memory_budget: 4MiB\n  planner: timed\n  optimizer: device")


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_captured_recipe_compiles(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The task graph has all weights as clean inputs, adapters outside, a duration for each kernel."""
    task, plan = str(tmp_path / "task.json"), str(tmp_path / "plan.json")
    assert main(["capture", recipe, "-o", task]) == 0
    found = answer(capsys)
    graph = read_taskgraph(task)
    kernels = [v for v in graph.vertices if v.kind is VertexKind.KERNEL]
    assert len(kernels) == found["kernels"] > 100 and all(v.duration for v in kernels)
    layer = 2 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128)
    # Layers, embedding, head and last norm in two bytes; rotary frequencies in four.
    assert found["frozen_bytes"] == 2 * layer + 2 * (2 * 512 * 128 + 128) + 4 * 16
    assert sum(arrives_at_gate(v) for v in graph.vertices) == 1 and any(is_foreign(v) for v in graph.vertices)
    assert main(["compile", task, "-o", plan, "--memory", "1MiB", "--cyclic", "--planner", "timed"]) == 0
    assert main(["verify", task, plan]) == 0


def test_a_plan_that_fits_says_what_stays_and_how_fast_it_is(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything stays in an ample budget; in a tight one some of it is streamed, and the files hold a safe plan."""
    assert main(["plan", "--json", recipe, "--memory", "1GiB"]) == 0
    ample = answer(capsys)
    assert ample["fits"] and ample["resident_bytes"] == ample["frozen_bytes"] and ample["reload_bytes"] == 0
    assert ample["step_seconds"] == pytest.approx(ample["compute_seconds"])
    assert "A100" in ample["estimated_for"], "seconds are of a device that has a name"
    assert ample["ratio"] == pytest.approx(1.0)
    folder = tmp_path / "plan"
    assert main(["plan", "--json", recipe, "--memory", "1MiB", "-o", str(folder)]) == 0
    tight = answer(capsys)
    assert tight["reload_bytes"] > 0 and tight["resident_bytes"] < tight["frozen_bytes"]
    assert tight["peak_bytes"] <= tight["budget_bytes"] == 1 << 20
    assert tight["bound_seconds"] <= tight["step_seconds"] * (1 + 1e-9)
    verify(read_taskgraph(folder / "task.json"), read_memgraph(folder / "plan.json"))
    names = json.loads((folder / "forecast.json").read_text())
    assert len(names["streamed"]) == tight["streamed_tensors"] and len(names["resident"]) == tight["resident_tensors"]
    assert any("q_proj" in name for name in names["streamed"] + names["resident"])
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.txt").read_text()
    assert "1MiB" in report and "A100" in report, "and for people, sizes in their units"
    assert json.loads((folder / "trace.json").read_text())


def test_a_budget_that_is_too_small_says_what_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1; the budget that is named fits, and one unit less does not."""
    recipe = write_recipe(tmp_path, "planner: timed\n  optimizer: device", layers=3)
    assert main(["plan", "--json", recipe, "--memory", "64KiB"]) == 1
    captured = capsys.readouterr()
    refusal = json.loads(captured.out)
    assert refusal["fits"] is False and str(refusal["needed_bytes"]) in captured.err
    needed = refusal["needed_bytes"]
    assert main(["plan", "--json", recipe, "--memory", str(needed)]) == 0
    assert answer(capsys)["peak_bytes"] <= needed
    assert main(["plan", "--json", recipe, "--memory", str(needed - 256)]) == 1


def test_the_recipe_s_own_budget_and_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget larger than this machine is taken as it is: the training may run elsewhere."""
    recipe = write_recipe(tmp_path, "memory_budget: 400TiB", packing=False, lora_dropout=0.1)
    assert main(["plan", "--json", recipe]) == 0
    assert answer(capsys)["budget_bytes"] == 400 << 40
    assert main(["plan", "--json", recipe, "--device", "cpu"]) == 0
    assert answer(capsys)["step_seconds"] > 0


@pytest.mark.parametrize(
    ("keys", "arguments", "message"),
    [
        ({"model_name_or_path": "/no/such/model"}, [], "model_name_or_path: /no/such/model"),
        ({"max_length": 65}, [], "max_length: 65 is more than the 64 positions"),
        ({"lora_target_modules": ["nothing"]}, [], "lora_target_modules: "),
        ({"learning_rat": 1}, [], "unknown key 'learning_rat'"),
        ({}, ["--memory", "much"], "not a size"),
        ({}, [], "give --memory"),
    ],
)
def test_bad_recipes_are_status_2(
    keys: dict[str, Any],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["plan", "--json", write_recipe(tmp_path, **keys), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


def test_outputs_that_cannot_be_written(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["capture", recipe, "-o", str(tmp_path / "no" / "task.json")]) == 2
    assert main(["plan", "--json", recipe, "--memory", "1GiB", "-o", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("cannot be written") == 2


def test_an_optimizer_on_the_host_leaves_the_device_to_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is trained is updated by the host, and no part of the budget."""
    file = write_recipe(tmp_path, "memory_budget: 4MiB\n  optimizer: host")
    assert main(["plan", "--json", file]) == 0
    found = answer(capsys)
    parts = found["budget"]
    assert found["optimizer"] == "host" and parts["adapters"] == parts["gradients"] == parts["optimizer"] == 0
    # Rank 4 on all projections, in four bytes.
    layer = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))
    assert found["update"] == "step", "the recipe's optimizer is not fused"
    assert found["host_updated_bytes"] == 2 * layer
    host = found["host_memory"]
    assert host["trained"] == host["gradients"] == 2 * layer and host["moments"] == 4 * layer
    assert host["frozen"] == found["frozen_bytes"]
    file = write_recipe(tmp_path, "memory_budget: 4MiB\n  optimizer: planned\noptim: adamw_torch_fused")
    assert main(["plan", "--json", file]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["optimizer"], found["update"]) == ("host", "deferred")
    file = write_recipe(tmp_path, "memory_budget: 4MiB\n  optimizer: host\n  host_memory: 4KiB")
    assert main(["plan", "--json", file]) == 2
    assert "host_memory: 4KiB is too small, the step needs " in capsys.readouterr().err


def test_several_devices_are_planned_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Host memory has each weight once."""
    recipe = write_recipe(tmp_path, "optimizer: device", per_device_train_batch_size=8)
    assert main(["plan", "--json", recipe, "--memory", "4MiB"]) == 0
    one = answer(capsys)
    assert main(["plan", "--json", recipe, "--memory", "4MiB", "--devices", "2", "--parallel", "all"]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    layers, _, shared = made
    ways = ["layers", "batch", "tensor"]
    assert [each["parallel"] for each in made] == ways
    for each in made:
        assert each["devices"] == 2 and each["fits"]
        assert each["frozen_bytes"] == one["frozen_bytes"]
        assert each["host_memory"]["frozen"] == one["host_memory"]["frozen"]
    assert layers["compute_seconds"] < one["compute_seconds"]
    # Columns of o_proj and down_proj are packed for each device.
    assert shared["host_memory"]["packed"] == 2 * 2 * (128 * 128 + 128 * 256)
    folder = str(tmp_path / "plan")
    assert (
        main(["plan", "--json", recipe, "--memory", "4MiB", "--devices", "2", "--micro-batches", "4", "-o", folder])
        == 0
    )
    task, plan = read_taskgraph(f"{folder}/task.json"), read_memgraph(f"{folder}/plan.json")
    verify(task, plan)
    assert len({v.space for v in plan.vertices if v.kind is VertexKind.KERNEL}) == 2
    assert main(["plan", "--json", recipe, "--memory", "4MiB", "--devices", "3", "--parallel", "batch"]) == 2
    assert "8 rows are not a multiple of 3" in capsys.readouterr().err
    assert main(["plan", "--json", recipe, "--devices", "2", "--parallel", "all", "-o", folder]) == 2
