"""Key/value caches: which of transformers' can be planned, and their contents as tensors of a batch and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from disco_accel.errors import CaptureError

Past = tuple[tuple[torch.Tensor, ...], ...]
"""For each layer its keys and values, each (batch, heads, tokens, head size); nothing for a layer without any yet."""
Windows = tuple[int, ...]
"""For each layer its sliding window in tokens, 0 for full attention; none where layers are made as they come."""


def check_cache(cache: Any) -> None:
    """Raise CaptureError, naming the class, for a cache that a plan cannot fill."""
    if type(cache) is not DynamicCache:
        raise CaptureError(
            f"past_key_values: a {type(cache).__name__} cannot be planned; pass a DynamicCache, a StaticCache or none"
        )
    if getattr(cache, "offloading", False):
        raise CaptureError("past_key_values: one that offloads itself cannot be planned; set offloading=False")
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CaptureError(f"past_key_values: layer {index} is a {type(layer).__name__}, which cannot be planned")
        if getattr(layer, "record_past", False):
            raise CaptureError(f"past_key_values: layer {index} records its past, for assisted decoding")


def tokens_of(batch: Mapping[str, Any]) -> int:
    """How many tokens a forward on ``batch`` adds to a cache. Raises CaptureError where that is not known."""
    tokens = next((batch[n] for n in ("input_ids", "inputs_embeds") if batch.get(n) is not None), None)
    if not isinstance(tokens, torch.Tensor):
        raise CaptureError("input_ids: a planned forward that fills a cache needs input_ids or inputs_embeds")
    return int(tokens.shape[1])


def past_of(cache: DynamicCache) -> Past:
    """The tensors that ``cache`` holds."""
    return tuple(_held(layer) for layer in cache.layers)


def _held(layer: object) -> tuple[torch.Tensor, ...]:
    assert isinstance(layer, DynamicLayer), "check_cache has refused others"
    if not layer.is_initialized:
        return ()
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def windows_of(cache: DynamicCache) -> Windows:
    """The windows of the layers of ``cache``."""
    return tuple(int(getattr(layer, "sliding_window", 0)) for layer in cache.layers)


def cache_arguments(cache: DynamicCache) -> dict[str, Any]:
    """The contents of ``cache`` as arguments of a traced forward."""
    return {"past": past_of(cache), "windows": windows_of(cache), "length": int(cache.get_seq_length())}


class TracedCache(DynamicCache):
    """A cache with the contents of another that clones a forward's additions: ``added``, by the names of ``fill``."""

    def __init__(self, past: Past, windows: Windows, length: int) -> None:
        """``length``: tokens so far, which a layer with a window may have forgotten."""
        super().__init__()
        self.added: dict[str, torch.Tensor] = {}
        if windows:
            self.layers = [DynamicSlidingWindowLayer(w) if w else DynamicLayer() for w in windows]
            self.layer_class_to_replicate = None
        for layer, held in zip(self.layers, past, strict=True):
            if held:
                assert isinstance(layer, DynamicLayer)
                layer.lazy_initialization(*held)
                layer.keys, layer.values = held
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> TracedCache:
        """With the contents that ``cache_arguments`` has put among ``arguments``, which are taken out."""
        return cls(*(arguments.pop(name) for name in ("past", "windows", "length")))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As DynamicCache's."""
        joined = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        window = getattr(self.layers[layer_idx], "sliding_window", 0) - 1
        for name, tensor in (("keys", key_states), ("values", value_states)):
            last = tensor[:, :, -window:] if 0 < window < tensor.shape[2] else tensor
            # Here and not at the end, so that what is cloned may leave the arena as soon as its layer is done.
            self.added[f"{layer_idx}.{name}"] = last.clone(memory_format=torch.contiguous_format)
        return joined


def fill(cache: DynamicCache, tensors: Mapping[str, torch.Tensor], tokens: int) -> None:
    """Add ``tokens`` new tokens to ``cache``: the tensors that ``TracedCache.added`` named, now with values.

    The tensors of a layer, which own their storages, are emptied as soon as they are in the cache.
    """
    waiting = dict(tensors)
    for name in [n for n in tensors if n.endswith(".keys")]:
        index = int(name.removesuffix(".keys"))
        keys, values = waiting.pop(name), waiting.pop(f"{index}.values")
        cache.update(keys, values, index)
        layer = cache.layers[index]
        if hasattr(layer, "cumulative_length"):
            # What the window has left behind already did not come along.
            layer.cumulative_length += tokens - keys.shape[2]
        for tensor in (keys, values):
            # The run that made them may hold them until its weights are resident again.
            tensor.untyped_storage().resize_(0)


def room_to_fill(past: Past, added: Mapping[str, int]) -> int:
    """Bytes that ``fill`` takes beside old and new tensors: the largest layer joined. ``added``: name → new bytes."""
    old = max((sum(t.numel() * t.element_size() for t in held) for held in past), default=0)
    return old + max((size + added[n.replace("keys", "values")] for n, size in added.items() if "keys" in n), default=0)
