"""A step that writes to memory of the user's on both sides of its gate, and the memory to give it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.traits import MADE_FOREIGN
from disco_accel.measure.record import OpRecord
from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import HostMemory
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.execute.host_programs import HOST, HostBuilder
from tests.execute.programs import Value, assert_bits, measured

ROWS, WIDTH, LAYERS = 6, 16, 4
GUARD = 32
"""Elements of other memory before and behind each tensor that is given."""
FILL = 7.0


@dataclass
class GivingBuilder(HostBuilder):
    """``given``: by name what a transfer takes to the user's memory."""

    given: dict[str, Value] = field(default_factory=dict)

    def give(self, name: str, value: Value) -> Value:
        made = self.given[name] = self.transfer(value, HOST)
        self.vertices[-1] = replace(self.vertices[-1], traits=MADE_FOREIGN)
        return made


def program(seed: int, device: torch.device | None = None) -> GivingBuilder:
    """A chain of layers. The input's product leaves before the gate, and the gradient of each weight behind it, one of
    them in another order of its elements; the host reads one where it was given, and one comes back to the device."""
    b, g = GivingBuilder(device=device or torch.device("cpu")), torch.Generator().manual_seed(seed)
    same = torch.Generator().manual_seed(5)
    weights = [b.weight(torch.randn(WIDTH, WIDTH, generator=same) / 4) for _ in range(LAYERS)]
    # Read before the gate alone.
    shift = b.input(torch.randn(WIDTH, generator=g))
    hidden = [b.call("add.Tensor", b.input(torch.randn(ROWS, WIDTH, generator=g)), shift)]
    for weight in weights:
        hidden.append(b.call("tanh", b.call("mm", hidden[-1], weight)))
    b.give("early", hidden[1])
    b.call("sum", hidden[-1], out="loss")
    grad = b.call("mul.Tensor", hidden[-1], b.input(torch.rand((), generator=g) + 0.5, late=True))
    for i in reversed(range(LAYERS)):
        gradient = b.call("mm", hidden[i].view(lambda t: t.t()), grad)
        made = b.give(f"g{i}", gradient.view(lambda t: t.t()) if i == 2 else gradient)
        if i == 1:
            b.on_host(b.call, "exp", made, keep="read")
        if i == 3:
            b.call("tanh", b.transfer(made, 0), keep="back")
        grad = b.call("mm", grad, weights[i].view(lambda t: t.t()))
    b.call("clone", grad, keep="y")
    return b


@dataclass(frozen=True)
class Made:
    """A program, and its plan in ``least`` memory or where there is room for ``all``."""

    b: GivingBuilder
    graph: TaskGraph
    records: dict[int, OpRecord]
    plan: MemGraph

    @classmethod
    def of(cls, memory: str, device: torch.device | None = None) -> Made:
        b = program(0, device)
        graph, records = measured(b)
        # The same plan on any machine, at any time.
        graph = replace(graph, vertices=tuple(replace(v, duration=v.duration and 1e-5) for v in graph.vertices))
        with pytest.raises(BudgetTooSmall) as caught:
            make_plan(graph, memory=256, planner="timed", cyclic=True)
        nbytes = caught.value.needed if memory == "least" else 1 << 20
        plan = make_plan(graph, memory=nbytes, planner="timed", cyclic=True)
        verify(replace(graph, spaces=plan.devices), plan)
        return cls(b, graph, records, plan)

    def executor(self, options: EngineOptions | None = None) -> Executor:
        options = options or EngineOptions()
        return Executor(self.plan, self.graph.ops, self.records, clean=self.b.clean, options=options)


class Given:
    """Memory for what leaves in one step, each with other memory on both sides; ``pinned``: page-locked, where the
    device has memory of its own."""

    def __init__(self, b: GivingBuilder, *, pinned: bool = False) -> None:
        self.b = b
        self.around: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.pages = HostMemory(1 << 16)
        if pinned and backend_of(b.device).separate_memory:
            self.pages.pin(b.device)
        for name, value in b.given.items():
            around = torch.full((value.tensor.numel() + 2 * GUARD,), FILL)
            self.around[name] = around = self.pages.adopt(around) if pinned else around
            self.tensors[name] = around.as_strided(value.tensor.shape, value.tensor.stride(), GUARD)

    def by_vertex(self, *, early: bool) -> dict[int, torch.Tensor]:
        return {self.b.given[name].ref[0]: t for name, t in self.tensors.items() if (name == "early") == early}

    def begin(self) -> dict[int, torch.Tensor]:
        return self.b.external | self.by_vertex(early=True)

    def late(self) -> dict[int, torch.Tensor]:
        return self.b.late | self.by_vertex(early=False)

    def assert_given(self) -> None:
        for name, value in self.b.given.items():
            assert torch.equal(self.tensors[name], value.tensor), name
            assert bool((self.around[name][:GUARD] == FILL).all() and (self.around[name][-GUARD:] == FILL).all()), name

    def assert_untouched(self, *names: str) -> None:
        assert all(bool((self.around[name] == FILL).all()) for name in names or self.around)


def run(executor: Executor, given: Given, *, in_two: bool = False) -> None:
    """One step; results and what was given have eager's bits."""
    if in_two:
        executor.run_out(given.begin())
        executor.run_end(given.late())
    else:
        executor.begin(given.begin())
        executor.wait_out()
        executor.deliver(given.late())
        executor.wait_end()
    results = given.b.results
    assert_bits({name: executor.value(v.ref, v.spec).clone() for name, v in results.items()}, given.b)
    given.assert_given()
