"""A captured step run vertex by vertex gives eager's bits: loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.capture.steps import Case, assert_same_bits, assert_well_formed, capture, run_captured, run_eager

BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    Case(),
    Case(checkpointing=True, padded=True, items="tensor"),
    Case(checkpointing=True, base=BF16, items="tensor"),
    Case(base=BF16, adapters=BF16, padded=True),
    Case(autocast=True, checkpointing=True, base=BF16, adapters=BF16, padded=True),
    Case(autocast=True, checkpointing=True),
    Case(autocast=True, base=BF16, items="tensor", tied=True),
    Case(attention="eager", checkpointing=True, padded=True, tied=True),
    Case("qwen2", checkpointing=True),
    Case("qwen2", checkpointing=True, base=BF16, padded=True, items="tensor"),
    Case("qwen2", base=BF16, adapters=BF16, checkpointing=True, tied=True),
    Case("qwen2", autocast=True, padded=True, tied=True),
    Case("qwen2", autocast=True, checkpointing=True, base=BF16, items="int"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_have_eagers_bits(case: Case) -> None:
    """Also for another batch and another tangent than those captured with: nothing of a batch is baked in."""
    model = case.model()
    with case.region():
        step = capture(model, case.batch())
    assert_well_formed(step.graph)
    for seed, tangent in ((0, 1.0), (1, 512.0)):
        batch = case.batch(seed)
        if "num_items_in_batch" in batch:
            batch["num_items_in_batch"] += seed
        expected = run_eager(model, batch, case.region(), tangent)
        assert_same_bits(run_captured(step, model, batch, tangent), expected)


def test_packed_rows_are_masked_as_in_eager_mode() -> None:
    """Positions that restart inside a row mean several sequences, unless a cache is in use."""
    case = Case("llama")
    model = case.model()
    batch = case.batch()
    del batch["attention_mask"]
    restart = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1).contiguous()
    for use_cache in (False, True):
        batch |= {"position_ids": restart, "use_cache": use_cache}
        masked = run_eager(model, batch, case.region())
        step = capture(model, batch)
        assert_same_bits(run_captured(step, model, batch), masked)
        causal = any(op.name == "aten::le" for op in step.graph.ops.values())
        assert causal is not use_cache


def test_unpadded_batch_uses_the_causal_kernel_without_a_mask() -> None:
    """As eager does; a padded batch hands its mask to the same fused kernel."""
    for padded in (False, True):
        case = Case(padded=padded)
        step = capture(case.model(), case.batch())
        calls = [op for op in step.graph.ops.values() if op.name.startswith("aten::_scaled_dot_product")]
        names = {op.name for op in calls}
        assert names == {
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        }
        forward = [op for op in calls if not op.name.endswith("backward")]
        causal, mask = {op.args[4] for op in forward}, {op.args[5] is not None for op in forward}
        assert causal == {not padded} and mask == {padded}


def test_capture_inside_an_open_autocast_region_is_the_one_outside() -> None:
    """Backward and recomputation run outside the region in eager mode, whatever the nesting at the call."""
    case = Case(autocast=True, checkpointing=True)
    model, batch = case.model(), case.batch()
    with case.region():
        once = capture(model, batch)
        model(**batch)
        with case.region():
            twice = capture(model, batch)
        assert torch.is_autocast_enabled("cpu")
    assert once.graph == twice.graph


def test_parameter_that_the_loss_does_not_reach_has_no_gradient() -> None:
    """Eager leaves its .grad None."""
    model = Case().model()
    batch = Case().batch()
    name = next(n for n, _ in model.named_parameters() if "embed_tokens" in n)
    spare = torch.nn.Parameter(torch.ones(3))
    model.register_parameter("spare", spare)
    step = capture(model, batch)
    assert "spare" not in {g.name for g in step.gradients} | {b.name for b in step.bindings}
    assert name in {b.name for b in step.bindings}
    assert_same_bits(run_captured(step, model, batch), run_eager(model, batch, Case().region()))


OTHER_FAMILIES = {
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families_have_eagers_bits(family: str) -> None:
    """Sliding windows, soft caps, norms of their own and fused projections need nothing family-specific."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.0,
    }
    if family == "gpt2":
        settings = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings, **OTHER_FAMILIES[family]))
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    case = Case(padded=family in ("qwen3", "gpt2", "gemma2"))
    step = capture(model, case.batch())
    assert_well_formed(step.graph)
    batch = case.batch(seed=3)
    assert_same_bits(run_captured(step, model, batch), run_eager(model, batch, case.region()))
