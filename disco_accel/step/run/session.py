"""All that is remembered of a prepared model from step to step: its plans, their memory, the step that runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from disco_accel.capture.waiting_modules import modules_wait
from disco_accel.config.machine_devices import numbers_on_machine, run_of_launcher
from disco_accel.config.settings import DiscoConfig, shared_weights_folder
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.execute.engine_options import threads_beside
from disco_accel.execute.executor import EngineOptions
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.traits import FOREIGN, RENEWED
from disco_accel.native.backend import backend_of, release_workspaces, run_device
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.observe.log_to_stderr import show_messages
from disco_accel.observe.report import write_report
from disco_accel.shortage import met_shortage
from disco_accel.sizes import format_size
from disco_accel.step.budget.grant_source import GivenBudget, shared_grants
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.budget.plan_memory import PlanKey, PlanMemory
from disco_accel.step.capture_lock import Gate, capturing
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import CompileOptions, compile_step, machine_of, plan_store
from disco_accel.step.compile.device_check import require_self_check
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.compile.memory_parts import require_host_memory
from disco_accel.step.compile.pipeline import PlannerSettings
from disco_accel.step.dynamo import compiled_note
from disco_accel.step.gradients.accumulation import Accumulation
from disco_accel.step.gradients.clipping_norms import norms_for_clipping
from disco_accel.step.gradients.gradient_norms import GradientNorms
from disco_accel.step.optimizer_home import (
    OptimizerHome,
    TrainedBytes,
    check_update,
    keeps_masters,
    optimizer_home,
    update_asked,
)
from disco_accel.step.placement.gradient_memory import GradientMemory
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.shard_memory import ShardMemory
from disco_accel.step.placement.shared_frozen import FrozenSharing
from disco_accel.step.run.arguments import Arguments, signature_of
from disco_accel.step.run.cast_regions import CastRegions
from disco_accel.step.run.frontend import ContextFactory, Frontend
from disco_accel.step.run.last_fallback import LastFallback
from disco_accel.step.run.observer import Observers
from disco_accel.step.run.output_usage import Outputs, UsageByStep
from disco_accel.step.run.progress_messages import ProgressMessages, batch_text
from disco_accel.step.run.shared_batches import SharedBatches
from disco_accel.step.run.step_stats import RunCounts, plan_figures
from disco_accel.step.run.verify_steps import StepVerifier
from disco_accel.step.state.side_effects import Effects
from disco_accel.step.state.step_key import StepKey, model_state, step_key
from disco_accel.step.update.planned_updates import PlannedUpdates
from disco_accel.store.shared_budgets import HostClaims

logger = logging.getLogger("disco_accel")

STATE = "_disco_state"
"""The attribute of a prepared model that holds its session."""
_WARM_STEPS = 2


class Session(PlanMemory):
    """All that ``prepare`` keeps for one model: its original forward, host weights, plans and the pending step."""

    def __init__(self, model: torch.nn.Module, config: DiscoConfig, frontend: Frontend, *, trains: bool = True) -> None:
        show_messages(config.quiet)
        self.config, self.frontend = config, frontend
        self.settings = config.resolve()
        first = "".join(f":{index}" for index in self.settings.gpus[:1])
        super().__init__(run_device(self.settings.device + first), self.settings.gpus)
        if config.host_memory == "shared":
            self.host_claims = HostClaims()
            there = min(self.settings.host_memory, self.host_claims.most)
            self.settings = replace(self.settings, host_memory=there)
        self.optimizer = optimizer_home(model, config, self.settings, self.device) if trains else OptimizerHome.DEVICE
        if trains:
            check_update(config, self.optimizer, self.settings.devices)
        sizes = TrainedBytes.of(model, keeps_masters(config) and trains)
        self.rounded = sizes.rounded
        """Bytes of the weights that have fp32 masters."""
        self._beside = sizes.beside
        sharing = FrozenSharing(shared_weights_folder(), self.say_once) if config.share_weights else None
        on_host = self.optimizer is OptimizerHome.HOST
        self.placement = Placement(model, self.device, trained_on_host=on_host, sharing=sharing)
        watched = update_asked(config) != "step"
        host_memory = self.settings.host_memory
        self.gradients = GradientMemory(self.device, host_memory, watched=watched, masters=sizes.beside)
        self.norms = GradientNorms(self.gradients.holds, self.lock, watched=watched)
        if watched and trains and self.optimizer is OptimizerHome.HOST:
            norms_for_clipping(self.norms)
        self.original_forward = model.forward
        self.arguments = Arguments(signature_of(model))
        self._refused: dict[PlanKey, str] = {}
        self.effects = Effects()
        self.last_fallback = LastFallback()
        self.usage = UsageByStep(frontend.usual_outputs)
        self.gate = Gate()
        self._said: set[str] = set()
        self.frozen_for_prefill: list[torch.nn.Parameter] | None = None
        """What ``prepare_frozen`` froze; None in training."""
        self._reports_left = 1 if config.report_dir is not None else 0
        self.messages = ProgressMessages(model, self.settings.link_bandwidth)
        self.counts = RunCounts()
        self.batches = SharedBatches(
            config,
            self.settings.devices,
            frontend,
            lambda model, fitted, below: self.compiled(model, fitted, ("loss",), below=below),
            self.say_once,
        )
        self.observers = Observers(self.counts, self.messages, frontend.observer(self.counts))
        self.verifier = verifier = StepVerifier(config.verify_steps)
        host_memory = self.settings.host_memory - sizes.beside
        told = self.say_once, self.observers.on_plan
        self.accumulation = Accumulation(self.gradients, self.plans, *told, lambda: verifier.active, host_memory)
        self.on_restore: list[Callable[[], None]] = []
        given = self.settings.memory_budget
        shared = config.memory_budget == "shared"
        source = shared_grants(self._machine_devices(), run_of_launcher()) if shared else GivenBudget(given)
        most = source.most()
        self.budgets = MovingBudget(self, source, given if most is None else min(given, most), host_memory)
        self.updates = PlannedUpdates(self.plans, *told, host_memory, config.update_on)
        may_tell = self.say_once if config.on_unsupported == "eager" else None
        self.casts = CastRegions(model, lambda: self.updates.waiting, may_tell)

    def _machine_devices(self) -> Sequence[int]:
        """Numbers of the devices that steps run on; those of host memory have some of their own, as in a plan."""
        if not backend_of(self.device).separate_memory:
            return range(self.settings.devices)
        return numbers_on_machine(self.settings.gpus or (self.device.index,))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of a prepared model is an unprepared model: it must never train the original.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())

    def compiled(
        self,
        model: torch.nn.Module,
        fitted: FittedBatch,
        outputs: Outputs,
        known_key: StepKey | None = None,
        differentiated: int = 1,
        below: float = float("inf"),
    ) -> CompiledStep:
        """The plan for this batch, made on first sight of its key, which is ``known_key`` if that is known already.

        Raises NotFaster for a new one that takes no less than ``below`` seconds in simulated time.
        """
        batch, cut = fitted.batch, fitted.length is not None and outputs != ("loss",)
        if outputs != ("loss",):
            fitted = replace(fitted, parts=1, parallel="tensor" if fitted.parallel == "tensor" else "layers")
        return self.plan_of(
            model,
            (known_key or step_key(model, batch), outputs, differentiated, cut, fitted.parts, fitted.parallel),
            lambda: self._training_contexts(model, batch),
            lambda options: compile_step(
                model,
                fitted,
                forward=self.original_forward,
                options=self.with_shards(model, replace(options, below=below), fitted.parallel),
                outputs=outputs,
                differentiated=differentiated,
                cut=cut,
            ),
            f"a training step on {batch_text(batch, fitted.length)}",
        )

    def _training_contexts(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Sequence[ContextFactory]:
        if (note := compiled_note(model)) is not None:
            self.say_once(note)
        return self.frontend.contexts(model, batch)

    def plan_of(
        self,
        model: torch.nn.Module,
        key: tuple[StepKey, *PlanKey],
        contexts: Callable[[], Sequence[ContextFactory]],
        compiler: Callable[[CompileOptions], CompiledStep],
        what: str,
    ) -> CompiledStep:
        """The plan under ``key``, made by ``compiler`` on first sight. ``what`` it is for is told to the user."""
        if key in self._refused:
            raise CaptureError(self._refused[key])
        plan = self.budgets.plan(key)
        if plan is not None:
            self.observers.on_plan_hit(plan)
            self.effects.met()
            return plan
        require_self_check(self.device, self.config, self.settings.memory_budget, self.settings.gpus)
        self.effects.admit(key[0].state, model_state(model).difference)
        self.abandon_active()
        # A forward in another thread may wait for it to read a weight, and the trace waits for that forward.
        self.updates.settle()
        self.placement.gather()
        self.budgets.claim_all()
        if backend_of(self.device).separate_memory:
            # Ops are measured in memory of their own, which the budget covers too.
            self.unload()
        try:
            watched = functools.partial(self.effects.of_trace, model)
            options = self._compile_options((watched, *contexts()))
            # In this order: whoever waits for forwards of other threads must not hold what those may wait for.
            with (
                collector_paused(),
                typed_out_of_memory("preparing the step"),
                self.messages.making(what) as stage,
                ExitStack() as gates,
            ):
                for gate in self.gates():
                    gates.enter_context(gate.tracing())
                with capturing(), self.effects.of_capture():
                    # Within the one capture at a time: a traced forward must not wait for another's modules.
                    gates.enter_context(modules_wait(model))
                    step = compiler(replace(options, say=stage, captured=gates.close))
                if self.rounded:
                    require_host_memory(
                        options.host_memory, step.graph, step.plan.host_memory, self.rounded, step.captured.copies
                    )
        except CaptureError as error:
            self.budgets.give_back()
            if not met_shortage(error):
                self._refused[key] = str(error)
            raise
        except BudgetTooSmall as error:
            self.budgets.give_back()
            if not self.rounded:
                raise
            more = f"; fp32 masters and moments take {format_size(self._beside)} more there"
            raise BudgetTooSmall(error.needed, error.given, error.what, error.parts + more) from error
        # What the forward changed it has changed: this plan was for the state before.
        found_again = not self.effects.lasting
        self.plans[(*key, step.budget.total) if found_again else (*key, len(self.plans), step.budget.total)] = step
        self.budgets.keep(key, step, found_again=found_again)
        self.observers.on_plan(step)
        return step

    def gates(self) -> list[Gate]:
        """Of the model and of prepared models inside it, whose weights a trace replaces too."""
        model = self.placement.model
        states = [m.__dict__[STATE] for m in model.modules() if STATE in m.__dict__] if model is not None else []
        return [state.gate for state in states]

    def _compile_options(self, contexts: Sequence[ContextFactory]) -> CompileOptions:
        if self.config.without_effect:
            self.say_once(self.config.without_effect)
        return CompileOptions(
            memory=self.budgets.total,
            others=self.budgets.largest_outside,
            host_memory=self.settings.host_memory,
            planner=self.config.planner,
            policy=self.config.policy,
            plan_seconds=self.config.deadline,
            engine=EngineOptions(
                device=str(self.device),
                devices=self.settings.gpus,
                lookahead=self.config.lookahead,
                dispatch=self.config.dispatch,
                link_bandwidth=self.settings.link_bandwidth,
                link_latency=self.config.link_latency,
                compute_threads=self._compute_threads(),
                host_threads=threads_beside(self.device.type, self.config.compute_threads),
            ),
            plan_cache=self.config.plan_cache,
            contexts=contexts,
            gather=self.placement.gather,
            trained=RENEWED if self.optimizer is OptimizerHome.HOST else FOREIGN,
            devices=self.settings.devices,
            chunks=self.config.chunks,
        )

    def _compute_threads(self) -> int | None:
        """Devices in host memory share PyTorch's threads."""
        if self.config.compute_threads is not None or self.settings.devices == 1:
            return self.config.compute_threads
        return max(1, torch.get_num_threads() // self.settings.devices)

    def with_shards(self, model: torch.nn.Module, options: CompileOptions, parallel: str) -> CompileOptions:
        """``options``, with the weights that devices share if they do: in ``parallel`` steps of ``tensor``."""
        if self.settings.devices == 1 or parallel != "tensor":
            return options
        shards = self.frontend.tensor_plan(model, self.settings.devices)
        if self.shards is None:
            self.shards = ShardMemory(self.device)
        return replace(options, shards=shards, shard_memory=self.shards)

    def with_more(self, model: torch.nn.Module, step: CompiledStep) -> CompiledStep:
        """``step``, or where an update of the weights is put off, the step that begins with it; where gradients are
        there, the step that adds to them."""
        with typed_out_of_memory("preparing the update"):
            settings = PlannerSettings(
                self.config.planner, self.config.policy, machine_of(step.engine), self.config.deadline
            )
            what = "the same step with the update of its weights at its head"
            store = plan_store(self.config.plan_cache, step.engine)
            making, norms = functools.partial(self.messages.making, what), self.norms.wanted
            updated = self.updates.step_for(model, step, settings, store, making, norms)
            if updated is not step:
                self.budgets.note_kind(updated)
                return updated
            making = functools.partial(self.messages.making, "the same step, which adds to the gradients in .grad")
            likely = norms or (self.norms.possible and not self.updates.seen)
            more = self.accumulation.step_for(step, settings, store, making, likely)
            if more is not step:
                self.budgets.note_kind(more)
            return more

    def say_once(self, warning: str) -> None:
        """Log ``warning`` the first time."""
        if warning not in self._said:
            self._said.add(warning)
            logger.warning("%s", warning)

    def trace_wanted(self) -> bool:
        """Whether the step about to start is the one that ``report_dir`` shows: the first in steady state."""
        return self._reports_left > 0 and self.counts.steps_compiled >= _WARM_STEPS

    def report(self, step: CompiledStep) -> None:
        """Write plan, trace, numbers and picture of the step that just ran into ``report_dir``."""
        self._reports_left -= 1
        assert self.config.report_dir is not None
        write_report(self.config.report_dir, step.plan, step.executor.events(), self.stats())

    def close(self) -> None:
        """Free all that the engine holds; the session is over."""
        self.unload()
        self.gradients.release()
        release_workspaces(self.device)
        if self.budgets.moving and self.config.report_dir is not None:
            self.budgets.history.draw(Path(self.config.report_dir) / "budget.png", self.budgets.moves)
        self.budgets.close()
        if self.host_claims is not None:
            self.host_claims.close()
        self._engine_process = None

    def stats(self) -> dict[str, Any]:
        """Counts, sizes (bytes) and times (seconds)."""
        result: dict[str, Any] = {**self.counts.as_dict(), **self.frontend.stats(), **self.updates.stats()}
        result |= self.accumulation.stats() | self.norms.stats()
        result["budget_bytes"] = self.budgets.total
        result |= self.budgets.stats()
        if self.host_claims is not None:
            result["host_held_bytes"] = self.host_claims.held
        step = self.current
        # One that has given its memory back, in another thread, has no figures until the next step.
        if step is not None and step.loaded is not None:
            step.settle()
            result |= plan_figures(step, self.settings.link_bandwidth)
        return result


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
    return None if state is None else state.current
