"""A forward without gradients that fills a key/value cache, from a plan: prefill, whole or a chunk at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from disco_accel.capture.captured_step import InputSource
from disco_accel.capture.parts import run_first_forward_changes
from disco_accel.errors import CaptureError
from disco_accel.integrate.hf.kv_cache import TracedCache, check_cache, fill, past_of, room_to_fill, windows_of
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.step.budget.moving_budget import retry_on_budget_change
from disco_accel.step.compile.budget_parts import leaving_bytes
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import CompileOptions, compile_forward
from disco_accel.step.run.pending import externals_of
from disco_accel.step.run.progress_messages import batch_text
from disco_accel.step.run.step_inputs import generator_from, generator_state, kept_on_failure
from disco_accel.step.run.step_plans import plan_of, with_shards
from disco_accel.step.state.containers import OWN_MARK
from disco_accel.step.state.step_key import step_key

if TYPE_CHECKING:
    from disco_accel.capture.captured_step import CapturedStep, InputBinding
    from disco_accel.capture.traced_modules import Forward
    from disco_accel.step.run.session import Session

_KIND = "prefill"
_CACHE = ("past", "windows", "length")
_INTEGERS = ("input_ids", "attention_mask", "position_ids")
_UNPLANNED = ("labels", "output_attentions", "output_hidden_states", "output_router_logits")


def planned_forward(
    state: Session, model: torch.nn.Module, forward: Callable[..., Any], kwargs: Mapping[str, Any]
) -> CausalLMOutputWithPast:
    """The result of ``forward(**kwargs)``, run from a plan of its shapes. ``model``: the one that was prepared.

    ``kwargs`` are those of a Hugging Face causal language model, a DynamicCache in ``past_key_values`` among them,
    which gets the keys and values; ``logits`` are (batch, 1, vocabulary), of the last position.

    Raises:
        CaptureError: an argument, the cache or an op cannot be planned.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets.
    """
    batch = prefill_batch(forward, kwargs)
    cache: DynamicCache = kwargs["past_key_values"]
    with state.placement.hidden():
        outputs = retry_on_budget_change(state.budgets, functools.partial(_run, state, model, forward, batch))
    tokens = _tokens(batch)
    # The old tensors go layer by layer while the cache takes the new ones.
    del batch
    logits = outputs.pop("logits")
    fill(cache, outputs, tokens)
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def prefill_batch(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` as a plan gets them: the cache as tensors, and logits of the last position alone.

    Raises:
        CaptureError: an argument or the cache cannot be planned.
    """
    cache = kwargs.get("past_key_values")
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
    return dict(sorted(batch.items())) | {
        "past": past_of(cache),
        "windows": windows_of(cache),
        "length": int(cache.get_seq_length()),
    }


def _tokens(batch: Mapping[str, Any]) -> int:
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, torch.Tensor):
        raise CaptureError("input_ids: a planned prefill needs input_ids or inputs_embeds")
    return int(tokens.shape[1])


def traced_forward(forward: Callable[..., Any]) -> Forward:
    """``forward`` in terms of tensors: from ``prefill_batch`` to the last logits and the new tensors of the cache."""

    def traced(**batch: Any) -> dict[str, torch.Tensor]:
        cache = TracedCache(*(batch.pop(name) for name in _CACHE))
        output = forward(**batch, past_key_values=cache, return_dict=True)
        if not cache.added:
            raise CaptureError(
                "use_cache: the model filled no cache, as in training mode with gradient checkpointing; "
                "call model.eval()"
            )
        return {"logits": output.logits[:, -1:], **cache.added}

    return traced


def outside_arena(name: str) -> bool:
    """Which outputs of ``traced_forward`` are written to memory of their own as soon as they are made: the cache."""
    return name != "logits"


def _run(
    state: Session, model: torch.nn.Module, forward: Callable[..., Any], batch: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    state.memory.require_own_process()
    with torch.no_grad(), state.memory.lock:
        _refuse_hooks(model)
        step = _compiled(state, model, forward, batch)
        state.loader.make_current(model, step, check_ends_later=True)
        executor = step.executor
        placed = {b: _empty(b, state.memory.device) for b in step.vertices_of(InputSource.OUTSIDE)}
        # The last run may still reload the residents, for this very run.
        step.settle()
        externals = externals_of(state, model, step, batch) | {b.vertex: tensor for b, tensor in placed.items()}
        with kept_on_failure(step):
            _run_on_current_weights(state, model, step, externals)
            values = executor.leave(step.groups[0])
        if any(batch["past"]):
            # The run would hold the old keys and values until its last copy, and the next chunk has another plan.
            executor.abandon()
        state.reports.on_prefill(step)
        state.budgets.step_ended()
        returned = {o.name: value for o, value in zip(step.captured.outputs, values, strict=True)}
        return returned | {b.name: tensor for b, tensor in placed.items()}


def _run_on_current_weights(
    state: Session, model: torch.nn.Module, step: CompiledStep, externals: dict[int, torch.Tensor]
) -> None:
    generator = generator_state(step)
    try:
        step.executor.run_out(externals)
    finally:
        written = state.loader.weights_seen.finish_check()
    if written:
        # Residents are older than a write that came before this forward.
        step.executor.abandon()
        state.loader.make_current(model, step)
        with generator_from(step, generator):
            step.executor.run_out(externals)


def _empty(binding: InputBinding, device: torch.device) -> torch.Tensor:
    spec = binding.spec
    return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device)


def _compiled(
    state: Session, model: torch.nn.Module, forward: Callable[..., Any], batch: Mapping[str, Any]
) -> CompiledStep:
    def beside(captured: CapturedStep) -> int:
        return room_to_fill(batch["past"], leaving_bytes(captured))

    def compiler(options: CompileOptions) -> CompiledStep:
        return compile_forward(
            model,
            batch,
            forward=traced_forward(forward),
            options=with_shards(state, model, options, state.setup.config.parallel),
            beside=beside,
            outside=outside_arena,
        )

    what = f"the reading of {batch_text(batch)}"
    run_first_forward_changes(model, state.memory.device, gradients=False)
    key = step_key(model, batch), _KIND
    return plan_of(state, model, key, lambda: hf_contexts(model, batch), compiler, what)


def _refuse_hooks(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        hooks = (module._forward_pre_hooks[number] for number in module._forward_pre_hooks_with_kwargs)
        if any(not hasattr(hook, OWN_MARK) for hook in hooks):
            raise CaptureError(
                f"{name}: has a forward pre-hook, as adapter_names gives to each layer, which no plan knows; remove it"
            )
