"""Which tensors of a trace share a storage.

The identity of the fake storage decides, never an op's schema: ``_unsafe_view`` claims a new tensor but
aliases, and in-place ops look like views of themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from disco_accel.capture.trace_log import arguments_of
from disco_accel.errors import CaptureError
from disco_accel.graph.taskgraph import TensorSpec


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for two live tensors exactly when they share a storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole storage behind ``tensor``."""
    return int(tensor.untyped_storage().nbytes())


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """How ``tensor`` lies in its storage.

    Raises:
        CaptureError: a lazy conjugate or negation, which no layout describes.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise CaptureError("a lazily conjugated or negated tensor cannot be captured; call .resolve_conj() on it")
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(int(n) for n in tensor.shape),
        stride=tuple(int(n) for n in tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def tensors_of(value: Any) -> list[torch.Tensor | None]:
    """The tensors that an op returned, in order; ``None`` for each undefined one."""
    if isinstance(value, torch.Tensor) or value is None:
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def written_storages(node: fx.Node, target: torch._ops.OpOverload) -> dict[int, int]:
    """Storage → bytes of each tensor that ``node``, a call of ``target``, changes in place."""
    given = arguments_of(node, target)
    found: dict[int, int] = {}
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for value in _nodes_in(given[argument.name]):
                tensor = value.meta["val"]
                found[storage_key(tensor)] = storage_bytes(tensor)
    return found


def _nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of an argument, also those inside lists."""
    if isinstance(value, fx.Node):
        return [value]
    return [node for item in value for node in _nodes_in(item)] if isinstance(value, (tuple, list)) else []
