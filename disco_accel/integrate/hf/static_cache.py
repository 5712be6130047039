"""transformers' static caches in plans: their tensors are arguments of a forward that it changes in place.

Shapes stay the same from token to token, so that one plan serves all of a batch and a capacity. A layer with a sliding
window counts its tokens in Python: a plan for one token is for a window that is full, or for one that is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.native.backend import is_host
from disco_accel.native.host_memory import copied_from

ARGUMENT = "static_cache"
"""The argument of a traced forward with the tensors of the cache; names of these tensors begin with it."""
_DESCRIBED = "static_layers"
_LOADED_AHEAD = 2
"""Layers at home have room on the device for so many at a time."""

Described = tuple[tuple[int, int, bool], ...]
"""For each layer the tokens that it holds at most, and -1; with a sliding window the tokens that it counts instead.
Behind these, whether its keys and values are in host memory."""


def is_static(cache: Any) -> bool:
    """Whether ``cache`` is one that this file knows."""
    return type(cache) is StaticCache


def check_static(cache: StaticCache, device: torch.device) -> None:
    """Raise CaptureError, naming the reason, for a static cache that no plan on ``device`` can fill."""
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer, _LayerAtHome):
            raise CaptureError(f"past_key_values: layer {index} is a {type(layer).__name__}, which cannot be planned")
        if not isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            raise CaptureError(
                "past_key_values: this version of transformers counts the tokens of a static cache elsewhere; 5.23 "
                "is known to work"
            )
        if layer.is_initialized and layer.device != device:
            raise CaptureError(f"past_key_values: layer {index} is on {layer.device}; make the cache on {device}")


class _LayerAtHome(StaticLayer):
    """Its keys and values are in host memory. A forward without a plan takes them to the device and back."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        super().prefetch()  # type: ignore[no-untyped-call]
        try:
            return super().update(key_states, value_states, *args, **kwargs)
        finally:
            self.offload()

    def prefetch(self) -> None:
        """Nothing: the base class's leaves a layer on the device when a forward has ended, on a stream of its own."""

    def offload(self) -> None:
        """As of the base class, into page-locked memory, and done when it returns."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (_in_host_memory(tensor, self.device) for tensor in (self.keys, self.values))


def _in_host_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, or a copy of it in host memory that copies to ``device`` are fast with."""
    if tensor.is_cpu and (tensor.is_pinned() or is_host(device)):
        return tensor
    made = copied_from(tensor.shape, tensor.stride(), tensor.dtype, device)
    return made.copy_(tensor)


def move_home(cache: StaticCache, indices: Collection[int] | None = None) -> None:
    """Have layers of ``cache`` keep keys and values in host memory: those of ``indices``, or all without a window."""
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if type(layer) is StaticLayer and (indices is None or index in indices):
            layer.__class__ = _LayerAtHome


def adopt_empty(cache: StaticCache, device: torch.device) -> None:
    """Take tensors without tokens to ``device``, or to host memory beside it: ``generate`` makes those for a prompt in
    chunks where the model's weights are."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if not layer.is_initialized or layer.device == device or not is_host(layer.device) or _holds_tokens(layer):
            continue
        if type(layer) is not _LayerAtHome:
            layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
        layer.device = device


def layers_to_move(cache: StaticCache, sizes: Mapping[int, int], missing: int) -> list[list[int]]:
    """Layers of ``cache`` to have at home where ``missing`` bytes of the budget are short: as few as free that many and
    what loads take, and all. ``sizes``: bytes of keys and values by layer, if they are known. Layers with a window, and
    with tokens, stay; the first layers do too, since loads of the last have the most time."""
    layers: list[Any] = cache.layers
    able = [i for i, layer in enumerate(layers) if type(layer) is StaticLayer and not _holds_tokens(layer)]
    if not able:
        return []
    free = missing + _LOADED_AHEAD * max(sizes.get(index, 0) for index in able)
    few: list[int] = []
    while sizes.keys() >= set(able) and len(few) < len(able) and sum(sizes[index] for index in few) < free:
        few.append(able[-1 - len(few)])
    return [few, able] if 0 < len(few) < len(able) else [able]


def _holds_tokens(layer: Any) -> bool:
    return bool(layer.is_initialized) and int(layer.cumulative_length) > 0


def names_at_home(cache: StaticCache) -> frozenset[str]:
    """Names of the tensors in host memory, among ``static_arguments`` and of ``_TracedStaticCache.added``."""
    layers: list[Any] = cache.layers
    return frozenset(
        f"{ARGUMENT}.{index}.{place}" if layer.is_initialized else f"{index}.{name}"
        for index, layer in enumerate(layers)
        if type(layer) is _LayerAtHome
        for place, name in enumerate(("keys", "values"))
    )


def static_arguments(cache: StaticCache, batch: Mapping[str, Any], tokens: int, device: torch.device) -> dict[str, Any]:
    """``cache`` as arguments of a traced forward on ``batch``, of so many new ``tokens``.

    Raises:
        CaptureError: the forward would ask for the number of tokens in the cache, which no plan knows.
        ExecutionError: the cache is too small for the tokens.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        # Where the layer's first update brings it in eager mode.
        layer.cumulative_length = layer.cumulative_length.to(device)
        if type(layer) is _LayerAtHome:
            # Others may have given it other tensors since.
            layer.offload()
    if any(layer.is_initialized for layer in layers):
        _require_positions(batch)
        _require_room(layers, tokens)
    return _described(layers, tokens)


def _described(layers: Sequence[Any], tokens: int) -> dict[str, Any]:
    described = tuple((layer.max_cache_len, _counted(layer, tokens), type(layer) is _LayerAtHome) for layer in layers)
    return {ARGUMENT: tuple(_tensors(layer) for layer in layers), _DESCRIBED: described}


