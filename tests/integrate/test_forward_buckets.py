"""Forwards without gradients on batches of many lengths: padded to few, cut again, eager's bits on the padded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, DiscoConfig, stats
from tests.integrate.forward_pairs import assert_equal, compare, counts, prepared
from tests.integrate.test_buckets import padded
from tests.support.models import family_lora, random_batch, tiny_lora

SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "vocabulary": 32}


def unlike(got: Any, want: Any, length: int) -> list[str]:
    """Names of the fields of ``got`` that are not those of ``want``, of the padded batch, cut to ``length``."""
    found = []
    if not torch.equal(got.loss, want.loss):
        found.append("loss")
    if not torch.equal(got.logits, want.logits[:, :length]):
        found.append("logits")
    for ours, theirs in zip(got.hidden_states or (), want.hidden_states or (), strict=True):
        found += [] if torch.equal(ours, theirs[:, :length]) else ["hidden_states"]
    for ours, theirs in zip(got.attentions or (), want.attentions or (), strict=True):
        found += [] if torch.equal(ours, theirs[..., :length, :length]) else ["attentions"]
    if got.past_key_values is not None:
        assert got.past_key_values.get_seq_length() == length
        for ours, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert ours.get_seq_length() == length
            for name in ("keys", "values"):
                same = torch.equal(getattr(ours, name), getattr(theirs, name)[:, :, :length])
                found += [] if same else [f"past_key_values.{name}"]
    return found


def test_all_fields_come_back_at_the_batchs_own_length() -> None:
    """Losses, logits, hidden states, attentions, and the cache, which decoding goes on with."""
    eager = family_lora("llama", attention="eager", num_hidden_layers=1).eval()
    planned = prepared(eager, buckets=(16, 32))
    options: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    for length in (9, 12, 15, 16):
        batch = random_batch(length=length, seed=length)
        with torch.no_grad():
            got, own = planned(**batch, **options), eager(**batch, **options)
            want = eager(**padded(batch, 16), **options)
            assert unlike(got, want, length) == []
            assert got.logits.is_contiguous() and got.logits.shape == own.logits.shape
            torch.testing.assert_close(got.logits, own.logits)
            token = batch["input_ids"][:, -1:]
            following = eager(token, past_key_values=got.past_key_values).logits
            torch.testing.assert_close(following, eager(token, past_key_values=own.past_key_values).logits)
    assert counts(planned) == (4, 0)
    seen = stats(planned)
    # One that puts transformers' hooks for hidden states in place, one for padded batches, of which the caller gets
    # copies, and one for the batch that fills its bucket.
    assert seen["plans"] == 3 and seen["forward_buckets"]["padded_steps"] == 3
    assert seen["buckets"]["lengths"] == 0, "training has seen none"


def test_results_that_cannot_be_cut_keep_the_batchs_own_length(caplog: pytest.LogCaptureFixture) -> None:
    """Tuples, and caches that a window of 8 tokens has moved on in; without the cache the same model is padded."""
    eager = family_lora("gemma3_text", num_hidden_layers=1).eval()
    planned = prepared(eager, buckets=(16,))
    batch = random_batch(length=10)
    compare(planned, eager, **batch)
    assert any("past_key_values: padding could not be taken out of it" in r.message for r in caplog.records)
    assert stats(planned)["forward_buckets"]["padded_steps"] == 0
    compare(planned, eager, **random_batch(length=10, seed=1))
    compare(planned, eager, **batch, use_cache=False, return_dict=False)
    assert stats(planned)["forward_buckets"]["padded_steps"] == 0
    with torch.no_grad():
        got, want = planned(**batch, use_cache=False), eager(**padded(batch, 16), use_cache=False)
    assert unlike(got, want, 10) == []
    assert stats(planned)["forward_buckets"]["padded_to"] == [16]
    assert counts(planned) == (4, 0) and stats(planned)["fallbacks"] == []


def test_a_bucket_that_exceeds_the_budget_keeps_the_batchs_own_length() -> None:
    eager = tiny_lora(**SMALL).eval()
    batch = {**random_batch(32, batch=4, length=10), "use_cache": False}
    roomy = prepared(eager, buckets=(96,))
    with torch.no_grad():
        roomy(**batch)
    needed = stats(roomy)["peak_bytes"]
    tight = prepared(eager, needed // 2, buckets=(96,))
    compare(tight, eager, **batch)
    compare(tight, eager, **batch)
    assert counts(tight) == (2, 0) and stats(tight)["forward_buckets"]["padded_steps"] == 0


def test_off_keeps_lengths_and_no_other_model_is_padded() -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepared(eager, buckets="off")
    for length in (5, 6, 7):
        compare(planned, eager, **random_batch(32, length=length), use_cache=False)
    assert stats(planned)["plans"] == 3 and stats(planned)["forward_buckets"]["padded_to"] == []


def test_a_trainers_evaluation_of_many_lengths_has_few_plans(tmp_path: Path) -> None:
    """Twelve lengths: two of their own, one bucket for the rest. Metrics are plain training's to rounding."""
    data = []
    for length in range(4, 16):
        row = random_batch(32, batch=1, length=length, seed=length)["input_ids"][0].tolist()
        data.append({"input_ids": row, "labels": row})
    found = []
    for planned in (False, True):
        model = tiny_lora(**SMALL)
        model.config.use_cache = False
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            max_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
        )
        config = DiscoConfig(memory_budget="32MiB", device="cpu", planner="build", plan_cache=None)
        callbacks = [DiscoCallback(config)] if planned else []
        collate = default_data_collator
        trainer = Trainer(model, arguments, train_dataset=data[:8], data_collator=collate, callbacks=callbacks)
        trainer.train()
        logits = trainer.predict(data).predictions
        found.append((trainer.evaluate(data)["eval_loss"], [torch.from_numpy(each) for each in logits]))
    assert found[1][0] == pytest.approx(found[0][0], rel=3e-7)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(got, want)
    assert counts(model) == (24, 0)
    assert stats(model)["forward_buckets"]["padded_to"] == [16]
    assert stats(model)["plans"] <= 4


def test_the_same_result_twice_has_the_same_bits() -> None:
    """A padded batch before and after others of its bucket."""
    eager = tiny_lora(**SMALL).eval()
    planned = prepared(eager, buckets=(16,))
    with torch.no_grad():
        first = planned(**random_batch(32, length=7))
        planned(**random_batch(32, length=11, seed=5))
        assert_equal(planned(**random_batch(32, length=7)), first)
    assert stats(planned)["plans"] == 1
