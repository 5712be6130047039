"""Tensors inside a field of a model's output: tuples, dicts, dataclasses and caches taken apart and put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, complex, bool, type, torch.nn.Module, torch.dtype, torch.device)


def leaves(value: Any, path: str, visited: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Dotted path → each tensor in ``value``, in the terms of ``field_at``."""
    visited = set() if visited is None else visited
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    for name, item in _items(value):
        yield from leaves(item, f"{path}.{name}", visited)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(i), v) for i, v in enumerate(value)]
    if value is None or isinstance(value, _PLAIN) or not hasattr(value, "__dict__"):
        return []
    return list(vars(value).items())


def with_leaves(value: Any, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """``value`` with the tensors under the paths of ``leaves`` replaced; objects and lists are changed in place."""
    if path in tensors:
        return tensors[path]
    if not any(name.startswith(f"{path}.") for name in tensors):
        return value
    new = {name: with_leaves(item, f"{path}.{name}", tensors) for name, item in _items(value)}
    if isinstance(value, tuple):
        return type(value)(*new.values()) if hasattr(value, "_fields") else tuple(new.values())
    if isinstance(value, list):
        value[:] = new.values()
    elif isinstance(value, Mapping):
        for key in list(value):
            value[key] = new[str(key)]  # type: ignore[index]
    else:
        vars(value).update(new)
    return value
