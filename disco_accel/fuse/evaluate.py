"""A run op by op, as the step computes it without fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disco_accel.fuse.value_views import view_of
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, OpResult, TensorArg, tensor_args
from disco_accel.native.op_encoding import op_overload


def evaluate(call: OpCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a run. ``tensors``: those that ``call.args`` names, in that order. A value inside it is released
    after its last reader."""
    values: list[torch.Tensor | None] = list(tensors)
    layouts = [arg.spec for arg in call.args if isinstance(arg, TensorArg)]
    written: dict[int, torch.Tensor] = {}
    device, over = tensors[0].device, _released(call, len(tensors))

    def value(arg: Arg) -> Any:
        if isinstance(arg, TensorArg):
            found = values[arg.input]
            assert found is not None, "it is released after its last reader"
            if arg.input < len(tensors):
                return found
            view = view_of(layouts[arg.input], arg.spec)
            assert view is not None, "fused_runs.py lets no other view into a run"
            return view.of(found)
        if isinstance(arg, EnumArg):
            return device if arg.kind == "device" else getattr(torch, arg.value)
        return [value(item) for item in arg] if isinstance(arg, tuple) else arg

    for number, inner in enumerate(call.body):
        result = inner.results[0]
        assert isinstance(result, OpResult)
        operator = op_overload(inner.name, inner.overload)
        names = [argument.name for argument in operator._schema.arguments]
        positional = sum(not argument.kwarg_only for argument in operator._schema.arguments)
        given = [value(arg) for arg in inner.args]
        more = dict(zip(names[positional:], given[positional:], strict=True))
        made = operator(*given[:positional], **more)
        values.append(made)
        layouts.append(result.spec)
        if result.output >= 0:
            written[result.output] = made
        del given, more, made
        for place in over[number]:
            values[place] = None
    return [written[output] for output in sorted(written)]


def _released(call: OpCall, inputs: int) -> list[list[int]]:
    """For each call of the body the places of values that no later one reads, of those that the run makes itself."""
    last = {inputs + number: number for number in range(len(call.body))}
    for number, inner in enumerate(call.body):
        last.update((arg.input, number) for arg in tensor_args(inner.args) if arg.input >= inputs)
    found: list[list[int]] = [[] for _ in call.body]
    for place, number in last.items():
        found[number].append(place)
    return found
