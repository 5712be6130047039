"""torchao: wrapper subclasses, which name their own inner tensors; in 8 bits one scale a row."""

from __future__ import annotations

from collections.abc import Iterator

from disco_accel.graph.taskgraph import TensorArg
from disco_accel.quantised.forms import (
    DequantiseCall,
    PackedForm,
    PackedPart,
    PackedWeight,
    StoredForm,
    cast_call,
    dense,
)
from disco_accel.quantised.library import QuantLibrary


def _float8_parts(weight: PackedWeight) -> tuple[PackedPart, ...]:
    scale = PackedPart(".scale", "float32", (weight.rows, 1))
    return (PackedPart(".qdata", "float8_e4m3fn", (weight.rows, weight.columns)), scale)


def _float8_calls(weight: PackedWeight) -> Iterator[DequantiseCall]:
    numbers, scale = _float8_parts(weight)
    single = dense("float32", weight.rows, weight.columns)
    yield cast_call(".qdata", numbers.spec, single)
    args = (TensorArg(0, single), TensorArg(1, scale.spec))
    yield DequantiseCall("aten::mul", "Tensor", ("=", ".scale"), args, single, may_overwrite=True)
    if weight.dtype != "float32":
        yield cast_call("=", single, weight.dequantised)


TORCHAO = QuantLibrary(
    name="torchao",
    package="torchao",
    quant_method="torchao",
    module="torchao",
    needs_headers=True,
    forms={PackedForm.FP8: StoredForm(_float8_parts, _float8_calls)},
)
