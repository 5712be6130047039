"""A captured step whose large kernels run in chunks: what of it, in which order, and what that does to its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.decompose.chunks.choice import Chooser, ChunkedKernel, KernelTraits
from disco_accel.decompose.chunks.cuts import Cut
from disco_accel.decompose.chunks.fake_results import CallResults
from disco_accel.decompose.chunks.loops import loops_of
from disco_accel.decompose.chunks.rewrite import Rewriting, StaysWhole
from disco_accel.decompose.chunks.runs import at_the_ends, reads_its_chunk, runs_of
from disco_accel.graph.check import after_gate
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, is_handed_out, overwrites


@dataclass(frozen=True)
class StepInChunks:
    """``captured`` in chunks. ``of``: vertex → the one of the whole step whose work it does, or a part of it.

    ``kernels`` of the whole step run in chunks; ``sums`` of them are added up over the chunks, so that they round
    otherwise than in one piece; ``most``: chunks that one has.
    """

    captured: CapturedStep
    of: Mapping[int, int]
    kernels: int
    sums: int
    most: int


def in_chunks(
    captured: CapturedStep, count: int, large: int, device: torch.device, value: int | None = None
) -> StepInChunks:
    """``captured`` with each kernel that reads and makes more than ``large`` bytes, or makes a value of more than
    ``value`` (None: the same), in ``count`` chunks, as far as its op allows; those between two such kernels follow.

    Weights do not count: they are needed whole by each chunk. ``device``: where the step runs.
    """
    made = _Attempt(captured, count, large, CallResults(device), large if value is None else value)
    effect = f"kernels of more than {large} bytes in up to {count} chunks"
    rewriting = made.rewritten()
    graph = replace(captured.graph, vertices=(*rewriting.vertices,), ops=rewriting.calls)
    outputs, gradients = _whole(captured.outputs, rewriting), _whole(captured.gradients, rewriting)
    return StepInChunks(
        captured.rewritten("chunks", effect, graph, outputs=outputs, gradients=gradients),
        rewriting.of,
        len(made.chunked),
        sum(bool(kernel.sums) for kernel in made.chunked.values()),
        max((kernel.count for kernel in made.chunked.values()), default=1),
    )


def _whole(values: Sequence[ValueBinding], rewriting: Rewriting) -> tuple[ValueBinding, ...]:
    return tuple(replace(value, ref=rewriting.value(value.ref)) for value in values)


class _Attempt:
    """Invariant of ``rewritten``: a kernel that has been found to run whole runs whole in every later round, so rounds
    end."""

    def __init__(self, captured: CapturedStep, count: int, large: int, fakes: CallResults, value: int) -> None:
        self._graph, self._count, self._fakes = captured.graph, count, fakes
        self._large, self._value = large, value
        self.handed_out = frozenset(value.ref for value in (*captured.outputs, *captured.gradients))
        self._to_user = {b.vertex for b in captured.bindings if b.source is InputSource.OUTSIDE}
        self._sizes = {(v.id, k): size for v in self._graph.vertices for k, size in enumerate(v.sizes)}
        self._weights = _made_of_weights(self._graph)
        self._behind_gate = after_gate(self._graph.vertices)
        self._stay_whole = set(_written_in_place(self._graph))
        self.chunked: dict[int, ChunkedKernel] = {}

    def rewritten(self) -> Rewriting:
        """The graph in chunks."""
        while True:
            self.chunked = self._choices()
            runs = runs_of(self._graph, self.chunked, self._weights, self._large)
            ends = set[int]()
            for run in runs:
                members = {kernel.vertex.id: kernel for kernel in run.members}
                ends |= at_the_ends(run, lambda kernel, ref: reads_its_chunk(kernel, ref, members[ref[0]]))  # noqa: B023
            if ends:
                self._stay_whole |= ends
                continue
            try:
                rewriting = Rewriting(self._graph, self._fakes, self.handed_out)
                for run in runs:
                    rewriting.add(run)
            except StaysWhole as error:
                self._stay_whole.add(error.kernel)
                continue
            return rewriting

    def _choices(self) -> dict[int, ChunkedKernel]:
        chooser = Chooser(self._count, self._large, self._fakes, self._sizes, self._weights)
        chunked: dict[int, ChunkedKernel] = {}
        cuts: dict[Ref, Cut] = {}
        for vertex in self._graph.vertices:
            call = self._graph.ops.get(vertex.id)
            if vertex.kind is not VertexKind.KERNEL or call is None or vertex.id in self._stay_whole:
                continue
            traits = self._traits(vertex)
            if not traits.large and not any(ref in cuts for ref in vertex.inputs):
                continue
            loops = loops_of(call)
            made = None if loops is None else chooser.chosen(vertex, call, loops, cuts, traits)
            if made is not None:
                chunked[vertex.id] = made
                cuts |= {(vertex.id, output): cut for output, cut in made.cuts.items()}
        return chunked

    def _traits(self, vertex: Vertex) -> KernelTraits:
        moved = sum(vertex.sizes) + sum(
            self._sizes[ref] for ref in dict.fromkeys(vertex.inputs) if ref[0] not in self._weights
        )
        return KernelTraits(
            large=(moved > self._large or max(vertex.sizes) > self._value) and vertex.id not in self._weights,
            handed_out=is_handed_out(vertex),
            backward=vertex.id in self._behind_gate,
            to_user=any(producer in self._to_user for producer, _ in vertex.inputs),
        )


def _made_of_weights(graph: TaskGraph) -> set[int]:
    """Inputs that the host has, and kernels that read nothing else: they unpack weights."""
    made: set[int] = set()
    for vertex in graph.vertices:
        if host_copy_exists(vertex) or (vertex.inputs and all(producer in made for producer, _ in vertex.inputs)):
            made.add(vertex.id)
    return made


def _written_in_place(graph: TaskGraph) -> set[int]:
    """Kernels that write over a value, and those that make one that is written over: whole, in their order."""
    kernels: set[int] = set()
    outside = {vertex.id for vertex in graph.vertices if vertex.kind is VertexKind.INPUT}
    for vertex in graph.vertices:
        for _, (producer, _) in overwrites(vertex):
            kernels |= {vertex.id, producer} - outside
    return kernels
