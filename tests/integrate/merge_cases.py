"""Bases, adapters and PEFT's own merges of them, as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def llama(**config: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**(_SIZES | config)))


def gemma() -> Any:
    """Its head is its table of tokens."""
    return Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=16))


def gpt2() -> Any:
    """Its layers have their inputs first."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, **ends))


def experts() -> Any:
    """A checkpoint has each expert by itself, the model one weight for all."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **sizes))


FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama": (llama, {"target_modules": "all-linear"}),
    "gemma": (gemma, {"target_modules": ["q_proj", "embed_tokens"]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts": (
        experts,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}
FORMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dora, modules_to_save": (llama, {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["lm_head"]}),
    "rslora": (llama, {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 16}),
    "patterns": (
        llama,
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"k_proj": 3}},
    ),
    "biases": (lambda: llama(attention_bias=True), {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "bias of LoRA": (lambda: llama(attention_bias=True), {"target_modules": ["q_proj"], "lora_bias": True}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    "tokens, tied": (gemma, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    "pissa": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "a table of its own": (gemma, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tied head": (gemma, {"target_modules": ["q_proj", "lm_head"]}),
    "tied adapters": (gemma, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "experts untouched": (experts, {"target_modules": ["q_proj"]}),
}


def make_case(
    folder: Path, make: Callable[[], Any], lora: dict[str, Any], dtype: torch.dtype, shard: str = "50GB"
) -> None:
    """Fill ``folder`` with ``base`` and ``adapter``, random, the base in files of ``shard`` bytes."""
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(folder / "base", max_shard_size=shard)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    tuned = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    tuned.save_pretrained(folder / "adapter")


def merge_with_peft(folder: Path, shard: str = "50GB", **options: Any) -> None:
    """PEFT's merge of the case in ``folder``, into ``peft`` there."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", **options)
    merged: Any = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
    merged.save_pretrained(folder / "peft", max_shard_size=shard)


def differing_files(ours: Path, theirs: Path) -> list[str]:
    """Files of either folder that the other has not, or not with the same bytes."""
    names = {path.name for folder in (ours, theirs) for path in folder.iterdir()}
    found = []
    for name in sorted(names):
        here, there = ours / name, theirs / name
        if not here.is_file() or not there.is_file() or here.read_bytes() != there.read_bytes():
            found.append(name)
    return found
