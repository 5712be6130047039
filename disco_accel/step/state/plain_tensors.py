"""Tensors that modules keep as plain attributes, and those among them that are views of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from disco_accel.errors import ConfigError
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


def follows_autograd(tensor: torch.Tensor) -> bool:
    """Whether it counts its versions. A tensor made under ``torch.inference_mode`` never does, even after its ``data``
    is replaced, and it may not be saved for a backward."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def make_ordinary(tensor: torch.Tensor, name: str) -> None:
    """Have ``tensor``, made under ``torch.inference_mode``, follow autograd: the same object over the same bytes.

    Raises:
        ConfigError: it is in use by native code; ``name`` is for the message.
    """
    with torch.inference_mode(False), torch.no_grad():
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {key: getattr(tensor, key) for key in names}
            made = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        else:
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        try:
            torch._C._swap_tensor_impl(tensor, made)
        except RuntimeError as error:
            raise ConfigError(
                f"{name} was made under torch.inference_mode, and cannot become an ordinary tensor: {error}; "
                "make the model outside of torch.inference_mode"
            ) from error


def move_views(tensors: Iterable[torch.Tensor], old: torch.Tensor, new: torch.Tensor) -> None:
    """Make those of ``tensors`` that are views of ``old`` the same views of ``new``, which is laid out as ``old``."""
    for tensor in tensors:
        if tensor.device != old.device or tensor.untyped_storage()._cdata != old.untyped_storage()._cdata:
            continue
        offset = (tensor.storage_offset() - old.storage_offset()) * tensor.element_size()
        if tensor.dtype is old.dtype and offset >= 0 and offset + footprint(tensor) <= footprint(old):
            start = new.storage_offset() + tensor.storage_offset() - old.storage_offset()
            tensor.data = new.as_strided(tensor.shape, tensor.stride(), start)
