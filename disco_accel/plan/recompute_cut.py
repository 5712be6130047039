"""Values to keep and kernels to repeat at a price of memory: a minimum cut.

A duplicate is a kernel that computes the values of an earlier one. It runs again, which costs its seconds. Or its
readers read the earlier values, which stay on the device for longer: bytes times seconds, times the price. A kernel
that runs again needs its own inputs, kept or computed again. So cheap kernels between two kept products run again, and
a product without readers does not. That is a minimum cut, as of a project and its requirements (Picard 1976; for the
activations of a joint graph of forward and backward also PyTorch's ``min_cut_rematerialization_partition``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.value_numbering import Clone

_FLOW = 1 << 28
"""The seconds of all duplicates as integer capacities, whose sum has to stay below 2^31."""


@dataclass(frozen=True)
class _Costs:
    """Of each duplicate, by its place: ``again``, seconds of running it; ``kept``, bytes times seconds of keeping its
    values instead. ``inputs``: pairs (duplicate, its reader among them). ``read``: duplicates that other vertices read.
    ``held``: bytes times seconds of each other value that is kept longer for duplicates; ``holds``: pairs (duplicate,
    such a value)."""

    again: np.ndarray
    kept: np.ndarray
    inputs: Sequence[tuple[int, int]]
    read: Sequence[int]
    held: np.ndarray
    holds: Sequence[tuple[int, int]]


def cut_at_price(graph: TaskGraph, found: Sequence[Clone]) -> Callable[[float], tuple[Clone, ...]]:
    """Return the function from a price to the duplicates of ``graph`` that are left out at it: at a lower price those
    of a higher one and more. ``found``: all duplicates, whose kernels have seconds.

    The unit of the price: one step's seconds for the memory of a device over one step.
    """
    costs = _costs(graph, found)
    memory = max(device.memory for device in graph.devices if not device.is_host_device)
    return lambda price: _cut(costs, price / memory, found)


def _costs(graph: TaskGraph, found: Sequence[Clone]) -> _Costs:
    place = {clone.vertex: i for i, clone in enumerate(found)}
    start = dict(_starts(graph))
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    inputs = list[tuple[int, int]]()
    read = set[int]()
    readers: dict[int, set[int]] = {}
    for vertex in graph.vertices:
        for producer in {producer for producer, _ in vertex.inputs}:
            readers.setdefault(producer, set()).add(vertex.id)
            if producer in place and vertex.id in place:
                inputs.append((place[producer], place[vertex.id]))
            elif producer in place:
                read.add(place[producer])
    again = np.array([by_id[clone.vertex].duration or 0.0 for clone in found])
    held, holds = list[float](), list[tuple[int, int]]()
    for maker, own in readers.items():
        vertex = by_id[maker]
        if maker in place or vertex.kind is not VertexKind.KERNEL:
            continue
        again_for = [reader for reader in own if reader in place]
        if len(own) == len(again_for) == 1:
            # It runs with the one duplicate that reads it, or not at all.
            again[place[again_for[0]]] += vertex.duration or 0.0
        elif again_for:
            until = max((start[reader] for reader in own if reader not in place), default=start[maker])
            longer = max(start[reader] for reader in again_for) - until
            if longer > 0:
                holds += [(place[reader], len(held)) for reader in again_for]
                held.append(sum(vertex.sizes) * longer)
    kept = np.array([clone.nbytes * (start[clone.vertex] - start[clone.original]) for clone in found])
    return _Costs(again, kept, inputs, sorted(read), np.array(held), holds)


def _starts(graph: TaskGraph) -> Iterator[tuple[int, float]]:
    """Yield each vertex with the seconds of all kernels before it."""
    clock = 0.0
    for vertex in graph.vertices:
        yield vertex.id, clock
        if vertex.kind is VertexKind.KERNEL:
            clock += vertex.duration or 0.0


def _cut(costs: _Costs, price: float, found: Sequence[Clone]) -> tuple[Clone, ...]:
    """Return the duplicates that do not run again where seconds and kept bytes at ``price`` are fewest together.

    Nodes: ``i`` on the source's side: duplicate i runs again; ``count + i``: its values are needed; then one for each
    held value, and source and sink. An edge that is cut is paid: i → sink for running again; needed i → i for values
    that are needed and not computed again; held → sink.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    count, held = len(found), len(costs.held)
    source, sink, endless = 2 * count + held, 2 * count + held + 1, 1 << 30
    scale = _FLOW / max(costs.again.sum(), 1e-30)
    numbers = np.arange(count)
    readers = np.array(costs.inputs, np.int64).reshape(-1, 2)
    holds = np.array(costs.holds, np.int64).reshape(-1, 2)
    edges = (
        (numbers, np.full(count, sink), 1 + costs.again * scale),
        (count + numbers, numbers, 1 + price * costs.kept * scale),
        (np.full(len(costs.read), source), count + np.array(costs.read, np.int64), None),
        (readers[:, 1], count + readers[:, 0], None),
        (2 * count + np.arange(held), np.full(held, sink), 1 + price * costs.held * scale),
        (holds[:, 0], 2 * count + holds[:, 1], None),
    )
    begin, end = (np.concatenate([edge[k] for edge in edges]) for k in (0, 1))
    capacity = [np.full(len(b), endless) if c is None else np.minimum(c, endless) for b, _, c in edges]
    network = csr_matrix((np.concatenate(capacity).astype(np.int32), (begin, end)), (sink + 1, sink + 1))
    left = network - maximum_flow(network, source, sink).flow
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return tuple(clone for i, clone in enumerate(found) if i not in reached)
