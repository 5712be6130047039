"""A token of decoding without weights: its arguments, and a static cache for so many tokens, on ``meta``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import StaticCache

from disco_accel.capture.thread_patches import patched
from disco_accel.errors import CaptureError
from disco_accel.integrate.hf.static_cache import check_static, fill_windows, token_arguments

_META = torch.device("meta")


def decoding_batch(model: Any, rows: int, capacity: int) -> dict[str, Any]:
    """The arguments of the last of ``capacity`` tokens of ``rows`` rows, as ``generate`` passes them to ``model``.

    ``model``: a causal language model on ``meta``. The tensors of the cache are among them as its plan has them.

    Raises:
        CaptureError: the model has no static cache that a plan can fill.
    """
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    check_static(cache, _META)
    fill_windows(cache, capacity)
    # Before the layers have tensors: with them masks would need the cache's length, which meta does not have.
    given: dict[str, Any] = model.prepare_inputs_for_generation(
        torch.zeros((rows, 1), dtype=torch.int64),
        past_key_values=cache,
        attention_mask=None,
        position_ids=torch.full((rows, 1), capacity - 1),
        use_cache=True,
        is_first_iteration=False,
    )
    given = {name: value for name, value in given.items() if name != "past_key_values"} | {"return_dict": True}
    _make_tensors(model, cache, given)
    fill_windows(cache, capacity)  # The forward has counted a token.
    return given | token_arguments(cache)


def _make_tensors(model: torch.nn.Module, cache: StaticCache, given: dict[str, Any]) -> None:
    """Give the layers of ``cache`` their keys and values: a forward on ``meta`` knows their shapes."""
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            # What transformers' decorator of expert modules leaves on each; not all of their products work on meta.
            if hasattr(module, "is_transposed"):
                stack.enter_context(patched(module, "forward", _shape_alone))
        model(**_on_meta(given), past_key_values=cache)
    layers: list[Any] = cache.layers
    if not all(layer.is_initialized for layer in layers):
        raise CaptureError("past_key_values: the model fills no static cache; --task prefill plans its prompt")
    for layer in layers:
        layer.cumulative_length = torch.zeros((), dtype=torch.int64)


def _shape_alone(_: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda tokens, *_args, **_kwargs: torch.empty_like(tokens)


def _on_meta(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_meta(each) for name, each in value.items()}
    return value.to(_META) if isinstance(value, torch.Tensor) else value
