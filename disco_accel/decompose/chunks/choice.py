"""How a kernel runs in chunks: which loop is cut, so that few bytes are copied and a chunk is small."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from disco_accel.capture.fake_kernels import fake_kernels, quiet
from disco_accel.capture.storages import storage_bytes, tensor_spec, tensors_of
from disco_accel.decompose.chunks.cuts import (
    Cut,
    Range,
    Ranges,
    Unaligned,
    cut_along,
    elements,
    fills_memory,
    narrowed,
    ranges_in,
    same_layout,
    samples,
)
from disco_accel.decompose.chunks.loops import Axes, Loops, loops_of
from disco_accel.graph.check import after_gate
from disco_accel.graph.taskgraph import (
    Arg,
    EnumArg,
    OpCall,
    Ref,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    tensor_args,
)
from disco_accel.graph.values import host_copy_exists, is_handed_out
from disco_accel.native.op_encoding import op_overload

_ABOUT_AS_FEW = 1.5
"""Three rows in chunks of one are as good as four chunks that no view of all rows follows."""

Part = Mapping[int, Range]
"""Label of a loop → the part of it that a chunk of a kernel runs."""


Returned = tuple[tuple[TensorSpec, int] | None, ...]
"""Of each returned tensor its layout and the bytes of its memory; None for an undefined one."""


Results = Callable[[OpCall], Returned | None]
"""The results of a call; None if it refuses its arguments."""


@dataclass(frozen=True, slots=True)
class ChunkedKernel:
    """A kernel in ``parts``. ``cuts``: output → how it is cut; outputs in ``sums`` are added up over the parts, those
    in ``alike`` are the first part's. ``large``: it is one of those for which there are chunks."""

    vertex: Vertex
    call: OpCall
    loops: Loops
    parts: tuple[Part, ...]
    cuts: Mapping[int, Cut]
    sums: tuple[int, ...]
    alike: tuple[int, ...]
    large: bool
    to_user: bool = False

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.parts)

    @property
    def results(self) -> tuple[int, ...]:
        """Outputs that are not made alike by every chunk."""
        return (*self.cuts, *self.sums)

    def part_call(self, part: int, seen: Sequence[TensorArg]) -> OpCall:
        """The call of chunk ``part`` on the tensors ``seen``, which are in the order of ``tensor_args``."""
        return replace(self.call, args=part_args(self.call, self.loops, self.parts[part], seen))


def part_args(call: OpCall, loops: Loops, part: Part, seen: Sequence[TensorArg]) -> tuple[Arg, ...]:
    """The arguments of ``call`` for a ``part`` of its loops, with the tensors ``seen``."""
    args = list(with_tensors(loops.part_args or call.args, seen))
    result = call.results[0]
    if loops.shape_at is not None and result is not None:
        args[loops.shape_at] = narrowed(result.spec, ranges_of(loops.results[0], part) or {}).shape
    return tuple(args)


def with_tensors(args: tuple[Arg, ...], seen: Sequence[TensorArg]) -> tuple[Arg, ...]:
    """``args`` with the tensors ``seen`` in place of their own, in the order of ``tensor_args``."""
    tensors = iter(seen)

    def filled(arg: Arg) -> Arg:
        if isinstance(arg, TensorArg):
            return next(tensors)
        return tuple(filled(item) for item in arg) if isinstance(arg, tuple) else arg

    return tuple(filled(arg) for arg in args)


def ranges_of(axes: Axes, part: Part) -> dict[int, Range] | None:
    """The ranges of a tensor with ``axes`` that go with ``part``; None where a shared index would be divided."""
    made = {}
    for dim, axis in enumerate(axes):
        if axis is None or axis.label not in part:
            continue
        begin, end = part[axis.label]
        if begin % axis.scale or end % axis.scale:
            return None
        made[dim] = begin // axis.scale, end // axis.scale
    return made


