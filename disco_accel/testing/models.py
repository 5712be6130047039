"""Tiny random causal LMs with a LoRA adapter, for differential tests against eager."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


def tiny_lora(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    layers: int = 2,
    hidden: int = 64,
    vocabulary: int = 96,
    seed: int = 0,
    **config: Any,
) -> torch.nn.Module:
    """A model in training mode with LoRA on all seven projections and random, non-zero B matrices."""
    torch.manual_seed(seed)
    make_config, make_model = FAMILIES[family]
    settings = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    }
    base = make_model(make_config(**(settings | config))).to(dtype)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(PROJECTIONS), lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def random_batch(vocabulary: int = 96, *, batch: int = 2, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` (all ones) and ``labels`` of shape (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
