"""A Trainer run under us from first step to published folder: every number and file is what plain training gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, DiscoConfig, stats
from tests.support.models import tiny_lora

LENGTH, VOCABULARY = 12, 32
Life = dict[str, Any]


def rows(seed: int, count: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * LENGTH, "labels": row} for row in ids]


def live(folder: Path, planned: bool) -> Life:
    """Train with evaluation in the middle until it stops getting better, go back to the best, predict and save."""
    model: Any = tiny_lora(layers=1, hidden=32, vocabulary=VOCABULARY, attention_dropout=0.1)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=3,
        max_steps=12,
        # So large that it gets worse before the end.
        learning_rate=0.3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    config = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(1, 48),
        eval_dataset=rows(2, 5),
        data_collator=default_data_collator,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1), *([DiscoCallback(config)] if planned else [])],
    )
    trainer.train()
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "step")
    log = [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]
    prediction = trainer.predict(rows(3, 5))
    trainer.save_model(str(folder / "published"))
    return {
        "model": model,
        "log": log,
        "best": Path(trainer.state.best_model_checkpoint).name,
        "steps": trainer.state.global_step,
        "adapter": get_peft_model_state_dict(model),
        "logits": torch.from_numpy(prediction.predictions),
        "evaluated": trainer.evaluate()["eval_loss"],
    }


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Life, Path]]:
    torch.set_num_threads(1)
    found = {}
    for name in ("plain", "planned"):
        folder = tmp_path_factory.mktemp(name)
        found[name] = live(folder, name == "planned"), folder
    return found


def test_every_number_of_the_run_is_plain_trainings(lives: dict[str, tuple[Life, Path]]) -> None:
    """Losses, gradient norms and evaluations, where it stopped, what it went back to, predictions: bit for bit."""
    (plain, _), (planned, _) = lives["plain"], lives["planned"]
    assert plain["steps"] < 12, "early stopping has to have something to do"
    assert plain["best"] != f"checkpoint-{plain['steps']}", "so has going back to the best"
    for key in ("log", "best", "steps", "evaluated"):
        assert planned[key] == plain[key], key
    assert torch.equal(planned["logits"], plain["logits"])
    assert planned["adapter"].keys() == plain["adapter"].keys()
    assert all(torch.equal(planned["adapter"][n], t) for n, t in plain["adapter"].items())
    seen = stats(planned["model"])
    assert seen["steps_compiled"] == 2 * planned["steps"] and seen["steps_eager"] == 0


def test_the_folder_is_what_plain_training_publishes(lives: dict[str, tuple[Life, Path]]) -> None:
    """The same files as without us, the adapter alone, nothing pickled but Trainer's own arguments."""
    names = {}
    for name, (life, folder) in lives.items():
        published = folder / "published"
        names[name] = {p.name for p in published.iterdir()}
        saved = load_file(published / "adapter_model.safetensors")
        assert all(torch.equal(saved[n], t) for n, t in life["adapter"].items())
        assert (published / "adapter_model.safetensors").stat().st_size < 200_000
    assert names["planned"] == names["plain"] >= {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def test_plain_peft_reloads_and_merges_the_adapter(lives: dict[str, tuple[Life, Path]], tmp_path: Path) -> None:
    """On a fresh base, without us: the trained model's logits; and those of the prepared model when both merge."""
    life, folder = lives["planned"]
    model = life["model"].eval()
    base: Any = tiny_lora(layers=1, hidden=32, vocabulary=VOCABULARY, attention_dropout=0.1).unload()  # type: ignore[operator]
    assert isinstance(base, LlamaForCausalLM)
    fresh = PeftModel.from_pretrained(base, folder / "published").eval()
    ids = torch.tensor([row["input_ids"] for row in rows(4, 2)])
    with torch.no_grad():
        assert torch.equal(fresh(input_ids=ids).logits, model(input_ids=ids).logits)
        merged = model.merge_and_unload(safe_merge=True)
        expected = fresh.merge_and_unload(safe_merge=True)
        assert torch.equal(merged(input_ids=ids).logits, expected(input_ids=ids).logits)
    merged.save_pretrained(tmp_path / "merged")
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(whole.state_dict()[n], t) for n, t in expected.state_dict().items())


def test_auto_classes_find_the_base_of_what_was_published(lives: dict[str, tuple[Life, Path]], tmp_path: Path) -> None:
    """With the base saved where the adapter's config points, one call loads both."""
    life, folder = lives["plain"]
    base: Any = tiny_lora(layers=1, hidden=32, vocabulary=VOCABULARY, attention_dropout=0.1).unload()  # type: ignore[operator]
    base.save_pretrained(tmp_path / "base")
    config = (folder / "published" / "adapter_config.json").read_text()
    target = lives["planned"][1] / "published" / "adapter_config.json"
    assert target.read_text() == config
    # Of a model that has no name: null, or "" in older versions of PEFT.
    target.write_text(json.dumps(json.loads(config) | {"base_model_name_or_path": f"{tmp_path}/base"}))
    loaded = AutoPeftModelForCausalLM.from_pretrained(lives["planned"][1] / "published")
    assert all(torch.equal(get_peft_model_state_dict(loaded)[n], t) for n, t in life["adapter"].items())
