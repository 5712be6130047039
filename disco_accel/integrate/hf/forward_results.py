"""Results of forwards taken apart: their tensors by name, and the rest, from which the same result is made again.

Those of padded batches are cut in between to the batch's own length, if all their fields can be.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from disco_accel.capture.storages import storage_key
from disco_accel.errors import CaptureError

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type)
_CACHES = (DynamicCache, EncoderDecoderCache, DynamicLayer, DynamicSlidingWindowLayer)
"""Classes whose attributes are all that they have."""
_CACHE = "past_key_values"
_TOKENS = {"logits": (1,), "hidden_states": (1,), "attentions": (-2, -1)}
"""Field of an output → the dimensions of its tensors that count tokens."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in a result. ``given``: it is that argument of the forward itself."""

    name: str
    given: bool = False


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of a class of ``_CACHES``, by its attributes."""

    of: type
    attributes: Any


class _ResultParts:
    """Takes one traced result apart, as of ``take_apart``. ``tensors``: by name, as the result holds them."""

    def __init__(self, given: Mapping[str, torch.Tensor], replaced: Mapping[int, str], held: set[int]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._given = {id(tensor): name for name, tensor in given.items()}
        self._replaced = replaced
        self._held = held | {storage_key(tensor) for tensor in given.values()}
        self._names: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        self._seen: dict[int, str] = {}

    def structure(self, value: Any, path: str = "") -> Any:
        """``value`` with places for its tensors. Raises CaptureError for an object that cannot be made again."""
        if id(value) in self._replaced:
            return _Place(self._replaced[id(value)], given=True)
        if isinstance(value, torch.Tensor):
            return self._place(value, path)
        if isinstance(value, _PLAIN):
            return value
        self._once(value, path)
        if type(value) in _CACHES:
            return _Object(type(value), self.structure(vars(value), path))
        if isinstance(value, ModelOutput) or type(value) is dict:
            inner = {key: self.structure(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
            return inner if type(value) is dict else _Object(type(value), inner)
        if type(value) in (tuple, list):
            items = [self.structure(item, f"{path}.{i}" if path else str(i)) for i, item in enumerate(value)]
            return type(value)(items)
        raise CaptureError(
            f"{path or 'the result'}: a {type(value).__name__} cannot be part of a planned forward's result; plans "
            "return tensors, tuples, lists, dicts, transformers' outputs and dynamic caches of them"
        )

    def _once(self, value: Any, path: str) -> None:
        """Refuse a changeable object in two places of a result: a plan would make two objects."""
        if isinstance(value, tuple) or self._seen.setdefault(id(value), path) == path:
            return
        raise CaptureError(f"{path}: the same {type(value).__name__} as {self._seen[id(value)]}; return a copy of it")

    def _place(self, tensor: torch.Tensor, path: str) -> _Place:
        if id(tensor) in self._given:
            return _Place(self._given[id(tensor)], given=True)
        name = path or "result"
        if tensor.requires_grad:
            raise CaptureError(f"{name}: requires a gradient, and a forward without gradients is planned without any")
        if id(tensor) in self._names:
            return _Place(self._names[id(tensor)])
        key = storage_key(tensor)
        if key in self._held:
            raise CaptureError(
                f"{name}: shares memory with a weight, a buffer or an argument, and a plan would return a copy"
            )
        if key in self._owners:
            raise CaptureError(f"{name}: shares memory with {self._owners[key]}, and a plan would return two copies")
        if name in self.tensors:
            raise CaptureError(f"{name}: two tensors of the result have this name; name the keys of dicts otherwise")
        self._names[id(tensor)] = name
        if tensor.numel():
            self._owners[key] = name
        self.tensors[name] = tensor
        return _Place(name)


def take_apart(
    result: Any, given: Mapping[str, torch.Tensor], replaced: Mapping[int, str], held: set[int]
) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a traced ``result`` by name, as it holds them, and its structure, for ``result_of``.

    ``given``: tensors among the arguments. ``replaced``: id of an object in the result → the argument that the caller
    puts in its place. ``held``: storages of the model's own tensors.

    Raises:
        CaptureError: an object that cannot be made again, or tensors that share memory.
    """
    parts = _ResultParts(given, replaced, held)
    structure = parts.structure(result)
    return parts.tensors, structure


