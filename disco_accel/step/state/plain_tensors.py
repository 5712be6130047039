"""Tensors that modules keep as plain attributes, and those among them that are views of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from disco_accel.native.host_memory import footprint

_TABLES = ("_modules", "_parameters", "_buffers")


def plain_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every strided tensor in an attribute of a module of ``model``, or in a list, tuple or dict there; no
    parameters."""
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _TABLES:
                tensors.update((id(t), t) for t in _tensors(value))
    return list(tensors.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is torch.Tensor:
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def replaced_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor in it, also in lists, tuples and dicts, put through ``replace``.

    It is ``value`` itself where that gives the same tensors.
    """
    if isinstance(value, torch.Tensor):
        return replace(value)
    if type(value) in (list, tuple):
        items = [replaced_tensors(item, replace) for item in value]
        same = all(now is before for now, before in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if type(value) is dict:
        made = {key: replaced_tensors(item, replace) for key, item in value.items()}
        return value if all(made[key] is value[key] for key in made) else made
    return value


def move_views(tensors: Iterable[torch.Tensor], old: torch.Tensor, new: torch.Tensor) -> None:
    """Make those of ``tensors`` that are views of ``old`` the same views of ``new``, which is laid out as ``old``."""
    for tensor in tensors:
        if tensor.device != old.device or tensor.untyped_storage()._cdata != old.untyped_storage()._cdata:
            continue
        offset = (tensor.storage_offset() - old.storage_offset()) * tensor.element_size()
        if tensor.dtype is old.dtype and offset >= 0 and offset + footprint(tensor) <= footprint(old):
            start = new.storage_offset() + tensor.storage_offset() - old.storage_offset()
            tensor.data = new.as_strided(tensor.shape, tensor.stride(), start)
