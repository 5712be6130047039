"""One captured step with its plan and its executor: the object behind each key of the plan table."""

from __future__ import annotations

import enum
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource, ValueBinding
from disco_accel.capture.constants import live_constant
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.step import Forward, capture_forward, capture_step
from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import TaskGraph, TensorArg, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.measure.record import OpRecord, apply, record
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.host_memory import bytes_of
from disco_accel.plan import Machine, make_plan
from disco_accel.plan.plan_cache import PlanCache, plan_fingerprint
from disco_accel.plan.search_work import Work
from disco_accel.plan.summary import cut_short, staying_bytes
from disco_accel.simulate.simulator import Link
from disco_accel.sizes import format_size
from disco_accel.step.budget import Budget, split_budget
from disco_accel.verify.static import verify
from disco_accel.version import __version__

logger = logging.getLogger("disco_accel")


class PlanCacheUse(enum.StrEnum):
    """Where a plan comes from, as ``stats(model)`` says it."""

    HIT = "hit"
    """Read from the cache of plans."""
    MISS = "miss"
    """Made, and stored there."""
    OFF = "off"
    """Made; there is no cache."""


@dataclass(eq=False)
class CompiledStep:
    """A verified plan and what runs it. ``seconds`` holds the time each stage of making it took.

    ``records`` and ``clean`` are what executors are made from, so that benchmarks can run the same plan otherwise.
    """

    captured: CapturedStep
    graph: TaskGraph
    plan: MemGraph
    records: Mapping[int, OpRecord]
    clean: Mapping[int, torch.Tensor]
    budget: Budget
    engine: EngineOptions
    seconds: dict[str, float] = field(default_factory=dict)
    plan_cache: PlanCacheUse = PlanCacheUse.OFF
    loaded: Executor | None = None
    groups: tuple[int, int] = (-1, -1)
    """Of the executor that runs: ``captured.outputs`` and ``captured.gradients``, in their order."""
    parameters: dict[str, torch.nn.Parameter] | None = None
    """The model's trainable parameters by name, looked up at the first run."""

    @property
    def executor(self) -> Executor:
        """The executor that ``load`` made."""
        assert self.loaded is not None
        return self.loaded

    def load(self, arena: torch.Tensor) -> None:
        """Make the executor, in an arena that other plans' executors may share."""
        start = time.perf_counter()
        self.use(self.make_executor(self.engine, arena=arena))
        self.seconds["load"] = time.perf_counter() - start

    def use(self, executor: Executor) -> Executor | None:
        """Run on ``executor`` from now on; returns the one before."""
        before, self.loaded = self.loaded, executor
        outputs, gradients = (
            [(value.ref, value.spec) for value in values] for values in (self.captured.outputs, self.captured.gradients)
        )
        self.groups = executor.add_leaving(outputs), executor.add_leaving(gradients)
        return before

    def make_executor(
        self, options: EngineOptions, *, arena: torch.Tensor | None = None, plan: MemGraph | None = None
    ) -> Executor:
        """An executor of this step's plan, or of another plan of the same graph; the caller closes it."""
        bindings = self.captured.bindings
        return Executor(
            plan or self.plan,
            self.graph.ops,
            self.records,
            clean=self.clean,
            options=options,
            arena=arena,
            names={b.vertex: b.name for b in bindings},
            specs={b.vertex: b.spec for b in bindings},
        )

    def settle(self) -> None:
        """Wait for the end of a forward whose outputs have left already; a step that waits at its gate stays there."""
        if self.loaded is not None and self.loaded.running and not self.captured.gradients:
            self.loaded.wait_end()

    def unload(self) -> None:
        """Free the executor; ``load`` makes another one."""
        if self.loaded is not None:
            self.loaded.close()
            self.loaded = None

    @property
    def compute_seconds(self) -> float:
        """Sum of the kernels' durations, each measured alone."""
        return sum(measured.seconds for measured in self.records.values())

    def copy_bytes(self, kind: VertexKind) -> int:
        """Bytes that OFFLOAD or RELOAD vertices move in one step."""
        return sum(sum(v.sizes) for v in self.plan.vertices if v.kind is kind)

    def bound_seconds(self, bandwidth: float | None) -> float:
        """The step cannot be shorter: max(compute, busier direction of the link)."""
        if bandwidth is None:
            return self.compute_seconds
        link = max(self.copy_bytes(VertexKind.OFFLOAD), self.copy_bytes(VertexKind.RELOAD)) / bandwidth
        return max(self.compute_seconds, link)

    @property
    def resident_bytes(self) -> int:
        """Bytes of frozen weights that never leave the arena; others of a step's start make room and come back."""
        return staying_bytes(self.plan)

    @functools.cached_property
    def externals(self) -> tuple[InputBinding, ...]:
        """Inputs that a forward is given: trainable parameters and the batch."""
        return tuple(self.vertices_of(InputSource.TRAINABLE, InputSource.BATCH))

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the step takes random numbers from the user's generator."""
        return any(call.rng is not None for call in self.graph.ops.values())

    @functools.cached_property
    def row_limits(self) -> dict[str, int]:
        """Name of a tensor of the batch → rows of the smallest table that it looks things up in, as token ids do."""
        names = {b.vertex: b.name for b in self.vertices_of(InputSource.BATCH)}
        limits: dict[str, int] = {}
        for vertex in self.graph.vertices:
            call = self.graph.ops.get(vertex.id)
            if call is None or not op_traits(call.name).row_lookup:
                continue
            table, indices = call.args[:2]
            if isinstance(table, TensorArg) and isinstance(indices, TensorArg):
                name, rows = names.get(vertex.inputs[indices.input][0]), table.spec.shape[0]
                if name is not None:
                    limits[name] = min(rows, limits.get(name, rows))
        return limits

    def frozen_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The frozen weights and buffers of ``model`` that the step reads, and constants that lie on the host.

        Raises:
            CaptureError: a constant has another layout than when the step was captured.
        """
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        return [named[b.name] for b in self.vertices_of(InputSource.FROZEN, InputSource.BUFFER)] + [
            live_constant(self.captured, b) for b in self._host_constants
        ]

    def watched_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """All that the step loads from the host: ``frozen_of`` and tensors that a forward reads from elsewhere, such as
        plain attributes."""
        constants = self.captured.constants.values()
        return [*self.frozen_of(model), *(tensor for tensor in constants if tensor.is_cpu)]

    def moved(self, frozen: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor of ``frozen_of`` the model lies elsewhere than where the plan loads it from."""
        bindings = [*self.vertices_of(InputSource.FROZEN, InputSource.BUFFER), *self._host_constants]
        pairs = zip(bindings, frozen, strict=True)
        return any(self.clean[b.vertex].data_ptr() != tensor.data_ptr() for b, tensor in pairs)

    @functools.cached_property
    def _host_constants(self) -> tuple[InputBinding, ...]:
        constants = self.captured.constants
        return tuple(b for b in self.vertices_of(InputSource.CONSTANT) if constants[b.name].is_cpu)

    def follow(self, model: torch.nn.Module) -> None:
        """Load frozen weights and buffers from where they lie now; ``load`` makes the executor that does so."""
        self.unload()
        self.clean = _host_bytes(model, self.captured)

    def vertices_of(self, *sources: InputSource) -> list[InputBinding]:
        """Inputs of the captured step by what they hold."""
        return [b for b in self.captured.bindings if b.source in sources]


