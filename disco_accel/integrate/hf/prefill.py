"""``prefill(model, input_ids)``: a prompt's first-token logits and key/value cache, under a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.generation import generating_model, own_forward
from disco_accel.integrate.hf.kv_cache import check_cache
from disco_accel.integrate.hf.planned_prefill import planned_prompt
from disco_accel.integrate.prepare import prepare_frozen, restore
from disco_accel.step.run.session import Session, find_state

logger = logging.getLogger("disco_accel")


def prefill(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    config: DiscoConfig | None = None,
    *,
    past_key_values: DynamicCache | None = None,
    chunk: int | None = None,
) -> CausalLMOutputWithPast:
    """Read a prompt from a plan, as the first step of ``generate`` does, and return ``logits`` and ``past_key_values``.

    ``input_ids``: (batch, tokens). ``attention_mask``: (batch, tokens in the cache + tokens), 0 for padding, which is
    on the left. ``logits``: (batch, 1, vocabulary), of the last token. ``past_key_values`` is a DynamicCache, the one
    that was passed or a new one; it can be handed to ``generate`` or to another ``prefill``.

    ``chunk``: read so many tokens at a time, each chunk attending to those before. Activations then take less memory,
    and the weights cross the link once for each chunk. If a chunk fails, the cache ends with the one before.

    A model that is not prepared needs ``config``: its weights move into the host arena as ``prepare`` moves them, and
    all its parameters are frozen, until ``restore(model)`` or ``prepare(model, config)``. A prepared model keeps its
    pending training step.

    Keys, values and logits have the bits of the first step of ``model.generate`` without us, for equal chunks and equal
    ``requires_grad``, by which PyTorch chooses between matrix products.

    Raises:
        ConfigError: an argument does not fit; names it.
        CaptureError: the model, or the kind of cache, cannot be planned.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets.
    """
    _check_ids(input_ids)
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ConfigError(f"chunk: {chunk!r} is not a number of tokens; give 1 or more, or None for the whole prompt")
    if past_key_values is not None:
        check_cache(past_key_values)
    while isinstance(model, DistributedDataParallel):
        model = model.module
    inner: Any = generating_model(model)
    _check_model(model, inner)
    past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
    mask = _mask(input_ids, attention_mask, past)
    state = _state_of(model, config)
    cache = DynamicCache(config=inner.config) if past_key_values is None else past_key_values
    forward = own_forward(state, model)
    output = None
    for start, end in _chunks(input_ids.shape[1], chunk):
        visible = mask[:, : past + end]
        # As generate numbers them: padding does not count.
        positions = (visible.long().cumsum(-1) - 1).masked_fill(visible == 0, 0)[:, past + start :]
        inputs = {"input_ids": input_ids[:, start:end], "attention_mask": visible, "position_ids": positions}
        output = planned_prompt(state, model, forward, {**inputs, "past_key_values": cache})
    assert output is not None, "a prompt has a token"
    return output


def _chunks(tokens: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    size = chunk or tokens
    for start in range(0, tokens, size):
        yield start, min(start + size, tokens)


def _check_ids(input_ids: Any) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise ConfigError(f"input_ids: is a {type(input_ids).__name__}; pass a tensor of shape (batch, tokens)")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"input_ids: is of {input_ids.dtype}; token ids are int64")
    if input_ids.dim() != 2:
        raise ConfigError(f"input_ids: has shape {tuple(input_ids.shape)}; give (batch, tokens)")
    if input_ids.numel() == 0:
        raise ConfigError(f"input_ids: has shape {tuple(input_ids.shape)}, no token; give a prompt of 1 token or more")


def _check_model(model: torch.nn.Module, inner: Any) -> None:
    settings = getattr(inner, "config", None)
    if settings is None or getattr(settings, "is_encoder_decoder", False):
        raise ConfigError(f"model: a {type(inner).__name__} is not a causal language model of transformers")
    adapters = getattr(model, "peft_config", {})
    prompts = [name for name, adapter in adapters.items() if getattr(adapter, "is_prompt_learning", False)]
    if prompts:
        raise ConfigError(f"model: adapter {prompts[0]!r} puts tokens of its own before the prompt; use generate()")


def _mask(input_ids: torch.Tensor, mask: Any, past: int) -> torch.Tensor:
    """The mask over the cache and the new tokens, checked; all ones where none was given."""
    shape = (input_ids.shape[0], past + input_ids.shape[1])
    if mask is None:
        return torch.ones(shape, dtype=torch.int64, device=input_ids.device)
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.int64, torch.int32, torch.bool):
        raise ConfigError("attention_mask: must be a tensor of integers, 1 for a token and 0 for padding")
    if tuple(mask.shape) != shape:
        raise ConfigError(
            f"attention_mask: has shape {tuple(mask.shape)}; with {past} tokens in the cache and input_ids of shape "
            f"{tuple(input_ids.shape)} it is {shape}"
        )
    if bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise ConfigError(f"attention_mask: row {row} ends with padding; pad prompts on the left")
    return mask


def _state_of(model: torch.nn.Module, config: DiscoConfig | None) -> Session:
    state = find_state(model)
    if state is not None and (config is None or config == state.setup.config):
        return state
    if config is None:
        raise ConfigError("config: the model is not prepared; pass a DiscoConfig, or call prepare(model, config) first")
    if not config.enabled:
        raise ConfigError("enabled: false switches planning off; call the model itself")
    if state is not None:
        if state.frozen is None:
            raise ConfigError(
                "config: the model is prepared for training with another one; leave config out, "
                "or call prepare(model, config)"
            )
        restore(model)
    logger.info("prefill: all parameters are frozen and moved into the host arena until restore(model)")
    return prepare_frozen(model, config)
