"""Forwards without gradients run from plans: whatever they return is eager's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from disco_accel import stats
from tests.integrate.forward_pairs import Plain, assert_equal, compare, counts, prepared, rows
from tests.support.models import family_lora, random_batch, tiny_lora

SMALL = {"layers": 1, "hidden": 32, "vocabulary": 32}


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {"output_hidden_states": True, "return_dict": False}),
        ("qwen3_moe", {"use_cache": False, "output_router_logits": True}),
        ("gpt2", {"output_attentions": True}),
    ],
)
def test_outputs_of_language_models(family: str, options: dict[str, Any]) -> None:
    """Losses, logits, caches with and without windows, hidden states, attentions, router logits; objects and tuples."""
    attention = "eager" if "output_attentions" in options else None
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    eager = family_lora(family, attention=attention, **layers).eval()
    planned = prepared(eager)
    with torch.inference_mode():
        for seed in range(3):
            batch = random_batch(length=10, seed=seed)
            assert_equal(planned(**batch, **options), eager(**batch, **options))
    assert counts(planned) == (3, 0) and stats(planned)["fallbacks"] == []
    # The first forward that is to return hidden states puts hooks of transformers in place.
    assert stats(planned)["plans"] == (2 if any(name.startswith("output") for name in options) else 1)


def test_a_cache_that_is_passed_grows_as_eagers() -> None:
    """Read in chunks by hand, with labels; the cache is the caller's own object. A window of 8 tokens moves on."""
    eager = family_lora("gemma3_text", num_hidden_layers=1).eval()
    planned = prepared(eager)
    ids = random_batch(length=18)["input_ids"]
    ours, theirs = DynamicCache(config=eager.config), DynamicCache(config=eager.config)
    with torch.no_grad():
        for start, end in ((0, 6), (6, 12), (12, 18)):
            part = {"input_ids": ids[:, start:end], "labels": ids[:, start:end]}
            got, want = planned(**part, past_key_values=ours), eager(**part, past_key_values=theirs)
            assert got.past_key_values is ours
            assert_equal(got, want)
    assert counts(planned) == (3, 0)


def test_models_that_make_embeddings_and_rewards() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96, pad_token_id=0, num_labels=1)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    batch = random_batch(length=12)
    batch["attention_mask"][0, 9:] = 0
    del batch["labels"]
    for base, field in ((LlamaModel(config), "last_hidden_state"), (LlamaForSequenceClassification(config), "logits")):
        eager = get_peft_model(base, lora).eval()
        planned = prepared(eager)
        assert compare(planned, eager, **batch)[field].shape[0] == 2
        assert counts(planned) == (1, 0)


def test_an_encoder_decoder_with_both_caches() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    base = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))
    eager = get_peft_model(base, LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False)).eval()
    planned = prepared(eager)
    ids = random_batch(60, length=12)["input_ids"]
    labels = ids[:, :6].contiguous()
    compare(planned, eager, input_ids=ids, labels=labels)
    with torch.no_grad():
        encoded = eager.get_base_model().get_encoder()(ids)
    # Then the encoder's output is returned as it was passed.
    assert compare(planned, eager, encoder_outputs=(encoded.last_hidden_state,), labels=labels)
    assert counts(planned) == (2, 0)


_KEPT: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "a tensor": lambda _, x, y: y,
    "of two dtypes": lambda _, x, y: (y.bfloat16(), y > 0.5, y.argmax(-1)),
    "views": lambda _, x, y: (y[:, 1:3], (y * 2).t(), y.mean().expand(3)),
    "an empty one": lambda _, x, y: (y[:0], y),
    "nested": lambda _, x, y: {"a": [y, {0: y.relu(), "n": None}], "b": (1, "two", 3.0, torch.float32)},
    "an argument": lambda _, x, y: (x, y),
    "one twice": lambda _, x, y: {"first": y, "second": y},
    "constants": lambda m, x, y: (y, torch.arange(3), m.plain * 1),
}


@pytest.mark.parametrize("name", _KEPT)
def test_a_module_without_transformers(name: str) -> None:
    """Each kind of result, twice; the caller may change what they are given in place."""
    eager = Plain(_KEPT[name])
    planned = prepared(eager)
    for seed in range(3):
        x = rows(seed)
        got = compare(planned, eager, x)
        if name == "an argument":
            assert got[0] is x
        if name == "one twice":
            assert got["first"] is got["second"]
        for tensor in [got] if isinstance(got, torch.Tensor) else got if isinstance(got, tuple) else ():
            if tensor is not x and tensor.numel() and 0 not in tensor.stride():
                tensor.zero_()
    assert counts(planned) == (3, 0)


def _requires_grad(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return y * module.scale


def _one_list_twice(_: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    found = [y]
    return {"a": found, "b": found}


_UNPLANNED: dict[str, tuple[Callable[[Any, torch.Tensor, torch.Tensor], Any], str]] = {
    "a weight": (lambda m, x, y: (y, m.linear.weight), "1: shares memory with a weight"),
    "a trained weight": (lambda m, x, y: (y, m.scale), "1: "),
    "part of a buffer": (lambda m, x, y: (y, m.table[:2]), "1: shares memory"),
    "a plain tensor": (lambda m, x, y: (y, m.plain), "1: "),
    "part of an argument": (lambda _, x, y: (y, x[:1]), "1: shares memory"),
    "two views": (lambda _, x, y: (y[:1], y[1:]), "1: shares memory with 0"),
    "one with a gradient": (_requires_grad, "requires a gradient"),
    "one list twice": (_one_list_twice, "b: the same list as a"),
    "two of one name": (lambda _, x, y: {"a": {"b": y}, "a.b": y * 2}, "a.b: two tensors"),
    "an object": (lambda _, x, y: {"a": y, "b": object}, ""),
    "no tensor": (lambda _, x, y: 3, "has no tensor of its own"),
    "a set": (lambda _, x, y: {"a": y, "b": {1}}, "b: a set cannot be part"),
}


@pytest.mark.parametrize("name", _UNPLANNED)
def test_a_result_that_a_plan_could_not_make_is_eagers_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It runs as it is, with the reason told once; what shares memory in eager mode still does."""
    result, reason = _UNPLANNED[name]
    eager = Plain(result)
    planned = prepared(eager)
    for seed in range(2):
        got = compare(planned, eager, rows(seed))
    if not reason:
        assert counts(planned) == (2, 0)
        return
    assert counts(planned) == (0, 2)
    (told,) = stats(planned)["fallbacks"]
    assert reason in told
    assert [r.message for r in caplog.records if "without a plan" in r.message] == [
        f"a forward without gradients runs without a plan, outside the memory budget: {told}"
    ]
    if name == "a weight":
        got[1].zero_()
        assert not planned.linear.weight.any()
    if name == "a plain tensor":
        assert got[1] is planned.plain


def test_logits_that_do_not_fit_whole_are_made_in_chunks() -> None:
    """Of 4 x 64 tokens and 2048 words, 2 MiB: the caller has them whole, the arena never has."""
    eager = tiny_lora(layers=1, hidden=32, vocabulary=2048).eval()
    batch = random_batch(2048, batch=4, length=64)
    batch = {"input_ids": batch["input_ids"], "use_cache": False}
    planned = prepared(eager, "3200KiB", chunks="auto")
    with torch.no_grad():
        got, want = planned(**batch), eager(**batch)
    torch.testing.assert_close(got.logits, want.logits)
    assert counts(planned) == (1, 0)
    seen = stats(planned)
    assert seen["budget"]["arena"] < got.logits.nbytes < seen["budget"]["total"] == 3200 << 10
