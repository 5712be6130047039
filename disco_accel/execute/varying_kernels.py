"""Kernels of a plan that depend on a length: between two steps they are given the arguments of another one.

The plan has memory for the longest. At a smaller length a value begins at the same address and ends earlier, so that
what is free of races at the longest is so at each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from disco_accel.errors import ExecutionError
from disco_accel.graph.lengths import _Between
from disco_accel.graph.taskgraph import OpCall, TensorSpec
from disco_accel.measure.record import OpRecord
from disco_accel.native.engine_class import Engine, OpTable
from disco_accel.native.op_encoding import Encoded


@dataclass(frozen=True, slots=True)
class _EncodedCall:
    """A call as the op table takes it. ``results``: a ResultMode and an encoded tensor of each; ``sizes`` of its
    allocations."""

    name: str
    overload: str
    args: Encoded
    results: tuple[tuple[int, Encoded], ...]
    sizes: tuple[int, ...]

    def add(self, ops: OpTable, label: str, addresses: Sequence[int], loose: tuple[int, int]) -> int:
        """Its number in ``ops``. ``loose``: address and bytes of room for further allocations."""
        op = int(ops.add_op(self.name, self.overload, self.args, label))
        for mode, where in self.results:
            ops.expect_result(op, mode, where)
        ops.set_schedule(op, list(addresses), list(self.sizes))
        if loose[1]:
            ops.set_loose(op, *loose)
        return op

    def set_varying(self, ops: OpTable, op: int, shortest: _EncodedCall) -> None:
        """Number ``op`` of ``ops``, which is this call at the longest length, is ``shortest`` at the shortest."""
        if (self.name, self.overload) != (shortest.name, shortest.overload):
            raise ValueError(f"{self.name}: another op at another length")
        ends = ((each.args, tuple(where for _, where in each.results), each.sizes) for each in (self, shortest))
        ops.set_varying(op, *ends)


@dataclass(frozen=True)
class _VaryingPlan:
    """The part of a plan that depends on a length. ``shortest``: calls and records there, by kernel. ``inputs``: by
    INPUT from the user, the layout at the longest and at the shortest length."""

    between: _Between
    shortest: Mapping[int, tuple[OpCall, OpRecord]] = field(default_factory=dict)
    inputs: Mapping[int, tuple[TensorSpec, TensorSpec]] = field(default_factory=dict)


class _VaryingKernels:
    """The kernels and inputs of one engine that depend on a length."""

    def __init__(self, plan: _VaryingPlan, table: OpTable, engine: Engine, storages: Mapping[int, int]) -> None:
        """``storages``: of inputs, in the op table."""
        self._between, self._table, self._engine = plan.between, table, engine
        self._inputs = [(storages[vertex], ends) for vertex, ends in plan.inputs.items()]
        self._layouts = frozenset(ends for _, ends in self._inputs)
        self._length: int | None = plan.between.longest

    def set_length(self, length: int) -> None:
        """Raises ExecutionError for a length that the plan is not for."""
        if length == self._length:
            return
        longest, shortest = self._between.longest, self._between.shortest
        if not shortest <= length <= longest:
            raise ExecutionError(f"the plan is for lengths from {shortest} to {longest}, not {length}")
        self._length = None
        try:
            # Most are keys or values of layers that are alike.
            specs = {ends: self._between.spec_at(length, *ends) for ends in self._layouts}
            for storage, ends in self._inputs:
                spec = specs[ends]
                self._table.resize_external(storage, _nbytes(spec))
                self._engine.expect_layout(storage, spec.dtype, spec.shape, spec.stride)
            self._table.set_length(longest - length, longest - shortest)
        except (ValueError, RuntimeError) as error:
            raise ExecutionError(f"the plan cannot run at length {length}: {error}") from error
        self._length = length


def _nbytes(spec: TensorSpec) -> int:
    if not math.prod(spec.shape):
        return 0
    extent = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    itemsize: int = getattr(torch, spec.dtype).itemsize
    return extent * itemsize