class Choices:
    """How kernels of ``graph`` run in chunks, ``count`` of them where a kernel is large. A large kernel reads and makes
    more than ``large`` bytes besides weights, which each chunk needs whole, or makes a value of more than ``value``
    bytes. ``fakes`` tell how results lie. ``to_user``: vertices of the user's memory."""

    def __init__(
        self, graph: TaskGraph, count: int, large: int, value: int, fakes: Results, to_user: Collection[int]
    ) -> None:
        self._graph, self._count, self._large, self._value, self._fakes = graph, count, large, value, fakes
        self._to_user = to_user
        self._sizes = {(v.id, k): size for v in graph.vertices for k, size in enumerate(v.sizes)}
        self._behind_gate = after_gate(graph.vertices)
        self.weights = _made_of_weights(graph)

    def made(self, stay_whole: Collection[int]) -> dict[int, ChunkedKernel]:
        """Kernel → its chunks, for those that are not to ``stay_whole``."""
        chunked: dict[int, ChunkedKernel] = {}
        cuts: dict[Ref, Cut] = {}
        for vertex in self._graph.vertices:
            call = self._graph.ops.get(vertex.id)
            if vertex.kind is not VertexKind.KERNEL or call is None or vertex.id in stay_whole:
                continue
            traits = self._traits(vertex)
            if not traits.large and not any(ref in cuts for ref in vertex.inputs):
                continue
            loops = loops_of(call)
            made = None if loops is None else self._chosen(vertex, call, loops, cuts, traits)
            if made is not None:
                chunked[vertex.id] = made
                cuts |= {(vertex.id, output): cut for output, cut in made.cuts.items()}
        return chunked

    def _traits(self, vertex: Vertex) -> _KernelTraits:
        moved = sum(vertex.sizes) + sum(
            self._sizes[ref] for ref in dict.fromkeys(vertex.inputs) if ref[0] not in self.weights
        )
        return _KernelTraits(
            large=(moved > self._large or max(vertex.sizes) > self._value) and vertex.id not in self.weights,
            handed_out=is_handed_out(vertex),
            backward=vertex.id in self._behind_gate,
            to_user=any(producer in self._to_user for producer, _ in vertex.inputs),
        )

    def _chosen(
        self, vertex: Vertex, call: OpCall, loops: Loops, cuts: Mapping[Ref, Cut], traits: _KernelTraits
    ) -> ChunkedKernel | None:
        """The best way to run ``vertex`` in chunks, the values of ``cuts`` being so; None if there is none. One that is
        not large only follows its inputs, without copies."""
        ways: list[tuple[int, int, ChunkedKernel]] = []
        for parts in self._candidates(vertex, call, loops, cuts, traits):
            made = self._made(vertex, call, loops, parts, traits)
            if made is None:
                continue
            copied, read = self._copies(made, cuts)
            if not traits.large and (copied or made.sums):
                continue
            if made.sums and not self._may_sum(made, traits):
                continue
            ways.append((copied, read, made))
        # Of ways that are about as good the first: the next ops follow the outermost dimensions.
        least = min((read for _, read, _ in ways), default=0)

        def rank(way: tuple[int, int, ChunkedKernel]) -> tuple[bool, bool, bool, int, bool]:
            copied, read, made = way
            more = read > _ABOUT_AS_FEW * least
            # A chunk that is large still is no better than a copy.
            return more and read > self._large, copied > self._large, bool(made.sums), copied, more

        ways.sort(key=rank)
        return next((made for _, _, made in ways if self._lies_as_expected(made)), None)

    def _candidates(
        self, vertex: Vertex, call: OpCall, loops: Loops, cuts: Mapping[Ref, Cut], traits: _KernelTraits
    ) -> Iterator[tuple[Part, ...]]:
        """Parts as an input is cut; then, of a large kernel, any loop in as many as are wanted."""
        seen = []
        for arg, axes in zip(tensor_args(call.args), loops.args, strict=True):
            cut = cuts.get(vertex.inputs[arg.input])
            parts = None if cut is None else _followed(arg, axes, cut)
            if parts is not None and parts not in seen:
                seen.append(parts)
                yield parts
        if not traits.large:
            return
        lengths = _lengths(call, loops)
        for label in lengths:
            ways = [_equal_parts(label, lengths[label], self._count, loops.units.get(label, 1))]
            if lengths[label] < self._count and not loops.units:
                ways += [_parts_of_rows(label, inner, lengths, self._count) for inner in lengths if inner != label]
            yield from (parts for parts in ways if parts is not None and parts not in seen)

    def _made(
        self, vertex: Vertex, call: OpCall, loops: Loops, parts: tuple[Part, ...], traits: _KernelTraits
    ) -> ChunkedKernel | None:
        cuts, sums, alike = dict[int, Cut](), list[int](), list[int]()
        labels = set(parts[0])
        if traits.to_user:
            return ChunkedKernel(vertex, call, loops, parts, {}, (), (), traits.large, to_user=True)
        owners = [result.output for result in call.results if result is not None]
        if len(set(owners)) != len(owners) or set(owners) != set(range(len(vertex.sizes))):
            return None
        for k, result in enumerate(call.results):
            if result is None:
                continue
            if k in loops.alike:
                alike.append(result.output)
                continue
            size = elements(result.spec) * getattr(torch, result.spec.dtype).itemsize
            if not fills_memory(result.spec) or self._sizes[vertex.id, result.output] != size:
                return None
            present = {axis.label for axis in loops.results[k] if axis is not None}
            if labels <= present:
                ranges = [ranges_of(loops.results[k], part) for part in parts]
                cut = None if None in ranges else cut_along(result.spec, [r for r in ranges if r is not None])
                if cut is None or traits.handed_out:
                    return None
                cuts[result.output] = cut
            elif not labels & present and labels <= loops.sums:
                sums.append(result.output)
            else:
                return None
        if any(ranges_of(axes, part) is None for axes in loops.args for part in parts):
            return None
        return ChunkedKernel(vertex, call, loops, parts, cuts, tuple(sums), tuple(alike), traits.large)

    def _copies(self, made: ChunkedKernel, cuts: Mapping[Ref, Cut]) -> tuple[int, int]:
        """Bytes of inputs that are copied because they are cut otherwise; and that one chunk reads and makes, weights
        aside."""
        copied = 0
        read = sum(self._sizes[made.vertex.id, k] // (made.count if k in made.cuts else 1) for k in made.results)
        for arg, axes in zip(tensor_args(made.call.args), made.loops.args, strict=True):
            ref = made.vertex.inputs[arg.input]
            ranges = ranges_of(axes, made.parts[0]) or {}
            share = elements(narrowed(arg.spec, ranges)) / max(elements(arg.spec), 1)
            read += 0 if ref[0] in self.weights else int(self._sizes[ref] * share)
            cut = cuts.get(ref)
            if cut is not None and not _in_one_chunk_each(arg, axes, made.parts, cut):
                copied += self._sizes[ref]
        return copied, read

    def _may_sum(self, made: ChunkedKernel, traits: _KernelTraits) -> bool:
        """Whether adding up parts of ``made`` is worth other bits: for a loss, and for gradients of weights."""
        scalars = all(r is None or not r.spec.shape for r in made.call.results)
        if scalars and (traits.handed_out or made.loops.part_args is not None):
            return True
        made_bytes = sum(self._sizes[made.vertex.id, k] for k in made.sums)
        summed = sum(self._sizes[ref] for ref in dict.fromkeys(made.vertex.inputs))
        return traits.backward and (traits.handed_out or 4 * made_bytes <= summed)

    def _lies_as_expected(self, made: ChunkedKernel) -> bool:
        """Whether a chunk's results lie as the cut says. How its inputs lie is known only when chunks are written."""
        for part in samples(made.count):
            seen = [
                replace(arg, spec=narrowed(arg.spec, ranges_of(axes, made.parts[part]) or {}))
                for arg, axes in zip(tensor_args(made.call.args), made.loops.args, strict=True)
            ]
            if results_of_part(made, part, made.part_call(part, seen), self._fakes) is None:
                return False
        return True


@dataclass(frozen=True, slots=True)
class _KernelTraits:
    """Facts that decide how a kernel may be cut. The user gets its results (``handed_out``); it is behind the gate
    (``backward``); it writes results to the user's memory itself (``to_user``)."""

    large: bool
    handed_out: bool
    backward: bool
    to_user: bool


def _made_of_weights(graph: TaskGraph) -> set[int]:
    """Inputs that the host has, and kernels that read nothing else: they unpack weights."""
    made: set[int] = set()
    for vertex in graph.vertices:
        if host_copy_exists(vertex) or (vertex.inputs and all(producer in made for producer, _ in vertex.inputs)):
            made.add(vertex.id)
    return made


def fake_results(device: torch.device) -> Results:
    """Ask ops themselves, over tensors without bytes on ``device``, each call once."""
    mode, known = FakeTensorMode(), dict[Any, Returned | None]()

    def results(call: OpCall) -> Returned | None:
        key = call.name, call.overload, repr(call.args)
        if key not in known:
            with quiet(), fake_kernels(), mode, torch.no_grad():
                known[key] = _called(call, device)
        return known[key]

    return results


def _called(call: OpCall, device: torch.device) -> Returned | None:
    def tensor(spec: TensorSpec) -> torch.Tensor:
        extent = 1 + spec.offset + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True) if n > 0)
        memory = torch.empty(extent, dtype=getattr(torch, spec.dtype), device=device)
        return memory.as_strided(spec.shape, spec.stride, spec.offset)

    op = op_overload(call.name, call.overload)
    pairs = [(_decoded(arg, tensor), formal) for arg, formal in zip(call.args, op._schema.arguments, strict=True)]
    positional = [arg for arg, formal in pairs if not formal.kwarg_only]
    named = {formal.name: arg for arg, formal in pairs if formal.kwarg_only}
    try:
        made = tensors_of(op(*positional, **named))
    except (RuntimeError, ValueError, IndexError, TypeError):
        # The whole call went through; one for a part that does not is none.
        return None
    return tuple(None if each is None else (tensor_spec(each), storage_bytes(each)) for each in made)


