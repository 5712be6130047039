"""A captured step whose large kernels run in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.decompose.chunks.choice import Choices, fake_results
from disco_accel.decompose.chunks.rewrite import Rewriting, rewritten
from disco_accel.decompose.chunks.runs import at_the_ends, runs_of
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import overwrites


@dataclass(frozen=True)
class StepInChunks:
    """``captured`` in chunks. ``of``: vertex → the one of the whole step whose work it does, or a part of it.
    ``kernels`` of the whole step run in chunks; ``sums`` of them are added up over the chunks, so that they round
    otherwise than in one piece; ``most``: chunks that one has."""

    captured: CapturedStep
    of: Mapping[int, int]
    kernels: int
    sums: int
    most: int


def in_chunks(
    captured: CapturedStep, count: int, large: int, device: torch.device, value: int | None = None
) -> StepInChunks:
    """``captured`` with large kernels in ``count`` chunks, as far as ops allow; kernels between two of them follow. A
    large kernel reads and makes more than ``large`` bytes, or makes a value of more than ``value`` (None: the same).
    Weights do not count: each chunk needs them whole. ``device``: where the step runs."""
    graph = captured.graph
    to_user = {binding.vertex for binding in captured.bindings if binding.source is InputSource.OUTSIDE}
    fakes, value = fake_results(device), large if value is None else value
    choices = Choices(graph, count, large, value, fakes, to_user)
    handed_out = frozenset(value.ref for value in (*captured.outputs, *captured.gradients))
    stay_whole = _written_in_place(graph)
    while True:
        # A kernel that has been found to run whole runs whole in every later round, so rounds end.
        chunked = choices.made(stay_whole)
        runs = runs_of(graph, chunked, choices.weights, large)
        if ends := set[int]().union(*map(at_the_ends, runs)):
            stay_whole |= ends
            continue
        made = rewritten(graph, runs, fakes, handed_out)
        if isinstance(made, Rewriting):
            break
        stay_whole.add(made)
    effect = f"kernels of more than {large} bytes in up to {count} chunks"
    outputs, gradients = _whole(captured.outputs, made), _whole(captured.gradients, made)
    graph = replace(graph, vertices=(*made.vertices,), ops=made.calls)
    return StepInChunks(
        captured.rewritten("chunks", effect, graph, outputs=outputs, gradients=gradients),
        made.of,
        len(chunked),
        sum(bool(kernel.sums) for kernel in chunked.values()),
        max((kernel.count for kernel in chunked.values()), default=1),
    )


def _whole(values: Sequence[ValueBinding], rewriting: Rewriting) -> tuple[ValueBinding, ...]:
    return tuple(replace(value, ref=rewriting.value(value.ref)) for value in values)


def _written_in_place(graph: TaskGraph) -> set[int]:
    """Kernels that write over a value, and those that make one that is written over: whole, in their order."""
    kernels: set[int] = set()
    outside = {vertex.id for vertex in graph.vertices if vertex.kind is VertexKind.INPUT}
    for vertex in graph.vertices:
        for _, (producer, _) in overwrites(vertex):
            kernels |= {vertex.id, producer} - outside
    return kernels
