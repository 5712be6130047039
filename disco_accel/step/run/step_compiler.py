"""Plans for one prepared model's steps: from its table, or made on first sight of a step's key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from disco_accel.capture.waiting_modules import modules_wait
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.execute.engine_options import threads_beside
from disco_accel.execute.executor import EngineOptions
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.traits import FOREIGN, RENEWED
from disco_accel.native.backend import backend_of
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.shortage import met_shortage
from disco_accel.sizes import format_size
from disco_accel.step.budget.engine_memory import EngineMemory, PlanKey
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.budget.plan_loader import PlanLoader
from disco_accel.step.capture_lock import Gate, capturing
from disco_accel.step.compile.budget_parts import require_host_memory
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import CompileOptions, PlanCheck, compile_step
from disco_accel.step.compile.device_check import require_self_check
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.dynamo import compiled_note
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.shard_memory import ShardMemory
from disco_accel.step.run.frontend import ContextFactory
from disco_accel.step.run.model_setup import ModelSetup
from disco_accel.step.run.output_usage import Outputs
from disco_accel.step.run.progress_messages import batch_text
from disco_accel.step.run.reports import Reports
from disco_accel.step.state.side_effects import Effects
from disco_accel.step.state.step_key import StepKey, model_state, step_key
from disco_accel.step.update.planned_updates import PlannedUpdates


class StepCompiler:
    """``effects``: what forwards of the model were seen to change. Used under the session's lock."""

    def __init__(
        self,
        setup: ModelSetup,
        forward: Callable[..., Any],
        placement: Placement,
        loader: PlanLoader,
        memory: EngineMemory,
        budgets: MovingBudget,
        updates: PlannedUpdates,
        reports: Reports,
        gates: Callable[[], Sequence[Gate]],
    ) -> None:
        """``forward``: the model's own. ``gates``: of it, and of prepared models inside it, whose weights a trace
        replaces too."""
        self._setup, self._forward, self._placement, self._loader = setup, forward, placement, loader
        self._memory, self._budgets, self._updates, self._reports = memory, budgets, updates, reports
        self._gates = gates
        self.effects = Effects()
        self._refused: dict[PlanKey, str] = {}

    def compiled(
        self,
        model: torch.nn.Module,
        fitted: FittedBatch,
        outputs: Outputs,
        known_key: StepKey | None = None,
        differentiated: int = 1,
        check: PlanCheck = lambda *_: None,
    ) -> CompiledStep:
        """The plan for this batch, made on first sight of its key, which is ``known_key`` if that is known already.

        ``check``: as of ``CompileOptions``.
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
                forward=self._forward,
                options=self.with_shards(model, replace(options, check=check), fitted.parallel),
                outputs=outputs,
                differentiated=differentiated,
                cut=cut,
            ),
            f"a training step on {batch_text(batch, fitted.length)}",
        )

    def _training_contexts(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Sequence[ContextFactory]:
        if (note := compiled_note(model)) is not None:
            self._reports.say_once(note)
        return self._setup.frontend.contexts(model, batch)

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
        plan = self._budgets.plan_sets.plan(key)
        if plan is not None:
            self._reports.observers.on_plan_hit(plan)
            self.effects.met()
            return plan
        device, setup = self._memory.device, self._setup
        require_self_check(device, setup.config, setup.settings.memory_budget, setup.settings.gpus)
        self.effects.admit(key[0].state, model_state(model).difference)
        self._memory.abandon_active()
        # A forward in another thread may wait for it to read a weight, and the trace waits for that forward.
        self._updates.settle()
        self._placement.gather()
        self._budgets.grant.claim_all()
        if backend_of(device).separate_memory:
            # Ops are measured in memory of their own, which the budget covers too.
            self._memory.unload()
        try:
            step = self._made(model, contexts, compiler, what)
        except CaptureError as error:
            self._budgets.grant.give_back()
            if not met_shortage(error):
                self._refused[key] = str(error)
            raise
        except BudgetTooSmall as error:
            self._budgets.grant.give_back()
            if not setup.sizes.rounded:
                raise
            more = f"; fp32 masters and moments take {format_size(setup.sizes.beside)} more there"
            raise BudgetTooSmall(error.needed, error.given, error.what, error.parts + more) from error
        # What the forward changed it has changed: this plan was for the state before.
        found_again, plans = not self.effects.lasting, self._memory.plans
        plans[(*key, step.budget.total) if found_again else (*key, len(plans), step.budget.total)] = step
        self._budgets.plan_sets.keep(key, step, found_again=found_again)
        self._reports.observers.on_plan(step)
        return step

    def _made(
        self,
        model: torch.nn.Module,
        contexts: Callable[[], Sequence[ContextFactory]],
        compiler: Callable[[CompileOptions], CompiledStep],
        what: str,
    ) -> CompiledStep:
        options = self._compile_options((functools.partial(self.effects.of_trace, model), *contexts()))
        # In this order: whoever waits for forwards of other threads must not hold what those may wait for.
        with (
            collector_paused(),
            typed_out_of_memory("preparing the step"),
            self._reports.messages.making(what) as stage,
            ExitStack() as gates,
        ):
            for gate in self._gates():
                gates.enter_context(gate.tracing())
            with capturing(), self.effects.of_capture():
                # Within the one capture at a time: a traced forward must not wait for another's modules.
                gates.enter_context(modules_wait(model))
                step = compiler(replace(options, say=stage, captured=gates.close))
            rounded = self._setup.sizes.rounded
            if rounded:
                offloaded, copies = step.plan.host.memory, step.captured.copies
                require_host_memory(options.host_memory, step.graph, offloaded, rounded, copies)
        return step

    def _compile_options(self, contexts: Sequence[ContextFactory]) -> CompileOptions:
        if self._setup.config.without_effect:
            self._reports.say_once(self._setup.config.without_effect)
        return CompileOptions(
            memory=self._budgets.grant.total,
            others=self._budgets.plan_sets.largest_outside,
            host_memory=self._setup.settings.host_memory,
            planner=self._setup.config.planner,
            policy=self._setup.config.policy,
            plan_seconds=self._setup.config.deadline,
            engine=EngineOptions(
                device=str(self._memory.device),
                devices=self._setup.settings.gpus,
                lookahead=self._setup.config.lookahead,
                dispatch=self._setup.config.dispatch,
                link_bandwidth=self._setup.settings.link_bandwidth,
                link_latency=self._setup.config.link_latency,
                compute_threads=self._compute_threads(),
                host_threads=threads_beside(self._memory.device.type, self._setup.config.compute_threads),
            ),
            plan_cache=self._setup.config.plan_cache,
            contexts=contexts,
            gather=self._placement.gather,
            trained=RENEWED if self._setup.trained_on_host else FOREIGN,
            devices=self._setup.settings.devices,
            chunks=self._setup.config.chunks,
        )

    def _compute_threads(self) -> int | None:
        """Devices in host memory share PyTorch's threads."""
        if self._setup.config.compute_threads is not None or self._setup.settings.devices == 1:
            return self._setup.config.compute_threads
        return max(1, torch.get_num_threads() // self._setup.settings.devices)

    def with_shards(self, model: torch.nn.Module, options: CompileOptions, parallel: str) -> CompileOptions:
        """``options``, with the weights that devices share if they do: in ``parallel`` steps of ``tensor``."""
        if self._setup.settings.devices == 1 or parallel != "tensor":
            return options
        shards = self._setup.frontend.tensor_plan(model, self._setup.settings.devices)
        if self._loader.shards is None:
            self._loader.shards = ShardMemory(self._memory.device)
        return replace(options, shards=shards, shard_memory=self._loader.shards)
