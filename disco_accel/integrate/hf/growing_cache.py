"""A token behind others in a cache that grows: the lengths that one plan is for, and the arguments at each of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache

from disco_accel.errors import CaptureError
from disco_accel.integrate.hf.kv_cache import Windows, cache_arguments, windows_of
from disco_accel.step.run.forwards import _GrowingBatch

_FEWEST = 64
"""A plan is for at least so many tokens: the first tokens of a generation share one."""
_MASK = "attention_mask"


def growing_arguments(cache: DynamicCache, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``cache_arguments`` of ``cache``, whose tensors lie as they do behind a token. Those that do not, such as a part
    of a long prompt, are copied, layer by layer. So is the mask in ``batch``, where it is a part of another."""
    length = int(cache.get_seq_length()) + 1
    layers: list[Any] = cache.layers
    for layer, window in zip(layers, windows_of(cache), strict=True):
        for name in ("keys", "values") if layer.is_initialized else ():
            tensor = getattr(layer, name)
            shape, stride = _layout(tensor, tensor.shape[2], _room(length, window, tensor.shape[2]))
            if tensor.stride() != stride:
                made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
                # Whole, or an interrupt would leave the cache without its values.
                setattr(layer, name, made.copy_(tensor))
    mask = batch.get(_MASK)
    if not isinstance(mask, torch.Tensor) or mask.stride() == torch.empty(mask.shape, device="meta").stride():
        return cache_arguments(cache)
    return cache_arguments(cache) | {_MASK: mask.clone(memory_format=torch.contiguous_format)}


def growing_batch(batch: Mapping[str, Any], parts: int) -> _GrowingBatch | None:
    """``batch``, the arguments for one token more and those of ``growing_arguments``, as one of those that share a
    plan. None: it shares its plan with none. ``parts``: of the lengths up to a power of two, with a plan for each.

    Raises:
        CaptureError: a layer has another number of tokens than its kind has, or the mask is for another number.
    """
    length, windows = batch["length"] + 1, batch["windows"]
    _require_regular(batch, length)
    shortest, longest = _shared(length, windows, parts)
    if shortest == longest:
        return None
    between = length if shortest < length < longest else (shortest + longest) // 2
    return _GrowingBatch(length, {longest, shortest, between}, functools.partial(_at, batch))


def _shared(length: int, windows: Windows, parts: int) -> tuple[int, int]:
    """The first and the last of the lengths that share a plan with ``length``. They are those up to a power of two. A
    forward does something else where a window fills up, or tensors get a second token: such lengths begin anew."""
    longest = max(_FEWEST, 1 << (length - 1).bit_length())
    shortest = 1 if longest == _FEWEST else longest // 2 + 1
    size = -(-(longest - shortest + 1) // parts)
    shortest += (length - shortest) // size * size
    longest = min(longest, shortest + size - 1)
    for first in {3, *(n for window in windows if window for n in (window, window + 1))}:
        if first <= length:
            shortest = max(shortest, first)
        else:
            longest = min(longest, first - 1)
    return shortest, longest


def _held(length: int, window: int) -> int:
    """Tokens that a layer holds before the last of ``length``."""
    return min(length - 1, window - 1) if window else length - 1


def _room(length: int, window: int, tokens: int) -> int:
    """Tokens in the memory that a layer's last ``tokens`` are part of: a full window has dropped one."""
    return tokens + 1 if 0 < window < length else tokens


def _layout(tensor: torch.Tensor, tokens: int, room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of so many tokens of a layer."""
    rows, heads, _, size = tensor.shape
    return (rows, heads, tokens, size), (heads * room * size, room * size, size, 1)


def _require_regular(batch: Mapping[str, Any], length: int) -> None:
    for index, held in enumerate(batch["past"]):
        tokens = {tensor.shape[2] for tensor in held}
        if held and tokens != {_held(length, batch["windows"][index])}:
            raise CaptureError(
                f"past_key_values: layer {index} holds {sorted(tokens)} tokens where the cache counts {length - 1}"
            )
    mask = batch.get(_MASK)
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() in (2, 4) and mask.shape[-1] == length):
        raise CaptureError(f"{_MASK}: is not one of 2 or 4 dimensions for the {length} tokens, the new one among them")


def _at(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """``batch`` as it is for so many tokens; tensors of the cache are without values."""
    past = tuple(
        tuple(_of_tokens(tensor, length, window) for tensor in held)
        for held, window in zip(batch["past"], batch["windows"], strict=True)
    )
    at: dict[str, Any] = {**batch, "past": past, "length": length - 1}
    if at.get(_MASK) is not None:
        at[_MASK] = _mask_of(at[_MASK], length)
    return at


def _of_tokens(tensor: torch.Tensor, length: int, window: int) -> torch.Tensor:
    tokens = _held(length, window)
    layout = _layout(tensor, tokens, _room(length, window, tokens))
    return torch.empty_strided(*layout, dtype=tensor.dtype, device="meta")


def _mask_of(mask: torch.Tensor, length: int) -> torch.Tensor:
    """A mask for ``length`` tokens that hides some if ``mask`` does: models choose their ops by that."""
    hides = mask.dim() == 2 and bool((mask == 0).any())
    made = torch.ones((*mask.shape[:-1], length), dtype=mask.dtype, device=mask.device)
    if hides:
        made[:, 0] = 0
    return made