@dataclass(frozen=True)
class CompileOptions:
    """How a step is planned and run; ``memory`` is the whole device budget, ``host_memory`` the host's, in bytes.

    ``plan_seconds``: time for the search, None = as much work as the graph is worth. ``plan_cache``: folder for plans
    of earlier runs; None = always plan. ``say``: told of each stage as it begins.
    ``captured`` is called when the trace is over. ``gather`` puts host tensors that a step loads, and that no
    attribute holds, where it loads them from fast.
    """

    memory: int
    host_memory: int
    planner: str
    policy: str
    engine: EngineOptions
    plan_seconds: float | None = None
    plan_cache: str | None = None
    contexts: Sequence[Callable[[], Any]] = ()
    say: Callable[[str], None] = lambda _: None
    captured: Callable[[], None] = lambda: None
    gather: Callable[[Iterable[torch.Tensor]], None] = lambda _: None


def compile_step(
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    *,
    forward: Callable[..., Any],
    options: CompileOptions,
    outputs: Sequence[str] = ("loss",),
    differentiated: int = 1,
    cut: bool = False,
) -> CompiledStep:
    """Capture, record, plan and verify one training step of ``model`` for batches shaped like ``kwargs``.

    ``outputs``, ``differentiated``: as in ``capture_step``. ``cut``: the user gets outputs without padding, in
    copies of their own.

    Raises:
        CaptureError: an op or module cannot be captured.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets, not arenas.
    """
    began = time.perf_counter()
    device = run_device(options.engine.device)
    captured = capture_step(
        model,
        kwargs,
        forward=forward,
        contexts=options.contexts,
        device=device,
        outputs=outputs,
        differentiated=differentiated,
    )
    options.captured()
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
    return _compile(model, captured, tensors, (1 + cut) * _outputs_bytes(captured), options, began)


