"""The ten model families on the emulated device: training, prompts and decoding as in eager mode there, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prefill, prepare, stats
from disco_accel.errors import CaptureError
from disco_accel.step.compile import planned_step
from tests.emulated.models import CUDA, assert_same, assert_steady, least, step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch


def batch(seed: int, length: int = 20) -> dict[str, torch.Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in random_batch(length=length, seed=seed).items()}


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("attention", [None, "eager"], ids=["own attention", "eager attention"])
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_lora_steps_are_bitwise_eager(family: str, attention: str | None) -> None:
    """With checkpointing and dropout, ops dispatched at random; a steady step allocates nothing on the device."""
    model = family_lora(family, checkpointing=True, lora_dropout=0.1, attention=attention)
    eager = copy.deepcopy(model).to(CUDA)
    planned = least(model, lambda m: step(m, batch(0)))
    for seed in range(3):
        torch.manual_seed(seed)
        expected = step(eager, batch(seed))
        torch.manual_seed(seed)
        assert_same(step(planned, batch(seed)), expected)
    last = batch(3)
    torch.cuda.synchronize()
    assert_steady(lambda: step(planned, last))
    found = stats(planned)
    assert found["steps_eager"] == 0 and found["engine"]["c10_allocations"] == 0
    assert found["reload_bytes"] > 0, "the budget is tight: weights move"


def test_dropout_in_memory_efficient_attention_is_refused_with_a_remedy() -> None:
    """Which PyTorch takes for heads in float32 that share no keys."""
    config = DiscoConfig(memory_budget="1GiB", device="cuda", plan_cache=None)
    with pytest.raises(CaptureError, match='attn_implementation="eager", or set attention\'s dropout to 0'):
        step(prepare(family_lora("gpt2", dropout=0.1), config), batch(0))


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_prompts_and_decoding_are_eagers(family: str) -> None:
    model = family_lora(family).eval()
    eager = copy.deepcopy(model).to(CUDA)
    inputs: dict[str, Any] = {k: v for k, v in batch(0).items() if k != "labels"}
    inputs["attention_mask"][0, :5] = 0
    planned = least(model, lambda m: prefill(m, **inputs))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 95, "pad_token_id": 0}
    want, got = (m.generate(**inputs, **options) for m in (eager, planned))
    assert torch.equal(got, want)
    with torch.no_grad():
        # Of the last position alone: of all positions the product has another shape, and other bits. Padding has no
        # positions, as in generation.
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        logits = eager(**inputs, position_ids=positions, use_cache=True, logits_to_keep=1).logits[:, -1]
    assert torch.equal(prefill(planned, **inputs).logits[:, -1], logits)
    found = stats(planned)
    assert found["prefills"] >= 2 and found["steps_eager"] == found["forwards_unplanned"] == 0
    assert found["fallbacks"] == [] and found["engine"]["c10_allocations"] == 0


@pytest.mark.usefixtures("random_order")
def test_the_host_picks_the_experts_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row numbers go to the host while copies run; kernels, slow here, do not decide which plan is taken."""
    monkeypatch.setattr(planned_step, "_GOES_ON", 0.0)
    model = family_lora("qwen3_moe", num_experts=32, moe_intermediate_size=64, hidden_size=64).eval()
    eager = copy.deepcopy(model).to(CUDA)
    inputs: dict[str, Any] = {k: v for k, v in batch(0).items() if k != "labels"}
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 95, "pad_token_id": 0, "disable_compile": True}

    def generated(m: Any) -> torch.Tensor:
        ids: torch.Tensor = m.generate(**inputs, **options, cache_implementation="static")
        return ids

    planned = least(model, generated)
    for _ in range(2):
        assert torch.equal(generated(planned), generated(eager))
    found = stats(planned)
    assert found["forwards_unplanned"] == 0 and found["engine"]["c10_allocations"] == 0
    weights = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert 0 < found["reload_bytes"] < weights // 2


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_steps_in_chunks_are_eagers(family: str) -> None:
    """To rounding, with dropout, which runs whole and draws as it does without chunks."""
    model = family_lora(family, checkpointing=True, lora_dropout=0.1)
    eager = copy.deepcopy(model).to(CUDA)
    planned = least(model, lambda m: step(m, batch(0)), chunks=4)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = step(eager, batch(seed))
        torch.manual_seed(seed)
        got = step(planned, batch(seed))
        assert torch.equal(got.pop("generator"), expected.pop("generator"))
        apart = sum((got[n].double() - t.double()).square().sum() for n, t in expected.items())
        assert apart <= 4e-12 * sum(t.double().square().sum() for t in expected.values())
    found = stats(planned)
    assert found["steps_eager"] == 0 and found["engine"]["c10_allocations"] == 0


def test_a_prompt_in_chunks_is_eagers() -> None:
    model = family_lora("llama").eval()
    eager = copy.deepcopy(model).to(CUDA)
    inputs: dict[str, Any] = {k: v for k, v in batch(0, 32).items() if k != "labels"}
    planned = least(model, lambda m: prefill(m, **inputs), chunks=4)
    with torch.no_grad():
        expected = eager(**inputs, use_cache=True, logits_to_keep=1)
    got = prefill(planned, **inputs)
    assert torch.equal(got.logits[:, -1], expected.logits[:, -1])
    for ours, theirs in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
