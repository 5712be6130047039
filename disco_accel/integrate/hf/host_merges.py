"""Merges of adapters on a GPU into base weights in host memory: PEFT takes both for tensors of one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

_CPU = torch.device("cpu")
_COPIES = frozenset({torch.ops.aten.copy_, torch.ops.aten._to_copy})
"""These take tensors of two devices."""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of a call that it writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_iter(given) if isinstance(each, torch.Tensor))


class _OnTheHost(TorchDispatchMode):
    """Ops with tensors of the host and of a device run on the host, and ops that write where the written tensor is.

    The sum of a weight and what an adapter adds to it, each element rounded once, has the same bits on both."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        # A number in a tensor goes with any device.
        tensors = [each for each in tree_iter((args, given)) if isinstance(each, torch.Tensor) and each.dim()]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1 and _CPU in devices and func.overloadpacket not in _COPIES:
            where = next((tensor.device for tensor in _written(func, args, given)), _CPU)
            args, given = tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), (tuple(args), given))
        return func(*args, **given)
