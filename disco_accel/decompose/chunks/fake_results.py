"""What an op returns for a part of its arguments: asked of the op itself, over tensors without bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from disco_accel.capture.fake_kernels import fake_kernels, quiet
from disco_accel.capture.storages import storage_bytes, tensor_spec, tensors_of
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, TensorArg, TensorSpec
from disco_accel.native.op_encoding import op_overload

Returned = tuple[tuple[TensorSpec, int] | None, ...]
"""Of each returned tensor its layout and the bytes of its memory; None for an undefined one."""


class CallResults:
    """Asks each call once. ``device``: where its tensors lie."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode()
        self._known: dict[Any, Returned | None] = {}

    def of(self, call: OpCall) -> Returned | None:
        """What ``call`` returns; None if it refuses its arguments."""
        key = call.name, call.overload, repr(call.args)
        if key not in self._known:
            self._known[key] = self._asked(call)
        return self._known[key]

    def _asked(self, call: OpCall) -> Returned | None:
        op = op_overload(call.name, call.overload)
        with quiet(), fake_kernels(), self._mode, torch.no_grad():
            args = [_decoded(arg, self._tensor) for arg in call.args]
            pairs = list(zip(args, op._schema.arguments, strict=True))
            positional = [arg for arg, formal in pairs if not formal.kwarg_only]
            named = {formal.name: arg for arg, formal in pairs if formal.kwarg_only}
            try:
                made = tensors_of(op(*positional, **named))
            except (RuntimeError, ValueError, IndexError, TypeError):
                # The whole call went through; one for a part that does not is none.
                return None
        return tuple(None if each is None else (tensor_spec(each), storage_bytes(each)) for each in made)

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        extent = 1 + spec.offset + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True) if n > 0)
        memory = torch.empty(extent, dtype=getattr(torch, spec.dtype), device=self._device)
        return memory.as_strided(spec.shape, spec.stride, spec.offset)


def _decoded(arg: Arg, tensor: Callable[[TensorSpec], torch.Tensor]) -> Any:
    if isinstance(arg, TensorArg):
        return tensor(arg.spec)
    if isinstance(arg, EnumArg):
        return torch.device(arg.value) if arg.kind == "device" else getattr(torch, arg.value)
    if isinstance(arg, tuple):
        return [_decoded(item, tensor) for item in arg]
    return arg
