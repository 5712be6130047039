"""``disco-accel prefill``, and ``plan`` and ``capture`` of its recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from disco_accel.cli.main import main
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.values import arrives_at_gate
from disco_accel.recipes.loading import load_model
from disco_accel.recipes.settings import parse_recipe

PROMPTS = ("It was a truth", "A small model needs a small text, universally acknowledged.")
CONFIG = {"memory_budget": "300KB", "device": "cpu", "plan_cache": None}


@pytest.fixture
def recipe(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n\n" + json.dumps({"text": PROMPTS[1]}) + "\n")
    return {
        "model_name_or_path": str(checkpoint),
        "prompts": str(file),
        "max_length": 48,
        "num_threads": 1,
        "disco_config": CONFIG,
    }


def written(tmp_path: Path, values: dict[str, Any]) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def run(tmp_path: Path, values: dict[str, Any], *options: str) -> int:
    return main(["prefill", written(tmp_path, values), *options])


def first_tokens(model: Any, checkpoint: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS]
    with torch.no_grad():
        return [int(model(ids).logits[0, -1].argmax()) for ids in rows]


def test_each_prompt_gives_eagers_first_token_within_the_budget(
    recipe: dict[str, Any], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, recipe) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    eager = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    assert [line["first_token"] for line in lines] == first_tokens(eager, checkpoint)
    assert [line["line"] for line in lines] == [1, 3]
    for line in lines:
        assert 0 < line["peak_bytes"] <= line["budget_bytes"] == 300_000
        assert line["tokens"] > 3 and line["seconds"] > 0 and line["plan_seconds"] > 0


def test_an_adapter_counts(
    recipe: dict[str, Any], values: dict[str, Any], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = load_model(parse_recipe(values))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=2.0)
    trained.save_pretrained(tmp_path / "adapter")
    assert run(tmp_path, {**recipe, "adapter_name_or_path": str(tmp_path / "adapter"), "chunk": 5}) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["first_token"] for line in lines] == first_tokens(trained.eval(), checkpoint)


def test_plan_and_capture_take_prefill_recipes(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prediction includes what the cache takes outside the arena; a budget that is too small says what is not."""
    file = written(tmp_path, recipe)
    assert main(["plan", "--json", file, "--device", "cpu", "-o", str(tmp_path / "plan")]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(["capture", file, "-o", str(tmp_path / "task.json")]) == 0
    assert json.loads(capsys.readouterr().out)["adapters"] == 0
    graph = read_taskgraph(str(tmp_path / "task.json"), {})
    assert not any(arrives_at_gate(v) for v in graph.vertices) and sum(v.out for v in graph.vertices) == 1 + 2 * 2
    assert main(["plan", "--json", file, "--device", "cpu", "--memory", "20000"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["fits"] is False and refused["needed_bytes"] > 20000
    assert main(["plan", "--json", file, "--device", "cpu", "--memory", str(refused["needed_bytes"])]) == 0


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"max_length": 4}, 2, "line 3 has 11 tokens, more than max_length: 4"),
        ({"prompts": "none.jsonl"}, 2, "prompts: none.jsonl: no such file"),
        ({"promts": "x"}, 2, "did you mean 'prompts'"),
        ({"chunk": 0}, 2, "chunk: 0 is too small"),
        ({"adapter_name_or_path": "nowhere"}, 2, "adapter_name_or_path: nowhere: has no adapter_config.json"),
        ({"disco_config": {**CONFIG, "memory_budget": 20000}}, 1, "memory_budget"),
    ],
)
def test_wrong_recipes_are_one_line(
    changes: dict[str, Any],
    status: int,
    message: str,
    recipe: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, {**recipe, **changes}) == status
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert re.search(message, printed.err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "line 1: not JSON"),
        ('{"prompt": 3}', "line 1: give an object"),
        ("[]", "give an object"),
    ],
)
def test_wrong_prompts_are_named(
    text: str, message: str, recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(recipe["prompts"]).write_text(text)
    assert run(tmp_path, recipe) == 2
    assert message in capsys.readouterr().err
