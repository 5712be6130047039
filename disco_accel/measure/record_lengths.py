"""Records of kernels that depend on a length, at its two ends: a run between them allocates no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from disco_accel.errors import CaptureError
from disco_accel.graph.lengths import _Between
from disco_accel.graph.taskgraph import OpCall, TaskGraph
from disco_accel.measure.record import _ALIGNMENT, Known, OpRecord, record

_SAMPLES = 16
"""Where a call has temporaries, it is measured at so many lengths more: attention on a GPU divides its work by a rule
of its own, which does not grow with the length."""
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

    def measured(graph: TaskGraph, only: Collection[int]) -> dict[int, OpRecord]:
        chosen = frozenset(only)
        return record(graph, device=device, compute_threads=compute_threads, only=chosen, known=known)

    between = _Between(max(graphs), min(graphs))
    longest, shortest = graphs[between.longest], graphs[between.shortest]
    found = {length: measured(graph, kernels) for length, graph in graphs.items()}
    scratch = {kernel for kernel in kernels if any(records[kernel].scratch_bytes for records in found.values())}
    if scratch:
        step = (between.longest - between.shortest) / _SAMPLES
        lengths = {between.shortest + round(step * sample) for sample in range(1, _SAMPLES)}
        for length in lengths.difference(found):
            found[length] = measured(between.graph_at(length, longest, shortest), scratch)
    by_length = {
        kernel: {n: records[kernel] for n, records in found.items() if kernel in records} for kernel in kernels
    }
    return {kernel: _at_ends(records, between, longest.ops[kernel]) for kernel, records in by_length.items()}


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
