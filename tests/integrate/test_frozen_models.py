"""A model that is frozen as a whole has its forwards planned: embeddings, rewards, evaluations, generations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from disco_accel import DiscoCallback, DiscoConfig, prefill, prepare, restore, stats
from disco_accel.errors import ConfigError
from tests.integrate.forward_pairs import assert_equal
from tests.support.models import random_batch

CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def made(kind: type[PreTrainedModel] = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, vocab_size=96, pad_token_id=0)  # type: ignore[arg-type]
    return kind(config).requires_grad_(False).eval()


def settings(model: torch.nn.Module, share: float = 0.6, **keys: Any) -> DiscoConfig:
    budget = int(share * sum(p.nbytes for p in model.parameters())) + (1 << 16)
    return DiscoConfig(memory_budget=budget, device="cpu", plan_cache=None, quiet=True, **keys)


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaModel, LlamaForSequenceClassification])
def test_forwards_have_eagers_bits_in_less_memory_than_the_weights(kind: type[PreTrainedModel]) -> None:
    """Also where gradients are enabled: there is none to make."""
    eager, model = made(kind), made(kind)
    prepare(model, settings(model))
    for seed in range(3):
        ids = random_batch(length=8, seed=seed)["input_ids"]
        with torch.set_grad_enabled(seed == 1):
            assert_equal(model(input_ids=ids), eager(input_ids=ids))
    found = stats(model)
    assert (found["forwards_planned"], found["forwards_unplanned"], found["fallbacks"]) == (3, 0, [])
    assert found["peak_bytes"] <= found["budget_bytes"] < sum(p.nbytes for p in model.parameters())
    assert found["reload_bytes"] > 0


def test_generations_and_evaluations_are_eagers(tmp_path: Path) -> None:
    eager, model = made(), made()
    ids = random_batch(length=8)["input_ids"]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    evaluated = []
    for each, callbacks in ((eager, []), (model, [DiscoCallback(settings(model))])):
        evaluated.append(Trainer(each, arguments, eval_dataset=rows, callbacks=callbacks).evaluate()["eval_loss"])
    assert evaluated[0] == evaluated[1]
    keys = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **keys), eager.generate(ids, **keys))
    found = stats(model)
    assert found["forwards_planned"] == 6 and found["forwards_unplanned"] == 0 and found["fallbacks"] == []


def test_a_trainer_that_is_to_train_it_says_what_to_do(tmp_path: Path) -> None:
    model = made()
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    rows = [{"input_ids": row, "labels": row} for row in random_batch()["input_ids"]]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[DiscoCallback(settings(model))])
    with pytest.raises(ConfigError, match="no trainable parameter; add a LoRA adapter"):
        trainer.train()


def stepped(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(**random_batch(length=8)).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_what_is_unfrozen_later_trains_in_eager_mode_until_it_is_prepared_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager, model = made(), made()
    config = settings(model, share=8)
    assert prepare(prepare(model, config), config) is model
    for each in (eager, model):
        each.lm_head.requires_grad_(True)
    for _ in range(2):
        assert_equal(stepped(model), stepped(eager))
    assert stats(model)["forwards_unplanned"] == 2
    assert sum("call prepare(model, config) to train the model" in message for message in caplog.messages) == 1
    prepare(model, config)
    assert_equal(stepped(model), stepped(eager))
    assert stats(model)["steps_compiled"] == 1 and stats(model)["steps_eager"] == 0
    model.lm_head.requires_grad_(False)
    restore(model)
    assert not any(p.requires_grad for p in model.parameters())


def test_an_adapter_that_is_added_later_trains_from_plans() -> None:
    eager, model = made(), made()
    config = settings(model, share=8)
    prepare(model, config)
    ids = random_batch(length=8)["input_ids"]
    assert_equal(model(input_ids=ids), eager(input_ids=ids))
    wrapped = []
    for each in (eager, model):
        torch.manual_seed(1)
        wrapped.append(get_peft_model(each, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)))
    prepare(wrapped[1], config)
    assert_equal(stepped(wrapped[1]), stepped(wrapped[0]))
    with torch.no_grad():
        assert_equal(wrapped[1](input_ids=ids), wrapped[0](input_ids=ids))
    found = stats(wrapped[1])
    assert found["steps_compiled"] == 1 and found["forwards_planned"] >= 1 and found["fallbacks"] == []


def test_a_prompt_and_a_copy_of_a_frozen_model() -> None:
    """``prefill`` finds it prepared; a copy is a model of its own."""
    eager, model = made(), made()
    prepare(model, settings(model))
    ids = random_batch(length=8)["input_ids"]
    assert torch.equal(prefill(model, ids).logits, eager(input_ids=ids, logits_to_keep=1).logits)
    copied = copy.deepcopy(model)
    assert stats(copied) == {}
    assert_equal(copied(input_ids=ids), eager(input_ids=ids))
