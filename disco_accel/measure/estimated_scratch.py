"""The scratch of ops that nobody is about to run, for plans made from a model's config alone.

On the host device an op's scratch is measured here, from its signature, as before a run. Ops that are too large to be
tried in passing, and all on a CUDA device that is not there, are counted and said, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import OpCall, TaskGraph, Vertex, VertexKind
from disco_accel.measure.record import record
from disco_accel.native.backend import Backend, backend_of, workspace_bytes
from disco_accel.native.host_backend import HostBackend
from disco_accel.native.op_encoding import op_overload
from disco_accel.native.plain_library import ExtensionError
from disco_accel.simulate.roofline import estimate
from disco_accel.sizes import format_size

_LARGEST = 256 << 20
"""Bytes of the inputs and outputs of an op that is tried."""

_LONGEST = 0.1
"""Seconds of one run, by estimate; an op is run about ten times."""

_WORKSPACE = 32 << 20
"""Bytes that matrix products take on a stream of the newest GPUs; older ones take less."""


@dataclass(frozen=True, slots=True)
class _KnownScratch:
    """``sizes``: kernel to bytes of scratch, where it is known and not 0. ``workspaces``: bytes outside the arena.
    ``unknown``: kernels whose scratch is not known; ``why``: one line for the user about them, "" if there are none."""

    sizes: Mapping[int, int]
    workspaces: int
    unknown: int
    why: str

    @property
    def as_pass(self) -> GraphPass:
        """The pass that makes the scratch one more output of its op, which nobody reads."""
        return GraphPass("scratch", "scratch of kernels that could be tried", self._applied)

    def _applied(self, graph: TaskGraph) -> TaskGraph:
        sizes = self.sizes
        vertices = tuple(replace(v, sizes=(*v.sizes, sizes[v.id])) if v.id in sizes else v for v in graph.vertices)
        return replace(graph, vertices=vertices)


def known_scratch(
    graph: TaskGraph, *, device: str, compute_threads: int | None = None, streams: int = 1
) -> _KnownScratch:
    """The scratch, as far as it is known, of the ops of ``graph``, unrecorded so far, on ``device`` (cpu or cuda).
    ``compute_threads`` as in ``record``; ``streams``: of the engine that will run it. Raises ExecutionError for an op
    that no run could plan."""
    kernels = [v for v in graph.vertices if v.kind is VertexKind.KERNEL]
    backend = backend_of(torch.device(device))
    if backend.separate_memory:
        return _on_gpu(backend, len(kernels), streams)
    vertices = {v.id: v for v in graph.vertices}
    absent = {v.id for v in kernels if not _is_registered(graph.ops[v.id])}
    small = frozenset(v.id for v in kernels if v.id not in absent and _is_small(v, graph, vertices))
    try:
        records = record(graph, compute_threads=compute_threads, only=small)
    except ExtensionError as error:
        reason = str(error).splitlines()[0]
        why = f"without the scratch of {len(kernels)} ops: the engine that would measure it cannot be built ({reason})"
        return _KnownScratch({}, 0, len(kernels), why)
    unknown = len(kernels) - len(small)
    reasons = []
    if unknown > len(absent):
        reasons.append(f"{unknown - len(absent)} ops, which are too large to be tried here")
    if absent:
        reasons.append(f"{len(absent)} ops that no library here has")
    why = "without the scratch of " + " and of ".join(reasons) if reasons else ""
    return _KnownScratch({v: r.scratch_bytes for v, r in records.items() if r.scratch_bytes}, 0, unknown, why)


def _on_gpu(backend: Backend, kernels: int, streams: int) -> _KnownScratch:
    why = f"without the scratch of {kernels} ops, which only a run on the GPU can tell"
    if backend.is_there():
        return _KnownScratch({}, (1 + streams) * workspace_bytes(backend.resolve()), kernels, why)
    most = format_size((1 + streams) * _WORKSPACE)
    why = (
        f"without the scratch of {kernels} ops and the workspaces of matrix products (up to {most}), which only a GPU "
        "can tell"
    )
    return _KnownScratch({}, 0, kernels, why)


def _is_registered(call: OpCall) -> bool:
    try:
        op_overload(call.name, call.overload)
    except AttributeError:
        return False
    return True


def _is_small(vertex: Vertex, graph: TaskGraph, vertices: dict[int, Vertex]) -> bool:
    moved = sum(vertex.sizes) + sum(vertices[producer].sizes[k] for producer, k in dict.fromkeys(vertex.inputs))
    return moved <= _LARGEST and estimate(vertex, graph.ops[vertex.id], HostBackend.speed) <= _LONGEST
