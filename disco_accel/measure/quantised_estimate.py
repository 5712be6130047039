"""A captured step as it would be with packed frozen weights, for a plan made where no quantising library is installed.

Each packed weight becomes the parts that its library stores, and each kernel that reads it gets kernels before it that
dequantise those parts: the library's own calls, in their order. Sizes and calls of each form are in the library's file
of ``quantised/``.

Estimated: a library may multiply in the forward by one call of its own, which dequantises inside. Here that part is a
kernel, ``gemm_4bit.dequantise`` or ``int8_scaled_mm.dequantise``, which a plan leaves out only with the product. (On
CUDA the latter multiplies integers instead, with a result of 32 bits.) PEFT's copy of the result of such layers is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import Arg, OpCall, OpResult, TaskGraph, TensorArg, Vertex, VertexKind, tensor_args
from disco_accel.quantised.forms import DequantiseCall, PackedForm, PackedPart, PackedWeight, bytes_of
from disco_accel.quantised.libraries import STORED_FORMS


def parts_of(weight: PackedWeight) -> tuple[PackedPart, ...]:
    """All that the library keeps of it, the packed numbers first."""
    return STORED_FORMS[weight.form].parts(weight)


def packed_bytes(weight: PackedWeight) -> int:
    """Of all parts."""
    return sum(part.bytes for part in parts_of(weight))


Packing = Mapping[int, PackedWeight]
"""INPUT vertex of a frozen weight → the packed weight in its place."""


def part_vertices(graph: TaskGraph, packing: Packing) -> dict[int, tuple[tuple[int, PackedPart], ...]]:
    """For each packed weight of ``graph`` the vertices of the parts that kernels read; the first is its own."""
    free = 1 + max((vertex.id for vertex in graph.vertices), default=-1)
    made = {}
    for vertex in graph.vertices:
        if vertex.id in packing:
            first, *others = (part for part in parts_of(packing[vertex.id]) if part.is_read)
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
        """The kernels that dequantise a weight, the last of which has it. They wait for the reader's other
        dependencies, as they do in the library: otherwise a runtime would dequantise the weights of all layers at
        once."""
        makers = (maker for maker, _ in reader.inputs if maker in self.kernels)
        after = tuple(sorted({*reader.after, *makers}))
        refs = {part.suffix: (id_, part) for id_, part in self.parts[source]}
        weight = self.packing[source]
        stored = STORED_FORMS[weight.form]
        inside = stored.product and self._multiplies_inputs(source, reader)
        for call in _inside(weight) if inside else stored.calls(weight):
            id_ = self.free
            self.free += 1
            inputs = tuple((refs[name][0], 0) for name in call.reads)
            over = ((0, 0),) if call.in_place else ()
            size = bytes_of(call.made)
            yield Vertex(
                id_, VertexKind.KERNEL, reader.space, call.op, inputs, (size,), after=after, inplace=over,
                may_inplace=(0,) if call.may_overwrite else (),
            )  # fmt: skip
            module = self.ops[reader.id].module if reader.id in self.ops else ""
            self.ops[id_] = OpCall(call.op, call.overload, call.args, (OpResult(0, call.made),), module)
            refs["="] = (id_, refs[call.reads[0]][1])

    def _multiplies_inputs(self, source: int, reader: Vertex) -> bool:
        """Whether ``reader`` is a product of the forward, run for the first time or again."""
        call = self.ops.get(reader.id)
        if call is None or call.name == "aten::linear":
            return True
        specs = [arg.spec for arg in tensor_args(call.args) if reader.inputs[arg.input][0] == source]
        return any((spec.stride[-1] != 1) != self.packing[source].inputs_first for spec in specs)


def _inside(weight: PackedWeight) -> Iterator[DequantiseCall]:
    """The part of the library's own product before it multiplies."""
    read = [part for part in parts_of(weight) if part.is_read]
    args: tuple[Arg, ...] = (*(TensorArg(k, part.spec) for k, part in enumerate(read)),)
    op = f"{STORED_FORMS[weight.form].product}.dequantise"
    yield DequantiseCall(op, "default", tuple(part.suffix for part in read), args, weight.dequantised)
