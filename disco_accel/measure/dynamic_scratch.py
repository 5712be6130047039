"""Ops whose temporaries depend on the values they are given: how much room those take at most.

A grouped matrix product runs one product per group, and its allocations depend on the group's rows: known only when a
batch has been routed. The engine gives such an op a bounded piece of its scratch instead of one address per allocation;
asking for more is an error that names the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disco_accel.errors import CaptureError
from disco_accel.graph.taskgraph import OpCall, TensorArg

_ALIGNMENT = 64
_MARGIN = 1.25
"""A library may round a group size that was not tried up to a larger block."""

Blocks = Sequence[tuple[int, int, int]]
"""``(nbytes, born, freed)`` of each allocation of a recorded call."""


def loose_bytes(
    call: OpCall, inputs: Sequence[torch.Tensor], run: Callable[[], Blocks], fixed: Blocks, name: str
) -> int:
    """Bytes for the allocations beyond ``fixed``, which are those with every group empty. ``inputs`` are the bytes of
    the op's input storages, in which group sizes are tried; they are left with equal groups, so that the op can be
    timed. ``run`` records one call. Raises CaptureError when the first allocations are not ``fixed``."""
    rows, offsets = _groups(call, inputs)
    sizes = sorted({rows, *(min(rows, (1 << k) + d) for k in range(rows.bit_length()) for d in (0, 1))})
    most = 0
    for size in sizes:
        # Group 0 has them all, then the last one: an op may look at where a group lies.
        for ends in ([size] * len(offsets), [rows - size] * (len(offsets) - 1) + [rows]):
            offsets.copy_(torch.tensor(ends, dtype=torch.int32))
            blocks = run()
            if [b[0] for b in blocks[: len(fixed)]] != [b[0] for b in fixed]:
                raise CaptureError(f"{name} allocates its results in an order that depends on its groups")
            most = max(most, _peak(blocks[len(fixed) :]))
    offsets.copy_((torch.arange(1, len(offsets) + 1) * rows) // len(offsets))
    return -(-int(most * _MARGIN) // _ALIGNMENT) * _ALIGNMENT


def _groups(call: OpCall, inputs: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """How many rows (or columns) are divided among the groups, and the int32 ends of the groups."""
    a, b, offs = call.args[:3]
    assert isinstance(a, TensorArg) and isinstance(b, TensorArg)
    if not isinstance(offs, TensorArg):
        return 0, torch.empty(0, dtype=torch.int32)
    first, second = a.spec.shape, b.spec.shape
    rows = second[-1] if len(first) == 3 else first[-1] if len(second) == 2 else first[0]
    ends = inputs[offs.input].view(torch.int32)[offs.spec.offset : offs.spec.offset + offs.spec.shape[0]]
    return rows, ends


def _peak(blocks: Blocks) -> int:
    """Most bytes used at once by blocks placed one behind the other, from the start again when all are free."""
    events: list[tuple[int, Any]] = []
    for nbytes, born, freed in blocks:
        events.append((born, nbytes))
        if freed >= 0:
            events.append((freed, None))
    used = live = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        if nbytes is None:
            live -= 1
            used = used if live else 0
            continue
        live += 1
        used = -(-used // _ALIGNMENT) * _ALIGNMENT + nbytes
        peak = max(peak, used)
    return peak
