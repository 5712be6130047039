"""A fused kernel beside the ops that it stands for: whether their bits are the same, and how long it takes.

Before a run every output is filled with other bytes. Comparisons take slices of the results.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from disco_accel.fuse.evaluate import evaluate
from disco_accel.fuse.kernels import Kernel, kernel_of
from disco_accel.fuse.twins import half_of, twin_of
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import OpCall, TensorArg, TensorSpec
from disco_accel.measure.drawn_values import KINDS, PATTERNS, Pools, fill, fill_patterns
from disco_accel.measure.kept_outcomes import _KeptOutcomes, _Outcome
from disco_accel.measure.record import OpRecord, same_bits, threads, view_of_buffer
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.engine_class import op_table
from disco_accel.native.op_encoding import encode_fused_call, label

logger = logging.getLogger("disco_accel")

_OTHER_BYTES = 0xA5
_SLICE = 4 << 20
"""Values that are compared at a time."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
RESULTS = 1 << 18
"""Elements of each result that are compared for each kind of values, at least, in as many draws as that takes."""
_MOST_DRAWS = 1024
"""A kernel of fewer than 256 elements is compared on fewer results. Its functions were tried alone, on more."""


@dataclass(frozen=True, slots=True)
class FusedRecord:
    """``record``: of a kernel that has the bits of its ops, or None, for the reason ``refused``. ``differs``: in its
    bits. ``over``: numbers of arguments that output 0 may be written over. ``cold_seconds``: beside those of
    ``record``, in a step that displaces what is in the caches."""

    record: OpRecord | None
    refused: str = ""
    differs: bool = False
    over: tuple[int, ...] = ()
    cold_seconds: float = 0.0

    def within(self, *, cold: bool) -> OpRecord:
        """The record for a step that displaces or does not. Only of a kernel that has the bits of its ops."""
        assert self.record is not None
        return replace(self.record, seconds=self.cold_seconds) if cold else self.record


def measure_fused(
    kernels: Sequence[tuple[OpCall, Kernel]], device: str, compute_threads: int | None = None
) -> list[FusedRecord]:
    """The record of each of ``kernels``, with as many ``compute_threads`` as the engine uses. One that fails, for want
    of memory too, is refused, and the others are measured."""
    if not kernels:
        return []
    where = run_device(device)
    pools: Pools = {}
    inside = threads(compute_threads), torch.no_grad(), torch.autocast(where.type, enabled=False)
    with inside[0], inside[1], inside[2], backend_of(where).on_default_stream():
        kept = _KeptOutcomes(where, (RESULTS, _MOST_DRAWS))
        try:
            return [_record(call, kernel, where, pools, kept) for call, kernel in kernels]
        finally:
            kept.save()


def _record(call: OpCall, kernel: Kernel, device: torch.device, pools: Pools, kept: _KeptOutcomes) -> FusedRecord:
    try:
        found = _measured(call, kernel, device, pools, kept)
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        found = FusedRecord(None, f"{label(call)}: {type(error).__name__}: {''.join(first)}")
    if found.record is None:
        logger.debug("a fused kernel is not used: %s", found.refused)
    return found


def _measured(call: OpCall, kernel: Kernel, device: torch.device, pools: Pools, kept: _KeptOutcomes) -> FusedRecord:
    if isinstance(kernel, str):
        return FusedRecord(None, kernel)
    half, twin = getattr(torch, half_of(call) or "bfloat16"), twin_of(call)
    if twin is not None:
        wide = kernel_of(twin)
        if not isinstance(wide, int):
            return FusedRecord(None, f"in float32: {wide or 'no kernel'}")
        known = kept.of(wide, twin, half)
        if known is None:
            known = _Outcome(_Beside(twin, wide, device, half, pools).has_bits())
            kept.add(wide, twin, half, known)
        if not known.bits:
            return FusedRecord(None, f"{label(call)}: other bits than its ops in float32", differs=True)
    known, beside = kept.of(kernel, call, half), None
    if known is None or known.bits:
        beside = _Beside(call, kernel, device, half, pools)
        # What is in memory may still be another kernel than the one that was compared.
        if known is None or not beside.same("normal", 0):
            known = beside.outcome()
            kept.add(kernel, call, half, known)
    if beside is None or not known.bits:
        return FusedRecord(None, f"{label(call)}: other bits than its ops", differs=True)
    warm, cold = (beside.seconds(cold=cold) for cold in (False, True))
    return FusedRecord(OpRecord(True, (), 0, warm, kernel=kernel), over=known.over, cold_seconds=cold)


