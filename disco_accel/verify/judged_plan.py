"""The data of all checks of the static judge: a plan beside its graph, and claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from disco_accel.errors import VerifyError
from disco_accel.graph.check import called
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import HOST, Space, is_backing
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import lasting_versions
from disco_accel.verify.happens_before import Claim, first_violated


@dataclass
class JudgedPlan:
    """A plan with its graph. ``carried`` and ``predecessors`` are filled by the first checks."""

    graph: TaskGraph
    mem: MemGraph
    task: dict[int, Vertex] = field(init=False)
    vertex: dict[int, Vertex] = field(init=False)
    carried: dict[Ref, Ref] = field(init=False, default_factory=dict)
    """Value of the plan (also of swap-outs) → the task graph's value that it holds."""
    predecessors: dict[int, set[int]] = field(init=False)
    versions: Mapping[Ref, list[Ref]] = field(init=False)
    """Input that changes over steps → its versions in order."""
    state: dict[Ref, Ref] = field(init=False)
    """Version of an input that changes over steps → that input."""
    home_uses: HomeUses = field(init=False)

    def __post_init__(self) -> None:
        self.task = {vertex.id: vertex for vertex in self.graph.vertices}
        self.vertex = {vertex.id: vertex for vertex in self.mem.vertices}
        self.versions = lasting_versions(self.graph.vertices)
        self.state = {version: state for state, versions in self.versions.items() for version in versions}
        self.home_uses = HomeUses.of(self.graph)

    @property
    def backing(self) -> tuple[Space, ...]:
        """The spaces of the plan in which no kernel runs."""
        listed = tuple(space for space in self.mem.spaces if is_backing(space.id) and space.id != HOST)
        return (self.mem.host, *listed)

    def name(self, vertex: int) -> str:
        """How messages call a vertex."""
        named = self.vertex.get(vertex)
        return f"vertex {vertex}" if named is None else called(named)

    def reads_at_home(self, vertex: int, position: int) -> bool:
        """Whether a vertex reads that input at its home: a kernel of a host device, a swap-in, or a resident range."""
        named = self.vertex[vertex]
        if named.kind is VertexKind.INPUT:
            return True
        if swaps_in(named):
            source = self.vertex[named.inputs[0][0]]
            return source.kind is VertexKind.INPUT or named.inputs[0] in self.home_uses.written
        task = self.task.get(vertex)
        return task is not None and position < len(task.inputs) and self.home_uses.at_home(task, task.inputs[position])

    def size(self, ref: Ref) -> int:
        """Bytes of a value of the plan."""
        return self.vertex[ref[0]].sizes[ref[1]]

    def is_whole(self, ref: Ref) -> bool:
        """Whether a value of the plan, which ``carried`` has, has all bytes of its task graph's value."""
        return self.size(ref) == self.size(self.carried[ref])

    def origin(self, ref: Ref) -> int:
        """The offset at which the value begins, of which ``ref``, which has a slot, holds a range."""
        return self.mem.slots[ref].offset - self.vertex[ref[0]].begin

    def last_version(self, ref: Ref) -> Ref:
        """The last version of an input that lives over steps."""
        return self.versions[ref][-1] if ref in self.versions else ref


class Claims:
    """Collects claims that one vertex finishes before another starts, and checks them all at once."""

    def __init__(self, plan: JudgedPlan, order: Mapping[int, int]) -> None:
        self.plan = plan
        self.order = order
        self.claims: list[Claim] = []

    def claim(self, first: int, then: int, why: Callable[[], str]) -> None:
        """Demand that ``first`` finishes before ``then`` starts."""
        if first not in self.plan.predecessors[then]:
            self.claims.append((self.order[first], self.order[then], why))

    def resolve(self) -> None:
        """Check every claim. Raises VerifyError at the first that does not hold."""
        order = self.order
        predecessors = [[order[p] for p in self.plan.predecessors[vertex]] for vertex in order]
        wrong = first_violated(predecessors, self.claims)
        if wrong is not None:
            by_position = list(order)
            first, then = by_position[wrong[0]], by_position[wrong[1]]
            name = self.plan.name
            raise VerifyError(f"{name(first)} need not finish before {name(then)} starts: {wrong[2]()}")
