"""Changes that Hugging Face models need around a trace, as context managers that capture enters without knowing
them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import masking_utils

from disco_accel.capture.checkpointing import marked_below, traced
from disco_accel.capture.thread_patches import patched
from disco_accel.errors import CaptureError
from disco_accel.step.compile.refusals import (
    require_fixed_forward,
    require_live_adapter,
    require_own_weights,
    require_scales,
)
from disco_accel.step.dynamo import compiled_parts_traced
from disco_accel.step.run.frontend import ContextFactory
from disco_accel.step.state.step_key import has_full_mask, is_packed


def hf_contexts(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[ContextFactory]:
    """Contexts for tracing ``model`` on this concrete batch.

    Raises:
        CaptureError: a key/value cache given to a step, experts chosen by a loop over the data, or a quantised weight
            without its scales.
    """
    require_scales(model)
    _check_experts(model)
    if kwargs.get("past_key_values") is not None:
        raise CaptureError("past_key_values: a training step cannot read or fill a cache; leave it out")
    segments = _checkpointed_modules(model)
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = any(getattr(getattr(m, "config", None), "use_cache", False) for m in model.modules())
    # HF looks for packed rows only where it has no cache, and checkpointing switches the cache off.
    packed = is_packed(kwargs) and (not use_cache or bool(segments))
    return [
        compiled_parts_traced,
        functools.partial(_masks_of, full=has_full_mask(kwargs), packed=packed),
        _head_for_all_positions,
        functools.partial(_marked_checkpointing, segments),
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
def _masks_of(*, full: bool, packed: bool) -> Iterator[None]:
    """Let HF decide about masks by the concrete batch, as in eager mode.

    Under tracing it would always build the mask, and attention given a mask cannot use the causal kernel.
    """

    def ignoring(ignore: Callable[..., bool]) -> Callable[..., bool]:
        def ignore_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
            return bool(ignore(None if full else padding_mask, *args, **kwargs))

        return ignore_mask

    def packing(find: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def packed_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
            return find(position_ids) if packed else None

        return packed_indices

    with (
        patched(masking_utils, "_ignore_causal_mask_sdpa", ignoring),
        patched(masking_utils, "find_packed_sequence_indices", packing),
    ):
        yield


_TRLS_HEAD = ("trl.trainer.utils", "trl.kernels.chunked_logprob")
_WITH_TRITON = "_use_triton"
"""Asked in both modules: whether TRL's head takes the positions with a label alone, by kernels written in Triton."""


@contextmanager
def _head_for_all_positions() -> Iterator[None]:
    """Let TRL's head score all positions by ops of PyTorch's, as it does where there is no Triton: how many positions
    have a label depends on the data. Sums are rounded in another order than by its kernels."""
    with ExitStack() as stack:
        for name in _TRLS_HEAD:
            module = sys.modules.get(name)
            if hasattr(module, _WITH_TRITON):
                stack.enter_context(patched(module, _WITH_TRITON, lambda _: lambda *_args, **_keys: False))
        yield


def _checkpointed_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that run under activation checkpointing."""
    return [
        module
        for module in model.modules()
        if module.training
        and getattr(module, "gradient_checkpointing", False)
        and getattr(module, "_gradient_checkpointing_func", None) is not None
    ]


@contextmanager
def _marked_checkpointing(segments: list[torch.nn.Module]) -> Iterator[None]:
    """Let the user's own functions checkpoint these modules, and mark forward, recomputation and backward."""
    with ExitStack() as stack:
        if segments:
            stack.enter_context(marked_below())
        for module in segments:
            marked = functools.partial(traced, module=module)
            stack.enter_context(patched(module, "_gradient_checkpointing_func", marked))
        yield