def compile_forward(
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    *,
    forward: Forward,
    options: CompileOptions,
    beside: Callable[[CapturedStep], int],
    outside: Callable[[str], bool],
) -> CompiledStep:
    """As ``compile_step``, for what ``forward`` returns without gradients.

    What ``outside`` names is written to memory of the caller's, as in ``capture_forward``. ``beside``: bytes of the
    budget that the caller needs for itself, besides the batch, that memory and a copy of each other output.

    Raises:
        CaptureError: an op or module cannot be captured.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets, not arenas.
    """
    began = time.perf_counter()
    device = run_device(options.engine.device)
    captured = capture_forward(
        model, kwargs, forward=forward, contexts=options.contexts, device=device, outside=outside
    )
    options.captured()
    outputs = sum(leaving_bytes(captured).values()) + beside(captured)
    return _compile(model, captured, batch_tensors(kwargs), outputs, options, began)


def _compile(
    model: torch.nn.Module,
    captured: CapturedStep,
    batch: Mapping[str, torch.Tensor],
    outputs: int,
    options: CompileOptions,
    began: float,
) -> CompiledStep:
    """The rest of ``compile_step``; ``outputs``: bytes outside the arena for what leaves it."""
    clock = [began, time.perf_counter()]
    device = run_device(options.engine.device)
    kernels = len(captured.graph.ops)
    options.say(f"measuring {kernels} kernels")
    records = record(captured.graph, device=options.engine.device, compute_threads=options.engine.compute_threads)
    graph = apply(captured.graph, records)
    clock.append(time.perf_counter())

    trainable = [p for p in model.parameters() if p.requires_grad]
    backend = backend_of(device)
    # Of the thread that measured and of each compute stream.
    workspaces = (1 + options.engine.compute_streams) * backend.workspace_bytes()
    budget = split_budget(options.memory, trainable, batch, workspaces, outputs, rounds=backend.allocates_in_blocks)
    backend.release_memory()
    # A budget that adapters and optimizer state already exceed still gets an answer: what the whole step needs.
    sized = with_memory(graph, max(budget.arena, graph.devices[0].alignment))
    cache = None if options.plan_cache is None else PlanCache(options.plan_cache)
    key = "" if cache is None else _fingerprint(sized, options, device)
    plan = None if cache is None else cache.load(key, sized, cyclic=True)
    cache_use = _cache_use(cache, plan)
    if plan is None:
        options.say(f"planning {kernels} kernels in {format_size(sized.devices[0].memory)}")
        try:
            plan = _make_plan(sized, options)
        except BudgetTooSmall as error:
            raise BudgetTooSmall(budget.total_for(error.needed), budget.total, "memory_budget: the step") from error
    clock.append(time.perf_counter())
    if cache_use is not PlanCacheUse.HIT:
        verify(sized, plan)
        if cache is not None:
            cache.store(key, plan)
    clock.append(time.perf_counter())

    stages = ("capture", "record", "plan", "verify")
    seconds = {name: b - a for name, a, b in zip(stages, clock, clock[1:], strict=False)}
    options.gather(captured.constants.values())
    clean = _host_bytes(model, captured)
    _check_host_memory(options.host_memory, sum(t.numel() for t in clean.values()), plan.host_memory)
    return CompiledStep(captured, graph, plan, records, clean, budget, options.engine, seconds, cache_use)


