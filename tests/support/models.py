"""Tiny random causal LMs with a LoRA adapter, for differential tests against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_WINDOWED = {**_SMALL, "head_dim": 8, "sliding_window": 8}
_EXPERTS = {**_SMALL, "num_experts_per_tok": 2}
TEN_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen2": _SMALL,
    "qwen3": {**_SMALL, "head_dim": 8},
    "mistral": {**_SMALL, "sliding_window": 8},
    "gemma2": _WINDOWED,
    "gemma3_text": _WINDOWED,
    "phi3": {**_SMALL, "pad_token_id": 0},
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64},
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
}
"""transformers' model type and its smallest sensible configuration, besides sizes that all share."""
_DROPOUTS = {"gpt2": ("embd_pdrop", "resid_pdrop", "attn_pdrop")}

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


def tiny_lora(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    layers: int = 1,
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


def family_lora(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    dropout: float = 0.0,
    lora_dropout: float = 0.0,
    attention: str | None = None,
    seed: int = 0,
    checkpoint_options: dict[str, Any] | None = None,
    quantise: Callable[[torch.nn.Module], None] | None = None,
    **config: Any,
) -> torch.nn.Module:
    """One of ``TEN_FAMILIES`` in training mode with LoRA on its linear layers, all matrices random.

    ``dropout`` is every dropout probability that the configuration knows. ``checkpoint_options``: further arguments
    of the user's gradient_checkpointing_kwargs. ``quantise`` packs the base's weights before the adapters come.
    """
    torch.manual_seed(seed)
    probabilities = dict.fromkeys(_DROPOUTS.get(family, ("attention_dropout",)), dropout)
    sizes = {} if family == "gpt2" else {"hidden_size": 32, "intermediate_size": 64}
    settings = {"vocab_size": 96, **sizes, **TEN_FAMILIES[family], **probabilities, **config}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), attn_implementation=attention)
    base.to(dtype).requires_grad_(False)
    if quantise is not None:
        quantise(base)
    # A router chooses experts: as in most recipes, it and they stay as they are.
    adapted: Any = ["q_proj", "k_proj", "v_proj", "o_proj"] if "experts" in str(settings) else "all-linear"
    if quantise is not None:
        # To PEFT not every library's layers are linear.
        present = {name.rpartition(".")[2] for name, _ in base.named_modules()}
        mixture = "experts" in str(settings)
        adapted = sorted(present & set(PROJECTIONS[:4] if mixture else (*PROJECTIONS, "qkv_proj", "gate_up_proj")))
    adapter = LoraConfig(r=4, lora_alpha=8, lora_dropout=lora_dropout, target_modules=adapted, init_lora_weights=False)
    model = get_peft_model(base, adapter)
    if checkpointing:
        model.enable_input_require_grads()
        options = {"use_reentrant": False, **(checkpoint_options or {})}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()
    return model


def family_full(
    family: str, *, dtype: torch.dtype = torch.float32, checkpointing: bool = False, seed: int = 0, **config: Any
) -> torch.nn.Module:
    """One of ``TEN_FAMILIES`` in training mode, all its weights trainable, without dropout."""
    torch.manual_seed(seed)
    sizes = {} if family == "gpt2" else {"hidden_size": 32, "intermediate_size": 64}
    dropouts = dict.fromkeys(_DROPOUTS.get(family, ("attention_dropout",)), 0.0)
    settings = {"vocab_size": 96, **sizes, **TEN_FAMILIES[family], **dropouts, **config}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: torch.nn.Module = model.train()
    return trained


def random_batch(vocabulary: int = 96, *, batch: int = 2, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` (all ones) and ``labels`` of shape (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
