"""Random Llamas with an adapter for the GPU stages: base weights in a host arena, never zeros, never twice."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.shapes import PRESETS, Shape
from disco_accel.native.host_memory import HostMemory
from disco_accel.step.placement.model_placement import keep_arena
from tests.support.quantised import Quantise

SMALL = PRESETS["tiny"]


def meta_llama(shape: Shape, *, dtype: torch.dtype, attention: str, positions: int = 2048) -> Any:
    """A Llama without memory behind its weights."""
    config = LlamaConfig(**shape, max_position_embeddings=positions, attention_dropout=0.0, tie_word_embeddings=False)
    with init_empty_weights(include_buffers=False):
        return LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)


def draw_weights(
    model: Any,
    source: torch.device,
    home: Callable[[torch.Tensor], torch.Tensor],
    seed: int = 0,
    quantise: Quantise | None = None,
) -> None:
    """Give ``model`` frozen weights, drawn on ``source`` (a GPU is faster at it), each where ``home`` puts it.

    The same ``source`` and ``seed`` give the same weights wherever they go. ``quantise`` packs each layer when it is
    drawn, so that the whole model is never there unpacked.
    """
    generator = torch.Generator(source).manual_seed(seed)
    for layer, parameters in itertools.groupby(list(model.named_parameters()), lambda pair: _layer_of(pair[0])):
        for name, parameter in parameters:
            drawn = torch.randn(parameter.shape, generator=generator, device=source, dtype=torch.float32) * 0.02
            # Norms are near 1 in a trained model.
            weight = home((drawn + 1 if "norm" in name else drawn).to(parameter.dtype))
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(weight, requires_grad=False)
        if layer and quantise is not None:
            quantise(model.get_submodule(layer))


def _layer_of(name: str) -> str:
    found = re.match(r".*\.layers\.\d+(?=\.)", name)
    return found[0] if found else ""


def arena_llama(
    shape: Shape, *, dtype: torch.dtype, attention: str, source: torch.device, seed: int = 0, positions: int = 2048
) -> tuple[Any, HostMemory]:
    """A Llama with ``draw_weights`` in a host arena, pinned if ``source`` is a GPU."""
    model = meta_llama(shape, dtype=dtype, attention=attention, positions=positions)
    memory = HostMemory(HostMemory.room_for(list(model.parameters())))
    if source.type == "cuda":
        memory.pin()
    draw_weights(model, source, memory.adopt, seed)
    keep_arena(model, memory)
    return model, memory


def with_adapter(
    model: Any, *, rank: int, checkpointing: bool, dropout: float = 0.0, seed: int = 0, offload: bool = False
) -> Any:
    """LoRA on all projections in the base's dtype, B not zero, the same wherever the base lies, in training mode.

    ``offload``: transformers keeps what is saved for the recomputation in host memory (5.17 and newer).
    """
    adapted: Any = get_peft_model(model, lora_config(rank, dropout), autocast_adapter_dtype=False)
    draw_adapter(adapted, model.dtype, seed)
    adapted.config.use_cache = False
    if checkpointing:
        checkpoint(model, offload=offload)
    adapted.train()
    return adapted


def lora_config(rank: int, dropout: float = 0.0) -> LoraConfig:
    """LoRA on all projections."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=dropout)


def draw_adapter(adapted: Any, dtype: torch.dtype, seed: int = 0) -> None:
    """Give the adapter of ``adapted`` its values in ``dtype``, the same wherever the base lies."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                scale = 0.02 if "lora_B" in name else parameter.shape[1] ** -0.5
                # PEFT makes it float32 on packed weights.
                parameter.data = parameter.data.to(dtype)
                # On the host: generators of other devices draw other numbers.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def checkpoint(model: Any, *, offload: bool = False) -> None:
    """Checkpoint the activations of each layer of ``model``, of transformers; ``offload`` as in ``with_adapter``."""
    # Called activation_checkpointing_enable where this name is deprecated; older versions have this one alone.
    more = {"offload": True} if offload else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, **more)


def batch_for(vocabulary: int, rows: int, length: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ``input_ids`` of shape (rows, length), which are their own ``labels``."""
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": ids, "labels": ids.clone()}
