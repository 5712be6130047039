"""The plain tensors behind a model's parameters: a quantised weight is a tree of packed bytes, scales and tables.

Three kinds of places hold them:

- a parameter or buffer that is a plain tensor itself;
- a traceable wrapper subclass (``__tensor_flatten__``), whose inner tensors may be wrappers again;
- an object beside the weight, such as the ``quant_state`` of four-bit weights. Libraries are recognised by the names of
  their classes (``quantised/libraries.py``) and need not be there.

Plans, budgets and the watch for changes all ask here, so that they see the same parts under the same names:
``...q_proj.weight.qdata``, ``...q_proj.weight.absmax``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import place
from disco_accel.quantised.libraries import LIBRARIES, OWN_STATES, PACKED_PARAMETERS, STATE_TABLES, STATES

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

LeafOf = Callable[[torch.Tensor], torch.Tensor]
"""From a plain tensor to the one that stands for it, laid out alike."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """One plain tensor of a model. ``name`` is unique; ``requires_grad`` is that of the parameter it is part of."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool = False
    requires_grad: bool = False


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all there is to ``tensor``."""
    known = type(tensor) in _PLAIN or hasattr(tensor, "fake_mode")
    return known and tensor.layout is torch.strided and not tensor.is_quantized


def packed_beside_state(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a packed weight, a Parameter with scales in objects beside it."""
    return not PACKED_PARAMETERS.isdisjoint(c.__name__ for c in type(tensor).__mro__)


def has_rule(tensor: torch.Tensor) -> bool:
    """Whether it is known which plain tensors ``tensor`` is made of."""
    if is_traceable_wrapper_subclass(tensor):
        return all(has_rule(inner) for _, inner in _inner(tensor))
    return is_plain(tensor) or (packed_beside_state(tensor) and tensor.layout is torch.strided)


def _inner(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield name, getattr(tensor, name)


def leaves(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of the tree that ``tensor``, called ``name``, is; for most it is itself."""
    if is_traceable_wrapper_subclass(tensor):
        for key, inner in _inner(tensor):
            yield from leaves(inner, f"{name}.{key}")
        return
    yield name, tensor
    if packed_beside_state(tensor):
        for key, value in tensor.__dict__.items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
            elif _is_state(value):
                yield from _tensors_in(value, name)


def rebuilt(tensor: torch.Tensor, leaf_of: LeafOf) -> torch.Tensor:
    """The same tree around other leaves; ``tensor`` itself where these are its own."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {key: rebuilt(getattr(tensor, key), leaf_of) for key in names}
        if all(made is getattr(tensor, key) for key, made in inner.items()):
            return tensor
        wrapper: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        return wrapper
    leaf = leaf_of(tensor)
    if leaf is not tensor and packed_beside_state(tensor):
        leaf.__dict__.update({key: rebuilt_state(value, leaf_of) for key, value in tensor.__dict__.items()})
    return leaf


def _is_state(value: Any) -> bool:
    return type(value).__name__ in STATES


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, item in (value if isinstance(value, dict) else vars(value)).items():
        if isinstance(item, torch.Tensor):
            yield f"{name}.{key}", item
        elif isinstance(item, dict) or _is_state(item):
            yield from _tensors_in(item, f"{name}.{key}")


def rebuilt_state(value: Any, leaf_of: LeafOf) -> Any:
    """A copy of a state with other tensors in it: a forward that writes to it changes the copy."""
    if isinstance(value, torch.Tensor):
        return leaf_of(value)
    if isinstance(value, dict):
        return {key: rebuilt_state(item, leaf_of) for key, item in value.items()}
    if not _is_state(value):
        return value
    made = object.__new__(type(value))
    made.__dict__.update({key: rebuilt_state(item, leaf_of) for key, item in vars(value).items()})
    return made


def states_of(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, str]]:
    """Objects with parts of weights among the attributes of ``module`` itself, which is called ``path``: the attribute,
    and a name."""
    table = STATE_TABLES.get(type(module).__name__)
    for key, value in module.__dict__.items():
        if _is_state(value) or (key == table and value):
            name = "weight" if key in OWN_STATES else key
            yield key, f"{path}.{name}" if path else name


@contextmanager
def states_replaced(model: torch.nn.Module, leaf_of: LeafOf) -> Iterator[None]:
    """Inside, modules have copies of the objects beside their weights, with other tensors in them."""
    before = [(vars(m), key, vars(m)[key]) for m in model.modules() for key, _ in states_of(m)]
    try:
        for table, key, value in before:
            table[key] = rebuilt_state(value, leaf_of)
        yield
    finally:
        for table, key, value in before:
            table[key] = value


def settle_states(model: torch.nn.Module) -> None:
    """Do the changes that layers of quantisation libraries make to their weights whenever their forward runs."""
    for library in LIBRARIES:
        library.settle(model)


def run_first_forward_changes(model: torch.nn.Module, device: torch.device, *, gradients: bool) -> None:
    """Leave such layers as their first forward on ``device`` would: it alone assigns to ``weight.data`` or to
    ``bias.data``, which no graph can say. ``gradients``: of a training step."""
    for library in LIBRARIES:
        library.run_first_forward(model, on_host=not backend_of(device).separate_memory, gradients=gradients)


def lost_scales(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str, bool]]:
    """As ``QuantLibrary.lost_scales``, of all libraries."""
    return itertools.chain.from_iterable(library.lost_scales(model) for library in LIBRARIES)


def named_parts(model: torch.nn.Module, *, remove_duplicate: bool = True) -> Iterator[PlainTensor]:
    """All plain tensors of ``model``: those of its parameters, of the states beside these, and of its buffers.

    A tensor that several places hold comes once; without ``remove_duplicate`` a tied parameter or buffer comes by all
    its names. A tensor beside a weight that is the same view of the same bytes as another part is that part.
    """
    seen: set[int] = set()
    places: set[tuple[Any, ...]] = set()

    def new(tensor: torch.Tensor) -> bool:
        if id(tensor) in seen:
            return not remove_duplicate
        seen.add(id(tensor))
        places.add(place(tensor))
        return True

    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        for leaf_name, leaf in leaves(parameter, name):
            if (leaf is parameter or place(leaf) not in places) and new(leaf):
                yield PlainTensor(leaf_name, leaf, requires_grad=parameter.requires_grad)
    for name, tensor in _beside_weights(model):
        if place(tensor) not in places and new(tensor):
            yield PlainTensor(name, tensor)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        for leaf_name, leaf in leaves(buffer, name):
            if new(leaf):
                yield PlainTensor(leaf_name, leaf, is_buffer=True)


def _beside_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for key, name in states_of(module, path):
            yield from _tensors_in(vars(module)[key], name)


def beside_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors beside packed weights, also those that are views of a weight's own bytes."""
    packed = (p for p in model.parameters() if packed_beside_state(p))
    own = [leaf for parameter in packed for _, leaf in leaves(parameter) if leaf is not parameter]
    return [*own, *(tensor for _, tensor in _beside_weights(model))]


def frozen_parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name → tensor of all parts of frozen weights."""
    return {p.name: p.tensor for p in named_parts(model) if not (p.requires_grad or p.is_buffer)}
