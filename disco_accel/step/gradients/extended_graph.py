"""A compiled step's graph with more done to its gradients, with its kernels' seconds: what another plan is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import TaskGraph, TensorSpec
from disco_accel.measure.record import OpRecord, measurements, record
from disco_accel.step.compile.compiled_step import CompiledStep, PlannedNorms
from disco_accel.step.gradients.accumulation_pass import with_accumulation
from disco_accel.step.gradients.norm_pass import with_norms


@dataclass(frozen=True)
class ExtendedGraph:
    """``old``: as in ``AccumulatedGraph``; ``norms``: where they are when a step has ended, None if it has none."""

    graph: TaskGraph
    records: Mapping[int, OpRecord]
    old: Mapping[int, int] = field(default_factory=dict)
    norms: PlannedNorms | None = None


def leaving_specs(step: CompiledStep) -> dict[int, tuple[str, TensorSpec]]:
    """Name and layout of the gradients that a plan takes to the user's memory, by transfer."""
    transfers = step.transfers
    return {transfers[g.ref]: (g.name, g.spec) for g in step.captured.gradients if g.ref in transfers}


def extended(step: CompiledStep, *, accumulate: bool, norms: bool) -> ExtendedGraph:
    """The graph of ``step``, whose gradients leave, with accumulation or norms. Raises as ``record``."""
    leaving = leaving_specs(step)
    specs = {transfer: spec for transfer, (_, spec) in leaving.items()}
    graph, kernels, old = step.graph, frozenset[int](), dict[int, int]()
    if accumulate:
        sums = with_accumulation(graph, specs)
        graph, kernels, old = sums.graph, sums.kernels, dict(sums.old)
    normed = with_norms(graph, specs) if norms else None
    planned = None
    if normed is not None:
        graph, kernels = normed.graph, kernels | normed.kernels
        planned = tuple(leaving[t][0] for t in normed.transfers), normed.value, normed.spec
    if not kernels:
        return ExtendedGraph(step.graph, step.records)
    threads = {"compute_threads": step.engine.compute_threads, "host_threads": step.engine.host_threads}
    measured = record(graph, device=step.engine.device, only=kernels, **threads)
    return ExtendedGraph(measurements(measured).run(graph), {**step.records, **measured}, old, planned)
