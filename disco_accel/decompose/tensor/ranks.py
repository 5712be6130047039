"""The graph of one rank, once for each rank, with the exchanges between them written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource, ValueBinding
from disco_accel.decompose.micro_batches import StepOnParts
from disco_accel.decompose.tensor.local_graph import ALL_GATHER, ALL_REDUCE, OfRank
from disco_accel.graph.taskgraph import Arg, OpCall, OpResult, Ref, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import MADE_FOREIGN
from disco_accel.graph.values import host_copy_exists, is_handed_out, overwrites

IN_SLICES = 1 << 20
"""Bytes of a reduced value from which on each rank adds up a slice, and sends the sum to the others."""

_SUMS = {"sum": "aten::add", "max": "aten::maximum"}
_REDUCE, _GATHER = ALL_REDUCE._schema.name, ALL_GATHER._schema.name


def on_ranks(
    captured: CapturedStep,
    shards: Mapping[str, int],
    ranks: int,
    itemsize: Callable[[str], int],
    in_slices: int = IN_SLICES,
) -> StepOnParts:
    """``captured``, the step of one of ``ranks`` ranks, on all of them.

    ``shards``: name of a weight → the dimension that is cut. Frozen ones are an input of each rank. Sums go in the
    order of the ranks, on each rank the same, so that all get the same bits. Results for the user are made on rank 0,
    and work of other ranks that nothing reads is left out. ``itemsize``: bytes of an element by dtype.
    """
    made = _Ranks(captured, shards, ranks, itemsize, in_slices)
    effect = f"the same kernels on each of {ranks} ranks, with their parts of weights; sums over ranks"
    graph, bindings = made.graph(), tuple(made.bindings)
    outputs, gradients = made.handed_out(captured.outputs), made.handed_out(captured.gradients)
    whole = captured.rewritten("ranks", effect, graph, bindings=bindings, outputs=outputs, gradients=gradients)
    return StepOnParts(whole, made.part_of)


@dataclass(frozen=True)
class _Summand:
    """A value that one rank adds, seen through a spec."""

    ref: Ref
    spec: TensorSpec


class _Ranks:
    def __init__(
        self,
        captured: CapturedStep,
        shards: Mapping[str, int],
        ranks: int,
        itemsize: Callable[[str], int],
        in_slices: int,
    ) -> None:
        self._captured, self._ranks, self._itemsize, self._in_slices = captured, ranks, itemsize, in_slices
        graph = self._graph = captured.graph
        self._device = next(device.id for device in graph.devices if not device.is_host_device)
        self._fresh = itertools.count(max(vertex.id for vertex in graph.vertices) + 1)
        self._calls: dict[int, OpCall] = {}
        self._vertices: list[Vertex] = []
        self.part_of: dict[int, int] = {}
        self._inputs = {vertex.id: vertex for vertex in graph.vertices if vertex.kind is VertexKind.INPUT}
        cut = {b.vertex: shards[b.name] for b in captured.bindings if self._is_cut(b, shards)}
        self._ids: list[dict[int, int]] = []
        for rank in range(ranks):
            shared = {v: v for v in self._inputs if v not in cut or not rank}
            shared |= {v: next(self._fresh) for v in cut if rank}
            self._ids.append(shared)
        self.bindings = [
            replace(b, vertex=ids[b.vertex], part=rank, parts=ranks, dim=cut[b.vertex]) if b.vertex in cut else b
            for rank, ids in enumerate(self._ids)
            for b in captured.bindings
            if not rank or b.vertex in cut
        ]

    def _is_cut(self, binding: InputBinding, shards: Mapping[str, int]) -> bool:
        return binding.name in shards and binding.source in (InputSource.FROZEN, InputSource.BUFFER)

    def graph(self) -> TaskGraph:
        """Kernel by kernel, each for all ranks one after the other."""
        for vertex in self._graph.vertices:
            call = self._graph.ops.get(vertex.id)
            if vertex.kind is VertexKind.INPUT:
                for id_ in dict.fromkeys(ids[vertex.id] for ids in self._ids):
                    self._vertices.append(replace(vertex, id=id_))
            elif call is None:
                self._once(vertex)
            elif call.name in (_REDUCE, _GATHER):
                self._exchange(vertex, call)
            elif call.rng is not None or any(self._is_once(ref[0]) for _, ref in overwrites(vertex)):
                # Drawn once, as on one device; the others get the result of rank 0, with its changes in place.
                self._once(vertex, call)
            else:
                for rank in range(self._ranks):
                    self._clone(vertex, call, rank)
        vertices = _needed(self._vertices, self._calls)
        there = {vertex.id for vertex in vertices}
        self.part_of = {vertex: rank for vertex, rank in self.part_of.items() if vertex in there}
        calls = {vertex: call for vertex, call in self._calls.items() if vertex in there}
        self.bindings = [binding for binding in self.bindings if binding.vertex in there]
        return replace(self._graph, vertices=tuple(vertices), ops=calls)

    def handed_out(self, values: Sequence[ValueBinding]) -> tuple[ValueBinding, ...]:
        """``values`` as rank 0 has them."""
        return tuple(replace(value, ref=(self._ids[0][value.ref[0]], value.ref[1])) for value in values)

    def _once(self, vertex: Vertex, call: OpCall | None = None) -> None:
        self._clone(vertex, call, 0)
        for ids in self._ids[1:]:
            ids[vertex.id] = self._ids[0][vertex.id]

    def _is_once(self, vertex: int) -> bool:
        """Whether rank 0 alone has it, and the others read it there."""
        return len({ids[vertex] for ids in self._ids}) == 1

    def _clone(self, vertex: Vertex, call: OpCall | None, rank: int) -> None:
        ids = self._ids[rank]
        ids[vertex.id] = vertex.id if not rank else next(self._fresh)
        inputs = tuple((ids[producer], output) for producer, output in vertex.inputs)
        after = tuple(dict.fromkeys(ids[other] for other in vertex.after))
        clone = replace(vertex, id=ids[vertex.id], inputs=inputs, after=after)
        if rank:
            clone = replace(clone, out=False, keep=False)
        self._vertices.append(clone)
        if call is None:
            return
        self.part_of[clone.id] = rank
        own = _has_rank_number(call.args)
        self._calls[clone.id] = replace(call, args=tuple(_of_rank(a, rank) for a in call.args)) if own else call
        if own and call.name == "aten::slice_copy":
            source = vertex.inputs[0][0]
            brought = self._inputs.get(source)
            if self._is_once(source) and not (brought is not None and host_copy_exists(brought)):
                # From rank 0, which has all of it, goes what the rank needs.
                self.part_of[clone.id] = 0

    def _kernel(self, vertex: Vertex, rank: int, call: OpCall, inputs: Sequence[Ref], size: int) -> Ref:
        """A kernel in the place of the exchange ``vertex``."""
        made = Vertex(next(self._fresh), VertexKind.KERNEL, self._device, call.name, tuple(inputs), (size,))
        made = replace(made, after=tuple(dict.fromkeys(self._ids[rank][other] for other in vertex.after)))
        self._vertices.append(made)
        self._calls[made.id] = call
        self.part_of[made.id] = rank
        return made.id, 0

    def _size(self, spec: TensorSpec) -> int:
        return math.prod(spec.shape) * self._itemsize(spec.dtype)

    def _exchange(self, vertex: Vertex, call: OpCall) -> None:
        (producer, output), result = vertex.inputs[0], call.results[0]
        given, how = call.args
        assert isinstance(given, TensorArg) and result is not None
        parts = [_Summand((ids[producer], output), given.spec) for ids in self._ids]
        if call.name == _GATHER:
            assert isinstance(how, int)
            made = [self._joined(vertex, call, rank, parts, how, result.spec) for rank in range(self._ranks)]
        else:
            op = _SUMS[str(how)]
            if self._size(result.spec) < self._in_slices or math.prod(result.spec.shape) < self._ranks:
                made = [self._sum(vertex, call, rank, parts, op, result.spec) for rank in range(self._ranks)]
            else:
                made = self._in_parts(vertex, call, parts, op, result.spec)
        for rank, ((id_, _), ids) in enumerate(zip(made, self._ids, strict=True)):
            ids[vertex.id] = id_
            if not rank and (vertex.out or vertex.keep):
                self._flag(id_, vertex)

    def _flag(self, id_: int, flags: Vertex) -> None:
        at = next(k for k in reversed(range(len(self._vertices))) if self._vertices[k].id == id_)
        self._vertices[at] = replace(self._vertices[at], out=flags.out, keep=flags.keep)

    def _sum(
        self, vertex: Vertex, call: OpCall, rank: int, parts: Sequence[_Summand], op: str, result: TensorSpec
    ) -> Ref:
        """On ``rank``: the first two, then one after the other."""
        total = parts[0]
        for part in parts[1:]:
            args: tuple[Arg, ...] = (TensorArg(0, total.spec), TensorArg(1, part.spec))
            overload = "default"
            if op == "aten::add":
                args, overload = (*args, 1), "Tensor"
            added = OpCall(op, overload, args, (OpResult(0, result),), call.module)
            ref = self._kernel(vertex, rank, added, (total.ref, part.ref), self._size(result))
            total = _Summand(ref, result)
        return total.ref

    def _joined(
        self, vertex: Vertex, call: OpCall, rank: int, parts: Sequence[_Summand], dim: int, result: TensorSpec
    ) -> Ref:
        args = tuple(TensorArg(k, part.spec) for k, part in enumerate(parts)), dim
        joined = OpCall("aten::cat", "default", args, (OpResult(0, result),), call.module)
        return self._kernel(vertex, rank, joined, [part.ref for part in parts], self._size(result))

    def _in_parts(
        self, vertex: Vertex, call: OpCall, parts: Sequence[_Summand], op: str, result: TensorSpec
    ) -> list[Ref]:
        """Slice j of all ranks' values goes to rank j, which adds it up; the sums go to all."""
        count = math.prod(result.shape)
        bounds = [count * k // self._ranks for k in range(self._ranks + 1)]
        sums = list[_Summand]()
        for owner, (begin, end) in enumerate(itertools.pairwise(bounds)):
            flat = TensorSpec(result.dtype, (end - begin,), (1,))
            slices = [
                _Summand(part.ref, replace(flat, offset=begin))
                if rank == owner
                else self._slice(vertex, call, rank, part.ref, count, begin, flat)
                for rank, part in enumerate(parts)
            ]
            sums.append(_Summand(self._sum(vertex, call, owner, slices, op, flat), flat))
        flat = TensorSpec(result.dtype, (count,), (1,))
        return [self._joined(vertex, call, rank, sums, 0, flat) for rank in range(self._ranks)]

    def _slice(
        self, vertex: Vertex, call: OpCall, rank: int, ref: Ref, count: int, begin: int, flat: TensorSpec
    ) -> _Summand:
        whole = TensorSpec(flat.dtype, (count,), (1,))
        args = TensorArg(0, whole), 0, begin, begin + flat.shape[0], 1
        copy = OpCall("aten::slice_copy", "Tensor", args, (OpResult(0, flat),), call.module)
        return _Summand(self._kernel(vertex, rank, copy, (ref,), self._size(flat)), flat)


def _of_rank(arg: Arg, rank: int) -> Arg:
    if isinstance(arg, OfRank):
        return arg.of(rank)
    return tuple(_of_rank(item, rank) for item in arg) if isinstance(arg, tuple) else arg


def _has_rank_number(args: Collection[Arg]) -> bool:
    return any(isinstance(arg, OfRank) or (isinstance(arg, tuple) and _has_rank_number(arg)) for arg in args)


def _needed(vertices: Sequence[Vertex], calls: Mapping[int, OpCall]) -> list[Vertex]:
    """Without those that nobody reads, waits for or gets. A draw moves the user's generator, read or not."""
    needed: set[int] = set()
    for vertex in reversed(vertices):
        call = calls.get(vertex.id)
        draws = call is not None and call.rng is not None
        handed_out = is_handed_out(vertex) or vertex.traits == MADE_FOREIGN
        if vertex.id in needed or handed_out or draws:
            needed.add(vertex.id)
            needed.update(producer for producer, _ in vertex.inputs)
            needed.update(vertex.after)
    return [vertex for vertex in vertices if vertex.id in needed]
