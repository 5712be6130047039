"""Fused kernels of one device: compiled beside the steps, compared with the ops that they stand for, and timed.

A kernel that differs from its ops in a bit is not used. Values are drawn of several kinds: normal numbers; numbers of
all magnitudes, with zeros, infinities and NaN among them; and small ones. Before a run every output is filled with
other bytes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch

from disco_accel.errors import ExtensionError
from disco_accel.fuse.call_json import kernel_text
from disco_accel.fuse.evaluate import evaluate
from disco_accel.fuse.fused_runs import FusedCost, Kind, alone, fused_runs, kind_of, runs_of
from disco_accel.fuse.kernels import Kernel, compile_kernels, kernel_of, load_kernels
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import OpCall, TaskGraph, TensorArg, TensorSpec, is_fused
from disco_accel.measure.record import OpRecord, rounded, same_bits, threads, view_of_buffer
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.engine_class import OpTable, op_table
from disco_accel.native.op_encoding import encode_fused_call, label
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")

_KINDS = ("normal", "any magnitude", "small")
_SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"))
_OTHER_BYTES = 0xA5
_LARGE = 1 << 30
"""Of whole numbers."""

WORTH_SECONDS = 1e-3
"""Of a step, in kernels that fused ones may take the place of. They save about half of it, and take 20 s of two cores
to compile: with less than this a training has to go on for 40,000 steps to gain by it."""


@dataclass(frozen=True, slots=True)
class _FusedRecord:
    """``record``: of a kernel that has the bits of its ops, or None, for the reason ``refused``. ``differs``: in its
    bits. ``over``: numbers of arguments that output 0 may be written over."""

    record: OpRecord | None
    refused: str = ""
    differs: bool = False
    over: tuple[int, ...] = ()


@dataclass(eq=False)
class Fusing:
    """Kernels of runs on ``device``, for an engine of ``compute_threads``. Plans of all models of a process share it;
    any thread may use it."""

    device: str
    compute_threads: int | None = None
    failed: str = ""
    """Why nothing can be compiled, or ""."""
    _records: dict[str, _FusedRecord] = field(init=False, default_factory=dict)
    """By ``kernel_text``."""
    _tried: set[Kind] = field(init=False, default_factory=set)
    _apart: set[Kind] = field(init=False, default_factory=set)
    """Kinds of calls that were tried alone, and those of which the compiler makes other bits."""
    _asked: set[str] = field(init=False, default_factory=set)

    def fused(self, graph: TaskGraph) -> TaskGraph:
        """``graph`` with fused kernels, as far as they are known."""
        return fused_runs(graph, self._cost, self._apart)

    def _cost(self, call: OpCall) -> FusedCost | None:
        found = self._records.get(kernel_text(call))
        return None if found is None or found.record is None else (rounded(found.record.seconds), found.over)

    def unknown(self, graph: TaskGraph) -> dict[str, OpCall]:
        """The runs of ``graph`` whose kernels were not measured; none where all together take too little of a step.

        Where a kernel was refused for its bits, each kind of call in it is tried alone: one that is refused too is in
        no further run.
        """
        if self.failed:
            return {}
        runs, seconds = runs_of(graph, self._apart)
        if seconds < WORTH_SECONDS:
            return {}
        wanted = dict(runs)
        for name, call in runs.items():
            known = self._records.get(name)
            if known is not None and known.differs:
                tried = (alone(inner) for inner in call.body if kind_of(inner) not in self._tried)
                wanted |= {kernel_text(single): single for single in tried}
        return {name: call for name, call in wanted.items() if name not in self._records}

    def compiled(self, calls: Iterable[OpCall]) -> bool:
        """Whether all of ``calls`` can be measured."""
        return all(kernel_of(call) is not None for call in calls)

    def use_compiled(self, graph: TaskGraph) -> None:
        """Load and measure the kernels for ``graph`` that earlier processes have compiled."""
        while runs := self.unknown(graph):
            self._try(partial(load_kernels, runs.values(), self.device))
            if not self.measure(runs):
                return

    def begin(self, runs: Mapping[str, OpCall], say: Callable[[str], None]) -> None:
        """Compile the kernels of ``runs``, in a thread and processes of their own; ``say`` hears how far it is."""
        new = {name: call for name, call in runs.items() if name not in self._asked and kernel_of(call) is None}
        self._asked |= new.keys()
        if new:
            start_thread(self._compile, new, say, name="disco-fuse", stop=lambda: None)

    def _compile(self, runs: Mapping[str, OpCall], say: Callable[[str], None]) -> None:
        self._try(partial(compile_kernels, runs.values(), self.device, say))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ExtensionError as error:
            if not self.failed:
                self.failed = str(error)
                logger.warning("steps run without fused kernels: %s (fuse: off says nothing)", error)

    def measure(self, runs: Mapping[str, OpCall]) -> int:
        """Compare and time the kernels of ``runs`` that are compiled, on the device; returns their number."""
        kernels = [(call, kernel) for call in runs.values() if (kernel := kernel_of(call)) is not None]
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
        return len(kernels)

    def records(self, graph: TaskGraph) -> dict[int, OpRecord]:
        """The records of the fused kernels of ``graph``."""
        found: dict[int, OpRecord] = {}
        for vertex, call in graph.ops.items():
            if is_fused(call):
                record = self._records[kernel_text(call)].record
                assert record is not None, "fused_runs takes kernels alone"
                found[vertex] = record
        return found

    @property
    def refused(self) -> int:
        """The number of runs whose kernels have other bits than their ops."""
        return sum(record.differs for record in self._records.values())


@functools.cache
def fusing_on(device: str, compute_threads: int | None) -> Fusing:
    """The one of this process for ``device`` and an engine of ``compute_threads``."""
    return Fusing(device, compute_threads)


def measure_fused(
    kernels: Sequence[tuple[OpCall, Kernel]], device: str, compute_threads: int | None = None
) -> list[_FusedRecord]:
    """The record of each of ``kernels``, with as many ``compute_threads`` as the engine uses. Raises ExecutionError
    where memory runs out."""
    where = run_device(device)
    inside = threads(compute_threads), torch.no_grad(), torch.autocast(where.type, enabled=False)
    with inside[0], inside[1], inside[2], backend_of(where).on_default_stream():
        return [_measured(call, kernel, where) for call, kernel in kernels]


def _measured(call: OpCall, kernel: Kernel, device: torch.device) -> _FusedRecord:
    if isinstance(kernel, str):
        return _FusedRecord(None, kernel)
    reads = [arg.spec for arg in call.args if isinstance(arg, TensorArg)]
    writes = [result.spec for result in call.results if result is not None]
    ops = op_table(device)
    inputs = [_buffer(spec, device) for spec in reads]
    outputs = [_buffer(spec, device) for spec in writes]
    op = _added(ops, call, kernel, inputs, outputs)
    over = set(_candidates(call))
    for kind in _KINDS:
        for number, (buffer, spec) in enumerate(zip(inputs, reads, strict=True)):
            _fill(view_of_buffer(buffer, spec), kind, number)
        tensors = [view_of_buffer(buffer, spec) for buffer, spec in zip(inputs, reads, strict=True)]
        expected = evaluate(call, tensors)
        if not _same(ops, op, _filled(outputs), call, expected):
            return _FusedRecord(None, f"{label(call)}: other bits than its ops", differs=True)
        for position in sorted(over):
            if not _same_over(ops, call, kernel, inputs, outputs, position, expected):
                over.discard(position)
    seconds = backend_of(device).op_seconds(ops, op)
    return _FusedRecord(OpRecord(True, (), 0, seconds, kernel=kernel), over=tuple(sorted(over)))


def _buffer(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    extent = spec.offset + 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return torch.zeros(extent * getattr(torch, spec.dtype).itemsize, dtype=torch.uint8, device=device)


def _added(
    ops: OpTable, call: OpCall, kernel: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    storages = [ops.add_fixed(buffer.data_ptr(), buffer.numel()) for buffer in inputs]
    written = {number: ops.add_fixed(buffer.data_ptr(), buffer.numel()) for number, buffer in enumerate(outputs)}
    # In the call's arguments several tensors may be views of one input; here each has a buffer of its own.
    args = tuple(replace(arg, input=i) for i, arg in enumerate(call.args) if isinstance(arg, TensorArg))
    encoded = encode_fused_call(replace(call, args=args), kernel, storages.__getitem__, written)
    return ops.add_op(call.name, "", encoded, label(call))


def _fill(tensor: torch.Tensor, kind: str, seed: int) -> None:
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if not tensor.is_floating_point():
        large = kind == "any magnitude" and tensor.dtype is not torch.bool
        limits = torch.iinfo(tensor.dtype) if large else None
        ends = (0, 2) if limits is None else (max(limits.min, -_LARGE), min(limits.max, _LARGE))
        tensor.random_(*ends, generator=generator)
        return
    drawn = torch.empty(tensor.shape, dtype=torch.float64, device=tensor.device).normal_(generator=generator)
    if kind == "small":
        drawn *= 2.0**-10
    elif kind == "any magnitude":
        drawn *= 10.0 ** torch.empty_like(drawn).uniform_(-42, 38, generator=generator)
        chance = torch.empty_like(drawn).uniform_(generator=generator)
        for number, special in enumerate(_SPECIAL):
            drawn[(chance >= number / 100) & (chance < (number + 1) / 100)] = special
    tensor.copy_(drawn)


def _same(
    ops: OpTable, op: int, outputs: Sequence[torch.Tensor], call: OpCall, expected: Iterable[torch.Tensor]
) -> bool:
    """Whether ``op``, of ``call``, writes the bits of ``expected`` to ``outputs``."""
    ops.run(op)
    specs = (result.spec for result in call.results if result is not None)
    found = (view_of_buffer(buffer, spec) for buffer, spec in zip(outputs, specs, strict=True))
    return all(same_bits(_one_nan(a), _one_nan(b)) for a, b in zip(expected, found, strict=True))


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """One pattern for all NaN: which of two operands' an addition hands on is the compiler's choice."""
    return tensor.masked_fill(tensor.isnan(), float("nan")) if tensor.is_floating_point() else tensor


def _same_over(
    ops: OpTable,
    call: OpCall,
    kernel: int,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    position: int,
    expected: Sequence[torch.Tensor],
) -> bool:
    """Whether output 0 may take the place of the argument at ``position``."""
    shared = inputs[position].clone()
    given = [shared if i == position else buffer for i, buffer in enumerate(inputs)]
    written = [shared, *_filled(outputs[1:])]
    return _same(ops, _added(ops, call, kernel, given, written), written, call, expected)


def _filled(buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    for buffer in buffers:
        buffer.fill_(_OTHER_BYTES)
    return buffers


def _candidates(call: OpCall) -> tuple[int, ...]:
    """Arguments that lie as output 0 does, where each element of a result depends on the same element alone."""
    result = call.results[0]
    assert result is not None
    spec = result.spec
    dense = spec.offset == 0 and prod(spec.shape) == 1 + sum(
        (n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)
    )
    if not dense or not all(_elementwise(inner, call) for inner in call.body):
        return ()
    return tuple(
        i
        for i, arg in enumerate(call.args)
        if isinstance(arg, TensorArg)
        and arg.spec == spec
        and sum(isinstance(other, TensorArg) and other.input == arg.input for other in call.args) == 1
    )


def _elementwise(inner: OpCall, call: OpCall) -> bool:
    """Whether an inner call reads every value element by element, in the place where it was made."""
    if not op_traits(inner.name).pointwise and inner.name != "aten::_to_copy":
        return False
    for arg in inner.args:
        if isinstance(arg, TensorArg) and arg.input >= len(call.args):
            made = call.body[arg.input - len(call.args)].results[0]
            if made is None or made.spec != arg.spec:
                return False
    return True
