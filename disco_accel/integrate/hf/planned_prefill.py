"""A forward without gradients that fills a key/value cache, from a plan: prefill, whole or a chunk at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from disco_accel.errors import CaptureError
from disco_accel.integrate.hf.kv_cache import TracedCache, cache_arguments, check_cache, fill, room_to_fill, tokens_of
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.step.compile.budget_parts import leaving_bytes
from disco_accel.step.run.forwards import PREFILL, ForwardRequest, run_forward
from disco_accel.step.state.containers import OWN_MARK

if TYPE_CHECKING:
    from disco_accel.step.run.session import Session

_INTEGERS = ("input_ids", "attention_mask", "position_ids")
_UNPLANNED = ("labels", "output_attentions", "output_hidden_states", "output_router_logits")


def planned_prompt(
    state: Session, model: torch.nn.Module, forward: Callable[..., Any], kwargs: Mapping[str, Any]
) -> CausalLMOutputWithPast:
    """The result of ``forward(**kwargs)``, run from a plan of its shapes. ``model``: the one that was prepared.

    ``kwargs`` are those of a Hugging Face causal language model, a DynamicCache in ``past_key_values`` among them,
    which gets the keys and values; ``logits`` are (batch, 1, vocabulary), of the last position.

    Raises:
        CaptureError: an argument, the cache or an op cannot be planned.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets.
    """
    _refuse_hooks(model)
    # The request goes with its tensors, so that the old ones go layer by layer while the cache takes the new ones.
    outputs, _ = run_forward(state, model, _request(model, forward, prefill_batch(forward, kwargs)))
    logits = outputs.pop("logits")
    cache: DynamicCache = kwargs["past_key_values"]
    fill(cache, outputs, tokens_of(kwargs))
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def _request(model: torch.nn.Module, forward: Callable[..., Any], batch: dict[str, Any]) -> ForwardRequest:
    traced = traced_forward(forward)
    return ForwardRequest(
        kind=PREFILL,
        batch=batch,
        trace=lambda **arguments: (traced(**arguments), None),
        contexts=lambda: hf_contexts(model, batch),
        beside=lambda captured: room_to_fill(batch["past"], leaving_bytes(captured)),
        releases=any(batch["past"]),
    )


def prefill_batch(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` as a plan gets them: the cache as tensors, and logits of the last position alone.

    Raises:
        CaptureError: an argument or the cache cannot be planned.
    """
    cache = kwargs.get("past_key_values")
    tokens_of(kwargs)
    if cache is None or kwargs.get("use_cache") is False:
        raise CaptureError("use_cache: a planned prefill fills a key/value cache; pass use_cache=True")
    check_cache(cache)
    for name in _UNPLANNED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise CaptureError(f"{name}: a planned prefill returns the last logits and the cache alone; leave it out")
    batch = {k: v for k, v in kwargs.items() if k not in ("past_key_values", "return_dict") and v is not None}
    batch |= {"use_cache": True}
    if "logits_to_keep" in inspect.signature(forward).parameters:
        batch["logits_to_keep"] = 1
    # In one order and layout, because a plan is for one: prefill() and generate, which cuts chunks, share plans.
    batch = {k: v.contiguous() if k in _INTEGERS and isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    return dict(sorted(batch.items())) | cache_arguments(cache)


def traced_forward(forward: Callable[..., Any]) -> Callable[..., dict[str, torch.Tensor]]:
    """``forward`` in terms of tensors: from ``prefill_batch`` to the last logits and the new tensors of the cache."""

    def traced(**batch: Any) -> dict[str, torch.Tensor]:
        cache = TracedCache.of(batch)
        output = forward(**batch, past_key_values=cache, return_dict=True)
        if not cache.added:
            raise CaptureError(
                "use_cache: the model filled no cache, as in training mode with gradient checkpointing; "
                "call model.eval()"
            )
        return {"logits": output.logits[:, -1:].clone(), **cache.added}

    return traced


def _refuse_hooks(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        hooks = (module._forward_pre_hooks[number] for number in module._forward_pre_hooks_with_kwargs)
        if any(not hasattr(hook, OWN_MARK) for hook in hooks):
            raise CaptureError(
                f"{name}: has a forward pre-hook, as adapter_names gives to each layer, which no plan knows; remove it"
            )