class _Beside:
    """A kernel and its ops on the same values. ``half``: the 16-bit type whose numbers its inputs have."""

    def __init__(self, call: OpCall, kernel: int, device: torch.device, half: torch.dtype, pools: Pools) -> None:
        self.call, self.kernel, self.device, self.half, self.pools = call, kernel, device, half, pools
        self.reads = [arg.spec for arg in call.args if isinstance(arg, TensorArg)]
        self.writes = [result.spec for result in call.results if result is not None]
        self.ops = op_table(device)
        self.inputs = [_buffer(spec, device) for spec in self.reads]
        self.outputs = [_buffer(spec, device) for spec in self.writes]
        self.op = self._added(self.inputs, self.outputs)
        self.expected: list[torch.Tensor] = []

    def draws(self, kind: str) -> int:
        """How many draws of ``kind`` compare enough results."""
        each = prod(self.writes[0].shape)
        if kind != "all 16 bits":
            return min(-(-RESULTS // each), _MOST_DRAWS)
        # Every other draw is of inputs that have fewer elements than a result.
        return min(max(2, -(-max(RESULTS, PATTERNS * len(self._floating())) // each)), _MOST_DRAWS)

    def has_bits(self) -> bool:
        """Whether the kernel has the bits of its ops in all draws."""
        return all(self.same(kind, draw) for kind in KINDS for draw in range(self.draws(kind)))

    def outcome(self) -> _Outcome:
        """The same, and the arguments that output 0 may be written over, as a draw of each kind shows."""
        over = may_be_written_over(self.call)
        for kind in KINDS:
            for draw in range(self.draws(kind)):
                if not self.same(kind, draw):
                    return _Outcome(bits=False)
                if draw == 0:
                    over = tuple(position for position in over if self.same_over(position))
        return _Outcome(True, over)

    def same(self, kind: str, draw: int) -> bool:
        """Whether the kernel has the bits of its ops on the values of ``draw``."""
        self._fill(kind, draw)
        tensors = [view_of_buffer(buffer, spec) for buffer, spec in zip(self.inputs, self.reads, strict=True)]
        self.expected = []
        self.expected = evaluate(self.call, tensors)
        return self._same(self.op, _filled(self.outputs))

    def same_over(self, position: int) -> bool:
        """Whether output 0 may take the place of the argument at ``position``, on the same values."""
        shared = self.inputs[position].clone()
        given = [shared if i == position else buffer for i, buffer in enumerate(self.inputs)]
        written = [shared, *_filled(self.outputs[1:])]
        return self._same(self._added(given, written), written)

    def seconds(self, *, cold: bool) -> float:
        """Of the kernel on normal numbers: denormal ones take longer on the host."""
        self.expected = []
        self._fill("normal", 0)
        return backend_of(self.device).op_seconds(self.ops, self.op, cold=cold)

    def _floating(self) -> list[int]:
        return [i for i, spec in enumerate(self.reads) if getattr(torch, spec.dtype).is_floating_point]

    def _fill(self, kind: str, draw: int) -> None:
        floating, results = self._floating(), prod(self.writes[0].shape)
        for number, (buffer, spec) in enumerate(zip(self.inputs, self.reads, strict=True)):
            # The whole buffer, for several elements of a view may be one.
            values = buffer.view(getattr(torch, spec.dtype))
            fill(values, kind, number, draw, self.pools)
            if kind == "all 16 bits" and number in floating:
                turn = floating.index(number), len(floating)
                fill_patterns(values, self.half, turn, draw, results, self.pools)

    def _added(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        storages = [self.ops.add_fixed(buffer.data_ptr(), buffer.numel()) for buffer in inputs]
        written = {n: self.ops.add_fixed(buffer.data_ptr(), buffer.numel()) for n, buffer in enumerate(outputs)}
        # In the call's arguments several tensors may be views of one input; here each has a buffer of its own.
        args = tuple(replace(arg, input=i) for i, arg in enumerate(self.call.args) if isinstance(arg, TensorArg))
        encoded = encode_fused_call(replace(self.call, args=args), self.kernel, storages.__getitem__, written)
        return self.ops.add_op(self.call.name, "", encoded, label(self.call))

    def _same(self, op: int, outputs: Sequence[torch.Tensor]) -> bool:
        self.ops.run(op)
        found = (view_of_buffer(buffer, spec) for buffer, spec in zip(outputs, self.writes, strict=True))
        return all(_same_values(a, b) for a, b in zip(self.expected, found, strict=True))


def _buffer(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    extent = spec.offset + 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return torch.zeros(extent * getattr(torch, spec.dtype).itemsize, dtype=torch.uint8, device=device)


def _same_values(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    return all(_same_slice(a, b) for a, b in _slices(expected, found))


def _same_slice(a: torch.Tensor, b: torch.Tensor) -> bool:
    words = _WORDS.get(a.element_size())
    # The same bits, or the same but for those of NaN.
    return (words is not None and torch.equal(a.view(words), b.view(words))) or same_bits(_one_nan(a), _one_nan(b))


def _slices(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in pieces of some ``_SLICE`` values, along their longest dimension."""
    if a.numel() <= _SLICE:
        return iter([(a, b)])
    dim = max(range(a.dim()), key=a.shape.__getitem__)
    length = max(1, _SLICE * a.shape[dim] // a.numel())
    return zip(a.split(length, dim), b.split(length, dim), strict=True)


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """One pattern for all NaN: which of two operands' an addition hands on is the compiler's choice."""
    return tensor.masked_fill(tensor.isnan(), float("nan")) if tensor.is_floating_point() else tensor


def _filled(buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    for buffer in buffers:
        buffer.fill_(_OTHER_BYTES)
    return buffers


def may_be_written_over(call: OpCall) -> tuple[int, ...]:
    """Numbers of the arguments that lie as output 0 does, where each element of a result depends on the same element
    alone."""
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
