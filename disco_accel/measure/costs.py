"""Costs of a step's ops: measured on the device that will run it, or estimated where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import OpCall, TaskGraph
from disco_accel.measure.estimated_scratch import known_scratch
from disco_accel.measure.record import Known, OpRecord, measurements, record
from disco_accel.measure.record_lengths import with_records_of
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.host_backend import HostBackend
from disco_accel.simulate.roofline import Speed, estimates


@dataclass(frozen=True)
class GraphCosts:
    """``passes`` put seconds and scratch into the graph that they are the costs of.

    ``workspaces``: bytes of the libraries that multiply matrices, outside the arena. ``in_blocks``: tensors outside the
    arena take whole blocks of an allocator. ``records``, by kernel, are for an executor; none if estimated.
    ``without_scratch``: kernels whose scratch nobody knows; ``note``: a line for the user about them, or "".
    """

    passes: tuple[GraphPass, ...]
    workspaces: int
    in_blocks: bool
    records: Mapping[int, OpRecord] = field(default_factory=dict)
    without_scratch: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Each distinct op is run on ``device``, once for all graphs: these can be compared. ``compute_threads`` and
    ``streams`` are those of the engine. ``varying``: records of calls that depend on a length, for all lengths."""

    device: str
    compute_threads: int | None = None
    streams: int = 1
    known: Known = field(default_factory=dict)
    varying: Sequence[tuple[OpCall, OpRecord]] = ()

    def of(self, graph: TaskGraph) -> GraphCosts:
        """The costs of ``graph``, whose kernels have no scratch yet. Raises CaptureError, ExecutionError. Workspaces
        are those of the thread that measured and of each compute stream."""
        records = self.records(graph)
        backend = backend_of(run_device(self.device))
        workspaces = (1 + self.streams) * backend.workspace_bytes()
        backend.release_memory()
        return GraphCosts((measurements(records),), workspaces, backend.allocates_in_blocks, records)

    def records(self, graph: TaskGraph) -> Mapping[int, OpRecord]:
        """Those of the kernels of ``graph``."""
        records = record(graph, device=self.device, compute_threads=self.compute_threads, known=self.known)
        return with_records_of(self.varying, graph, records)


@dataclass(frozen=True, slots=True)
class _MeasuredBefore:
    """Of graphs whose distinct ops ``source`` has run already: no tensor is touched. ``workspaces``: as it found."""

    source: Measured
    workspaces: int

    def of(self, graph: TaskGraph) -> GraphCosts:
        """The costs of ``graph``, whose kernels have no scratch yet."""
        records = self.source.records(graph)
        in_blocks = backend_of(run_device(self.source.device)).allocates_in_blocks
        return GraphCosts((measurements(records),), self.workspaces, in_blocks, records)


_HOST = replace(HostBackend.speed, name="a host with two memory channels", memory=4e10)
"""Of kernels in host memory, on all cores. Two channels of DDR5-5600 have 90 GB/s, of which rows that are picked get
about half."""


@dataclass(frozen=True, slots=True)
class Estimated:
    """Seconds from the shapes of ops, scratch where it can be tried. ``kind``: cpu or cuda; no op of the step runs on a
    GPU. ``speed``: the device that seconds are estimated for (None: that of the kind's backend)."""

    kind: str
    speed: Speed | None = None
    compute_threads: int | None = None
    streams: int = 1

    def of(self, graph: TaskGraph) -> GraphCosts:
        """The longer of arithmetic and traffic for each op; see ``estimated_scratch`` for its scratch."""
        scratch = known_scratch(graph, device=self.kind, compute_threads=self.compute_threads, streams=self.streams)
        backend = backend_of(torch.device(self.kind))
        passes = estimates(self.speed or backend.speed, _HOST), scratch.as_pass
        in_blocks = backend.allocates_in_blocks
        unknown, why = scratch.unknown, scratch.why
        return GraphCosts(passes, scratch.workspaces, in_blocks, without_scratch=unknown, note=why)


Costs = Measured | _MeasuredBefore | Estimated
"""A source of costs."""
