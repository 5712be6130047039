"""Programs whose kernels change values that live over steps, and plans for them made by hand.

``training`` is a chain of layers with a gradient that a gate holds back; each weight is changed in place. ``plan_of``
keeps some weights resident and passes the others through a few places: loaded before use, written home after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import lasting_versions, overwrites
from disco_accel.native.backend import run_device
from disco_accel.verify.static import verify
from tests.execute.programs import Builder, Program, Value, assert_bits, build, bump_plan, measured, step

ROWS, WIDTH = 6, 16
RATE = 1 / 64
FIRST_COPY = 1000
"""Ids of the copies in a plan begin there."""


def weights_of(count: int = 3) -> list[torch.Tensor]:
    """Weights of a chain of ``count`` layers, always the same."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(count)]


def training(weights: Sequence[torch.Tensor], *, twice: bool = False, host_updated: bool = False) -> Program:
    """A step of SGD over homes ``weights``: forward, gate, backward with an update of each layer as it goes; ``twice``:
    a decay of all weights at the end; ``host_updated``: the host changes weights too. Kept: ``y``, and the last version
    of weight i as ``w<i>``."""

    def program(b: Builder, g: torch.Generator) -> None:
        hidden = [b.input(torch.randn(ROWS, WIDTH, generator=g))]
        states = [b.state(weight, host_updated) for weight in weights]
        for state in states:
            hidden.append(b.call("tanh", b.call("mm", hidden[-1], state)))
        b.call("sum", hidden[-1], out="loss")
        grad = b.call("mul.Tensor", hidden[-1], b.input(torch.rand((), generator=g) + 0.5, late=True))
        last: dict[int, Value] = {}
        for i in reversed(range(len(states))):
            change = b.call("mm", hidden[i].view(lambda t: t.t()), grad)
            # Reads the weight as it was before: eager execution changes it only afterwards.
            grad = b.call("mm", grad, states[i].view(lambda t: t.t()))
            last[i] = b.call("add_.Tensor", states[i], change, alpha=-RATE, inplace=True)
        b.call("clone", grad, keep="y")
        for i in range(len(states)):
            if twice:
                last[i] = b.call("mul_.Tensor", last[i], 1 - RATE, inplace=True)
            b.results[f"w{i}"] = last[i]

    return program


def adam(homes: Sequence[torch.Tensor], *, fused: bool = False) -> Program:
    """A step over homes of weight, mean and mean square of each layer, one after the other: a product of all weights
    whose result stands for the gradient of each. The last version of home i is kept as ``w<i>``."""

    def program(b: Builder, g: torch.Generator) -> None:
        states = [b.state(home) for home in homes]
        hidden = b.input(torch.randn(ROWS, WIDTH, generator=g))
        for weight in states[::3]:
            hidden = b.call("tanh", b.call("mm", hidden, weight))
        grad = b.call("mm", hidden.view(lambda t: t.t()), hidden, keep="grad")
        for k in range(0, len(states), 3):
            weight, mean, square = states[k : k + 3]
            if fused:
                made = _fused_adam(b, weight, mean, square, grad)
            else:
                mean = b.call("lerp_.Scalar", mean, grad, 0.125, inplace=True)
                square = b.call("mul_.Tensor", square, 0.75, inplace=True)
                square = b.call("addcmul_", square, grad, grad, value=0.25, inplace=True)
                root = b.call("add.Tensor", b.call("sqrt", square), 1e-3)
                made = [b.call("addcdiv_", weight, mean, root, value=-RATE, inplace=True), mean, square]
            for i, value in enumerate(made):
                b.results[f"w{k + i}"] = value

    return program


def _fused_adam(b: Builder, weight: Value, mean: Value, square: Value, grad: Value) -> list[Value]:
    """One op that writes weight and moments and returns nothing."""
    count = b.input(torch.tensor(3.0))
    lists = [[weight], [grad], [mean], [square], [], [count]]
    rates = {"lr": RATE, "beta1": 0.875, "beta2": 0.75, "weight_decay": 0.125, "eps": 1e-3}
    flags = {"amsgrad": False, "maximize": False}
    return b.call_writing("_fused_adamw_", *lists, written=[weight, mean, square], **rates, **flags)


