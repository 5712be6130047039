"""Calls of runs that are small enough to compile in a test."""

from __future__ import annotations

from disco_accel.fuse.fused_runs import FUSED
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, OpResult, TensorArg, TensorSpec

WIDE = TensorSpec("float32", (512, 67), (67, 1))
HALF = TensorSpec("bfloat16", (512, 67), (67, 1))
COLUMN = TensorSpec("float32", (512, 1), (1, 1))
EXPANDED = TensorSpec("float32", (512, 67), (1, 0))


def inner(name: str, overload: str, args: tuple[Arg, ...], spec: TensorSpec, output: int = -1) -> OpCall:
    return OpCall(f"aten::{name}", overload, args, (OpResult(output, spec),))


def run_of(reads: tuple[TensorSpec, ...], *body: OpCall) -> OpCall:
    results = tuple(r for call in body for r in call.results if r is not None and r.output >= 0)
    args = tuple(TensorArg(i, spec) for i, spec in enumerate(reads))
    return OpCall(FUSED, "default", args, results, body=body)


def scaled(number: float) -> OpCall:
    """x + number * y in float32, and the same in bfloat16."""
    product = inner("mul", "Tensor", (TensorArg(1, WIDE), number), WIDE)
    total = inner("add", "Tensor", (TensorArg(0, WIDE), TensorArg(2, WIDE), 1), WIDE, 0)
    cast = EnumArg("dtype", "bfloat16")
    half = inner("_to_copy", "default", (TensorArg(3, WIDE), cast, None, None, None, False, None), HALF, 1)
    return run_of((WIDE, WIDE), product, total, half)


def gated(op: str) -> OpCall:
    """silu(x) ``op`` y, in bfloat16: with a rounding between the two."""
    silu = inner("silu", "default", (TensorArg(0, HALF),), HALF)
    return run_of((HALF, HALF), silu, inner(op, "Tensor", (TensorArg(2, HALF), TensorArg(1, HALF)), HALF, 0))


def normalised() -> OpCall:
    """x * rsqrt(column + eps)."""
    shifted = inner("add", "Tensor", (TensorArg(1, COLUMN), 1e-5, 1), COLUMN)
    root = inner("rsqrt", "default", (TensorArg(2, COLUMN),), COLUMN)
    return run_of(
        (WIDE, COLUMN), shifted, root, inner("mul", "Tensor", (TensorArg(0, WIDE), TensorArg(3, COLUMN)), WIDE, 0)
    )


def nearly(number: float) -> OpCall:
    """silu(x) in bfloat16, times ``number`` in float32 before it is rounded."""
    to_wide, to_half = EnumArg("dtype", "float32"), EnumArg("dtype", "bfloat16")
    wide = inner("_to_copy", "default", (TensorArg(0, HALF), to_wide, None, None, None, False, None), WIDE)
    silu = inner("silu", "default", (TensorArg(1, WIDE),), WIDE)
    product = inner("mul", "Tensor", (TensorArg(2, WIDE), number), WIDE)
    half = inner("_to_copy", "default", (TensorArg(3, WIDE), to_half, None, None, None, False, None), HALF, 0)
    return run_of((HALF,), wide, silu, product, half)


def routed() -> OpCall:
    """x times a weight of each row, which lies in memory once."""
    return run_of((WIDE, EXPANDED), inner("mul", "Tensor", (TensorArg(0, WIDE), TensorArg(1, EXPANDED)), WIDE, 0))
