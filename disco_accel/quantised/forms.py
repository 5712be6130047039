"""Forms of packed weights, and the parts and calls by which a library stores and dequantises one. No torch."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from disco_accel.graph.taskgraph import Arg, EnumArg, TensorArg, TensorSpec

_ITEMSIZE = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4}


class PackedForm(enum.StrEnum):
    """How frozen weights are stored. NESTED: their scales are packed in 8 bits."""

    NF4 = "nf4"
    NF4_NESTED = "nf4-nested"
    FP4 = "fp4"
    FP4_NESTED = "fp4-nested"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def in_four_bits(self) -> bool:
        return self not in (PackedForm.INT8, PackedForm.FP8)

    @property
    def nested(self) -> bool:
        return self in (PackedForm.NF4_NESTED, PackedForm.FP4_NESTED)


class PackedPart(NamedTuple):
    """A tensor of a packed weight: ``suffix`` of the weight's name, such as ``.absmax``. ``is_read``: by kernels."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    is_read: bool = True

    @property
    def bytes(self) -> int:
        return bytes_of(self.spec)

    @property
    def spec(self) -> TensorSpec:
        return dense(self.dtype, *self.shape)


class PackedWeight(NamedTuple):
    """A weight of ``rows`` outputs and ``columns`` inputs, of ``dtype`` before it was packed and once dequantised.
    ``inputs_first``: its layer stores it the other way round, as GPT-2's do."""

    form: PackedForm
    rows: int
    columns: int
    dtype: str
    inputs_first: bool = False

    @property
    def dequantised(self) -> TensorSpec:
        return dense(self.dtype, self.rows, self.columns)


class DequantiseCall(NamedTuple):
    """A call of the library's. ``reads``: suffixes of parts, and ``=`` for the result of the call before it."""

    op: str
    overload: str
    reads: tuple[str, ...]
    args: tuple[Arg, ...]
    made: TensorSpec
    in_place: bool = False
    may_overwrite: bool = False


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a library stores weights of one form.

    ``parts``: all that it keeps of a weight, the packed numbers first. ``calls``: what dequantises them. ``product``:
    its own op that multiplies inputs by packed weights; empty where it dequantises first. ``asked_by``: the keys of
    transformers' ``quantization_config`` that ask for the form, ``dtype_key`` the one that names the data type of
    products.
    """

    parts: Callable[[PackedWeight], tuple[PackedPart, ...]]
    calls: Callable[[PackedWeight], Iterator[DequantiseCall]]
    product: str = ""
    asked_by: Mapping[str, Any] = field(default_factory=dict)
    dtype_key: str = ""


def dense(dtype: str, *shape: int) -> TensorSpec:
    """The layout of a contiguous tensor."""
    stride = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
    return TensorSpec(dtype, shape, stride)


def bytes_of(spec: TensorSpec) -> int:
    """Of all elements of a contiguous tensor."""
    return _ITEMSIZE[spec.dtype] * math.prod(spec.shape)


def cast_call(source: str, spec: TensorSpec, made: TensorSpec) -> DequantiseCall:
    """The part or result ``source``, laid out as ``spec``, in the data type of ``made``."""
    args = (TensorArg(0, spec), EnumArg("dtype", made.dtype), None, None, None, False, None)
    return DequantiseCall("aten::_to_copy", "default", (source,), args, made)
