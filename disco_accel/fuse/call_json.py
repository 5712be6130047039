"""Calls as JSON, for the process that compiles kernels, and as text that names a kernel."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, OpResult, TensorArg, TensorSpec


def call_to_object(call: OpCall) -> dict[str, Any]:
    """``call`` without its module and random numbers, which a run has none of."""
    return {
        "name": call.name,
        "overload": call.overload,
        "args": [_arg(arg) for arg in call.args],
        "results": [None if r is None else [r.output, *_spec(r.spec)] for r in call.results],
        "body": [call_to_object(inner) for inner in call.body],
    }


def call_of(data: dict[str, Any]) -> OpCall:
    """The call of ``call_to_object``."""
    return OpCall(
        data["name"],
        data["overload"],
        tuple(_arg_of(arg) for arg in data["args"]),
        tuple(None if result is None else OpResult(result[0], _spec_of(result[1:])) for result in data["results"]),
        body=tuple(call_of(inner) for inner in data["body"]),
    )


def kernel_text(call: OpCall) -> str:
    """The text that a call's kernel is known by: one serves all layers. Calls are none, for 0.0, -0.0, 0 and False are
    equal."""
    return json.dumps(call_to_object(call), sort_keys=True, separators=(",", ":"))


def kernel_name(call: OpCall) -> str:
    """The sha256 of ``kernel_text``, in hex, for names on disk."""
    return hashlib.sha256(kernel_text(call).encode()).hexdigest()


def _arg(arg: Arg) -> Any:
    if isinstance(arg, TensorArg):
        return {"tensor": [arg.input, *_spec(arg.spec)]}
    if isinstance(arg, EnumArg):
        return {"enum": [arg.kind, arg.value]}
    if isinstance(arg, tuple):
        return {"list": [_arg(item) for item in arg]}
    # JSON has no infinity, and no difference between 1 and 1.0 that all readers keep.
    return {"float": arg.hex()} if isinstance(arg, float) else arg


def _arg_of(data: Any) -> Arg:
    if not isinstance(data, dict):
        plain: Arg = data
        return plain
    ((kind, value),) = data.items()
    if kind == "tensor":
        return TensorArg(value[0], _spec_of(value[1:]))
    if kind == "enum":
        return EnumArg(*value)
    return float.fromhex(value) if kind == "float" else tuple(_arg_of(item) for item in value)


def _spec(spec: TensorSpec) -> list[Any]:
    return [spec.dtype, spec.shape, spec.stride, spec.offset]


def _spec_of(data: list[Any]) -> TensorSpec:
    return TensorSpec(data[0], tuple(data[1]), tuple(data[2]), data[3])
