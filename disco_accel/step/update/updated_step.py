"""The plan of a step that begins with an update, made from the compiled step that it is without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from disco_accel.capture.captured_step import InputSource
from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import run_passes
from disco_accel.measure.record import measurements, record
from disco_accel.native.host_memory import bytes_of
from disco_accel.step.compiled_step import CompiledStep
from disco_accel.step.memory_parts import host_memory_parts
from disco_accel.step.pipeline import PlannerSettings, PlanStore, replan
from disco_accel.step.update.pending_update import Changed, PendingUpdate
from disco_accel.step.update.update_pass import UpdatedStep, samples, with_updates


@dataclass(eq=False, kw_only=True)
class StepWithUpdate(CompiledStep):
    """A compiled step whose plan begins with an update. ``plain``: the same step without one, for running it again.
    ``homes``: weight, moments and master of each part of the update, whose memory the executor works in; no gradient,
    whose memory the next one may take."""

    plain: CompiledStep
    updated: UpdatedStep
    homes: tuple[Changed, ...]

    def given(self, pending: PendingUpdate) -> dict[int, torch.Tensor]:
        """What the kernels of the update are given in each step, by INPUT."""
        return self.updated.foreign(pending.parts)

    def use_memory_of(self, pending: PendingUpdate) -> None:
        """Let the executor, or the next one, keep weights and moments where ``pending`` has them."""
        homes = tuple(part.changed for part in pending.parts)
        if list(map(_addresses, homes)) != list(map(_addresses, self.homes)):
            self.unload()
        self.homes = homes

    def make_executor(
        self, options: EngineOptions, *, arena: torch.Tensor | None = None, plan: MemGraph | None = None
    ) -> Executor:
        """As ``CompiledStep.make_executor``, with homes for weights and moments."""
        states = {vertex: bytes_of(tensor) for vertex, tensor in self.updated.states(self.homes).items()}
        return Executor(
            plan or self.plan,
            self.graph.ops,
            self.records,
            clean={vertex: tensor for vertex, tensor in self.clean.items() if vertex not in states},
            states=states,
            options=options,
            arena=None if arena is None else {self.graph.devices[0].id: arena},
            names=self._names(),
            specs={b.vertex: b.spec for b in self.captured.bindings},
        )

    def finish(self, pending: PendingUpdate, done: int) -> None:
        """Do what is left of ``pending`` when ``done`` of its kernels have run."""
        with torch.no_grad():
            for kernel in self.updated.kernels[done:]:
                kernel.run(pending.parts[kernel.part])

    def _names(self) -> dict[int, str]:
        names = {b.vertex: b.name for b in self.captured.bindings}
        for inputs in self.updated.inputs:
            weight = names[inputs.weight]
            names[inputs.exp_avg], names[inputs.exp_avg_sq] = f"exp_avg of {weight}", f"exp_avg_sq of {weight}"
            names[inputs.gradient] = f"the gradient of {weight}"
            if inputs.master is not None:
                names[inputs.master] = f"the fp32 master of {weight}"
        return names


def _addresses(tensors: Changed) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def step_with_update(
    model: torch.nn.Module,
    plain: CompiledStep,
    pending: PendingUpdate,
    settings: PlannerSettings,
    store: PlanStore | None,
    host_memory: int,
    say: Callable[[str], None],
) -> StepWithUpdate | None:
    """Return the plan of ``plain``, a step of ``model``, with ``pending`` at its head; None if the step does not load
    all of its weights, or has too little memory for it. ``store``: of plans; ``host_memory``: bytes that
    training may take on the host; ``say`` hears of the stages."""
    weights = _weights_of(model, plain, pending)
    if weights is None:
        return None
    began = time.perf_counter()
    updated = with_updates(plain.graph, weights, pending.parts)
    say(f"measuring {len(updated.kernels)} updates")
    sample, stands_for = samples(updated)
    measured = record(sample, device="cpu", host_threads=plain.engine.host_threads)
    records = {kernel: measured[stand_in] for kernel, stand_in in stands_for.items()}
    graph = run_passes(updated.graph, [measurements(records)])
    recorded = time.perf_counter()
    say(f"planning {len(graph.ops)} kernels, {len(updated.kernels)} of them updates")
    try:
        plan = replan(graph, graph.devices[0].memory, settings, store)
    except BudgetTooSmall:
        return None
    if sum(host_memory_parts(plain.graph, plan.host_memory).values()) > host_memory:
        return None
    own = {field.name: getattr(plain, field.name) for field in fields(CompiledStep)}
    own |= {
        "graph": graph,
        "plan": plan,
        "records": {**plain.records, **records},
        "seconds": {"record": recorded - began, "plan": time.perf_counter() - recorded},
        "loaded": None,
        "groups": (-1, -1),
    }
    return StepWithUpdate(
        **own, plain=plain, updated=replace(updated, graph=graph), homes=tuple(part.changed for part in pending.parts)
    )


def _weights_of(model: torch.nn.Module, plain: CompiledStep, pending: PendingUpdate) -> list[int] | None:
    """The INPUT of each parameter that is updated."""
    named = dict(model.named_parameters())
    by_id = {id(named[b.name]): b.vertex for b in plain.vertices_of(InputSource.TRAINABLE)}
    weights = [by_id.get(id(part.parameter)) for part in pending.parts]
    return None if None in weights else [weight for weight in weights if weight is not None]
