"""Training steps whose optimizer runs on a device in host memory, beside one of the run's kind, and their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.measure.record import apply, record
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.host_memory import HostMemory, footprint
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.execute.programs import Builder, Value

HOST = 1
"""Id of the device in host memory."""


@dataclass
class HostBuilder(Builder):
    """A builder with a second device, in host memory."""

    def on_host(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``make`` appends is on the host device, and runs eagerly on the CPU."""
        device, self.device = self.device, torch.device("cpu")
        before = len(self.vertices)
        try:
            return make(*args, **kwargs)
        finally:
            self.device = device
            for position in range(before, len(self.vertices)):
                self.vertices[position] = replace(self.vertices[position], space=HOST)

    def transfer(self, value: Value, device: int, keep: str = "") -> Value:
        """A copy of a whole value on ``device``."""
        to = torch.device("cpu") if device == HOST else self.device
        copy = torch.empty_strided(value.tensor.shape, value.tensor.stride(), dtype=value.tensor.dtype, device=to)
        copy.copy_(value.tensor)
        size = footprint(value.tensor)
        vertex = Vertex(
            len(self.vertices), VertexKind.COPY, device, inputs=(value.ref,), sizes=(size,), keep=bool(keep)
        )
        vertex = replace(vertex, source=self.vertices[value.ref[0]].space)
        self.vertices.append(vertex)
        made = Value((vertex.id, 0), copy)
        if keep:
            self.results[keep] = made
        return made

    def graph(self, name: str = "host") -> TaskGraph:
        devices = (Space(0, 1 << 40), Space(HOST, 1 << 40, kind=SpaceKind.HOST))
        return check_taskgraph(TaskGraph(name, devices, tuple(self.vertices), self.ops))


ROWS, WIDTH, LAYERS = 6, 16, 3
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-6, 0.1
SCALE = 0.5
"""A frozen number that gradients are multiplied with on the host."""
UNIT = 64
"""Elements: pieces of an update begin at multiples of it."""


def weights_of() -> list[torch.Tensor]:
    """The weights before the first step, always the same."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(LAYERS)]


def data_of(seed: int) -> torch.Tensor:
    """The input of step ``seed``."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Form:
    """How a step updates. ``head``: with gradients of the step before, which the host has as ``gradients`` says, before
    the forward pass; else each layer behind its gradient. ``pieces``: kernels of one update."""

    head: bool
    pieces: int = 1
    gradients: str = "foreign"


FORMS: Mapping[str, Form] = {
    "tail": Form(False),
    "tail in pieces": Form(False, 4),
    "head": Form(True),
    "head in pieces": Form(True, 2, "host_updated"),
}


@dataclass
class Homes:
    """All that lives over steps on the host. ``before``: gradients of the step before."""

    weights: list[torch.Tensor] = field(default_factory=weights_of)
    means: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)])
    squares: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)])
    counts: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(()) for _ in range(LAYERS)])
    before: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)])
    scale: torch.Tensor = field(default_factory=lambda: torch.tensor(SCALE))
    rate: torch.Tensor = field(default_factory=lambda: torch.tensor(RATE, dtype=torch.float64))
    pages: HostMemory | None = None
    """Page-locked as long as this lives."""

    def all(self) -> list[torch.Tensor]:
        """Of states: weights, means, squares, counts."""
        return [*self.weights, *self.means, *self.squares, *self.counts]

    @classmethod
    def pinned(cls, device: torch.device) -> Homes:
        """In page-locked memory, where ``device`` has memory of its own."""
        homes = cls()
        memory = homes.pages = HostMemory(1 << 16)
        for kind in (homes.weights, homes.means, homes.squares, homes.counts, homes.before):
            kind[:] = [memory.adopt(home) for home in kind]
        if backend_of(device).separate_memory:
            memory.pin(device)
        return homes