def fill_windows(cache: StaticCache, capacity: int) -> None:
    """Count as many tokens in each layer with a window as before the last of ``capacity`` tokens, if that fills it."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = layer.max_cache_len if layer.max_cache_len < capacity else 0


def token_arguments(cache: StaticCache) -> dict[str, Any]:
    """``static_arguments`` for one token more, of a ``cache`` whose tensors need not have values."""
    return _described(cache.layers, 1)


def _require_positions(batch: Mapping[str, Any]) -> None:
    """Without them the forward takes them from the length of the cache."""
    mask = batch.get("attention_mask")
    masks = mask.values() if isinstance(mask, Mapping) else [mask]
    ready = all(m is None or (isinstance(m, torch.Tensor) and m.dim() == 4) for m in masks)
    if batch.get("position_ids") is None or not ready:
        raise CaptureError(
            "past_key_values: a static cache that holds tokens needs position_ids and a 4-dimensional attention_mask, "
            "as generate makes them"
        )


def _require_room(layers: Sequence[Any], tokens: int) -> None:
    """A write behind the end of a cache would be an error of one kernel, on a GPU one that ends the process's work."""
    for layer in layers:
        if not isinstance(layer, StaticSlidingWindowLayer):
            held = int(layer.cumulative_length)
            if held + tokens > layer.max_cache_len:
                raise ExecutionError(
                    f"past_key_values: holds {held} of at most {layer.max_cache_len} tokens, and this forward adds "
                    f"{tokens}; make a StaticCache with a larger max_cache_len"
                )
            return


def _tensors(layer: Any) -> tuple[torch.Tensor, ...]:
    held = (layer.keys, layer.values) if layer.is_initialized else ()
    return (*held, layer.cumulative_length)


def _counted(layer: Any, tokens: int) -> int:
    if not isinstance(layer, StaticSlidingWindowLayer):
        return -1
    length, most = layer.cumulative_length_int, layer.max_cache_len
    if tokens > 1 or not layer.is_initialized:
        return length
    # For one token the update asks only whether the window is full.
    return most if length >= most else 0


def static_cache_of(arguments: dict[str, Any], sizes: dict[int, int]) -> _TracedStaticCache:
    """The cache that ``static_arguments`` has put among ``arguments``, which are taken out. ``sizes`` gets the bytes of
    keys and values of each layer that has none before."""
    return _TracedStaticCache(arguments.pop(ARGUMENT), arguments.pop(_DESCRIBED), sizes)


class _TracedStaticCache(StaticCache):
    """A static cache whose layers hold the tensors that are given. ``made``: tensors of layers that had none before, by
    layer and name, as clones."""

    def __init__(self, held: Sequence[Sequence[torch.Tensor]], described: Described, sizes: dict[int, int]) -> None:
        layers = [_layer(tensors, *about[:2]) for tensors, about in zip(held, described, strict=True)]
        Cache.__init__(self, layers=layers)
        self._new = [index for index, tensors in enumerate(held) if len(tensors) == 1]
        self._before = [counted for _, counted, _ in described]
        self._sizes = sizes

    @property
    def counts(self) -> tuple[int, ...]:
        """The tokens that the forward has added to each layer that counts them in Python."""
        layers: list[Any] = self.layers
        pairs = zip(layers, self._before, strict=True)
        return tuple(0 if before < 0 else layer.cumulative_length_int - before for layer, before in pairs)

    @property
    def added(self) -> dict[str, torch.Tensor]:
        """Clones of the tensors that the forward has made for layers without, by names for ``fill_static``."""
        made: dict[str, torch.Tensor] = {}
        for index in self._new:
            layer: Any = self.layers[index]
            if layer.is_initialized:
                made |= {f"{index}.{name}": getattr(layer, name).clone() for name in ("keys", "values")}
                self._sizes[index] = layer.keys.nbytes + layer.values.nbytes
        return made


class _UncountedLayer(StaticSlidingWindowLayer):
    """With tokens: its count may not be the true one, so that nobody may ask for it."""

    def get_seq_length(self) -> int:
        raise CaptureError("past_key_values: the forward asks for the length of a static cache, which no plan knows")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise CaptureError("attention_mask: the forward makes that of a static cache itself; pass a 4-dimensional one")


def _layer(tensors: Sequence[torch.Tensor], most: int, counted: int) -> Any:
    layer: Any
    if counted < 0:
        layer = StaticLayer(max_cache_len=most)
    else:
        kind = StaticSlidingWindowLayer if len(tensors) == 1 else _UncountedLayer
        layer = kind(max_cache_len=most, sliding_window=most)
        layer.cumulative_length_int = counted
    layer.cumulative_length = tensors[-1]
    if len(tensors) > 1:
        _hold(layer, *tensors[:2])
    return layer


def _hold(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As ``lazy_initialization`` of the layer."""
    layer.keys, layer.values = keys, values
    # Its length is where the forward runs.
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, layer.cumulative_length.device, True
    layer.batch_size, layer.num_heads, _, layer.k_head_dim = keys.shape
    layer.v_head_dim = values.shape[-1]


def fill_static(cache: StaticCache, made: Mapping[str, torch.Tensor], counts: Sequence[int]) -> None:
    """Behind a planned forward, which has changed the tensors of ``cache``: do the rest of an update. ``made``: by the
    names of ``_TracedStaticCache.added``; ``counts``: its ``counts``."""
    for index, (layer, count) in enumerate(zip(cache.layers, counts, strict=True)):
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int += count
        if f"{index}.keys" in made:
            _hold(layer, made[f"{index}.keys"], made[f"{index}.values"])
