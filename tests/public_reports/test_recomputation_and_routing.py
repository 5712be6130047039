"""Reports about recomputation, several forwards of a step, experts and parts of a model that some batches leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from disco_accel.errors import CaptureError
from tests.public_reports.rig import PLENTY, Run, adamw, assert_same, batch, case, compare, llama, lora, run

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


def experts(**keys: Any) -> Any:
    """A mixture of six experts, two of them for each token."""
    config = {**SIZES, **HEADS, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(config | keys))).train()
    model.set_experts_implementation("grouped_mm")
    return model


@case(4)
def test_the_auxiliary_loss_comes_and_goes(run: Run) -> None:
    """transformers #45120, #44586: ``output_router_logits``, with padding and accumulation."""
    model = experts(router_aux_loss_coef=0.1).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.gate" in name or "q_proj" in name)
    model = run.prepare(model)
    optimizer = adamw(model)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 10:] = 0
    for step, wanted in enumerate((True, False, True)):
        for part in range(2):
            outputs = model(**batch(2 * step + part), attention_mask=mask, output_router_logits=wanted)
            run.backward(model, outputs.loss / 2)
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


@pytest.mark.parametrize("how", ["grouped_mm", pytest.param("batched_mm", marks=pytest.mark.long)])
def test_adapters_of_experts_have_gradients(how: str) -> None:
    """unsloth-zoo #606, peft #3711: expert LoRA had no gradients under one backend."""

    def script(run: Run) -> None:
        base = experts()
        base.set_experts_implementation(how)
        model = run.prepare(lora(base, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        optimizer = adamw(model)
        for seed in range(2):
            run.step(model, optimizer, **batch(seed))
        run.end(model, optimizer)
        missing = [name for name, grad in run.seen if name.startswith("grad.") and "lora" in name and grad is None]
        assert not missing

    compare(script, "plenty", "device", planned=2)


def llava() -> Any:
    """A small vision tower before a small Llama, adapters in both."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=8, projection_dim=32),
        text_config=LlamaConfig(**SIZES, **HEADS),
        image_token_index=3,
    )
    return lora(LlavaForConditionalGeneration(config))


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_towers_train_with_checkpointing(reentrant: bool) -> None:
    """transformers #42489, unsloth #5039: with checkpointing the vision tower trained nothing. Images are refused, and
    train eagerly as they do without us."""

    def script(run: Run) -> None:
        model = llava()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model = run.prepare(model.train())
        optimizer = adamw(model)
        for seed in range(2):
            ids = batch(seed)["input_ids"]
            ids[:, 2:6] = 3
            pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
            run.step(model, optimizer, input_ids=ids, labels=ids, pixel_values=pixels)
        run.end(model, optimizer)

    with pytest.raises(CaptureError, match="where images stand among the tokens"):
        run(script, memory_budget=PLENTY)
    assert_same(run(script, memory_budget=PLENTY, on_unsupported="eager"), run(script))


@pytest.mark.parametrize("keeps", [False, *(pytest.param(keeps, marks=pytest.mark.long) for keeps in (True, None))])
def test_checkpointing_draws_as_it_is_told(keeps: bool | None) -> None:
    """unsloth-zoo #1218: an offloading checkpoint took ``preserve_rng_state`` for an activation."""

    def script(run: Run) -> None:
        model = lora(llama(), lora_dropout=0.1)
        model.enable_input_require_grads()
        options = {"use_reentrant": False} | ({} if keeps is None else {"preserve_rng_state": keeps})
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model = run.prepare(model.train())
        optimizer = adamw(model)
        for seed in range(2):
            run.step(model, optimizer, **batch(seed))
        run.end(model, optimizer)

    compare(script, "plenty", "device", planned=2)


def seq2seq(kind: str) -> Any:
    """A small encoder and decoder."""
    if kind == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 128, "dropout": 0.0}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if kind == "bart":
        return BartForConditionalGeneration(BartConfig(**sizes, **heads, **tokens, max_position_embeddings=64))
    more = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": None}
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **heads, **tokens, **more, begin_suppress_tokens=None)
    )


@pytest.mark.parametrize("kind", ["whisper", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("bart", "t5"))])
def test_encoders_that_some_batches_leave_out(kind: str) -> None:
    """unsloth #3592, torchtune #2709: a second backward, and modules that some batches do not use."""

    def script(run: Run) -> None:
        base = seq2seq(kind)
        base.config.use_cache = False
        model = run.prepare(lora(base, target_modules=["q", "v"] if kind == "t5" else ["q_proj", "v_proj"]))
        optimizer = adamw(model)
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            labels = torch.randint(4, 128, (2, 8), generator=generator)
            if kind == "whisper":
                inputs = {"input_features": torch.randn(2, 8, 32, generator=generator)}
            else:
                inputs = {"input_ids": torch.randint(4, 128, (2, 12), generator=generator)}
            if seed % 2:
                with torch.no_grad():
                    inputs = {"encoder_outputs": (base.get_encoder()(*inputs.values()).last_hidden_state,)}
            run.step(model, optimizer, **inputs, labels=labels)
        run.end(model, optimizer)

    compare(script, "plenty" if kind != "t5" else "least", "device", planned=4)


def test_generation_between_steps_leaves_flags_alone() -> None:
    """CoursIA #12720, unsloth #5269, #4886, #3828, trl #3683: ``use_cache`` and checkpointing stayed set, and models
    with linear attention then generated rubbish."""

    def script(run: Run) -> None:
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16, "num_experts": 0}
        layers = {"layer_types": ["linear_attention", "full_attention"], "eos_token_id": None}
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**(SIZES | HEADS | linear | dims | layers)))
        model = run.prepare(lora(model))
        optimizer = adamw(model)
        for seed in range(3):
            model.config.use_cache = bool(seed % 2)
            model.eval()
            with torch.no_grad():
                tokens = model.generate(
                    input_ids=batch(seed)["input_ids"], max_new_tokens=8, do_sample=False, use_cache=True
                )
            run.see("tokens", tokens)
            model.train()
            run.step(model, optimizer, **batch(seed))
            run.see("use_cache", model.config.use_cache)
            run.see("checkpointing", [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)])
        run.end(model, optimizer)

    compare(script, "plenty", "device", planned=3)


PROMPTS = {
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_that_are_trained(kind: str, checkpointing: bool) -> None:
    """peft #869, #2191: prefix tuning beside checkpointing; the same numbers, or the same refusal as plain."""

    def script(run: Run) -> None:
        model: Any = get_peft_model(llama(), PROMPTS[kind])
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = run.prepare(model.train())
        optimizer = adamw(model)
        for seed in range(2):
            run.step(model, optimizer, **batch(seed), attention_mask=torch.ones(2, 16, dtype=torch.long))
        run.end(model, optimizer)

    try:
        run(script)
    except RuntimeError as plain:
        assert "size" in str(plain)
        with pytest.raises(CaptureError, match=r"capturing module .*self_attn failed: .*broadcast"):
            run(script, memory_budget=PLENTY)
    else:
        compare(script, "plenty", "device", planned=2)