def pass_through(weights: Sequence[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The product and the gradients of all weights, eagerly."""
    hidden = [x]
    for weight in weights:
        hidden.append(torch.tanh(torch.mm(hidden[-1], weight)))
    grad, gradients = hidden[-1], []
    for i in reversed(range(len(weights))):
        gradients.append(torch.mm(hidden[i].t(), grad))
        grad = torch.mm(grad, weights[i].t())
    return hidden[-1], gradients[::-1]


class HostTraining:
    """One step as a graph, by ``form``; its kept results are ``y`` and, at the head of a step, gradients ``g<i>``."""

    def __init__(self, form: Form, homes: Homes, device: torch.device) -> None:
        self.form, self.homes, self.b = form, homes, HostBuilder(device=device)
        b = self.b
        self.x = b.input(data_of(0))
        self.weights = [b.state(home) for home in homes.weights]
        self.moments = [
            [b.on_host(b.state, home[i]) for home in (homes.means, homes.squares, homes.counts)] for i in range(LAYERS)
        ]
        self.rate = b.on_host(b.input, homes.rate)
        self.scale = b.on_host(b.weight, homes.scale)
        self.before = []
        if form.head:
            make = b.input if form.gradients == "foreign" else b.host_updated
            self.before = [b.on_host(make, gradient) for gradient in homes.before]
        self.last = list(self.weights)
        self._build()

    def _build(self) -> None:
        b = self.b
        for i, gradient in enumerate(self.before):
            self._update(i, gradient)
        # What the host has changed is read on the device.
        weights = [Value(last.ref, last.tensor.to(b.device)) for last in self.last]
        hidden = [self.x]
        for weight in weights:
            hidden.append(b.call("tanh", b.call("mm", hidden[-1], weight)))
        b.call("clone", hidden[-1], keep="y")
        grad = hidden[-1]
        for i in reversed(range(LAYERS)):
            kept = f"g{i}" if self.form.head else ""
            gradient = b.call("mm", hidden[i].view(lambda t: t.t()), grad, keep=kept)
            grad = b.call("mm", grad, weights[i].view(lambda t: t.t()))
            if not self.form.head:
                self._update(i, b.transfer(gradient, HOST))
        for i, last in enumerate(self.last):
            b.results[f"w{i}"] = last

    def _update(self, i: int, gradient: Value) -> None:
        b = self.b
        scaled = b.on_host(b.call, "mul.Tensor", gradient, self.scale)
        mean, square, count = self.moments[i]
        count = b.on_host(b.call, "add_.Tensor", count, 1, inplace=True)
        weight = Value(self.last[i].ref, self.last[i].tensor.cpu())
        elements = weight.tensor.numel()
        size = -(-elements // self.form.pieces // UNIT) * UNIT
        for begin in range(0, elements, size):
            pieces = [
                value.view(lambda t, begin=begin: t.view(-1)[begin : begin + size])
                for value in (weight, scaled, mean, square)
            ]
            weight, mean, square = self._update_piece(pieces, count, (weight, mean, square))
        self.last[i] = weight

    def _update_piece(self, pieces: list[Value], count: Value, whole: tuple[Value, ...]) -> list[Value]:
        """``pieces`` of weight, gradient, mean and mean square; the new versions of ``whole`` weight, mean, square."""
        weight, gradient, mean, square = pieces
        rates = {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "eps": EPS}
        made = self.b.on_host(
            self.b.call_writing,
            "_fused_adamw_.tensor_lr",
            *([weight], [gradient], [mean], [square], [], [count]),
            written=[weight, mean, square],
            lr=self.rate,
            **rates,
            amsgrad=False,
            maximize=False,
        )
        return [Value(new.ref, value.tensor) for new, value in zip(made, whole, strict=True)]

    def externals(self, seed: int) -> dict[int, torch.Tensor]:
        """What step ``seed`` is given: its data, the rate, gradients of the step before in foreign memory."""
        given = {self.x.ref[0]: data_of(seed).to(self.b.device), self.rate.ref[0]: self.homes.rate}
        if self.before and self.form.gradients == "foreign":
            given |= {value.ref[0]: home for value, home in zip(self.before, self.homes.before, strict=True)}
        return given


class EagerTraining:
    """The same training in plain PyTorch, with its own fused AdamW on the CPU."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form, self.device = form, device
        self.weights = [torch.nn.Parameter(weight) for weight in weights_of()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        self.before = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        """The kept results of ``HostTraining``."""
        if self.form.head:
            self._update(self.before)
        with torch.no_grad():
            y, gradients = pass_through([w.to(self.device) for w in self.weights], data_of(seed).to(self.device))
        if self.form.head:
            self.before = [gradient.cpu() for gradient in gradients]
        else:
            self._update([gradient.cpu() for gradient in gradients])
        return {"y": y} | {f"g{i}": g for i, g in enumerate(gradients) if self.form.head}

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient * SCALE
        self.optimizer.step()

    def homes(self) -> list[torch.Tensor]:
        """As ``Homes.all``."""
        states = [self.optimizer.state[weight] for weight in self.weights]
        kinds = ("exp_avg", "exp_avg_sq", "step")
        return [*(w.detach() for w in self.weights), *(state[kind] for kind in kinds for state in states)]


class HostRun:
    """An executor of a verified plan, beside eager training. ``memory``: of device 0, the ``least`` that the timed
    planner has a plan for, or room for ``all`` values."""

    def __init__(
        self, form: Form, memory: str = "least", options: EngineOptions | None = None, homes: Homes | None = None
    ) -> None:
        self.options = options or EngineOptions()
        device = run_device(self.options.device)
        self.homes, self.eager = homes or Homes(), EagerTraining(form, device)
        self.training = HostTraining(form, self.homes, device)
        self.form, builder = form, self.training.b
        graph = builder.graph()
        self.records = record(graph, device=self.options.device, host_threads=self.options.host_threads)
        graph = apply(graph, self.records)
        # The same plan on any machine, at any time.
        timeless = [replace(v, duration=v.duration and 1e-5) for v in graph.vertices]
        self.graph = replace(graph, vertices=tuple(timeless))
        self.plan = make_plan(self.graph, memory=_bytes(self.graph, memory), planner="timed", cyclic=True)
        verify(replace(self.graph, spaces=self.plan.devices), self.plan)
        self.executor = Executor(
            self.plan,
            graph.ops,
            self.records,
            clean=builder.clean,
            states=builder.states,
            options=self.options,
        )

    def __enter__(self) -> HostRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()

    def begin(self, seed: int) -> None:
        """Start step ``seed`` of the plan alone."""
        self.executor.begin(self.training.externals(seed))

    def step(self, seed: int) -> None:
        """Both do a step; results have the same bits."""
        expected = self.eager.step(seed)
        self.begin(seed)
        self.executor.wait_out()
        self.executor.wait_end()
        results = self.training.b.results
        got = {name: self.executor.value(value.ref, value.spec).clone() for name, value in results.items()}
        for name, want in expected.items():
            assert torch.equal(got[name].cpu(), want.cpu()), name
        for i, weight in enumerate(self.eager.weights):
            assert got[f"w{i}"].is_cpu and torch.equal(got[f"w{i}"], weight), f"w{i}"
        if self.form.head:
            for i, before in enumerate(self.homes.before):
                before.copy_(got[f"g{i}"])

    def assert_homes(self) -> None:
        """They hold what eager training has."""
        for number, (home, want) in enumerate(zip(self.homes.all(), self.eager.homes(), strict=True)):
            assert torch.equal(home, want), number

    def restore(self) -> None:
        """Put what eager training has into all homes."""
        for home, right in zip(self.homes.all(), self.eager.homes(), strict=True):
            home.copy_(right)
        self.executor.restore_states()


def _bytes(graph: TaskGraph, memory: str) -> int:
    if memory == "all":
        return sum(-(-size // 256) * 256 for vertex in graph.vertices for size in vertex.sizes)
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, memory=256, planner="timed", cyclic=True)
    return caught.value.needed
