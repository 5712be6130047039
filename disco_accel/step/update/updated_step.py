"""The plan of a step that begins with an update, made from the compiled step that it is without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from disco_accel.capture.captured_step import InputSource
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.execute.planned_states import planned_states
from disco_accel.graph.check import after_gate
from disco_accel.graph.memgraph import MemGraph
from disco_accel.measure.record import measurements
from disco_accel.native.host_memory import bytes_of
from disco_accel.plan import Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.pipeline import PlannedStep, plan_if_it_fits
from disco_accel.step.gradients.extended_step import ExtendedStep
from disco_accel.step.update.pending_update import Changed, PendingUpdate
from disco_accel.step.update.update_choice import UpdateChoice
from disco_accel.step.update.update_pass import UpdatedStep


@dataclass(eq=False, kw_only=True)
class StepWithUpdate(CompiledStep):
    """A compiled step whose plan begins with an update. ``plain``: the same step without one, for running it again.
    ``homes``: weight, moments and master of each part of the update, whose memory the executor works in; no gradient,
    whose memory the next one may take."""

    plain: CompiledStep
    updated: UpdatedStep
    homes: tuple[Changed, ...]

    def given(self, pending: PendingUpdate) -> dict[int, torch.Tensor]:
        """Tensors that the kernels of the update are given in each step, by INPUT."""
        return self.updated.foreign(pending.parts)

    def use_memory_of(self, pending: PendingUpdate) -> None:
        """Let the executor, or the next one, keep weights and moments where ``pending`` has them."""
        homes = tuple(part.changed for part in pending.parts)
        if list(map(_addresses, homes)) != list(map(_addresses, self.homes)):
            self.unload()
        self.homes = homes

    def make_executor(
        self, options: EngineOptions, *, arenas: Mapping[int, torch.Tensor] | None = None, plan: MemGraph | None = None
    ) -> Executor:
        """As ``CompiledStep.make_executor``, with homes for weights and moments."""
        states = {vertex: bytes_of(tensor) for vertex, tensor in self.updated.states(self.homes).items()}
        return Executor(
            plan or self.plan,
            self.graph.ops,
            {**self.records, **self.fused},
            clean={vertex: tensor for vertex, tensor in self.clean.items() if vertex not in states},
            states=states,
            options=options,
            arena=arenas,
            names=self._names(),
            specs={b.vertex: b.spec for b in self.captured.bindings},
        )

    def finish(self, pending: PendingUpdate) -> None:
        """Do the rest of ``pending`` that the last step, which has ended early, has left."""
        at_home = self.executor.bring_home()
        with torch.no_grad():
            for kernel in self.updated.left(self.executor.ops_run_on_host(), at_home):
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
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.data_ptr() for tensor in tensors)


def step_with_update(
    model: torch.nn.Module,
    plain: CompiledStep,
    pending: PendingUpdate,
    host_memory: int,
    say: Callable[[str], None],
    update_on: str,
    more: ExtendedStep,
) -> StepWithUpdate | None:
    """Return the plan of ``plain``, a step of ``model``, with ``pending`` at its head; None if the step does not load
    all of its weights, or has too little memory for it. ``host_memory``: bytes that training may take on the host;
    ``say`` hears of the stages. ``update_on``: as in the config. ``more``: ``plain`` as it was captured, perhaps with
    norms."""
    weights = _weights_of(model, plain, pending)
    if weights is None:
        return None
    began = time.perf_counter()
    updates = UpdateChoice.of(plain.engine, plain.graph, weights, pending.parts)
    updated = updates.placed()
    say(f"measuring {len(updated.kernels)} updates")
    updates.records(updated)
    machine = plain.settings.machine or Machine()
    choices = updates.choices(update_on, machine)
    # The choice is made for the kernels that the plain plan runs; which of all there are to run is decided anew.
    updates = replace(updates, graph=more.captured.graph)
    recorded = time.perf_counter()
    best: tuple[float, UpdatedStep, ExtendedStep, PlannedStep] | None = None
    for on_device, arena in choices:
        updated = updates.placed(on_device)
        records = updates.records(updated)
        graph = measurements(records).run(updated.graph)
        say(f"planning {len(graph.ops)} kernels, {len(updated.kernels)} of them updates")
        captured = more.captured.rewritten("updates", "of the weights, at the step's head", graph)
        step = replace(more, captured=captured, records={**more.records, **records})
        planned = plan_if_it_fits(captured, plain.budget.with_arena(arena), plain.settings_beside)
        if planned is None or plain.host_bytes(planned.plan) > host_memory:
            continue
        seconds = simulate(planned.plan, machine).makespan if len(choices) > 1 else 0.0
        if home_by_gate(planned.plan) and (best is None or seconds < best[0]):
            best = seconds, updated, step, planned
        if best is not None and update_on != "auto":
            break
    if best is None:
        return None
    _, updated, step, planned = best
    own = step.step_fields(plain, planned, began, recorded)
    return StepWithUpdate(**own, plain=plain, updated=updated, homes=tuple(part.changed for part in pending.parts))


def home_by_gate(plan: MemGraph) -> bool:
    """Whether all that a device updates is home when the forward's outputs are handed out: the caller, who may look at
    weights then, finds them updated, and the watch over them begins."""
    states = planned_states(plan)
    late = after_gate(plan.vertices, (*plan.data_edges, *plan.memory_edges))
    return not any(states.stores(vertex) and vertex.id in late for vertex in plan.vertices)


def _weights_of(model: torch.nn.Module, plain: CompiledStep, pending: PendingUpdate) -> list[int] | None:
    """The INPUT of each parameter that is updated; None if one has none, or several, as on several devices: each would
    have to wait for the update."""
    named = dict(model.named_parameters())
    trained = plain.vertices_of(InputSource.TRAINABLE)
    by_id = {id(named[b.name]): b.vertex for b in trained}
    if len(by_id) < len(trained):
        return None
    weights = [by_id.get(id(part.parameter)) for part in pending.parts]
    return None if None in weights else [weight for weight in weights if weight is not None]