@dataclass(eq=False)
class _Copy:
    """What a place of the arena holds: a version of a state, as value ``ref`` of the plan."""

    slot: Slot
    state: int = -1
    ref: Ref = (-1, 0)
    version: Ref = (-1, 0)
    newer: bool = False
    users: list[int] = field(default_factory=list)


@dataclass
class _Home:
    """It holds ``version``. ``source``: what a reload names to read it; ``readers`` of what is there now."""

    source: Ref
    version: Ref
    readers: list[int] = field(default_factory=list)


class _Planner:
    """Walks the serial order; ``copies`` are where each state is on the device now."""

    def __init__(self, graph: TaskGraph, resident: Collection[int], returning: Collection[int], buffers: int) -> None:
        bump = bump_plan(graph)
        self.graph = graph
        self.state = {v: first[0] for first, versions in lasting_versions(graph.vertices).items() for v in versions}
        self.sizes = {v.id: v.sizes[0] for v in graph.vertices if (v.id, 0) in self.state}
        there = {*resident, *returning}
        self.slots = {ref: slot for ref, slot in bump.slots.items() if ref not in self.state or ref[0] in there}
        self.copies = {state: _Copy(bump.slots[state, 0], state, (state, 0), (state, 0)) for state in there}
        self.returning = {state: self.copies[state] for state in returning}
        top, size = bump.devices[0].memory, -(-max(self.sizes.values()) // 256) * 256
        self.buffers = [_Copy(Slot(0, top + k * size)) for k in range(buffers)]
        self.memory = top + buffers * size
        self.homes = {state: _Home((state, 0), (state, 0)) for state in self.sizes}
        self.order: list[Vertex] = []
        self.after = set(bump.memory_edges)

    def run(self, back: bool) -> MemGraph:
        for vertex in self.graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                self.order.append(vertex)
            else:
                self.kernel(vertex)
        for copy in self.buffers:
            self.write_back(copy)
        if back:
            for state, copy in self.returning.items():
                self.reload(state, copy)
        data = {(u, v.id) for v in self.order for u, _ in v.inputs}
        return MemGraph(
            self.graph.name,
            (replace(self.graph.devices[0], memory=self.memory),),
            tuple(self.order),
            self.slots,
            tuple(sorted(data)),
            tuple(sorted(self.after - data)),
            cyclic=True,
        )

    def kernel(self, vertex: Vertex) -> None:
        read = [ref for ref in vertex.inputs if ref in self.state]
        copies = {ref: self.copy_of(ref, {self.state[other] for other in read}) for ref in read}
        inputs = tuple(copies[ref].ref if ref in copies else ref for ref in vertex.inputs)
        self.order.append(replace(vertex, inputs=inputs))
        for output, ref in overwrites(vertex):
            if ref in copies:
                copy = copies.pop(ref)
                self.after |= {(user, vertex.id) for user in copy.users}
                self.slots[vertex.id, output] = copy.slot
                copy.ref = copy.version = (vertex.id, output)
                copy.newer, copy.users = True, [vertex.id]
        for copy in copies.values():
            copy.users.append(vertex.id)
            if self.returning.get(copy.state) is copy:
                # Its first user here is its last: the others load it elsewhere.
                del self.copies[copy.state]

    def copy_of(self, version: Ref, staying: Collection[int]) -> _Copy:
        state = self.state[version]
        if state not in self.copies:
            copy = next(copy for copy in self.buffers if copy.state not in staying)
            self.buffers.remove(copy)
            self.buffers.append(copy)
            self.write_back(copy)
            self.copies.pop(copy.state, None)
            self.reload(state, copy)
            self.copies[state] = copy
        assert self.copies[state].version == version, "a version is read before the next one is made"
        return self.copies[state]

    def write_back(self, copy: _Copy) -> None:
        if copy.newer:
            home = self.homes[copy.state]
            offload = self.append(copy.ref, copy.state, source=0, target=HOST)
            self.after |= {(reader, offload) for reader in home.readers}
            self.homes[copy.state] = _Home((offload, 0), copy.version)
            copy.users.append(offload)
            copy.newer = False

    def reload(self, state: int, copy: _Copy) -> None:
        home = self.homes[state]
        reload = self.append(home.source, state, source=HOST, target=0)
        home.readers.append(reload)
        self.after |= {(user, reload) for user in copy.users}
        self.slots[reload, 0] = copy.slot
        copy.state, copy.ref, copy.version = state, (reload, 0), home.version
        copy.newer, copy.users = False, [reload]

    def append(self, read: Ref, state: int, *, source: int, target: int) -> int:
        number, sizes = FIRST_COPY + len(self.order), (self.sizes[state],)
        vertex = Vertex(number, VertexKind.COPY, target, inputs=(read,), sizes=sizes, source=source)
        self.order.append(vertex)
        return vertex.id


def plan_of(
    graph: TaskGraph,
    resident: Collection[int] = (),
    returning: Collection[int] = (),
    buffers: int = 1,
    back: bool = True,
) -> MemGraph:
    """A cyclic plan. States in ``resident`` stay in their slots; those in ``returning`` leave them after the first use,
    for one of ``buffers`` places that all others share, and with ``back`` they are there again at the end."""
    return _Planner(graph, resident, returning, buffers).run(back)


Planner = Callable[[TaskGraph, Sequence[int]], MemGraph]
PLANS: Mapping[str, Planner] = {
    "resident": lambda graph, states: plan_of(graph, resident=states),
    "away": lambda graph, states: plan_of(graph),
    "two places": lambda graph, states: plan_of(graph, buffers=2),
    "mixed": lambda graph, states: plan_of(graph, resident=states[:1]),
    "returning": lambda graph, states: plan_of(graph, resident=states[:1], returning=states[1:]),
}


class Trained:
    """A program over states, run by an executor and eagerly side by side. Its plan is verified."""

    def __init__(
        self,
        program: Callable[[Sequence[torch.Tensor]], Program],
        homes: Sequence[torch.Tensor],
        planner: Planner,
        options: EngineOptions | None = None,
        arena: torch.Tensor | None = None,
    ) -> None:
        self.program, self.homes, self.eager = program, homes, [home.clone() for home in homes]
        self.options = options or EngineOptions()
        builder = build(program(homes), device=run_device(self.options.device))
        graph, records = measured(builder)
        # The same plan on any machine, at any time.
        timeless = [replace(v, duration=v.duration and 1e-5) for v in graph.vertices]
        graph = replace(graph, vertices=tuple(timeless))
        self.plan = planner(graph, list(builder.states))
        verify(replace(graph, spaces=self.plan.devices), self.plan)
        self.states = list(builder.states)
        self.executor = Executor(
            self.plan,
            graph.ops,
            records,
            clean=builder.clean,
            states=builder.states,
            options=self.options,
            arena=arena,
            names={state: f"weight {i}" for i, state in enumerate(self.states)},
        )

    def inputs(self, seed: int) -> Builder:
        """Of one step, with what eager execution makes of it."""
        return build(self.program(self.eager), seed, run_device(self.options.device))

    def step(self, seed: int, run: Callable[[Executor, Builder], dict[str, torch.Tensor]] = step) -> None:
        """Both do a step; results and states have the same bits."""
        inputs = self.inputs(seed)
        assert_bits(run(self.executor, inputs), inputs)
        self.eager = [inputs.results[f"w{i}"].tensor.cpu() for i in range(len(self.homes))]

    def assert_homes(self) -> None:
        """They hold what eager execution has made."""
        for home, eager in zip(self.homes, self.eager, strict=True):
            assert torch.equal(home, eager)
