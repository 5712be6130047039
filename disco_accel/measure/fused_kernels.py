"""Fused kernels of one device: compiled beside the steps, compared with the ops that they stand for, and timed.

A kernel that differs from its ops in a bit is not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from disco_accel.errors import ExtensionError
from disco_accel.fuse.call_json import kernel_text
from disco_accel.fuse.fused_runs import FusedCost, Kind, _Runs, kind_of, runs_of
from disco_accel.fuse.kernels import compile_kernels, is_compiled, kernel_of, load_kernels
from disco_accel.fuse.twins import alone, functions_of
from disco_accel.graph.order import working_bytes
from disco_accel.graph.taskgraph import OpCall, TaskGraph, is_fused
from disco_accel.measure.fused_bits import FusedRecord, measure_fused
from disco_accel.measure.record import OpRecord, rounded
from disco_accel.native.backend import backend_of, run_device
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")

WORTH_SECONDS = 5e-3
"""Of a step, in kernels that fused ones may take the place of. They save about half of it, and take 21 s of two cores
to compile, half as much again in 16 bits (a Llama of 8 layers on an AMD EPYC). With less than this a training has to go
on for 8,000 steps to gain by it."""


@dataclass(eq=False)
class Fusing:
    """Kernels of runs on ``device``, for an engine of ``compute_threads``. Plans of all models of a process share it;
    any thread may use it."""

    device: str
    compute_threads: int | None = None
    failed: str = ""
    """Why nothing can be compiled, or ""."""
    _records: dict[str, FusedRecord] = field(init=False, default_factory=dict)
    """By ``kernel_text``."""
    _tried: set[Kind] = field(init=False, default_factory=set)
    _apart: set[Kind] = field(init=False, default_factory=set)
    """Kinds of calls that were tried alone, and those of which the compiler makes other bits."""
    _asked: set[str] = field(init=False, default_factory=set)

    _last: _Runs | None = field(init=False, default=None)
    """Of the graph that ``use_compiled`` was asked about, for ``fused``: to find them takes a tenth of a millisecond a
    kernel."""

    def fused(self, graph: TaskGraph) -> TaskGraph:
        """``graph`` with fused kernels, as far as they are known."""
        runs, self._last = self._last, None
        if runs is None or runs.graph is not graph or runs.apart != self._apart:
            runs = runs_of(graph, self._apart)
        return runs.joined(partial(self._cost, cold=self._cold(graph)))

    def _cost(self, call: OpCall, *, cold: bool) -> FusedCost | None:
        found = self._records.get(kernel_text(call))
        if found is None or found.record is None:
            return None
        return rounded(found.within(cold=cold).seconds), found.over

    def _cold(self, graph: TaskGraph) -> bool:
        return backend_of(run_device(self.device)).displaces(working_bytes(graph))

    def unknown(self, graph: TaskGraph) -> dict[str, OpCall]:
        """The runs of ``graph`` whose kernels were not measured; none where all together take too little of a step.

        Each kind of function in them is tried alone beside them, and where a kernel was refused for its bits, each kind
        of call in it. One that is refused too is in no further run.
        """
        return {} if self.failed else self._unknown(runs_of(graph, self._apart))

    def _unknown(self, runs: _Runs) -> dict[str, OpCall]:
        if runs.seconds < WORTH_SECONDS:
            return {}
        calls, kinds = runs.calls, set(self._tried)
        wanted = dict(calls)
        for name, call in calls.items():
            known = self._records.get(name)
            suspects = call.body if known is not None and known.differs else functions_of(call)
            for inner in suspects:
                if kind_of(inner) not in kinds:
                    kinds.add(kind_of(inner))
                    single = alone(inner)
                    wanted[kernel_text(single)] = single
        return {name: call for name, call in wanted.items() if name not in self._records}

    def compiled(self, calls: Iterable[OpCall]) -> bool:
        """Whether all of ``calls`` can be measured."""
        return all(is_compiled(call) for call in calls)

    def use_compiled(self, graph: TaskGraph) -> None:
        """Load and measure the kernels for ``graph`` that earlier processes have compiled."""
        while not self.failed:
            self._last = runs_of(graph, self._apart)
            unknown = self._unknown(self._last)
            if not unknown:
                return
            self._try(partial(load_kernels, unknown.values(), self.device))
            if not any(record.differs for record in self.measure(unknown)):
                # No kernel has to be tried otherwise.
                return

    def begin(self, runs: Mapping[str, OpCall], say: Callable[[str], None]) -> None:
        """Compile the kernels of ``runs``, in a thread and processes of their own; ``say`` hears how far it is."""
        new = {name: call for name, call in runs.items() if name not in self._asked and not is_compiled(call)}
        self._asked |= new.keys()
        if new:
            self._try(partial(start_thread, self._compile, new, say, name="disco-fuse", stop=lambda: None))

    def _compile(self, runs: Mapping[str, OpCall], say: Callable[[str], None]) -> None:
        self._try(partial(compile_kernels, runs.values(), self.device, say))

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (ExtensionError, RuntimeError) as error:
            # RuntimeError: a thread cannot be started.
            if not self.failed:
                self.failed = str(error)
                logger.warning("steps run without fused kernels: %s (fuse: off says nothing)", error)

    def measure(self, runs: Mapping[str, OpCall]) -> list[FusedRecord]:
        """Compare and time the kernels of ``runs`` that are compiled, on the device; returns their records."""
        known = (call for call in runs.values() if is_compiled(call))
        kernels = [(call, kernel) for call in known if (kernel := kernel_of(call)) is not None]
        found = measure_fused(kernels, self.device, self.compute_threads)
        self._records |= {kernel_text(call): record for (call, _), record in zip(kernels, found, strict=True)}
        for (call, _), record in zip(kernels, found, strict=True):
            if len(call.body) == 1:
                self._tried.add(kind_of(call.body[0]))
                if record.differs:
                    self._apart.add(kind_of(call.body[0]))
        refused = [record.refused for record in found if record.record is None]
        if refused:
            logger.info("%d of %d fused kernels are not used; one: %s", len(refused), len(found), refused[0])
        return found

    def records(self, graph: TaskGraph) -> dict[int, OpRecord]:
        """The records of the fused kernels of ``graph``."""
        cold = self._cold(graph)
        fused = {vertex: kernel_text(call) for vertex, call in graph.ops.items() if is_fused(call)}
        return {vertex: self._records[text].within(cold=cold) for vertex, text in fused.items()}

    @property
    def refused(self) -> int:
        """The number of runs whose kernels have other bits than their ops."""
        return sum(record.differs for record in self._records.values())


@functools.cache
def fusing_on(device: str, compute_threads: int | None) -> Fusing:
    """The one of this process for ``device`` and an engine of ``compute_threads``."""
    return Fusing(device, compute_threads)
