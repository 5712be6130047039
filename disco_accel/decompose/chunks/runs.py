"""The order of chunks: one chunk through a run of kernels that read each other's, before the next chunk."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from disco_accel.decompose.chunks.choice import ChunkedKernel, lies_in_chunks
from disco_accel.graph.check import after_gate, dependencies
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind, tensor_args
from disco_accel.graph.values import overwrites


@dataclass
class Run:
    """``members``: kernels of equally many chunks, in serial order. ``before`` and ``behind``: whole vertices that
    stood between them."""

    members: list[ChunkedKernel] = field(default_factory=list)
    before: list[Vertex] = field(default_factory=list)
    behind: list[Vertex] = field(default_factory=list)


def runs_of(
    graph: TaskGraph, chunked: Mapping[int, ChunkedKernel], weights: Collection[int] = (), most: int = 0
) -> list[Run]:
    """Return all vertices but INPUTs, as runs in an order that keeps every dependency. One without members is of whole
    vertices alone. ``most``: bytes of ``weights``, by vertex, that the kernels of a run may need together. Each chunk
    needs them anew, and those that do not stay are loaded for every chunk."""
    sizes = {(vertex.id, k): size for vertex in graph.vertices for k, size in enumerate(vertex.sizes)}
    runs = list[Run]()
    for run in _Runs(graph, chunked).made():
        parts = _split(run.members, sizes, weights, most) if run.members else [[]]
        for k, members in enumerate(parts):
            runs.append(Run(members, run.before if not k else [], run.behind if k + 1 == len(parts) else []))
    return runs


def _split(
    members: Sequence[ChunkedKernel], sizes: Mapping[Ref, int], weights: Collection[int], most: int
) -> list[list[ChunkedKernel]]:
    """``members`` in runs whose weights are no more than ``most`` bytes, where one kernel's are no more. They end where
    the fewest bytes go on: not within an MLP, whose hidden values would all be there."""
    parts, begin = list[list[ChunkedKernel]](), 0
    crossing = _crossing(members, sizes)
    held: dict[Ref, int] = {}
    place = 0
    while place < len(members):
        needs = {ref: sizes[ref] for ref in members[place].vertex.inputs if ref[0] in weights}
        if held and needs.keys() - held.keys() and sum((held | needs).values()) > most:
            # Of ends that are as good the last.
            end = min(range(begin + 1, place + 1), key=lambda k: (crossing[k], -k))
            parts.append(list(members[begin:end]))
            begin = place = end
            held = {}
            continue
        held |= needs
        place += 1
    return [*parts, list(members[begin:])]


def _crossing(members: Sequence[ChunkedKernel], sizes: Mapping[Ref, int]) -> list[int]:
    """Before each place, and behind the last: bytes that members before it make and that later ones read."""
    last: dict[Ref, int] = {}
    for place, kernel in enumerate(members):
        last |= dict.fromkeys(kernel.vertex.inputs, place)
    change = [0] * (len(members) + 1)
    for place, kernel in enumerate(members):
        for output in range(len(kernel.vertex.sizes)):
            ref = kernel.vertex.id, output
            if last.get(ref, place) > place:
                change[place + 1] += sizes[ref]
                change[last[ref] + 1] -= sizes[ref]
    return list(accumulate(change))


class _Runs:
    """Invariant: nothing in ``_open`` depends on ``_late``, and nothing in ``_between`` on ``_open``."""

    def __init__(self, graph: TaskGraph, chunked: Mapping[int, ChunkedKernel]) -> None:
        self._graph, self._chunked = graph, chunked
        self._behind_gate = after_gate(graph.vertices)
        self._done: list[Run] = []
        self._open: dict[int, ChunkedKernel] = {}
        self._between: list[Vertex] = []
        """Whole vertices that do not depend on the open run, and some perhaps needed by it."""
        self._late: dict[int, Vertex] = {}
        """Whole vertices that depend on the open run."""

    def made(self) -> list[Run]:
        for vertex in self._graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                continue
            kernel = self._chunked.get(vertex.id)
            if kernel is not None:
                if not self._joins(kernel):
                    self._close()
                self._open[vertex.id] = kernel
            elif not self._open:
                self._done.append(Run(before=[vertex]))
            elif any(True for _ in overwrites(vertex)):
                # Readers of the value that it overwrites come before it: none may move behind.
                self._close()
                self._done.append(Run(before=[vertex]))
            elif any(each in self._open or each in self._late for each in dependencies(vertex)):
                self._late[vertex.id] = vertex
            else:
                self._between.append(vertex)
        self._close()
        return self._done

    def _joins(self, kernel: ChunkedKernel) -> bool:
        if not self._open:
            return True
        first = next(iter(self._open.values()))
        if kernel.count != first.count:
            return False
        if (kernel.vertex.id in self._behind_gate) != (first.vertex.id in self._behind_gate):
            return False
        if any(each in self._late for each in dependencies(kernel.vertex)):
            return False
        inputs = kernel.vertex.inputs
        return all(_reads_its_chunk(kernel, ref, self._open[ref[0]]) for ref in inputs if ref[0] in self._open)

    def _close(self) -> None:
        if not self._open:
            return
        members = list(self._open.values())
        needed = {each for kernel in members for each in dependencies(kernel.vertex)}
        before, behind = list[Vertex](), list[Vertex]()
        for vertex in reversed(self._between):
            if vertex.id in needed:
                needed.update(dependencies(vertex))
                before.insert(0, vertex)
            else:
                behind.insert(0, vertex)
        place = {vertex.id: k for k, vertex in enumerate(self._graph.vertices)}
        behind = sorted([*behind, *self._late.values()], key=lambda vertex: place[vertex.id])
        self._done.append(Run(members, before, behind))
        self._open, self._between, self._late = {}, [], {}


def _reads_its_chunk(kernel: ChunkedKernel, ref: Ref, maker: ChunkedKernel) -> bool:
    """Whether each chunk of ``kernel`` reads just the chunk of ``ref`` that ``maker``'s chunk of that number makes."""
    cut = maker.cuts.get(ref[1])
    if cut is None or maker.count != kernel.count:
        return False
    return all(
        lies_in_chunks(arg, axes, kernel.parts, cut)
        for arg, axes in zip(tensor_args(kernel.call.args), kernel.loops.args, strict=True)
        if kernel.vertex.inputs[arg.input] == ref
    )


def at_the_ends(run: Run) -> set[int]:
    """Return the members that are not between two large ones, of those that read each other's values chunk by chunk:
    whole they are as good."""
    by_id = {kernel.vertex.id: kernel for kernel in run.members}
    near = {
        kernel.vertex.id: [
            ref[0] for ref in kernel.vertex.inputs if ref[0] in by_id and _reads_its_chunk(kernel, ref, by_id[ref[0]])
        ]
        for kernel in run.members
    }
    behind_large = _spread([k.vertex.id for k in run.members], by_id, near)
    readers: dict[int, list[int]] = {each: [] for each in by_id}
    for reader, makers in near.items():
        for maker in makers:
            readers[maker].append(reader)
    before_large = _spread([k.vertex.id for k in reversed(run.members)], by_id, readers)
    return {each for each in by_id if each not in behind_large or each not in before_large}


def _spread(order: Sequence[int], by_id: Mapping[int, ChunkedKernel], near: Mapping[int, list[int]]) -> set[int]:
    reached: set[int] = set()
    for each in order:
        if by_id[each].large or any(other in reached for other in near[each]):
            reached.add(each)
    return reached
