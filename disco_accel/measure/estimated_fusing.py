"""Fused kernels of a step that no device here runs: each run takes as long as the traffic of its inputs and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disco_accel.fuse.fused_runs import FusedCost, runs_of
from disco_accel.graph.taskgraph import OpCall, TaskGraph, is_fused
from disco_accel.measure import fused_kernels
from disco_accel.measure.fused_bits import may_be_written_over
from disco_accel.measure.record import OpRecord
from disco_accel.simulate.roofline import Speed, fused_estimate


@dataclass(frozen=True)
class _EstimatedFusing:
    """As ``Fusing``, of a device with ``speed``. Nothing is compiled: of some runs that device may have other bits, and
    leave their ops apart."""

    speed: Speed

    def fused(self, graph: TaskGraph) -> TaskGraph:
        """``graph``, whose kernels have seconds, with all runs joined that take less then; or as it is, where they take
        too little of a step."""
        runs = runs_of(graph)
        return graph if runs.seconds < fused_kernels.WORTH_SECONDS else runs.joined(self._cost)

    def records(self, graph: TaskGraph) -> Mapping[int, OpRecord]:
        """The records of the fused kernels of ``graph``."""
        durations = {vertex.id: vertex.duration or 0.0 for vertex in graph.vertices}
        return {v: OpRecord(True, (), 0, durations[v]) for v, call in graph.ops.items() if is_fused(call)}

    def _cost(self, call: OpCall) -> FusedCost:
        return fused_estimate(call, self.speed), may_be_written_over(call)
