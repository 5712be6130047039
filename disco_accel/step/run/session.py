"""All that is remembered of a prepared model from step to step: its plans, their memory, the step that runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from disco_accel.config.budget_why import budget_why
from disco_accel.config.machine_devices import numbers_on_machine, run_of_launcher
from disco_accel.config.settings import DiscoConfig, Settings, shared_weights_folder
from disco_accel.errors import BudgetTooSmall
from disco_accel.native.backend import backend_of, release_workspaces, run_device
from disco_accel.observe.log_to_stderr import show_messages
from disco_accel.step.budget.engine_memory import EngineMemory
from disco_accel.step.budget.grant_source import shared_grants
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.budget.plan_loader import PlanLoader
from disco_accel.step.budget.unplanned_room import unplanned_room
from disco_accel.step.capture_lock import Gate
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.accumulation import Accumulation, ModelGradients
from disco_accel.step.gradients.gradient_norms import GradientNorms, norms_for_clipping
from disco_accel.step.optimizer_home import (
    OptimizerHome,
    TrainedBytes,
    check_update,
    keeps_masters,
    optimizer_home,
    update_asked,
)
from disco_accel.step.placement.distributed import FrozenSharing
from disco_accel.step.placement.gradient_memory import GradientMemory
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.unplanned import UnplannedMemory
from disco_accel.step.run.arguments import BindArguments, binder_of
from disco_accel.step.run.frontend import Frontend
from disco_accel.step.run.new_shapes import NewShapes
from disco_accel.step.run.one_backward import CastRegions
from disco_accel.step.run.output_usage import UsageByStep
from disco_accel.step.run.reports import Reports, plan_figures
from disco_accel.step.run.verify_steps import StepVerifier
from disco_accel.step.state.side_effects import Effects
from disco_accel.step.state.step_key import StepKey
from disco_accel.step.update.planned_updates import PlannedUpdates
from disco_accel.store.shared_budgets import HostClaims

STATE = "_disco_state"
"""The attribute of a prepared model that holds its session."""


@dataclass(frozen=True)
class _ModelSetup:
    """The config of a model with its meaning on this machine, and where the trained weights, of ``sizes``, are updated.
    ``host_claims`` tells a store of memory held on the host, if there is one to tell."""

    config: DiscoConfig
    settings: Settings
    frontend: Frontend
    device: torch.device
    optimizer: OptimizerHome
    sizes: TrainedBytes
    host_claims: HostClaims | None

    @classmethod
    def of(cls, model: torch.nn.Module, config: DiscoConfig, frontend: Frontend, *, trains: bool) -> _ModelSetup:
        """Of ``model``. Raises ConfigError where a key does not fit the machine."""
        settings = config.resolve()
        first = "".join(f":{index}" for index in settings.gpus[:1])
        device = run_device(settings.device + first)
        claims = HostClaims() if config.host_memory == "shared" else None
        if claims is not None:
            settings = replace(settings, host_memory=min(settings.host_memory, claims.most))
        optimizer = optimizer_home(model, config, settings, device) if trains else OptimizerHome.DEVICE
        if trains:
            check_update(config, optimizer, settings.devices)
        sizes = TrainedBytes.of(model, keeps_masters(config) and trains)
        return cls(config, settings, frontend, device, optimizer, sizes, claims)

    @property
    def host_memory(self) -> int:
        """Bytes that training may take on the host beside fp32 masters and their moments."""
        return self.settings.host_memory - self.sizes.beside

    @property
    def trained_on_host(self) -> bool:
        """Whether the optimizer updates the weights there."""
        return self.optimizer is OptimizerHome.HOST


@dataclass
class _ModelCalls:
    """The memory of a model's calls. ``forward``: the model's own. ``gate``: between forwards that run without a plan
    and captures."""

    forward: Callable[..., Any]
    bind: BindArguments
    gate: Gate
    usage: UsageByStep
    casts: CastRegions
    verifier: StepVerifier
    effects: Effects = field(default_factory=Effects)
    """The side effects of the model's forwards."""
    new_shapes: NewShapes = field(default_factory=NewShapes)
    refused: dict[tuple[Hashable, ...], str] = field(default_factory=dict)
    """Keys for which no plan can be made, with the reasons."""
    too_small: dict[tuple[Hashable, ...], tuple[int, BudgetTooSmall]] = field(default_factory=dict)
    """Keys of forwards without gradients → the largest budget that was too small, in bytes, and the refusal."""
    padded_fields: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Forwards without gradients, in words → fields of their results from which padding cannot be taken."""
    layer_bytes: dict[Hashable, dict[int, int]] = field(default_factory=dict)
    """By rows and capacities of a static cache: bytes of keys and values of each layer that plans have made."""
    parallel: dict[StepKey, str] = field(default_factory=dict)
    """The fastest way on several devices of each step, where ``parallel: auto`` has looked for it."""
    last_fallback: tuple[StepKey, str] | None = None
    """The last step that fell back to eager mode, and the reason: it is known again before anything is tried."""


class Session:
    """All that ``prepare`` keeps for one model. No part of it knows the whole; functions that run a step do."""

    engine: Mapping[str, Any] = MappingProxyType({})
    """Options of the engine that tests and benchmarks set, for steps that are compiled from then on."""

    def __init__(self, model: torch.nn.Module, config: DiscoConfig, frontend: Frontend, *, trains: bool = True) -> None:
        show_messages(config.quiet)
        self.setup = setup = _ModelSetup.of(model, config, frontend, trains=trains)
        self.budget_why = budget_why(config, setup.settings)
        """Of a budget that is not a size, for the user; "" otherwise."""
        self.reports = Reports(model, frontend.observer, config.report_dir, setup.settings.link_bandwidth)
        say_once, made = self.reports.say_once, self.reports.on_plan
        self.memory = EngineMemory(setup.device, setup.settings.gpus, setup.host_claims)
        sharing = FrozenSharing(shared_weights_folder(), say_once) if config.share_weights else None
        trained = setup.sizes.training if trains and not setup.trained_on_host else 0
        unplanned = _unplanned_memory(self, trained)
        on_host = setup.trained_on_host
        self.placement = Placement(model, setup.device, trained_on_host=on_host, sharing=sharing, unplanned=unplanned)
        self.updates = updates = PlannedUpdates(self.memory.plans, say_once, made, setup.host_memory, config.update_on)
        gate, name = Gate(), self.reports.messages.name
        verifier = StepVerifier(config.verify_steps, model.forward, gate, self.memory, self.placement, name)
        self.gradients = _gradients(setup, self.memory, self.reports, verifier, trains=trains)
        self.budgets = _budgets(setup, self.memory)
        self.loader = PlanLoader(self.memory, self.placement, self.gradients.memory, self.budgets, updates)
        casts = CastRegions(model, lambda: updates.waiting, say_once if config.on_unsupported == "eager" else None)
        usage = UsageByStep(frontend.usual_outputs)
        self.calls = _ModelCalls(model.forward, binder_of(model), gate, usage, casts, verifier)
        self.frozen: list[torch.nn.Parameter] | None = None
        """Of a model that has forwards alone, the parameters that ``prepare_frozen`` froze; None if it is trained."""
        self.on_restore: list[Callable[[], None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of a prepared model is an unprepared model: it must never train the original.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

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
            grant.draw_history(Path(folder) / "budget.png")
        self.budgets.close()
        self.memory.close()

    def stats(self) -> dict[str, Any]:
        """Counts, sizes (bytes) and times (seconds)."""
        frontend, claims = self.setup.frontend, self.setup.host_claims
        result: dict[str, Any] = {**self.reports.counts.as_dict(), **frontend.stats(), **self.updates.stats()}
        result |= self.gradients.accumulation.stats() | self.gradients.norms.stats()
        result |= self.placement.stats()
        result["budget_bytes"], result["budget_why"] = self.budgets.grant.total, self.budget_why
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
    setup: _ModelSetup, memory: EngineMemory, reports: Reports, verifier: StepVerifier, *, trains: bool
) -> ModelGradients:
    watched = update_asked(setup.config) != "step"
    gradients = GradientMemory(setup.device, setup.settings.host_memory, watched=watched, masters=setup.sizes.beside)
    norms = GradientNorms(gradients.holds, memory.lock, watched=watched)
    if watched and trains and setup.trained_on_host:
        norms_for_clipping(norms)
    told = reports.say_once, reports.on_plan
    accumulation = Accumulation(gradients, memory.plans, *told, lambda: verifier.active, setup.host_memory)
    return ModelGradients(gradients, norms, accumulation)


def _unplanned_memory(session: Session, trained: int) -> UnplannedMemory:
    """``trained``: bytes of the budget that training takes on the device outside of plans."""
    reference = weakref.ref(session)

    def room(wanted: int) -> int:
        now = reference()
        return 0 if now is None else unplanned_room(now.memory, now.budgets.grant.total, trained, wanted)

    def budget() -> int:
        now = reference()
        return sys.maxsize if now is None else now.budgets.grant.total

    def say(warning: str) -> None:
        now = reference()
        if now is not None:
            now.reports.say_once(warning)

    return UnplannedMemory(session.setup.device, room, budget, say)


def _budgets(setup: _ModelSetup, memory: EngineMemory) -> MovingBudget:
    given, shared = setup.settings.memory_budget, setup.config.memory_budget == "shared"
    source = shared_grants(_machine_devices(setup), run_of_launcher()) if shared else None
    most = None if source is None else source.most()
    return MovingBudget(memory, source, given if most is None else min(given, most), setup.host_memory)


def _machine_devices(setup: _ModelSetup) -> Sequence[int]:
    """Numbers of the devices that steps run on; those of host memory have some of their own, as in a plan."""
    if not backend_of(setup.device).separate_memory:
        return range(setup.settings.devices)
    return numbers_on_machine(setup.settings.gpus or (setup.device.index,))


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