def _decoded(arg: Arg, tensor: Callable[[TensorSpec], torch.Tensor]) -> Any:
    if isinstance(arg, TensorArg):
        return tensor(arg.spec)
    if isinstance(arg, EnumArg):
        return torch.device(arg.value) if arg.kind == "device" else getattr(torch, arg.value)
    if isinstance(arg, tuple):
        return [_decoded(item, tensor) for item in arg]
    return arg


def results_of_part(made: ChunkedKernel, part: int, call: OpCall, fakes: Results) -> Returned | None:
    """The results of ``call``, chunk ``part`` of ``made``; None unless they lie as the cuts say."""
    returned = fakes(call)
    if returned is None or len(returned) != len(call.results):
        return None
    for k, (result, got) in enumerate(zip(call.results, returned, strict=True)):
        if result is None:
            continue
        if got is None:
            return None
        ranges: Ranges = {}
        if result.output in made.cuts:
            ranges = ranges_of(made.loops.results[k], made.parts[part]) or {}
        spec = narrowed(result.spec, ranges)
        cut = made.cuts.get(result.output)
        if cut is not None:
            length = cut.length(part)
            stride = tuple(s if s % cut.period else s // cut.period * length for s in spec.stride)
            spec = replace(spec, stride=stride, offset=0)
        if not same_layout(spec, got[0]):
            return None
    return returned


def lies_in_chunks(arg: TensorArg, axes: Axes, parts: Sequence[Part], cut: Cut) -> bool:
    """Whether every one of ``parts`` reads just one chunk of ``cut`` of ``arg``."""
    if cut.count != len(parts):
        return False
    try:
        return all(ranges_in(arg.spec, cut, j) == _part_of(arg, axes, parts[j]) for j in samples(len(parts)))
    except Unaligned:
        return False


def _in_one_chunk_each(arg: TensorArg, axes: Axes, parts: Sequence[Part], cut: Cut) -> bool:
    """Whether all that each of ``parts`` reads of ``arg`` lies in one chunk of ``cut``, of which it may be a part."""
    for j in samples(len(parts)):
        spec = narrowed(arg.spec, ranges_of(axes, parts[j]) or {})
        try:
            if {} not in [ranges_in(spec, cut, chunk) for chunk in range(cut.count)]:
                return False
        except Unaligned:
            return False
    return True


def _part_of(arg: TensorArg, axes: Axes, part: Part) -> dict[int, Range]:
    ranges = ranges_of(axes, part) or {}
    return {d: r for d, r in ranges.items() if r != (0, arg.spec.shape[d])}


def _followed(arg: TensorArg, axes: Axes, cut: Cut) -> tuple[Part, ...] | None:
    """The parts of loops that go with the chunks of an input; None if a chunk is no part of one."""
    parts: list[Part] = []
    try:
        for chunk in range(cut.count):
            ranges = ranges_in(arg.spec, cut, chunk)
            if not ranges:
                return None
            part = {}
            for dim, (begin, end) in ranges.items():
                axis = axes[dim]
                if axis is None:
                    return None
                part[axis.label] = begin * axis.scale, end * axis.scale
            parts.append(part)
    except Unaligned:
        return None
    return tuple(parts) if len(parts) > 1 and all(part.keys() == parts[0].keys() for part in parts) else None


def _lengths(call: OpCall, loops: Loops) -> dict[int, int]:
    """Label → length of its loop, those of the first result's outermost dimensions first."""
    lengths: dict[int, int] = {}
    pairs = [(r.spec, axes) for r, axes in zip(call.results, loops.results, strict=True) if r is not None]
    pairs += [(arg.spec, axes) for arg, axes in zip(tensor_args(call.args), loops.args, strict=True)]
    for spec, axes in pairs:
        for dim in sorted(range(len(axes)), key=lambda d: -spec.stride[d]):
            axis = axes[dim]
            if axis is not None and spec.shape[dim] > 1:
                lengths.setdefault(axis.label, spec.shape[dim] * axis.scale)
    return lengths


def _equal_parts(label: int, length: int, count: int, unit: int) -> tuple[Part, ...] | None:
    """``length`` steps in at most ``count`` parts of a multiple of ``unit``, the last perhaps a shorter one."""
    each = -(-length // count)
    each = -(-each // unit) * unit
    if each >= length:
        return None
    return tuple({label: (begin, min(begin + each, length))} for begin in range(0, length, each))


def _parts_of_rows(outer: int, inner: int, lengths: Mapping[int, int], count: int) -> tuple[Part, ...] | None:
    """Every step of ``outer`` by itself, with parts of ``inner``: where there are fewer rows than chunks."""
    wanted = -(-lengths[inner] // (count // lengths[outer]))
    each = next(n for n in range(wanted, lengths[inner] + 1) if lengths[inner] % n == 0)
    if each == lengths[inner]:
        return None
    return tuple(
        {outer: (row, row + 1), inner: (begin, begin + each)}
        for row in range(lengths[outer])
        for begin in range(0, lengths[inner], each)
    )
