"""A run op by op, as the step computes it without fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disco_accel.fuse.value_views import view_of
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, OpResult, TensorArg
from disco_accel.native.op_encoding import op_overload


def evaluate(call: OpCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a run. ``tensors``: those that ``call.args`` names, in that order."""
    values, layouts = list(tensors), [arg.spec for arg in call.args if isinstance(arg, TensorArg)]
    written: dict[int, torch.Tensor] = {}
    device = tensors[0].device

    def value(arg: Arg) -> Any:
        if isinstance(arg, TensorArg):
            if arg.input < len(tensors):
                return values[arg.input]
            view = view_of(layouts[arg.input], arg.spec)
            assert view is not None, "fused_runs.py lets no other view into a run"
            return view.of(values[arg.input])
        if isinstance(arg, EnumArg):
            return device if arg.kind == "device" else getattr(torch, arg.value)
        return [value(item) for item in arg] if isinstance(arg, tuple) else arg

    for inner in call.body:
        result = inner.results[0]
        assert isinstance(result, OpResult)
        operator = op_overload(inner.name, inner.overload)
        names = [argument.name for argument in operator._schema.arguments]
        positional = sum(not argument.kwarg_only for argument in operator._schema.arguments)
        given = [value(arg) for arg in inner.args]
        more = dict(zip(names[positional:], given[positional:], strict=True))
        values.append(operator(*given[:positional], **more))
        layouts.append(result.spec)
        if result.output >= 0:
            written[result.output] = values[-1]
    return [written[output] for output in sorted(written)]
