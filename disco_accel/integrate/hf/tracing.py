"""What Hugging Face models need around a trace, as context managers that capture enters without knowing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import masking_utils

from disco_accel.capture.thread_patches import patched
from disco_accel.capture.trace_log import checkpointed
from disco_accel.errors import CaptureError
from disco_accel.step.dynamo import compiled_parts_traced
from disco_accel.step.frontend import ContextFactory
from disco_accel.step.refusals import require_fixed_forward, require_live_adapter, require_own_weights
from disco_accel.step.step_key import BatchFacts, batch_facts


def hf_contexts(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[ContextFactory]:
    """Contexts for tracing ``model`` on this concrete batch.

    Raises:
        CaptureError: activation checkpointing with ``use_reentrant=True``, a key/value cache given to a step, or
            experts chosen by a loop over the data.
    """
    _check_experts(model)
    if kwargs.get("past_key_values") is not None:
        raise CaptureError("past_key_values: a training step cannot read or fill a cache; leave it out")
    segments = _checkpointed_modules(model)
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = any(getattr(getattr(m, "config", None), "use_cache", False) for m in model.modules())
    facts = batch_facts(kwargs)
    # HF looks for packed rows only where it has no cache, and checkpointing switches the cache off.
    facts = replace(facts, packed=facts.packed and (not use_cache or bool(segments)))
    return [
        compiled_parts_traced,
        functools.partial(_masks_of, facts),
        functools.partial(_tagged_checkpointing, segments),
    ]


def training_contexts(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[ContextFactory]:
    """``hf_contexts`` for a step that trains.

    Raises:
        CaptureError: also for an adapter that is merged or disabled, for modules that replace their weights, and for
            random choices in Python.
    """
    require_live_adapter(model)
    require_own_weights(model)
    require_fixed_forward(model, kwargs)
    return hf_contexts(model, kwargs)


def _check_experts(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        # What transformers' decorator of expert modules leaves on each of them.
        if hasattr(module, "is_transposed") and getattr(config, "_experts_implementation", None) == "eager":
            raise CaptureError(
                f"experts_implementation: eager loops over the experts that {name} was given, which depends on the "
                "data; load the model with experts_implementation: grouped_mm, or call "
                'model.set_experts_implementation("grouped_mm")'
            )


@contextmanager
def _masks_of(facts: BatchFacts) -> Iterator[None]:
    """Let HF decide about masks by the concrete batch, as in eager mode.

    Under tracing it would always build the mask, and attention given a mask cannot use the causal kernel.
    """

    def ignoring(ignore: Callable[..., bool]) -> Callable[..., bool]:
        def ignore_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
            return bool(ignore(None if facts.full_mask else padding_mask, *args, **kwargs))

        return ignore_mask

    def packing(packed: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def packed_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
            return packed(position_ids) if facts.packed else None

        return packed_indices

    with (
        patched(masking_utils, "_ignore_causal_mask_sdpa", ignoring),
        patched(masking_utils, "find_packed_sequence_indices", packing),
    ):
        yield


def _checkpointed_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """Modules that run under activation checkpointing, with the user's own options for it."""
    checkpointed = []
    for name, module in model.named_modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is None or not getattr(module, "gradient_checkpointing", False) or not module.training:
            continue
        options = dict(function.keywords) if isinstance(function, functools.partial) else {}
        if options.get("use_reentrant") is not False:
            raise CaptureError(
                f"use_reentrant: {name or 'the model'} checkpoints with use_reentrant=True, which cannot be captured; "
                'pass gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        checkpointed.append((module, options))
    return checkpointed


@contextmanager
def _tagged_checkpointing(segments: list[tuple[torch.nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Checkpoint the same modules with the same options, but note what is forward, recompute and backward."""
    with ExitStack() as stack:
        for module, options in segments:
            tagged = _always(functools.partial(checkpointed, **options))
            stack.enter_context(patched(module, "_gradient_checkpointing_func", tagged))
        yield


def _always(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: replacement
