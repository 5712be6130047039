"""One captured step with its plan and its executor: the object behind each key of the plan table."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource
from disco_accel.capture.constants import live_constant
from disco_accel.capture.leaving_gradients import leaving_by
from disco_accel.capture.parts import beside_weights, named_parts, settle_states
from disco_accel.errors import CaptureError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.execute.varying_kernels import _VaryingPlan
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import Ref, TaskGraph, TensorArg, TensorSpec, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.measure.record import OpRecord
from disco_accel.native.host_memory import bytes_of
from disco_accel.plan import Machine
from disco_accel.plan.bound.larger_memory import larger_memory
from disco_accel.plan.keep_or_recompute import Recomputation
from disco_accel.plan.plan_cache import PlanCacheUse
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.plan.summary import link_bytes, staying_bytes
from disco_accel.simulate.simulator import simulate
from disco_accel.sizes import format_size
from disco_accel.step.compile.boundary import boundary_of, residents_of
from disco_accel.step.compile.budget_parts import Budget, host_memory_parts
from disco_accel.step.compile.pipeline import PlannedStep, PlannerSettings, plan_step
from disco_accel.step.compile.planned_step import _ChoiceOfRows
from disco_accel.step.compile.useful_budgets import gains_of_memory
from disco_accel.step.optimizer_home import TrainedBytes
from disco_accel.step.placement.gradient_memory import GradientMemory, GradientPlaces, LeavingGradient
from disco_accel.step.placement.shard_memory import ShardMemory

PlannedNorms = tuple[tuple[str, ...], Ref, TensorSpec]
"""Names of parameters, the kept value that holds the norms of their gradients one behind the other, and its layout."""


@dataclass(eq=False)
class CompiledStep:
    """A verified plan and its executor. ``seconds`` holds the time each stage of making it took.

    ``graph``: that of ``captured``, without kernels that ``plan`` leaves out. Executors are made from ``records``, of
    all kernels of ``captured``, and ``clean``, so that benchmarks can run the same plan otherwise. ``settings``: of its
    planner, for plans of the same step within other budgets.
    """

    captured: CapturedStep
    graph: TaskGraph
    plan: MemGraph
    records: Mapping[int, OpRecord]
    clean: Mapping[int, torch.Tensor]
    budget: Budget
    engine: EngineOptions
    settings: PlannerSettings
    seconds: dict[str, float] = field(default_factory=dict)
    plan_cache: PlanCacheUse = PlanCacheUse.OFF
    loaded: Executor | None = None
    groups: tuple[int, int] = (-1, -1)
    """Of the executor that runs: ``captured.outputs``, and ``captured.gradients`` that stay on the device, in order."""
    norms: PlannedNorms | None = None
    """Of its gradients, if the plan makes them."""
    shards: ShardMemory | None = None
    """Of weights that devices share."""
    chunked_kernels: int = 0
    """Kernels that run in chunks: sums and products of parts may round otherwise than in one piece."""
    recomputation: Recomputation | None = None
    """The part of it that the plan drops; None: the step repeats nothing."""
    fused: Mapping[int, OpRecord] = field(default_factory=dict)
    """Of fused kernels, which ``graph`` has in the place of kernels of ``captured``."""
    hasty: bool = False
    """Whether a longer search may find a faster plan with such kernels."""
    rows: _ChoiceOfRows | None = None
    """Of weights, which the host may pick; None: there is nothing to choose."""
    at_shortest: Mapping[int, OpRecord] = field(default_factory=dict)
    """Of a forward for several lengths: records at the shortest of the kernels that depend on it."""
    parameters: dict[str, torch.nn.Parameter] | None = None
    """The model's trainable parameters by name, looked up at the first run."""
    runs = 0
    """Steps that have run from this plan. No field: a copy with another plan begins at 0."""

    def with_plan(self, planned: PlannedStep, **fields: Any) -> Self:
        """The same step by another plan, with other ``fields``."""
        own: dict[str, Any] = {"graph": planned.graph, "plan": planned.plan, "budget": planned.budget, "loaded": None}
        own |= {"recomputation": planned.recomputation, "plan_cache": planned.cache_use, "groups": (-1, -1)}
        own |= {"fused": planned.fused, "hasty": planned.hasty}
        own["seconds"] = {"record": self.seconds["record"], **planned.seconds}
        return replace(self, **(own | fields))

    def planned_within(self, total: int, settings: PlannerSettings, elsewhere: PlanningProcess | None = None) -> Self:
        """The same step by the verified plan within another ``total`` budget: with other rows picked on the host,
        where there is a choice. It touches no tensor if all kernels are measured, so that any thread may plan.

        Raises:
            BudgetTooSmall: as ``plan_step``, and VerifyError.
        """
        budget = self.budget.within(total)
        if self.rows is None:
            return self.with_plan(plan_step(self.captured, budget, settings, elsewhere=elsewhere))
        made = self.rows.within(budget, settings, elsewhere)
        assert made.costs is not None
        return self.with_plan(made.planned, captured=made.captured, records=made.costs.records)

    @property
    def settings_beside(self) -> PlannerSettings:
        """Of plans that take turns with this one, and should begin with the same weights in the arena."""
        return replace(self.settings, boundary=boundary_of(self.captured, self.plan))

    @functools.cached_property
    def residents(self) -> Mapping[tuple[str, int], tuple[int, Slot]]:
        """See ``residents_of``."""
        return residents_of(self.captured, self.plan)

    def in_place_after(self, before: CompiledStep) -> list[int]:
        """Inputs that lie, when a step of this plan begins, where ``before`` has the same weight between its steps, and
        that both load from the same bytes."""
        found = []
        for weight, (vertex, slot) in self.residents.items():
            left, place = before.residents.get(weight, (-1, None))
            if place == slot and left in before.clean and vertex in self.clean:
                one, other = before.clean[left], self.clean[vertex]
                if one.data_ptr() == other.data_ptr() and one.numel() == other.numel():
                    found.append(vertex)
        return found

    @property
    def executor(self) -> Executor:
        """The executor that ``load`` made."""
        assert self.loaded is not None
        return self.loaded

    def load(self, arenas: Mapping[int, torch.Tensor]) -> None:
        """Make the executor, in arenas by device that other plans' executors may share."""
        start = time.perf_counter()
        self.use(self.make_executor(self.engine, arenas=arenas))
        self.seconds["load"] = time.perf_counter() - start

    def use(self, executor: Executor) -> Executor | None:
        """Run on ``executor`` from now on; returns the one before."""
        before, self.loaded = self.loaded, executor
        on_device = () if self.trained_on_host else self.captured.gradients
        outputs, gradients = (
            [(value.ref, value.spec) for value in values] for values in (self.captured.outputs, on_device)
        )
        self.groups = executor.add_leaving(outputs), executor.add_leaving(gradients)
        return before

    def make_executor(
        self, options: EngineOptions, *, arenas: Mapping[int, torch.Tensor] | None = None, plan: MemGraph | None = None
    ) -> Executor:
        """An executor of this step's plan, or of another plan of the same graph; the caller closes it."""
        bindings = self.captured.bindings
        if self.budget.has_graphs:
            options = replace(options, graph_bytes=self.budget.graphs)
        return Executor(
            plan or self.plan,
            self.graph.ops,
            {**self.records, **self.fused},
            clean=self.clean,
            options=options,
            arena=arenas,
            names={b.vertex: b.name for b in bindings},
            specs={b.vertex: b.spec for b in bindings},
            varying=self.varying,
        )

    @property
    def varying(self) -> _VaryingPlan | None:
        """The part of the plan that depends on a length. Raises CaptureError as ``_Lengths.found_in``."""
        lengths = self.captured.lengths
        if lengths is None:
            return None
        shortest = {
            kernel: (lengths.calls[first].shortest, self.at_shortest[first])
            for kernel, first in lengths.found_in(self.graph).items()
        }
        inputs = {b.vertex: lengths.inputs[b.name] for b in self.captured.bindings if b.name in lengths.inputs}
        return _VaryingPlan(lengths.between, shortest, inputs)

    @functools.cached_property
    def leaving(self) -> tuple[LeavingGradient, ...]:
        """``captured.gradients``, as they leave where trained weights are on the host."""
        return tuple(LeavingGradient.of(g.name, g.spec) for g in self.captured.gradients)

    @functools.cached_property
    def transfers(self) -> Mapping[Ref, int]:
        """Gradient → the transfer that takes it to the user's memory."""
        return leaving_by(self.captured.graph)

    def gradient_places(self, memory: GradientMemory) -> GradientPlaces:
        """Memory for ``captured.gradients`` of the step that waits at its gate, in their order; none for those that
        have no copy in their own layout. Empty where trained weights are on the device.

        Raises:
            ConfigError: ``host_memory`` is too small for gradients that are held beside these.
        """
        return memory.places(self.leaving, self.bytes_beside_gradients) if self.trained_on_host else []

    def transferred(self, places: GradientPlaces) -> dict[int, torch.Tensor]:
        """By transfer of the plan: the memory that it takes a gradient to."""
        refs = [gradient.ref for gradient in self.captured.gradients]
        found = zip(refs, places, strict=True) if places else ()
        return {self.transfers[ref]: place for ref, place in found if place is not None and ref in self.transfers}

    def gradients(self, memory: GradientMemory, places: GradientPlaces) -> list[torch.Tensor]:
        """``captured.gradients`` as the last step left them, where the trained weights are; on the host they are
        complete, in ``places``."""
        if not self.trained_on_host:
            return self.executor.leave(self.groups[1])
        done: dict[str, torch.Tensor] = {}
        left: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}
        for gradient, place in zip(self.captured.gradients, places, strict=True):
            if place is not None and gradient.ref in self.transfers:
                done[gradient.name] = place
            else:
                left[gradient.name] = place, self.executor.value(gradient.ref, gradient.spec)
        if left:
            done |= zip(left, memory.fill(list(left.values())), strict=True)
        return [done[gradient.name] for gradient in self.captured.gradients]

    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """By name: norms of gradients that the last step has made, on the host."""
        if self.norms is None:
            return {}
        names, ref, spec = self.norms
        values = self.executor.value(ref, spec).to("cpu", copy=True)
        return dict(zip(names, values.unbind(), strict=True))

    def settle(self) -> None:
        """Wait for the end of a forward whose outputs have left already; a step that waits at its gate stays there."""
        if self.loaded is not None and self.loaded.running and not self.captured.gradients:
            self.loaded.wait_end()

    def unload(self) -> None:
        """Free the executor; ``load`` makes another one."""
        if self.loaded is not None:
            self.loaded.close()
            self.loaded = None

    @functools.cached_property
    def compute_seconds(self) -> float:
        """Sum of the durations of the busiest device's kernels, each measured alone."""
        seconds: dict[int, float] = {}
        for vertex in self.graph.vertices:
            record = self.fused.get(vertex.id) or self.records.get(vertex.id)
            if record is not None:
                seconds[vertex.space] = seconds.get(vertex.space, 0.0) + record.seconds
        devices = (device.id for device in self.plan.devices if not device.is_host_device)
        return max((seconds.get(device, 0.0) for device in devices), default=0.0)

    def bound_seconds(self, bandwidth: float | None) -> float:
        """The step cannot be shorter: max(compute, busier direction of the link)."""
        if bandwidth is None:
            return self.compute_seconds
        devices = (device.id for device in self.plan.devices if not device.is_host_device)
        return max(self.compute_seconds, *(max(link_bytes(self.plan, device)) / bandwidth for device in devices))

    @functools.cached_property
    def gains_of_memory(self) -> dict[str, Any]:
        """See there; found when they are asked for."""
        machine = self.settings.machine or Machine()
        fusing = self.settings.fusing
        joined = None if fusing is None else fusing.fused
        larger = larger_memory(self.graph, machine, self.captured.graph, self.settings.recompute, joined)
        loads, _ = link_bytes(self.plan)
        return gains_of_memory(larger, self.budget, loads, simulate(self.plan, machine).makespan)

    @property
    def resident_bytes(self) -> int:
        """Bytes of frozen weights that never leave the arena; others of a step's start make room and come back."""
        return staying_bytes(self.plan)

    @functools.cached_property
    def externals(self) -> tuple[InputBinding, ...]:
        """Inputs that a forward is given: the batch, and trained weights that live on the device."""
        on_device = () if self.trained_on_host else (InputSource.TRAINABLE,)
        return tuple(self.vertices_of(*on_device, InputSource.BATCH))

    @functools.cached_property
    def parts(self) -> int:
        """How many parts of a batch the step works on one by one, and adds up."""
        return max((binding.parts for binding in self.vertices_of(InputSource.BATCH)), default=1)

    @functools.cached_property
    def trained_on_host(self) -> bool:
        """Whether the step loads trained weights from the host, where their optimizer changes them."""
        return bool(_trained_on_host(self.captured))

    @functools.cached_property
    def trained_bytes(self) -> int:
        """Bytes of the trained weights that the step loads from the host."""
        copies = self.captured.copies
        return sum(self.clean[b.vertex].numel() for b in _trained_on_host(self.captured) if b.vertex not in copies)

    def host_bytes(self, plan: MemGraph) -> int:
        """Bytes of host memory that ``plan``, with the inputs of this step, takes."""
        return sum(host_memory_parts(self.graph, plan.host.memory, copies=self.captured.copies).values())

    @property
    def bytes_beside_gradients(self) -> int:
        """Bytes of host memory: weights, moments of those that are trained there, offloaded values."""
        copies = self.captured.copies
        weights = sum(tensor.numel() for vertex, tensor in self.clean.items() if vertex not in copies)
        return weights + TrainedBytes(self.trained_bytes, 0).moments + self.plan.host.memory

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
            if vertex.kind is VertexKind.COPY and vertex.inputs[0][0] in names:
                # The host looks rows up by a copy of the numbers.
                names[vertex.id] = names[vertex.inputs[0][0]]
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
        """``lasting_weights`` of ``model`` that the step reads, and constants that lie on the host.

        Raises:
            CaptureError: a constant has another layout than when the step was captured.
        """
        settle_states(model)
        named = {part.name: part.tensor for part in named_parts(model, remove_duplicate=False)}
        return [named[b.name] for b in self.captured.lasting_weights] + [
            live_constant(self.captured, b) for b in self._host_constants
        ]

    def watched_of(self, model: torch.nn.Module, frozen: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All that the step loads from the host: ``frozen``, which ``frozen_of`` has found, and tensors that a forward
        reads from elsewhere, such as plain attributes, or other views of a weight's bytes."""
        others = [*self.captured.constants.values(), *beside_weights(model)]
        # Several devices may load one.
        watched = {id(tensor): tensor for tensor in frozen}
        watched |= {id(tensor): tensor for tensor in others if tensor.is_cpu and id(tensor) not in watched}
        return list(watched.values())

    def trained_moved(self, model: torch.nn.Module) -> bool:
        """Whether a trained weight lies elsewhere than where the plan loads it from."""
        if not self.trained_on_host:
            return False
        named = self.parameters or dict(model.named_parameters())
        bindings = self.vertices_of(InputSource.TRAINABLE)
        with torch._C.DisableTorchFunctionSubclass():
            return any(self.clean[b.vertex].data_ptr() != named[b.name].data_ptr() for b in bindings)

    def moved(self, frozen: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor of ``frozen_of`` the model lies elsewhere than where the plan loads it from."""
        bindings = [*self.captured.lasting_weights, *self._host_constants]
        return any(self._elsewhere(b, tensor) for b, tensor in zip(bindings, frozen, strict=True))

    def _elsewhere(self, binding: InputBinding, tensor: torch.Tensor) -> bool:
        place = self.clean[binding.vertex].data_ptr()
        if binding.parts > 1:
            assert self.shards is not None
            return self.shards.moved(binding, tensor, place)
        return tensor.data_ptr() != place

    @functools.cached_property
    def _host_constants(self) -> tuple[InputBinding, ...]:
        constants = self.captured.constants
        return tuple(b for b in self.vertices_of(InputSource.CONSTANT) if constants[b.name].is_cpu)

    def follow(self, model: torch.nn.Module) -> None:
        """Load weights and buffers from where they lie now; ``load`` makes the executor that does so."""
        self.unload()
        self.clean = host_bytes(model, self.captured, self.shards)

    def vertices_of(self, *sources: InputSource) -> list[InputBinding]:
        """Inputs of the captured step by their sources."""
        return [b for b in self.captured.bindings if b.source in sources]


def host_bytes(
    model: torch.nn.Module, captured: CapturedStep, shards: ShardMemory | None = None
) -> dict[int, torch.Tensor]:
    """INPUT vertex → its bytes on the host, for everything the plan may drop and load again. ``shards`` has those of
    parts of weights."""
    named = {part.name: part.tensor for part in named_parts(model, remove_duplicate=False)}
    host_bytes = {}
    trained = _trained_on_host(captured)
    cut = shared_weights(captured)
    if shards is not None:
        shards.keep([binding for binding in cut if binding.name in named], named)
    for binding in captured.bindings:
        if binding.source is InputSource.CONSTANT:
            # One on a device has no elements.
            host_bytes[binding.vertex] = bytes_of(live_constant(captured, binding).detach().cpu())
        elif binding.source in (InputSource.FROZEN, InputSource.BUFFER) or binding in trained:
            if binding.name not in named:
                raise CaptureError(f"{binding.name}: captured as a {binding.source}, but the model no longer has it")
            weight = named[binding.name].detach()
            if shards is not None and binding in cut:
                host_bytes[binding.vertex] = shards.bytes_of(binding, weight)
            else:
                host_bytes[binding.vertex] = bytes_of(weight)
    return host_bytes


def shared_weights(captured: CapturedStep) -> list[InputBinding]:
    """Inputs that are parts of a weight."""
    sources = InputSource.FROZEN, InputSource.BUFFER
    return [binding for binding in captured.bindings if binding.parts > 1 and binding.source in sources]


def _trained_on_host(captured: CapturedStep) -> list[InputBinding]:
    """Inputs that hold trained weights of which the host has the bytes."""
    on_host = {v.id for v in captured.graph.vertices if host_copy_exists(v)}
    return [b for b in captured.bindings if b.source is InputSource.TRAINABLE and b.vertex in on_host]


def describe(step: CompiledStep) -> str:
    """One line for the user: the size of the capture, and the copies of the plan."""
    kernels = sum(v.kind is VertexKind.KERNEL for v in step.graph.vertices)
    bound = {binding.vertex for binding in step.captured.bindings}
    weights = sum(sum(v.sizes) for v in step.graph.vertices if host_copy_exists(v) and v.id in bound)
    loaded, saved = link_bytes(step.plan)
    which = "weights" if step.trained_on_host else "frozen weights"
    return (
        f"captured {kernels} kernels; budget {format_size(step.budget.total)} "
        f"(arena {format_size(step.budget.arena)}); {format_size(step.resident_bytes)} of "
        f"{format_size(weights)} {which} stay resident, "
        f"{format_size(loaded)} reloaded and {format_size(saved)} offloaded each step"
        f"{'' if step.recomputation is None else step.recomputation.text}"
    )
