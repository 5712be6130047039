"""Preferences in the recipe: TRL's losses, rows of answers, and steps from plans with eager's bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from disco_accel.cli.main import main as command
from disco_accel.errors import ConfigError
from disco_accel.recipes.corpus import IGNORED, Blocks
from disco_accel.recipes.loading import load_tokenizer
from disco_accel.recipes.lora import main
from disco_accel.recipes.metrics import METRICS_NAME
from disco_accel.recipes.preferences import (
    build_preferences,
    give_log_probabilities,
    kto_loss,
    odds_ratio_loss,
    preference_loss,
)
from disco_accel.recipes.settings import parse_recipe

PAIRS = [
    {"prompt": "It was a truth", "chosen": " universally acknowledged", "rejected": " small"},
    {"prompt": "a small model", "chosen": " needs a text", "rejected": " needs truth. It was a"},
] * 4
JUDGED = [
    {"prompt": "It was a truth", "completion": " universally acknowledged", "label": True},
    {"prompt": "a small model", "completion": " needs truth. It was a", "label": False},
    {"prompt": "a small text", "completion": " needs a model", "label": True},
]
RECORDS: dict[str, list[dict[str, Any]]] = {"dpo": PAIRS, "orpo": PAIRS, "kto": JUDGED * 4}


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


WRITTEN_OUT = {
    "sigmoid": lambda chosen, rejected, *_: -math.log(logistic(0.3 * (chosen - rejected))),
    "hinge": lambda chosen, rejected, *_: max(0.0, 1 - 0.3 * (chosen - rejected)),
    "ipo": lambda chosen, rejected, n, m: (chosen / n - rejected / m - 1 / (2 * 0.3)) ** 2,
}
"""TRL's formulas for one pair, of log ratios to the reference and lengths, with beta 0.3."""


@pytest.mark.parametrize("loss_type", WRITTEN_OUT)
def test_a_loss_is_trls_formula(loss_type: str) -> None:
    policy, reference = torch.tensor([-3.0, -9.0, -4.0, -2.5]), torch.tensor([-3.5, -6.0, -3.0, -7.0])
    lengths = torch.tensor([4, 6, 3, 5])
    ratios = (policy - reference).tolist()
    pairs = [(ratios[at], ratios[at + 2], int(lengths[at]), int(lengths[at + 2])) for at in range(2)]
    expected = sum(WRITTEN_OUT[loss_type](*pair) for pair in pairs) / 2
    found = preference_loss(policy, reference, lengths, beta=0.3, loss_type=loss_type)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_the_odds_ratio_loss_is_trls_formula() -> None:
    """The likelihood is of all tokens of chosen rows, in one mean; the odds are of each answer's mean."""
    tokens = [[-0.5, -2.0, -0.25, -1.0], [-0.1, -0.3, -0.05, 0.0], [-3.0, -2.5, -1.5, -0.5], [-1.0, -0.5, -0.125, 0.0]]
    answers = [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0]]
    seen = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    likelihood = -(0.5 + 2 + 0.25 + 1 + 0.1 + 0.3 + 0.05) / 7
    ratios = 0.0
    for chosen, rejected in ((-1.25 / 2, -2.0 / 2), (-0.35 / 2, -0.625 / 2)):
        odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (chosen, rejected)]
        ratios += math.log(logistic(math.log(odds[0] / odds[1]))) / 2
    found = odds_ratio_loss(
        torch.tensor(tokens), torch.tensor(answers, dtype=torch.bool), torch.tensor(seen, dtype=torch.bool), beta=0.3
    )
    assert float(found) == pytest.approx(-likelihood - 0.3 * ratios, rel=1e-6)


def test_the_kto_loss_is_trls_formula() -> None:
    policy, reference = torch.tensor([-3.0, -9.0, -4.0]), torch.tensor([-3.5, -6.0, -7.0])
    desirable = torch.tensor([True, False, False])
    found = kto_loss(policy, reference, torch.tensor(0.75), desirable, beta=0.3, weights=(1.5, 0.5))
    expected = 1.5 * (1 - logistic(0.3 * (0.5 - 0.75)))
    expected += sum(0.5 * (1 - logistic(0.3 * (0.75 - ratio))) for ratio in (-3.0, 3.0))
    assert float(found) == pytest.approx(expected / 3, rel=1e-6)


def file_of(folder: Path, *records: Any) -> str:
    file = folder / "records.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return str(file)


def rows_of(values: dict[str, Any], loss: str, folder: Path, *records: Any) -> tuple[Blocks, Any]:
    """Rows of 24 tokens, and their tokenizer."""
    keys = {**values, "loss": loss, "dataset": file_of(folder, *records), "max_length": 24, "lora_dropout": 0.0}
    recipe = parse_recipe(keys)
    tokenizer = load_tokenizer(recipe)
    return build_preferences(recipe, tokenizer), tokenizer


def texts_of(row: dict[str, torch.Tensor], answer: str, tokenizer: Any) -> tuple[str, str]:
    """(prompt, answer): the tokens that are seen and have no label, and those that have one."""
    ids, labels, mask = (row[f"{answer}_{name}"] for name in ("input_ids", "labels", "attention_mask"))
    kept = labels != IGNORED
    assert len(ids) == 24 and torch.equal(ids[kept], labels[kept]) and bool(mask[kept].all())
    prompt, text = (tokenizer.decode(ids[which], skip_special_tokens=True) for which in (~kept & mask.bool(), kept))
    return prompt, text


