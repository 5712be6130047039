"""Records of kernels that depend on a length, at its two ends: a run between them allocates no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from disco_accel.errors import CaptureError
from disco_accel.graph.lengths import _Between
from disco_accel.graph.taskgraph import OpCall, TaskGraph
from disco_accel.measure.record import _ALIGNMENT, Known, OpRecord, record

_AtEnds = tuple[OpRecord, OpRecord]
"""At the longest length, and at the shortest."""


def records_at_ends(
    graphs: Mapping[int, TaskGraph], kernels: Collection[int], device: str, compute_threads: int | None, known: Known
) -> dict[int, _AtEnds]:
    """Kernel → its records, of ``graphs`` by length, all of one forward. The rest is as of ``record``.

    Where a call has temporaries, nobody knows how these depend on the length. All its allocations are served from one
    piece of scratch then, which has room for those at each of the lengths.

    Raises:
        CaptureError: as ``record``; an op needs its result elsewhere at one of the lengths.
    """
    only = frozenset(kernels)
    found = {
        length: record(graph, device=device, compute_threads=compute_threads, only=only, known=known)
        for length, graph in graphs.items()
    }
    between = _Between(max(graphs), min(graphs))
    calls = graphs[between.longest].ops
    by_length = {kernel: {length: records[kernel] for length, records in found.items()} for kernel in kernels}
    return {kernel: _at_ends(records, between, calls[kernel]) for kernel, records in by_length.items()}


def with_records_of(
    calls: Sequence[tuple[OpCall, OpRecord]], graph: TaskGraph, records: Mapping[int, OpRecord]
) -> Mapping[int, OpRecord]:
    """``records`` of the kernels of ``graph``, those of ``calls`` in their places; a call is known as an object."""
    if not calls:
        return records
    known = {id(call): found for call, found in calls}
    return {kernel: known.get(id(graph.ops[kernel]), found) for kernel, found in records.items()}


def _at_ends(by_length: Mapping[int, OpRecord], between: _Between, call: OpCall) -> _AtEnds:
    longest, shortest = by_length[between.longest], by_length[between.shortest]
    if any((r.native_out, r.elsewhere) != (longest.native_out, longest.elsewhere) for r in by_length.values()):
        raise CaptureError(f"{call.module or call.name}: {call.name} runs otherwise at other lengths of the cache")
    if any(r.scratch_bytes for r in by_length.values()) or not _sizes_alone(by_length, between):
        room = max(sum(_aligned(a.nbytes) for a in r.allocations) + r.loose_bytes for r in by_length.values())
        one = replace(longest, allocations=(), scratch_bytes=_aligned(room), loose_bytes=_aligned(room))
        return one, one
    return longest, shortest


def _sizes_alone(by_length: Mapping[int, OpRecord], between: _Between) -> bool:
    """Whether the allocations differ in bytes alone, which are affine in the length."""
    rows = {n: tuple((a.output, a.offset) for a in r.allocations) for n, r in by_length.items()}
    sizes = {n: tuple(a.nbytes for a in r.allocations) for n, r in by_length.items()}
    ends = sizes[between.longest], sizes[between.shortest]
    return len(set(rows.values())) == 1 and all(between.at(n, *ends) == size for n, size in sizes.items())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
