"""Random Llamas with an adapter for the GPU stages: base weights in a host arena, never zeros, never twice."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel.execute.hostmem import HostMemory
from disco_accel.integrate.placement import keep_arena

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
SEVEN_B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


def arena_llama(
    shape: dict[str, int], *, dtype: torch.dtype, attention: str, source: torch.device, seed: int = 0
) -> tuple[Any, HostMemory]:
    """A Llama whose weights are drawn on ``source`` (a GPU is faster at it) into a host arena, pinned for CUDA."""
    config = LlamaConfig(**shape, max_position_embeddings=2048, attention_dropout=0.0, tie_word_embeddings=False)
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    named = list(model.named_parameters())
    memory = HostMemory(HostMemory.room_for([p for _, p in named]))
    if source.type == "cuda":
        memory.pin()
    generator = torch.Generator(source).manual_seed(seed)
    for name, parameter in named:
        target = memory.allocate(parameter.shape, dtype)
        drawn = torch.randn(parameter.shape, generator=generator, device=source, dtype=torch.float32) * 0.02
        # Norms are near 1 in a trained model.
        target.copy_(drawn + 1 if "norm" in name else drawn)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(target, requires_grad=False)
    keep_arena(model, memory)
    return model, memory


def with_adapter(model: Any, *, rank: int, checkpointing: bool, dropout: float = 0.0, seed: int = 0) -> Any:
    """LoRA on all projections in the base's dtype, B not zero, in training mode."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=dropout)
    adapted: Any = get_peft_model(model, lora, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    adapted.config.use_cache = False
    if checkpointing:
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.train()
    return adapted


def batch_for(vocabulary: int, rows: int, length: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ``input_ids`` of shape (rows, length), which are their own ``labels``."""
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": ids, "labels": ids.clone()}