def _cache_use(cache: PlanCache | None, plan: MemGraph | None) -> PlanCacheUse:
    if cache is None:
        return PlanCacheUse.OFF
    return PlanCacheUse.MISS if plan is None else PlanCacheUse.HIT


def leaving_bytes(captured: CapturedStep) -> dict[str, int]:
    """Name → bytes of the user's copy of each output, or of its memory outside the arena. A loss takes none."""
    outside = (b for b in captured.bindings if b.source is InputSource.OUTSIDE)
    returned: list[ValueBinding | InputBinding] = [*captured.outputs, *outside]
    return {
        o.name: math.prod(o.spec.shape) * getattr(torch, o.spec.dtype).itemsize if o.spec.shape else 0 for o in returned
    }


def _outputs_bytes(captured: CapturedStep) -> int:
    """Bytes outside the arena: the user's copy of each output, and the gradient of those that are differentiated."""
    sizes = leaving_bytes(captured)
    return sum(sizes.values()) + sum(sizes[o.name] for o in captured.outputs[: captured.differentiated])


def with_memory(graph: TaskGraph, memory: int) -> TaskGraph:
    """The graph on devices of ``memory`` bytes each."""
    return replace(graph, devices=tuple(replace(device, memory=memory) for device in graph.devices))


def _make_plan(graph: TaskGraph, options: CompileOptions) -> MemGraph:
    work, machine = Work(options.plan_seconds), machine_of(options.engine)
    plan = make_plan(graph, policy=options.policy, planner=options.planner, cyclic=True, machine=machine, work=work)
    if work.cut:
        logger.warning("%s", cut_short(graph, plan, work, machine))
    return plan


def _fingerprint(graph: TaskGraph, options: CompileOptions, device: torch.device) -> str:
    return plan_fingerprint(
        graph,
        planner=options.planner,
        policy=options.policy,
        plan_seconds=options.plan_seconds,
        cyclic=True,
        machine=machine_of(options.engine),
        environment={
            "torch": torch.__version__,
            "disco_accel": __version__,
            "device": f"{device.type} {backend_of(device).hardware()}",
            "threads": str(options.engine.compute_threads or torch.get_num_threads()),
            "streams": str(options.engine.compute_streams),
        },
    )


def machine_of(engine: EngineOptions) -> Machine | None:
    """The machine that plans are compared on: the throttled link where there is one, else the planner's own."""
    if engine.link_bandwidth is None:
        return None
    link = Link(engine.link_bandwidth, engine.link_latency)
    return Machine(h2d=link, d2h=link)


def _check_host_memory(host_memory: int, weights: int, offloads: int) -> None:
    if weights + offloads > host_memory:
        raise ConfigError(
            f"host_memory: {format_size(host_memory)} is too small; frozen weights take {format_size(weights)} "
            f"and offloaded values {format_size(offloads)}"
        )


def _host_bytes(model: torch.nn.Module, captured: CapturedStep) -> dict[int, torch.Tensor]:
    """INPUT vertex → its bytes on the host, for everything the plan may drop and load again."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    host_bytes = {}
    for binding in captured.bindings:
        if binding.source is InputSource.CONSTANT:
            # One on a device has no elements.
            host_bytes[binding.vertex] = bytes_of(live_constant(captured, binding).detach().cpu())
        elif binding.source in (InputSource.FROZEN, InputSource.BUFFER):
            if binding.name not in named:
                raise CaptureError(f"{binding.name}: captured as a {binding.source}, but the model no longer has it")
            host_bytes[binding.vertex] = bytes_of(named[binding.name].detach())
    return host_bytes


def describe(step: CompiledStep) -> str:
    """One line for the user: what was captured and what the plan does."""
    kernels = sum(v.kind is VertexKind.KERNEL for v in step.graph.vertices)
    weights = sum(sum(v.sizes) for v in step.graph.vertices if host_copy_exists(v))
    return (
        f"captured {kernels} kernels; budget {format_size(step.budget.total)} "
        f"(arena {format_size(step.budget.arena)}); {format_size(step.resident_bytes)} of "
        f"{format_size(weights)} frozen weights stay resident, "
        f"{format_size(step.copy_bytes(VertexKind.RELOAD))} reloaded and "
        f"{format_size(step.copy_bytes(VertexKind.OFFLOAD))} offloaded each step"
    )
