"""The dynamic judge: runs a MemGraph on tokens instead of tensors, in the most hostile order its edges allow.

Memory starts poisoned; a vertex scribbles over all its outputs when it starts, reads its inputs when it starts and
again when it finishes, and takes as long as the adversary likes. What is made in a step, and what the host updates
before it, has tokens that no other step has, so that content of the step before is not taken for that of this one.
Needs no torch.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from disco_accel.errors import Stalled, VerifyError
from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.copies import is_resident_range, swaps_in, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.strict_json import plain
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import (
    arrives_at_gate,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    lasting_versions,
    must_survive_step,
    outlives_step,
)

_POISON = -1
_FIRST_MARK = 1 << 40
_Cells = np.ndarray[Any, np.dtype[np.int64]]


def run_reference(graph: TaskGraph, memgraph: MemGraph, seed: int) -> None:
    """Run one step of ``memgraph``, two if it is cyclic, in a random order drawn from ``seed``.

    Raises VerifyError if a vertex reads wrong data or a value that must survive does not; Stalled if nothing can go on.
    """
    rng = random.Random(seed)
    memory = _Memory(graph, memgraph)
    for step in range(2 if memgraph.cyclic else 1):
        memory.begin_step()
        _Step(graph, memgraph, memory, rng, first=step == 0).run()


class _Memory:
    """Arenas and host as cells between all addresses that occur; each cell holds the token of a value.

    ``home``: one cell for each value that changes over steps, on the host. ``token``: that of each value in this step.
    A cell of an arena has a *mark*: a token together with the place where the value begins, so that bytes of a value
    are not taken for other bytes of it.
    """

    def __init__(self, graph: TaskGraph, memgraph: MemGraph) -> None:
        self.token: dict[Ref, int] = {}
        self.marks: dict[tuple[int, int], int] = {}
        self.marked: list[int] = []
        self.given = itertools.count()
        self.values = [(vertex.id, k) for vertex in graph.vertices for k in range(len(vertex.sizes))]
        self.versions = lasting_versions(graph.vertices)
        lasting = [v for v in graph.vertices if host_copy_exists(v)]
        self.last = {(v.id, 0): self.versions.get((v.id, 0), [(v.id, 0)])[-1] for v in lasting}
        """Input that lives over steps → what a step leaves of it."""
        self.host_updated = {(v.id, 0) for v in lasting if not outlives_step(v)}
        sizes = {(vertex.id, 0): vertex.sizes[0] for vertex in graph.vertices if vertex.sizes}
        self.home = {state: np.full(1, _POISON, np.int64) for state in self.versions if sizes[state]}
        self.home_uses = HomeUses.of(graph)
        home_of = {version: home for state, home in self.home.items() for version in self.versions[state]}
        carried = carried_values(memgraph)
        by_id = {vertex.id: vertex for vertex in memgraph.vertices}
        places: dict[Ref, tuple[int, int, int]] = {}
        for ref, slot in memgraph.slots.items():
            size = by_id[ref[0]].sizes[ref[1]]
            if size and not (swaps_out(by_id[ref[0]]) and carried[ref] in home_of):
                places[ref] = (slot.space, slot.offset, slot.offset + size)
        self.carried = carried
        self.origin = {ref: begin - by_id[ref[0]].begin for ref, (_, begin, _) in places.items()}
        """By copy in an arena: where the value begins there of which it has bytes."""
        self.resident_ranges = {(v.id, 0): v.inputs[0] for v in memgraph.vertices if is_resident_range(v)}
        bounds: dict[int, set[int]] = defaultdict(set)
        for where, begin, end in places.values():
            bounds[where] |= {begin, end}
        cells = {where: {address: i for i, address in enumerate(sorted(b))} for where, b in bounds.items()}
        self.arena = {where: np.full(len(index), _POISON, np.int64) for where, index in cells.items()}
        self.view: dict[Ref, _Cells] = {
            ref: self.arena[where][cells[where][begin] : cells[where][end]]
            for ref, (where, begin, end) in places.items()
        }
        for vertex in memgraph.vertices:
            if swaps_out(vertex) and carried[vertex.id, 0] in home_of:
                self.view[vertex.id, 0] = home_of[carried[vertex.id, 0]]
        self.view.update({ref: home_of[ref] for ref in self.home_uses.written if ref in home_of})

    def mark(self, ref: Ref, token: int) -> int:
        """What the cells of ``ref`` hold if it has its bytes of the value of ``token``."""
        if ref not in self.origin or token == _POISON:
            return token
        key = (token, self.origin[ref])
        if key not in self.marks:
            self.marks[key] = _FIRST_MARK + len(self.marked)
            self.marked.append(token)
        return self.marks[key]

    def token_of(self, mark: int) -> int:
        """The token that is part of ``mark``."""
        return self.marked[mark - _FIRST_MARK] if mark >= _FIRST_MARK else mark

    def begin_step(self) -> None:
        """Give each value a token of this step; what lives over steps begins as the step before left it."""
        before, self.token = self.token, {ref: next(self.given) for ref in self.values}
        for ref, last in self.last.items():
            if before and ref not in self.host_updated:
                self.token[ref] = before[last]
            elif ref in self.home:
                self.home[ref][:] = self.token[ref]

    def poison(self, spared: Iterable[Ref]) -> None:
        """Overwrite every byte but those of the copies ``spared``."""
        saved = [(self.view[ref], self.view[ref].copy()) for ref in spared if ref in self.view]
        for cells in self.arena.values():
            cells.fill(_POISON)
        for view, content in saved:
            view[:] = content


class _Step:
    def __init__(
        self, graph: TaskGraph, memgraph: MemGraph, memory: _Memory, rng: random.Random, *, first: bool
    ) -> None:
        self.task = {vertex.id: vertex for vertex in graph.vertices}
        self.vertices = {vertex.id: vertex for vertex in memgraph.vertices}
        self.memgraph = memgraph
        self.memory = memory
        self.rng = rng
        self.first = first
        self.waiting: dict[int, int] = {}
        self.successors: dict[int, list[int]] = defaultdict(list)
        self.ready: list[int] = []
        self.running: dict[int, dict[Ref, int]] = {}
        self.outs_left = sum(
            handed_out_at_gate(vertex) for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT
        )
        self.finished = 0
        self.content: dict[Ref, int] = {}
        """Values outside all arenas (foreign memory, zero bytes): ref → token."""

    def run(self) -> None:
        """Run until every vertex has finished, then check the values that must have survived."""
        self._connect()
        self.ready = [v.id for v in self.vertices.values() if v.kind is not VertexKind.INPUT and not self.waiting[v.id]]
        self._fill_inputs()
        self._open_gate_if_due()
        starts_next = self._eagerness()
        while self.ready or self.running:
            if self.ready and (not self.running or starts_next()):
                self._start(self.ready.pop(self.rng.randrange(len(self.ready))))
            else:
                self._finish(self.rng.choice(list(self.running)))
        if self.finished < len(self.vertices):
            stuck = [vertex for vertex, count in self.waiting.items() if count > 0][:8]
            raise Stalled(f"nothing can go on; these vertices still wait: {stuck}")
        self._check_end()

    def _eagerness(self) -> Callable[[], bool]:
        """Return a random choice between starting a vertex and finishing one, with odds drawn for this run."""
        eagerness = self.rng.choice((0.1, 0.5, 0.9, 1.0))
        return lambda: self.rng.random() < eagerness

    def _connect(self) -> None:
        predecessors: dict[int, set[int]] = defaultdict(set)
        for u, v in (*self.memgraph.data_edges, *self.memgraph.memory_edges):
            predecessors[v].add(u)
        for vertex in self.memgraph.vertices:
            for producer, _ in vertex.inputs:
                if self.vertices[producer].kind is VertexKind.INPUT:
                    predecessors[vertex.id].add(producer)
            self.waiting[vertex.id] = len(predecessors[vertex.id])
            for predecessor in sorted(predecessors[vertex.id]):
                self.successors[predecessor].append(vertex.id)

    def _fill_inputs(self) -> None:
        clean = [(vertex.id, 0) for vertex in self.task.values() if host_copy_exists(vertex)]
        ranges = self.memory.resident_ranges
        self.memory.poison([] if self.first else [*clean, *ranges])
        for ref, value in ranges.items():
            if not self.first:
                self._expect(ref[0], ref, value, "is resident but not back")
            self._write(ref, self.memory.token[value])
            self._release(ref[0])
        for vertex in self.task.values():
            if vertex.kind is not VertexKind.INPUT:
                continue
            if host_copy_exists(vertex) and not self.first:
                self._expect(vertex.id, (vertex.id, 0), (vertex.id, 0), "is resident but not back")
            if not arrives_at_gate(vertex):
                self._arrive(vertex)

    def _arrive(self, vertex: Vertex) -> None:
        self._write((vertex.id, 0), self.memory.token[vertex.id, 0])
        self._release(vertex.id)

    def _open_gate_if_due(self) -> None:
        if self.outs_left:
            return
        self.outs_left = -1
        for vertex in self.task.values():
            if handed_out_at_gate(vertex) and vertex.kind is not VertexKind.INPUT:
                self._expect_value(vertex, "is handed out")
        late = [vertex for vertex in self.task.values() if arrives_at_gate(vertex)]
        self.rng.shuffle(late)
        for vertex in late:
            self._arrive(vertex)

    def _release(self, vertex: int) -> None:
        self.finished += 1
        self.waiting[vertex] = -1
        for successor in self.successors[vertex]:
            self.waiting[successor] -= 1
            if self.waiting[successor] == 0:
                self.ready.append(successor)

    def _start(self, vertex_id: int) -> None:
        vertex = self.vertices[vertex_id]
        task = self.task.get(vertex_id)
        self._check_inputs(vertex)
        self._check_all_bytes(vertex)
        reused = set[tuple[int, Ref]]()
        if task is not None:
            pairs = (*((0, position) for position in task.may_inplace), *task.inplace)
            reused = {(output, vertex.inputs[position]) for output, position in pairs}
        if vertex.id not in self.task:
            outputs = {(vertex_id, 0): self._token_at_source(vertex)}
        else:
            outputs = {(vertex_id, k): self.memory.token[vertex_id, k] for k in range(len(vertex.sizes))}
        for ref, token in outputs.items():
            self._write(ref, token)
        for output, ref in reused:
            if (vertex_id, output) in self.memory.home_uses.written:
                outputs[ref] = _POISON
            elif (vertex_id, output) in self.memory.view and ref in self.memory.view:
                mine, theirs = self.memory.view[vertex_id, output], self.memory.view[ref]
                if np.shares_memory(mine, theirs):
                    outputs[ref] = _POISON
        self.running[vertex_id] = outputs

    def _finish(self, vertex_id: int) -> None:
        vertex = self.vertices[vertex_id]
        outputs = self.running.pop(vertex_id)
        overwritten = {ref for ref, token in outputs.items() if token == _POISON}
        self._check_inputs(vertex, overwritten)
        if vertex.id not in self.task and self._token_at_source(vertex) != outputs[vertex_id, 0]:
            raise VerifyError(f"the source of vertex {vertex_id} ({plain(vertex.op)}) was overwritten while it ran")
        for ref, token in outputs.items():
            if token != _POISON and not self._holds(ref, token):
                raise VerifyError(f"the output of vertex {vertex_id} ({plain(vertex.op)}) was overwritten while it ran")
        self._release(vertex_id)
        task = self.task.get(vertex_id)
        if task is not None and handed_out_at_gate(task):
            self.outs_left -= 1
            self._open_gate_if_due()

    def _token_at_source(self, copy: Vertex) -> int:
        """Return the token that ``copy`` carries: the one at its source, right or wrong."""
        source = copy.inputs[0]
        if self._reads_host_copy(copy):
            home = self.memory.home.get(source)
            return self.memory.token[source] if home is None else int(home[0])
        view = self.memory.view.get(source)
        return self.content.get(source, _POISON) if view is None else self.memory.token_of(int(view[0]))

    def _at_home(self, state: Ref, version: Ref) -> bool:
        return int(self.memory.home[state][0]) == self.memory.token[version]

    def _reads_host_copy(self, copy: Vertex) -> bool:
        return swaps_in(copy) and self.vertices[copy.inputs[0][0]].kind is VertexKind.INPUT

    def _check_inputs(self, vertex: Vertex, overwritten: set[Ref] | None = None) -> None:
        task = self.task.get(vertex.id)
        for position, ref in enumerate(vertex.inputs):
            if overwritten and ref in overwritten:
                continue
            if task is not None and position >= len(task.inputs):
                self._expect(vertex.id, ref, self.memory.carried[ref], f"reads inputs[{position}]")
            elif task is not None and self.memory.home_uses.at_home(task, task.inputs[position]):
                self._expect_at_home(vertex, position, task.inputs[position])
            elif task is not None:
                self._expect(vertex.id, ref, task.inputs[position], f"reads inputs[{position}]")
            elif self._reads_host_copy(vertex):
                if self._token_at_source(vertex) != self.memory.token[ref]:
                    raise VerifyError(f"vertex {vertex.id} ({plain(vertex.op)}) reads another version of {ref} at home")
            else:
                view = self.memory.view.get(ref)
                if view is not None and (view[0] == _POISON or not bool((view == view[0]).all())):
                    raise VerifyError(f"vertex {vertex.id} ({plain(vertex.op)}) copies bytes that are not one value")

    def _check_all_bytes(self, vertex: Vertex) -> None:
        """Raise VerifyError unless what a kernel reads of each value is all of it, in one place."""
        task = self.task.get(vertex.id)
        ranges: dict[Ref, dict[int, Ref]] = defaultdict(dict)
        for position, ref in enumerate(vertex.inputs if task is not None else ()):
            value = self.memory.carried[ref]
            first = task is not None and position < len(task.inputs)
            if ref in self.memory.origin:
                ranges[value][self.vertices[ref[0]].begin] = ref
            if first == bool(self.vertices[ref[0]].begin):
                raise VerifyError(f"vertex {vertex.id} ({plain(vertex.op)}) reads {ref} as inputs[{position}]")
        for value, refs in ranges.items():
            end = 0
            for begin, ref in sorted(refs.items()):
                if begin != end or 0 not in refs or self.memory.origin[ref] != self.memory.origin[refs[0]]:
                    break
                end += self.vertices[ref[0]].sizes[ref[1]]
            if end != self.task[value[0]].sizes[value[1]]:
                raise VerifyError(f"vertex {vertex.id} ({plain(vertex.op)}) reads value {value} up to byte {end} alone")

    def _expect_at_home(self, vertex: Vertex, position: int, value: Ref) -> None:
        home = self.memory.home.get(self.memory.home_uses.homes[value])
        # What no kernel changes is at its home whenever it is read.
        if home is not None and int(home[0]) != self.memory.token[value]:
            what = f"reads inputs[{position}] at home, where value {value} is not"
            raise VerifyError(f"vertex {vertex.id} ({plain(vertex.op)}) {what}")

    def _expect_value(self, vertex: Vertex, what: str) -> None:
        for k in range(len(vertex.sizes)):
            self._expect(vertex.id, (vertex.id, k), (vertex.id, k), what)

    def _expect(self, vertex: int, ref: Ref, value: Ref, what: str) -> None:
        if ref not in self.memory.view and host_copy_exists(self.vertices[ref[0]]) and what.startswith("is resident"):
            return
        if not self._holds(ref, self.memory.token[value]):
            op = plain(self.vertices[vertex].op)
            raise VerifyError(f"vertex {vertex} ({op}) {what} as {ref}, which does not hold value {value}")

    def _holds(self, ref: Ref, token: int) -> bool:
        view = self.memory.view.get(ref)
        if view is None:
            return self.content.get(ref) == token
        return bool((view == self.memory.mark(ref, token)).all())

    def _write(self, ref: Ref, token: int) -> None:
        view = self.memory.view.get(ref)
        if view is not None:
            view[:] = self.memory.mark(ref, token)
            return
        vertex = self.vertices[ref[0]]
        host_only = vertex.kind is VertexKind.INPUT and not is_foreign(vertex) and vertex.sizes[0] > 0
        if not host_only:
            self.content[ref] = token

    def _check_end(self) -> None:
        copies: dict[int, list[Ref]] = defaultdict(list)
        for ref, view in self.memory.view.items():
            value = self.memory.carried[ref]
            whole = self.vertices[ref[0]].sizes[ref[1]] == self.task[value[0]].sizes[value[1]]
            if whole and view.size and bool((view == view[0]).all()):
                copies[self.memory.token_of(int(view[0]))].append(ref)
        for vertex in self.task.values():
            unchanged = host_copy_exists(vertex) and len(self.memory.versions.get((vertex.id, 0), ())) < 2
            if not must_survive_step(vertex) or unchanged or is_foreign(vertex):
                continue
            for k, size in enumerate(vertex.sizes):
                if size and not copies[self.memory.token[vertex.id, k]]:
                    raise VerifyError(f"vertex {vertex.id} ({plain(vertex.op)}): output {k} must be kept but is gone")
        for ref, value in self.memory.resident_ranges.items() if self.memgraph.cyclic else ():
            self._expect(ref[0], ref, value, "is resident but not back")
        for state, last in self.memory.last.items():
            if self.memgraph.cyclic and state in self.memory.view:
                self._expect(state[0], state, last, "is resident but not back")
            elif state != last and state in self.memory.home and not self._at_home(state, last):
                raise VerifyError(f"vertex {state[0]} is changed, and its home does not have its last version")
