"""All that is remembered of a prepared model from step to step: its plans, their memory, the step that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from disco_accel.config.machine_devices import numbers_on_machine, run_of_launcher
from disco_accel.config.settings import DiscoConfig, shared_weights_folder
from disco_accel.native.backend import backend_of, release_workspaces
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.observe.log_to_stderr import show_messages
from disco_accel.step.budget.engine_memory import EngineMemory
from disco_accel.step.budget.grant_source import GivenBudget, shared_grants
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.budget.plan_loader import PlanLoader
from disco_accel.step.capture_lock import Gate
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import PlanCheck
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.gradients.accumulation import Accumulation
from disco_accel.step.gradients.clipping_norms import norms_for_clipping
from disco_accel.step.gradients.gradient_norms import GradientNorms
from disco_accel.step.gradients.model_gradients import ModelGradients
from disco_accel.step.optimizer_home import update_asked
from disco_accel.step.placement.gradient_memory import GradientMemory
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.shared_frozen import FrozenSharing
from disco_accel.step.run.arguments import Arguments, signature_of
from disco_accel.step.run.cast_regions import CastRegions
from disco_accel.step.run.frontend import Frontend
from disco_accel.step.run.last_fallback import LastFallback
from disco_accel.step.run.model_calls import ModelCalls
from disco_accel.step.run.model_setup import ModelSetup
from disco_accel.step.run.output_usage import UsageByStep
from disco_accel.step.run.reports import Reports
from disco_accel.step.run.shared_batches import SharedBatches
from disco_accel.step.run.step_compiler import StepCompiler
from disco_accel.step.run.step_stats import plan_figures
from disco_accel.step.run.verify_steps import StepVerifier
from disco_accel.step.update.planned_updates import PlannedUpdates

STATE = "_disco_state"
"""The attribute of a prepared model that holds its session."""


class Session:
    """All that ``prepare`` keeps for one model. Its parts know each other where they need to, and none of them this."""

    def __init__(self, model: torch.nn.Module, config: DiscoConfig, frontend: Frontend, *, trains: bool = True) -> None:
        show_messages(config.quiet)
        self.setup = setup = ModelSetup.of(model, config, frontend, trains=trains)
        self.reports = Reports(model, frontend, config.report_dir, setup.settings.link_bandwidth)
        say_once = self.reports.say_once
        self.memory = EngineMemory(setup.device, setup.settings.gpus, setup.host_claims)
        sharing = FrozenSharing(shared_weights_folder(), say_once) if config.share_weights else None
        self.placement = Placement(model, setup.device, trained_on_host=setup.trained_on_host, sharing=sharing)
        verifier = StepVerifier(config.verify_steps)
        told = say_once, self.reports.observers.on_plan
        self.updates = PlannedUpdates(self.memory.plans, *told, setup.host_memory, config.update_on)
        self.gradients = _gradients(setup, self.memory, self.reports, verifier, trains=trains)
        self.budgets = _budgets(setup, self.memory)
        self.loader = PlanLoader(self.memory, self.placement, self.gradients.memory, self.budgets, self.updates)
        gates = functools.partial(_gates, self.placement)
        self.compiler = compiler = StepCompiler(
            setup,
            model.forward,
            self.placement,
            self.loader,
            self.memory,
            self.budgets,
            self.updates,
            self.reports,
            gates,
        )

        def fastest(model: torch.nn.Module, fitted: FittedBatch, check: PlanCheck) -> CompiledStep:
            return compiler.compiled(model, fitted, ("loss",), check=check)

        updates = self.updates
        self.calls = ModelCalls(
            model.forward,
            Arguments(signature_of(model)),
            Gate(),
            UsageByStep(frontend.usual_outputs),
            LastFallback(),
            CastRegions(model, lambda: updates.waiting, say_once if config.on_unsupported == "eager" else None),
            SharedBatches(config, setup.settings.devices, frontend, fastest, say_once),
            verifier,
        )
        self.frozen_for_prefill: list[torch.nn.Parameter] | None = None
        """What ``prepare_frozen`` froze; None in training."""
        self.on_restore: list[Callable[[], None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of a prepared model is an unprepared model: it must never train the original.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())

    def with_more(self, model: torch.nn.Module, step: CompiledStep) -> CompiledStep:
        """``step``, or where an update of the weights is put off, the step that begins with it; where gradients are
        there, the step that adds to them."""
        norms = self.gradients.norms
        with typed_out_of_memory("preparing the update"):
            what = "the same step with the update of its weights at its head"
            making, wanted = functools.partial(self.reports.messages.making, what), norms.wanted
            updated = self.updates.step_for(model, step, making, wanted)
            if updated is not step:
                self.budgets.plan_sets.note_kind(updated)
                return updated
            what = "the same step, which adds to the gradients in .grad"
            making = functools.partial(self.reports.messages.making, what)
            likely = wanted or (norms.possible and not self.updates.seen)
            more = self.gradients.accumulation.step_for(step, making, likely)
            if more is not step:
                self.budgets.plan_sets.note_kind(more)
            return more

    def report(self, step: CompiledStep) -> None:
        """Write plan, trace, numbers and picture of the step that just ran into ``report_dir``."""
        self.reports.write(step, self.stats())

    def close(self) -> None:
        """Free all that the engine holds; the session is over."""
        self.memory.unload()
        self.gradients.memory.release()
        release_workspaces(self.memory.device)
        grant, folder = self.budgets.grant, self.setup.config.report_dir
        if grant.moving and folder is not None:
            grant.history.draw(Path(folder) / "budget.png", grant.moves)
        self.budgets.close()
        self.memory.close()

    def stats(self) -> dict[str, Any]:
        """Counts, sizes (bytes) and times (seconds)."""
        frontend, claims = self.setup.frontend, self.setup.host_claims
        result: dict[str, Any] = {**self.reports.counts.as_dict(), **frontend.stats(), **self.updates.stats()}
        result |= self.gradients.accumulation.stats() | self.gradients.norms.stats()
        result["budget_bytes"] = self.budgets.grant.total
        result |= self.budgets.stats()
        if claims is not None:
            result["host_held_bytes"] = claims.held
        step = self.memory.current
        # One that has given its memory back, in another thread, has no figures until the next step.
        if step is not None and step.loaded is not None:
            step.settle()
            result |= plan_figures(step, self.setup.settings.link_bandwidth)
        return result


def _gradients(
    setup: ModelSetup, memory: EngineMemory, reports: Reports, verifier: StepVerifier, *, trains: bool
) -> ModelGradients:
    watched = update_asked(setup.config) != "step"
    gradients = GradientMemory(setup.device, setup.settings.host_memory, watched=watched, masters=setup.sizes.beside)
    norms = GradientNorms(gradients.holds, memory.lock, watched=watched)
    if watched and trains and setup.trained_on_host:
        norms_for_clipping(norms)
    told = reports.say_once, reports.observers.on_plan
    accumulation = Accumulation(gradients, memory.plans, *told, lambda: verifier.active, setup.host_memory)
    return ModelGradients(gradients, norms, accumulation)


def _budgets(setup: ModelSetup, memory: EngineMemory) -> MovingBudget:
    given, shared = setup.settings.memory_budget, setup.config.memory_budget == "shared"
    source = shared_grants(_machine_devices(setup), run_of_launcher()) if shared else GivenBudget(given)
    most = source.most()
    return MovingBudget(memory, source, given if most is None else min(given, most), setup.host_memory)


def _machine_devices(setup: ModelSetup) -> Sequence[int]:
    """Numbers of the devices that steps run on; those of host memory have some of their own, as in a plan."""
    if not backend_of(setup.device).separate_memory:
        return range(setup.settings.devices)
    return numbers_on_machine(setup.settings.gpus or (setup.device.index,))


def _gates(placement: Placement) -> list[Gate]:
    model = placement.model
    states = [m.__dict__[STATE] for m in model.modules() if STATE in m.__dict__] if model is not None else []
    return [state.calls.gate for state in states]


def _nothing() -> None:
    return None


def find_state(model: torch.nn.Module) -> Session | None:
    """The state of ``model`` or of the module that DDP, ``torch.compile`` or another wrapper holds."""
    module = model
    while True:
        state: Session | None = module.__dict__.get(STATE)
        if state is not None:
            return state
        inner = module._modules.get("module", module._modules.get("_orig_mod"))
        if inner is None:
            return None
        module = inner


def current_step(model: torch.nn.Module) -> CompiledStep | None:
    """The captured step, plan and executor behind the last planned step of ``model``; None before the first."""
    state = find_state(model)
    return None if state is None else state.memory.current