def result_of(structure: Any, tensors: Mapping[str, torch.Tensor], arguments: Callable[[str], Any]) -> Any:
    """The result with this ``structure`` and these ``tensors``. ``arguments``: name → the caller's own."""
    if isinstance(structure, _Place):
        return arguments(structure.name) if structure.given else tensors[structure.name]
    if isinstance(structure, _Object):
        inner = result_of(structure.attributes, tensors, arguments)
        if issubclass(structure.of, ModelOutput):
            return structure.of(**inner)
        made = structure.of.__new__(structure.of)
        vars(made).update(inner)
        return made
    if type(structure) is dict:
        return {key: result_of(item, tensors, arguments) for key, item in structure.items()}
    if type(structure) in (tuple, list):
        return type(structure)(result_of(item, tensors, arguments) for item in structure)
    return structure


def with_padding(structure: Any, tensors: Mapping[str, torch.Tensor], padded: int) -> str | None:
    """Names a field of the result of a batch of ``padded`` tokens a row whose padding cannot be told from the rest;
    None if all fields can be cut."""
    if not isinstance(structure, _Object) or not issubclass(structure.of, ModelOutput):
        return "the result"
    for field, value in structure.attributes.items():
        if field == _CACHE:
            whole = _is_cache(value) and all(_is_whole(layer, tensors, padded) for layer in _layers(value))
        elif field == "loss":
            whole = isinstance(value, _Place) and not value.given and tensors[value.name].dim() == 0
        else:
            places = value if isinstance(value, tuple) else (value,)
            whole = field in _TOKENS and all(_counts(place, tensors, _TOKENS[field], padded) for place in places)
        if not whole:
            return str(field)
    return None


def cut_result(structure: Any, tensors: dict[str, torch.Tensor], length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A result that ``with_padding`` finds nothing in, as the batch of ``length`` tokens a row has it, its tensors
    contiguous as eager's are. ``tensors`` is emptied meanwhile."""
    cut: dict[str, torch.Tensor] = {}
    for name in list(tensors):
        tensor, field = tensors.pop(name), name.partition(".")[0]
        dimensions = (2,) if field == _CACHE and tensor.dim() == 4 else _TOKENS.get(field, ())
        for dimension in dimensions:
            tensor = tensor.narrow(dimension, 0, length)
        cut[name] = tensor.contiguous()
    attributes = dict(structure.attributes)
    if _CACHE in attributes:
        cache = attributes[_CACHE]
        layers = [_shortened(layer, length) for layer in _layers(cache)]
        attributes[_CACHE] = replace(cache, attributes=cache.attributes | {"layers": layers})
    return replace(structure, attributes=attributes), cut


def _counts(place: Any, tensors: Mapping[str, torch.Tensor], dimensions: tuple[int, ...], padded: int) -> bool:
    if not isinstance(place, _Place) or place.given:
        return False
    tensor = tensors[place.name]
    return tensor.dim() >= 3 and all(tensor.shape[dimension] == padded for dimension in dimensions)


def _is_cache(value: Any) -> bool:
    return isinstance(value, _Object) and value.of is DynamicCache


def _layers(cache: _Object) -> list[Any]:
    layers: list[Any] = cache.attributes["layers"]
    return layers


def _is_whole(layer: Any, tensors: Mapping[str, torch.Tensor], padded: int) -> bool:
    """Whether ``layer`` holds every token. Behind padding a window may have left tokens of the batch's own behind."""
    if not isinstance(layer, _Object) or layer.of not in (DynamicLayer, DynamicSlidingWindowLayer):
        return False
    held = [layer.attributes.get(name) for name in ("keys", "values")]
    return all(_counts(place, tensors, (2,), padded) for place in held)


def _shortened(layer: _Object, length: int) -> _Object:
    if "cumulative_length" not in layer.attributes:
        return layer
    return replace(layer, attributes=layer.attributes | {"cumulative_length": length})