def test_both_answers_of_a_pair_come_behind_its_prompt(tmp_path: Path, values: dict[str, Any]) -> None:
    rows, tokenizer = rows_of(values, "dpo", tmp_path, *PAIRS)
    for answer in ("chosen", "rejected"):
        assert texts_of(rows[0], answer, tokenizer) == (PAIRS[0]["prompt"], PAIRS[0][answer])


def test_a_prompt_has_another_completion_of_its_batch_beside_its_own(tmp_path: Path, values: dict[str, Any]) -> None:
    """TRL's order: the completion of the record before, the first of a batch that of its last. Alone: its own."""
    rows, tokenizer = rows_of(values, "kto", tmp_path, *JUDGED)
    others = [JUDGED[at]["completion"] for at in (1, 0, 2)]
    for row, record, other in zip(rows, JUDGED, others, strict=True):
        assert texts_of(row, "completion", tokenizer) == (record["prompt"], record["completion"])
        assert texts_of(row, "KL", tokenizer) == (record["prompt"], other)
        assert bool(row["desirable"]) is record["label"]


@pytest.mark.parametrize(
    ("loss", "record", "words"),
    [
        ("dpo", '{"prompt": "a"', "line 2: not JSON"),
        ("dpo", {"prompt": "a", "chosen": "b"}, 'line 2: give an object with text "prompt", "chosen" and "rejected"'),
        ("orpo", {"prompt": "a", "chosen": "b", "rejected": ""}, "as loss: orpo takes it"),
        ("dpo", {"prompt": "truth " * 60, "chosen": "b", "rejected": "c"}, "line 2: its prompt fills max_length: 24"),
        ("kto", PAIRS[0], 'line 2: give an object with text "prompt" and "completion", and "label", true or false'),
        ("kto", {"prompt": "a", "completion": "b", "label": 1}, "as loss: kto takes it"),
        ("kto", {**JUDGED[0], "prompt": "truth " * 60}, "line 2: its prompt fills max_length: 24"),
        ("kto", "", "has one record"),
    ],
)
def test_a_record_that_a_loss_does_not_take_is_named(
    tmp_path: Path, values: dict[str, Any], loss: str, record: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(values, loss, tmp_path, RECORDS[loss][0], record)
    assert words in str(caught.value)


def test_dropout_of_the_base_drops_nothing() -> None:
    """Else the reference would be another one at each step."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    give_log_probabilities(model)
    assert torch.equal(model[1](torch.ones(64)), torch.ones(64)) and model.training


def recipe_of(values: dict[str, Any], folder: Path, **changes: Any) -> tuple[str, Path]:
    """Of ``loss: dpo`` if ``changes`` say nothing else."""
    keys = {
        **values,
        "loss": "dpo",
        "dataset": file_of(folder, *RECORDS[changes.get("loss", "dpo")]),
        "max_length": 24,
        "lora_dropout": 0.0,
        "max_steps": 3,
        **changes,
    }
    file = folder / f"{len(list(folder.glob('*.yaml')))}.yaml"
    file.write_text(yaml.safe_dump({**keys, "output_dir": str(folder / file.stem)}))
    return str(file), folder / file.stem


@pytest.mark.parametrize(
    ("changes", "forwards", "first"),
    [
        ({}, 1, math.log(2)),
        ({"loss_type": "ipo", "beta": 0.5, "gradient_accumulation_steps": 2}, 1, None),
        ({"loss": "orpo", "beta": 0.5}, 0, None),
        ({"loss": "kto", "undesirable_weight": 1.25, "gradient_accumulation_steps": 2}, 3, (2.25 / 4 + 2 / 4) / 2),
    ],
    ids=str,
)
def test_preferences_are_trained_from_plans_with_eagers_bits(
    values: dict[str, Any], tmp_path: Path, changes: dict[str, Any], forwards: int, first: float | None
) -> None:
    """References are planned forwards of the same weights, ``forwards`` for each micro-batch with that of the estimate
    of KL, and the policy moves away from them as it should. ``first``: the loss of a policy that is its reference."""
    plans = {"memory_budget": "4MiB", "device": "cpu", "plan_cache": None}
    seen = []
    for ours in ({}, {"disco_config": plans}):
        file, output = recipe_of(values, tmp_path, **changes, **ours)
        assert main([file]) == 0
        metrics = json.loads((output / METRICS_NAME).read_text())
        seen.append(([step["loss_hex"] for step in metrics["steps"]], load_file(output / "adapter_model.safetensors")))
        shown = metrics["disco"]
    (eager_losses, eager), (losses, adapter) = seen
    assert losses == eager_losses and eager.keys() == adapter.keys()
    assert all(torch.equal(adapter[name], eager[name]) for name in eager)
    steps = 3 * changes.get("gradient_accumulation_steps", 1)
    assert shown["steps_compiled"] == steps and shown["forwards_planned"] == forwards * steps
    assert shown["fallbacks"] == [] and shown["forwards_unplanned"] == shown["steps_eager"] == 0
    began, ended = (float.fromhex(losses[at]) for at in (0, -1))
    assert changes.get("loss_type") or ended < began
    assert first is None or began == pytest.approx(first)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_plan_names_the_bytes_that_a_training_of_preferences_names(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    plans = {"memory_budget": "30KiB", "compute_threads": 1, "device": "cpu", "plan_cache": None}
    file, _ = recipe_of(values, tmp_path, loss=loss, disco_config=plans)
    assert command(["plan", "--json", file, "--device", "cpu"]) == 1
    refusal = json.loads(capsys.readouterr().out)
    assert main([file]) == 2
    # The reference needs less, and says so first.
    needed = int(capsys.readouterr().err.split("at least ")[-1].split(" ")[0])
    assert refusal["needed_bytes"] == pytest.approx(needed, rel=0.01)
