"""What shows whether a compiler rounds functions as eager does: a 16-bit run in float32, and a call alone.

Sums, products, comparisons and casts have one right result. An exponential has several, one for each way to compute it,
which differ in the last bit of float32. Rounding to 16 bits hides that bit in all but one of some ten thousand results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from disco_accel.fuse.fused_runs import FUSED
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, OpResult, TensorArg, TensorSpec, tensor_args

HALVES = ("bfloat16", "float16")
"""Data types of floating-point numbers of 16 bits."""
_ALONE = (1 << 18) + 3
"""Elements of a function's results when it is tried alone: enough to compare, and no multiple of a vector's width."""


def functions_of(call: OpCall) -> Iterator[OpCall]:
    """The calls in the body of a run whose results a compiler may round otherwise."""
    return (inner for inner in call.body if op_traits(inner.name).function)


def twin_of(call: OpCall) -> OpCall | None:
    """A run with functions and 16-bit numbers as the same run in float32; None for other runs."""
    if next(functions_of(call), None) is None or half_of(call) is None:
        return None
    return _wide(call)


def half_of(call: OpCall) -> str | None:
    """The first 16-bit data type in a run."""
    specs = [arg.spec for arg in tensor_args(call.args)]
    specs += [result.spec for inner in call.body for result in inner.results if result is not None]
    return next((spec.dtype for spec in specs if spec.dtype in HALVES), None)


def alone(call: OpCall) -> OpCall:
    """The run of ``call``, one of a body, alone: its kernel shows whether the compiler rounds it as eager does. A
    function is tried on many elements, whatever shape it has in the step."""
    specs: list[TensorSpec] = []
    result = call.results[0]
    assert result is not None
    shapes = {arg.spec.shape for arg in tensor_args(call.args)}
    many = TensorSpec("", (_ALONE,), (1,)) if op_traits(call.name).function and () not in shapes else None

    def laid_out(spec: TensorSpec) -> TensorSpec:
        return spec if many is None else replace(many, dtype=spec.dtype)

    def numbered(arg: Arg) -> Arg:
        if isinstance(arg, TensorArg):
            specs.append(laid_out(arg.spec))
            return TensorArg(len(specs) - 1, specs[-1])
        return tuple(numbered(item) for item in arg) if isinstance(arg, tuple) else arg

    written = OpResult(0, laid_out(result.spec))
    body = replace(call, args=tuple(numbered(arg) for arg in call.args), results=(written,))
    args = tuple(TensorArg(i, spec) for i, spec in enumerate(specs))
    return OpCall(FUSED, "default", args, (written,), body=(body,))


def _wide(call: OpCall) -> OpCall:
    results = tuple(None if r is None else OpResult(r.output, _wide_spec(r.spec)) for r in call.results)
    body = tuple(_wide(inner) for inner in call.body)
    return replace(call, args=tuple(_wide_arg(arg) for arg in call.args), results=results, body=body)


def _wide_arg(arg: Arg) -> Arg:
    if isinstance(arg, TensorArg):
        return TensorArg(arg.input, _wide_spec(arg.spec))
    if isinstance(arg, EnumArg):
        return replace(arg, value="float32") if arg.kind == "dtype" and arg.value in HALVES else arg
    return tuple(_wide_arg(item) for item in arg) if isinstance(arg, tuple) else arg


def _wide_spec(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="float32") if spec.dtype in HALVES else spec
