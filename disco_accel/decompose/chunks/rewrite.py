"""Writes a graph in chunks: kernels chunk by chunk, copies where a value is needed otherwise than it is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from disco_accel.capture.inplace import overwritable
from disco_accel.decompose.chunks.choice import ChunkedKernel, Results, ranges_of, results_of_part, with_tensors
from disco_accel.decompose.chunks.cuts import (
    Cut,
    Unaligned,
    dense,
    elements,
    in_chunk,
    is_contiguous,
    narrowed,
    ranges_in,
    same_layout,
)
from disco_accel.decompose.chunks.loops import goes_by_strides
from disco_accel.decompose.chunks.runs import Run
from disco_accel.graph.op_traits import Arithmetic, op_traits
from disco_accel.graph.taskgraph import (
    EnumArg,
    OpCall,
    OpResult,
    Ref,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    tensor_args,
)


class _StaysWhole(Exception):
    """The chunks of a kernel would not lie as they should: it must run whole."""


def rewritten(graph: TaskGraph, runs: Iterable[Run], fakes: Results, handed_out: frozenset[Ref]) -> Rewriting | int:
    """``graph`` as its ``runs``; or the kernel that must run whole, since its chunks would not lie as they should."""
    rewriting = Rewriting(graph, fakes, handed_out)
    try:
        for run in runs:
            rewriting.add(run)
    except _StaysWhole as error:
        return int(error.args[0])
    return rewriting


@dataclass
class _Chunks:
    """A value in chunks: how it is cut, and the value of each."""

    cut: Cut
    refs: list[Ref]


@dataclass
class Rewriting:
    """The graph as far as it is written. ``of``: vertex → the one of the whole graph whose work it does.
    ``handed_out``: values of the whole graph that the user gets."""

    graph: TaskGraph
    fakes: Results
    handed_out: frozenset[Ref]
    vertices: list[Vertex] = field(default_factory=list)
    calls: dict[int, OpCall] = field(default_factory=dict)
    of: dict[int, int] = field(default_factory=dict)
    whole: dict[Ref, Ref] = field(default_factory=dict)
    """Value of the whole graph → the same here, where it is in one piece."""
    chunks: dict[Ref, _Chunks] = field(default_factory=dict)
    made_by: dict[int, list[int]] = field(default_factory=dict)
    """Vertex of the whole graph → those that must have run when it has."""
    _slices: dict[tuple[Ref, TensorSpec], tuple[Ref, TensorSpec]] = field(default_factory=dict)
    _contiguous: dict[tuple[Ref, TensorSpec], tuple[Ref, TensorSpec]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fresh = itertools.count(max(vertex.id for vertex in self.graph.vertices) + 1)
        self._by_id: dict[int, Vertex] = {}
        self._old = {vertex.id: vertex for vertex in self.graph.vertices}
        for vertex in self.graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                self._add(vertex, vertex.id)
                self.whole[vertex.id, 0] = vertex.id, 0
                self.made_by[vertex.id] = [vertex.id]

    def add(self, run: Run) -> None:
        """All of ``run``, chunk by chunk. Raises _StaysWhole."""
        for vertex in run.before:
            self._add_whole(vertex)
        members = {kernel.vertex.id for kernel in run.members}
        ids: dict[int, list[int]] = {each: [] for each in members}
        partial: dict[Ref, Ref] = {}
        for part in range(run.members[0].count if run.members else 0):
            for kernel in run.members:
                self._add_part(kernel, part, ids, partial)
        for kernel in run.members:
            self.made_by[kernel.vertex.id] = ids[kernel.vertex.id]
            self._finish_sums(kernel, partial)
        for vertex in run.behind:
            self._add_whole(vertex)

    def value(self, ref: Ref) -> Ref:
        """``ref`` of the whole graph in one piece, copied together if it is in chunks."""
        if ref not in self.whole:
            chunks = self.chunks[ref]
            cut = chunks.cut
            assert len(chunks.refs) == cut.count, "nothing reads a value whole before all of it is made"
            size = sum(self._size(each) for each in chunks.refs)
            itemsize = getattr(torch, cut.dtype).itemsize
            blocks = size // (cut.period * itemsize)
            seen = [TensorArg(k, dense(cut.dtype, (blocks, cut.length(k)), (0, 1))) for k in range(len(chunks.refs))]
            spec = dense(cut.dtype, (blocks, cut.period), (0, 1))
            self.whole[ref] = self._concatenated(ref, chunks.refs, seen, 1, spec), 0
        return self.whole[ref]

    def _add(self, vertex: Vertex, of: int, call: OpCall | None = None) -> None:
        self.vertices.append(vertex)
        self._by_id[vertex.id] = vertex
        self.of[vertex.id] = of
        if call is not None:
            self.calls[vertex.id] = call

    def _size(self, ref: Ref) -> int:
        return self._by_id[ref[0]].sizes[ref[1]]

    def _add_whole(self, vertex: Vertex) -> None:
        call = self.graph.ops.get(vertex.id)
        after = tuple(dict.fromkeys(each for other in vertex.after for each in self.made_by[other]))
        inputs = [self.value(ref) for ref in vertex.inputs] if call is None else list[Ref]()
        if call is not None:
            inputs, call = self._whole_call(vertex, call)
        changed = tuple(inputs) != vertex.inputs
        made = replace(vertex, inputs=tuple(inputs), after=after)
        if changed and vertex.inplace:
            at = {output: inputs.index(self.value(vertex.inputs[position])) for output, position in vertex.inplace}
            made = replace(made, inplace=tuple(at.items()))
        if changed and call is not None and vertex.may_inplace:
            made = replace(made, may_inplace=overwritable(made.inputs, made.sizes, call, self._by_id))
        self._add(made, vertex.id, call)
        self.made_by[vertex.id] = [vertex.id]
        for output in range(len(vertex.sizes)):
            self.whole[vertex.id, output] = vertex.id, output

    def _whole_call(self, vertex: Vertex, call: OpCall) -> tuple[list[Ref], OpCall]:
        """Inputs and call of a kernel that runs whole: on parts of values where that is all that it reads."""
        overwritten = {vertex.inputs[position] for _, position in vertex.inplace}
        if not overwritten and any(ref in self.chunks for ref in vertex.inputs):
            inputs: list[Ref] = []
            seen = []
            for arg in tensor_args(call.args):
                found = self._seen(vertex.inputs[arg.input], arg.spec)
                seen.append(_argument(inputs, *self._as_contiguous(call, arg.spec, vertex, found)))
            made = replace(call, args=with_tensors(call.args, seen))
            results = self._same_results(made) if _multiplied_alike(call, seen) else None
            if results is not None:
                return inputs, replace(made, results=results)
        inputs = []
        seen = [_argument(inputs, self.value(vertex.inputs[a.input]), a.spec) for a in tensor_args(call.args)]
        return inputs, replace(call, args=with_tensors(call.args, seen))

    def _same_results(self, call: OpCall) -> tuple[OpResult | None, ...] | None:
        """The results of a call whose arguments lie otherwise now; None if they lie otherwise too."""
        returned = self.fakes(call)
        if returned is None or len(returned) != len(call.results):
            return None
        results: list[OpResult | None] = []
        for result, got in zip(call.results, returned, strict=True):
            if result is not None and (got is None or not same_layout(result.spec, got[0])):
                return None
            results.append(None if result is None or got is None else OpResult(result.output, got[0]))
        return tuple(results)

    def _add_part(self, kernel: ChunkedKernel, part: int, ids: dict[int, list[int]], partial: dict[Ref, Ref]) -> None:
        old = kernel.vertex
        inputs: list[Ref] = []
        args = []
        for arg, axes in zip(tensor_args(kernel.call.args), kernel.loops.args, strict=True):
            spec = narrowed(arg.spec, ranges_of(axes, kernel.parts[part]) or {})
            found = self._seen(old.inputs[arg.input], spec)
            args.append(_argument(inputs, *self._as_contiguous(kernel.call, arg.spec, old, found)))
        call = kernel.part_call(part, args)
        returned = results_of_part(kernel, part, call, self.fakes)
        if returned is None:
            raise _StaysWhole(old.id)
        results = tuple(
            None if result is None or got is None else OpResult(result.output, got[0])
            for result, got in zip(call.results, returned, strict=True)
        )
        sizes = [0] * len(old.sizes)
        for result, got in zip(call.results, returned, strict=True):
            if result is not None and got is not None:
                sizes[result.output] = got[1]
        call = replace(call, results=results)
        id_ = next(self._fresh)
        after = [each for other in old.after for each in ([ids[other][part]] if other in ids else self.made_by[other])]
        vertex = replace(old, id=id_, inputs=tuple(inputs), after=tuple(dict.fromkeys(after)))
        if not kernel.to_user:
            vertex = replace(vertex, sizes=tuple(sizes), out=False, keep=False)
        vertex = replace(vertex, may_inplace=overwritable(vertex.inputs, vertex.sizes, call, self._by_id))
        self._add(vertex, old.id, call)
        ids[old.id].append(id_)
        for output, cut in kernel.cuts.items():
            self.chunks.setdefault((old.id, output), _Chunks(cut, [])).refs.append((id_, output))
        for output in kernel.alike:
            self.whole.setdefault((old.id, output), (id_, output))
        for output in kernel.sums:
            self._add_up(kernel, output, (id_, output), partial)

    def _add_up(self, kernel: ChunkedKernel, output: int, ref: Ref, partial: dict[Ref, Ref]) -> None:
        """The sum of the parts so far: those of earlier chunks first."""
        old = kernel.vertex.id, output
        if old not in partial:
            partial[old] = ref
            return
        spec = _result_spec(kernel, output)
        call = OpCall(
            _ADD, "Tensor", (TensorArg(0, spec), TensorArg(1, spec), 1), (OpResult(0, spec),), kernel.call.module
        )
        self._check(call, kernel)
        partial[old] = self._add_kernel(kernel.vertex, call, (partial[old], ref), kernel.vertex.sizes[output]), 0

    def _finish_sums(self, kernel: ChunkedKernel, partial: Mapping[Ref, Ref]) -> None:
        """Sums of all parts take the place of the kernel's values, for the user and for other kernels."""
        old = kernel.vertex
        totals = {output: partial[old.id, output] for output in kernel.sums}
        if kernel.loops.mean:
            spec, weight = _result_spec(kernel, 0), _result_spec(kernel, 1)
            args = TensorArg(0, spec), TensorArg(1, weight)
            call = OpCall("aten::div", "Tensor", args, (OpResult(0, spec),), kernel.call.module)
            self._check(call, kernel)
            totals[0] = self._add_kernel(old, call, (totals[0], totals[1]), old.sizes[0]), 0
        for output, ref in totals.items():
            self.whole[old.id, output] = ref
            self.made_by[old.id] = [*self.made_by[old.id], ref[0]]
            if (old.id, output) in self.handed_out:
                self._replace(replace(self._by_id[ref[0]], out=old.out, keep=old.keep))

    def _check(self, call: OpCall, kernel: ChunkedKernel) -> None:
        """A sum of parts lies as the part does, or the kernel stays whole."""
        returned = self.fakes(call)
        expected = call.results[0]
        assert expected is not None
        if returned is None or returned[0] is None or returned[0][0] != expected.spec:
            raise _StaysWhole(kernel.vertex.id)

    def _replace(self, vertex: Vertex) -> None:
        place = next(k for k in reversed(range(len(self.vertices))) if self.vertices[k].id == vertex.id)
        self.vertices[place] = self._by_id[vertex.id] = vertex

    def _add_kernel(self, old: Vertex, call: OpCall, inputs: Sequence[Ref], size: int) -> int:
        vertex = Vertex(next(self._fresh), VertexKind.KERNEL, old.space, call.name, tuple(inputs), (size,))
        may = overwritable(vertex.inputs, vertex.sizes, call, self._by_id)
        self._add(replace(vertex, may_inplace=may), old.id, call)
        return vertex.id

    def _seen(self, ref: Ref, spec: TensorSpec) -> tuple[Ref, TensorSpec]:
        """The value here with the elements that ``spec`` shows of the whole ``ref``, and how they lie there."""
        if ref in self.whole:
            return self.whole[ref], spec
        chunks = self.chunks[ref]
        known = self._slices.get((ref, spec))
        if known is None:
            try:
                known = self._slice(ref, spec, chunks)
            except Unaligned:
                known = None
            if known is None:
                return self.value(ref), spec
            self._slices[ref, spec] = known
        return known

    def _as_contiguous(
        self, call: OpCall, before: TensorSpec, old: Vertex, found: tuple[Ref, TensorSpec]
    ) -> tuple[Ref, TensorSpec]:
        """``found``, an argument of ``call``, or a contiguous copy if kernels may count on how it lay ``before``."""
        ref, spec = found
        if goes_by_strides(call) or not is_contiguous(before) or is_contiguous(spec):
            return found
        if found not in self._contiguous:
            made = dense(spec.dtype, spec.shape, range(len(spec.shape)))
            format_ = EnumArg("memory_format", "contiguous_format")
            clone = OpCall("aten::clone", "default", (TensorArg(0, spec), format_), (OpResult(0, made),), call.module)
            size = elements(spec) * getattr(torch, spec.dtype).itemsize
            self._contiguous[found] = (self._add_kernel(old, clone, (ref,), size), 0), made
        return self._contiguous[found]

    def _slice(self, ref: Ref, spec: TensorSpec, chunks: _Chunks) -> tuple[Ref, TensorSpec] | None:
        """``spec`` in one chunk, or copied together from several; None where only a copy of the whole value will do."""
        parts = [(k, in_chunk(spec, chunks.cut, k), ranges_in(spec, chunks.cut, k)) for k in range(len(chunks.refs))]
        parts = [each for each in parts if each[1] is not None]
        if len(parts) == 1:
            k, found, ranges = parts[0]
            assert found is not None
            return (chunks.refs[k], found) if not ranges else None
        dims = [d for d, (n, s) in enumerate(zip(spec.shape, spec.stride, strict=True)) if n > 1 and s]
        dims.sort(key=lambda d: -spec.stride[d])
        size = math.prod(spec.shape[d] for d in dims) * getattr(torch, spec.dtype).itemsize
        if size >= sum(self._size(each) for each in chunks.refs):
            return None
        cut_dims = {d for _, _, ranges in parts for d in ranges or ()}
        if len(cut_dims) != 1:
            return None
        (dim,) = cut_dims
        end = 0
        for _, _, ranges in parts:
            if ranges is None or dim not in ranges or ranges[dim][0] != end:
                return None
            end = ranges[dim][1]
        if end != spec.shape[dim]:
            return None
        seen = []
        for position, (_, part, _) in enumerate(parts):
            assert part is not None
            shape, stride = tuple(part.shape[d] for d in dims), tuple(part.stride[d] for d in dims)
            seen.append(TensorArg(position, TensorSpec(part.dtype, shape, stride, part.offset)))
        made = dense(spec.dtype, tuple(spec.shape[d] for d in dims), range(len(dims)))
        refs = [chunks.refs[k] for k, _, _ in parts]
        call = _cat(seen, dims.index(dim), made, "chunks")
        if (returned := self.fakes(call)) is None or returned[0] is None or returned[0][0] != made:
            return None
        copied = self._concatenated(ref, refs, seen, dims.index(dim), made)
        strides = [0 if s == 0 else 1 for s in spec.stride]
        for position, d in enumerate(dims):
            strides[d] = made.stride[position]
        return (copied, 0), TensorSpec(spec.dtype, spec.shape, tuple(strides))

    def _concatenated(
        self, ref: Ref, refs: Sequence[Ref], seen: Sequence[TensorArg], dim: int, spec: TensorSpec
    ) -> int:
        old = self._old[ref[0]]
        size = elements(spec) * getattr(torch, spec.dtype).itemsize
        call = _cat(seen, dim, spec, self.graph.ops[old.id].module)
        return self._add_kernel(old, call, refs, size)


_ADD = "aten::add"


def _cat(seen: Sequence[TensorArg], dim: int, spec: TensorSpec, module: str) -> OpCall:
    return OpCall("aten::cat", "default", (tuple(seen), dim), (OpResult(0, spec),), module)


def _argument(inputs: list[Ref], ref: Ref, spec: TensorSpec) -> TensorArg:
    if ref not in inputs:
        inputs.append(ref)
    return TensorArg(inputs.index(ref), spec)


def _multiplied_alike(call: OpCall, seen: Sequence[TensorArg]) -> bool:
    """Whether a product of the tensors ``seen`` has the bits of ``call``: other strides may mean another routine."""
    if op_traits(call.name).arithmetic is Arithmetic.NONE:
        return True
    pairs = zip(tensor_args(call.args), seen, strict=True)
    return all(same_layout(replace(a.spec, offset=0), replace(b.spec, offset=0)) for a, b in pairs)


def _result_spec(kernel: ChunkedKernel, output: int) -> TensorSpec:
    return next(r.spec for r in kernel.call.results if r is not None and r.output == output)
