"""A captured step as it would be with packed frozen weights, for a plan made where no quantising library is installed.

Each packed weight becomes the parts that its library stores, and each kernel that reads it gets kernels before it that
dequantise those parts: the library's own calls, in their order. Sizes are those of bitsandbytes (blocks of 64 weights,
of 256 scales where these are packed too) and of torchao (one scale a row).

What is estimated: bitsandbytes multiplies in the forward by one call, which dequantises inside itself; here that part
is a kernel of its own, ``gemm_4bit.dequantise`` or ``int8_scaled_mm.dequantise``, which a plan cannot leave out. (On
CUDA the latter multiplies integers instead, with a result of 32 bits.) PEFT's copy of the result of bitsandbytes'
layers is left out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import (
    Arg,
    EnumArg,
    OpCall,
    OpResult,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    tensor_args,
)

_BLOCK = 64
"""Weights of one scale in 4 bits."""
_NESTED_BLOCK = 256
"""Scales of one scale, where they are packed too."""
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
        return _ITEMSIZE[self.dtype] * math.prod(self.shape)

    @property
    def spec(self) -> TensorSpec:
        return _dense(self.dtype, *self.shape)


class PackedWeight(NamedTuple):
    """A weight of ``rows`` outputs and ``columns`` inputs, of ``dtype`` before it was packed and once dequantised.
    ``inputs_first``: its layer stores it the other way round, as GPT-2's do."""

    form: PackedForm
    rows: int
    columns: int
    dtype: str
    inputs_first: bool = False

    @property
    def parts(self) -> tuple[PackedPart, ...]:
        """All that the library keeps of it, the packed numbers first."""
        count = self.rows * self.columns
        if self.form is PackedForm.INT8:
            return (PackedPart("", "int8", (self.rows, self.columns)), PackedPart(".SCB", "float32", (self.rows,)))
        if self.form is PackedForm.FP8:
            scale = PackedPart(".scale", "float32", (self.rows, 1))
            return (PackedPart(".qdata", "float8_e4m3fn", (self.rows, self.columns)), scale)
        blocks = -(-count // _BLOCK)
        numbers, table = PackedPart("", "uint8", (-(-count // 2), 1)), PackedPart(".code", "float32", (16,), False)
        if not self.form.nested:
            return (numbers, PackedPart(".absmax", "float32", (blocks,)), table)
        return (
            numbers,
            PackedPart(".absmax", "uint8", (blocks,)),
            PackedPart(".state2.absmax", "float32", (-(-blocks // _NESTED_BLOCK),)),
            PackedPart(".state2.code", "float32", (256,)),
            PackedPart(".offset", "float32", ()),
            table,
        )

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(part.bytes for part in self.parts)


Packing = Mapping[int, PackedWeight]
"""INPUT vertex of a frozen weight → what takes its place."""


def part_vertices(graph: TaskGraph, packing: Packing) -> dict[int, tuple[tuple[int, PackedPart], ...]]:
    """For each packed weight of ``graph`` the vertices of the parts that kernels read; the first is its own."""
    free = 1 + max((vertex.id for vertex in graph.vertices), default=-1)
    made = {}
    for vertex in graph.vertices:
        if vertex.id in packing:
            first, *others = (part for part in packing[vertex.id].parts if part.is_read)
            made[vertex.id] = ((vertex.id, first), *((free + k, part) for k, part in enumerate(others)))
            free += len(others)
    return made


def packed(packing: Packing, form: PackedForm) -> GraphPass:
    """The pass that packs weights, all of them in ``form``. A kernel that reads one keeps its call."""
    return GraphPass(
        "packed weights", f"{form}, dequantised before each use", lambda graph: _Packed(graph, packing).run()
    )


class _Packed:
    """One run of the pass."""

    def __init__(self, graph: TaskGraph, packing: Packing) -> None:
        self.graph, self.packing = graph, packing
        self.parts = part_vertices(graph, packing)
        self.ops = dict(graph.ops)
        self.kernels = {v.id for v in graph.vertices if v.kind is VertexKind.KERNEL}
        self.free = 1 + max((p for parts in self.parts.values() for p, _ in parts), default=-1)
        self.free = max(self.free, 1 + max((v.id for v in graph.vertices), default=-1))

    def run(self) -> TaskGraph:
        vertices: list[Vertex] = []
        for vertex in self.graph.vertices:
            if vertex.id in self.parts:
                for id_, part in self.parts[vertex.id]:
                    vertices.append(replace(vertex, id=id_, sizes=(part.bytes,)))
                continue
            read = {source for source, _ in vertex.inputs} & self.parts.keys()
            dequantised = {}
            for source in sorted(read):
                made = list(self._dequantised(source, vertex))
                vertices += made
                dequantised[source] = made[-1].id
            inputs = tuple((dequantised.get(source, source), k) for source, k in vertex.inputs)
            vertices.append(replace(vertex, inputs=inputs) if read else vertex)
        return replace(self.graph, vertices=tuple(vertices), ops=self.ops)

    def _dequantised(self, source: int, reader: Vertex) -> Iterator[Vertex]:
        """The kernels that dequantise a weight, the last of which has it.

        They wait for what else the reader waits for, as they do in the library: a runtime that starts whatever is ready
        would dequantise the weights of all layers at once.
        """
        makers = (maker for maker, _ in reader.inputs if maker in self.kernels)
        after = tuple(sorted({*reader.after, *makers}))
        refs = {part.suffix: (id_, part) for id_, part in self.parts[source]}
        weight = self.packing[source]
        inside = weight.form is not PackedForm.FP8 and self._multiplies_inputs(source, reader)
        for step in _inside(weight, reader.id) if inside else _STEPS[weight.form](weight):
            id_ = self.free
            self.free += 1
            inputs = tuple((refs[name][0], 0) for name in step.reads)
            over = ((0, 0),) if step.in_place else ()
            size = _bytes(step.made)
            yield Vertex(
                id_, VertexKind.KERNEL, reader.device, step.op, inputs, (size,), after=after, inplace=over,
                may_inplace=(0,) if step.may_overwrite else (),
            )  # fmt: skip
            module = self.ops[reader.id].module if reader.id in self.ops else ""
            self.ops[id_] = OpCall(step.op, step.overload, step.args, (OpResult(0, step.made),), module)
            refs["="] = (id_, refs[step.reads[0]][1])

    def _multiplies_inputs(self, source: int, reader: Vertex) -> bool:
        """Whether ``reader`` is a product of the forward, run for the first time or again."""
        call = self.ops.get(reader.id)
        if call is None or call.name == "aten::linear":
            return True
        specs = [arg.spec for arg in tensor_args(call.args) if reader.inputs[arg.input][0] == source]
        return any((spec.stride[-1] != 1) != self.packing[source].inputs_first for spec in specs)


class _Step(NamedTuple):
    """A call of the library's. ``reads``: suffixes of parts, and ``=`` for what the call before it made."""

    op: str
    overload: str
    reads: tuple[str, ...]
    args: tuple[Arg, ...]
    made: TensorSpec
    in_place: bool = False
    may_overwrite: bool = False


def _inside(weight: PackedWeight, reader: int) -> Iterator[_Step]:
    """What the library's own product does before it multiplies. ``reader`` makes the call unlike all others."""
    read = [part for part in weight.parts if part.is_read]
    name = "gemm_4bit" if weight.form.in_four_bits else "int8_scaled_mm"
    args: tuple[Arg, ...] = (*(TensorArg(k, part.spec) for k, part in enumerate(read)), reader)
    made = _dense(weight.dtype, weight.rows, weight.columns)
    yield _Step(f"bitsandbytes::{name}.dequantise", "default", tuple(part.suffix for part in read), args, made)


def _four_bits(weight: PackedWeight) -> Iterator[_Step]:
    numbers, absmax, *nested = weight.parts
    blocks = absmax.shape[0]
    scales = ".absmax"
    if weight.form.nested:
        yield _Step(
            "bitsandbytes::dequantize_blockwise",
            "default",
            (".absmax", ".state2.absmax", ".state2.code"),
            (
                TensorArg(0, absmax.spec),
                TensorArg(1, nested[0].spec),
                TensorArg(2, nested[1].spec),
                _NESTED_BLOCK,
                EnumArg("dtype", "float32"),
            ),
            _dense("float32", blocks),
        )
        spec = _dense("float32", blocks)
        args = (TensorArg(0, spec), TensorArg(1, nested[2].spec), 1)
        yield _Step("aten::add_", "Tensor", ("=", ".offset"), args, spec, in_place=True)
        scales = "="
    yield _Step(
        "bitsandbytes::dequantize_4bit",
        "default",
        ("", scales),
        (
            TensorArg(0, numbers.spec),
            TensorArg(1, _dense("float32", blocks)),
            _BLOCK,
            weight.form.value.partition("-")[0],
            (weight.rows, weight.columns),
            EnumArg("dtype", weight.dtype),
        ),
        _dense(weight.dtype, weight.rows, weight.columns),
    )


def _int8(weight: PackedWeight) -> Iterator[_Step]:
    numbers = weight.parts[0]
    made = _dense(weight.dtype, weight.rows, weight.columns)
    yield _cast("", numbers.spec, made)
    args = (TensorArg(0, made), TensorArg(1, _dense("float32", weight.rows, 1)))
    yield _Step("aten::mul_", "Tensor", ("=", ".SCB"), args, made, in_place=True)


def _float8(weight: PackedWeight) -> Iterator[_Step]:
    numbers, scale = weight.parts
    single = _dense("float32", weight.rows, weight.columns)
    yield _cast(".qdata", numbers.spec, single)
    args = (TensorArg(0, single), TensorArg(1, scale.spec))
    yield _Step("aten::mul", "Tensor", ("=", ".scale"), args, single, may_overwrite=True)
    if weight.dtype != "float32":
        yield _cast("=", single, _dense(weight.dtype, weight.rows, weight.columns))


def _cast(source: str, spec: TensorSpec, made: TensorSpec) -> _Step:
    args = (TensorArg(0, spec), EnumArg("dtype", made.dtype), None, None, None, False, None)
    return _Step("aten::_to_copy", "default", (source,), args, made)


_STEPS = {
    PackedForm.NF4: _four_bits,
    PackedForm.NF4_NESTED: _four_bits,
    PackedForm.FP4: _four_bits,
    PackedForm.FP4_NESTED: _four_bits,
    PackedForm.INT8: _int8,
    PackedForm.FP8: _float8,
}


def _dense(dtype: str, *shape: int) -> TensorSpec:
    stride = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
    return TensorSpec(dtype, shape, stride)


def _bytes(spec: TensorSpec) -> int:
    return _ITEMSIZE[spec.dtype] * math.prod(spec.shape)
