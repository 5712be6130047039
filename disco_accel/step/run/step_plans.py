"""Plans of one prepared model's steps, from its table or made on first sight of a step's key.

First the outputs of a step are chosen, then its plan, then the step that runs: with an update at its head, or with sums
of gradients, where these are wanted. All functions are called under the session's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from disco_accel.capture.returned_fields import NoSuchOutput
from disco_accel.capture.waiting_modules import modules_wait
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.execute.engine_options import threads_beside
from disco_accel.execute.executor import EngineOptions
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.traits import FOREIGN, HOST_UPDATED
from disco_accel.native.backend import backend_of
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.shortage import met_shortage
from disco_accel.sizes import format_size
from disco_accel.step.budget.engine_memory import PlanKey
from disco_accel.step.capture_lock import Gate, capturing
from disco_accel.step.compile.boundary import boundary_of
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import CompileOptions, PlanCheck, compile_step
from disco_accel.step.compile.device_check import require_self_check
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.compile.refusals import advised
from disco_accel.step.dynamo import compiled_note
from disco_accel.step.placement.shard_memory import ShardMemory
from disco_accel.step.run.frontend import ContextFactory
from disco_accel.step.run.output_usage import Outputs, OutputUsage
from disco_accel.step.run.progress_messages import batch_text
from disco_accel.step.run.session import STATE, Session
from disco_accel.step.state.step_key import StepKey, model_state, step_key

Compile = Callable[[CompileOptions], CompiledStep]


def compiled_for_use(
    state: Session, model: torch.nn.Module, fitted: FittedBatch, usage: OutputUsage, key: StepKey
) -> CompiledStep:
    """The plan of this step for the field that is differentiated: of outputs without loss and logits the first field
    that can be, as models that make embeddings return them. Another one is planned for at its first backward.

    Raises:
        CaptureError: no field can be, or the step cannot be captured; names a remedy, where one is known.
    """
    try:
        return _for_first_field(state, model, fitted, usage, key)
    except NoSuchOutput:
        raise
    except CaptureError as error:
        advice = advised(model, error)
        if advice is error:
            # Raised from itself it would lose its cause, which tells a shortage of memory.
            raise
        raise advice from error


def _for_first_field(
    state: Session, model: torch.nn.Module, fitted: FittedBatch, usage: OutputUsage, key: StepKey
) -> CompiledStep:
    try:
        return planned_for(state, model, fitted, usage, key)
    except NoSuchOutput as error:
        first, before = error, usage.differentiated
    for name in first.fields:
        usage.differentiated = name
        try:
            step = planned_for(state, model, fitted, usage, key)
        except NoSuchOutput:
            continue
        state.calls.usage.usual_field = name
        return step
    usage.differentiated = before
    raise first


def planned_for(
    state: Session, model: torch.nn.Module, fitted: FittedBatch, usage: OutputUsage, key: StepKey | None = None
) -> CompiledStep:
    """The plan of this step for its ``usage``, less fields that are only read where no plan can return them, too.

    Raises as ``compiled``.
    """
    while True:
        try:
            return compiled(state, model, fitted, usage.outputs(fitted.batch), key)
        except (BudgetTooSmall, CaptureError) as error:
            waits = isinstance(error, BudgetTooSmall) and state.budgets.may_wait(error)
            if waits or met_shortage(error) or not usage.returns_less():
                raise


def compiled(
    state: Session,
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
    state.placement.take_unfrozen(p for p in model.parameters() if p.requires_grad)
    batch, cut = fitted.batch, fitted.length is not None and outputs != ("loss",)
    if outputs != ("loss",):
        fitted = replace(fitted, parts=1, parallel="tensor" if fitted.parallel == "tensor" else "layers")
    return plan_of(
        state,
        model,
        (known_key or step_key(model, batch), outputs, differentiated, cut, fitted.parts, fitted.parallel),
        lambda: _training_contexts(state, model, batch),
        lambda options: compile_step(
            model,
            fitted,
            forward=state.calls.forward,
            options=with_shards(state, model, replace(options, check=check), fitted.parallel),
            outputs=outputs,
            differentiated=differentiated,
            cut=cut,
        ),
        f"a training step on {batch_text(batch, fitted.length)}",
    )


def _training_contexts(state: Session, model: torch.nn.Module, batch: Mapping[str, Any]) -> Sequence[ContextFactory]:
    if (note := compiled_note(model)) is not None:
        state.reports.say_once(note)
    return state.setup.frontend.contexts(model, batch)


def plan_of(
    state: Session,
    model: torch.nn.Module,
    key: tuple[StepKey, *PlanKey],
    contexts: Callable[[], Sequence[ContextFactory]],
    compiler: Compile,
    what: str,
) -> CompiledStep:
    """The plan under ``key``, made by ``compiler`` on first sight. ``what`` it is for is told to the user."""
    if key in state.calls.refused:
        raise CaptureError(state.calls.refused[key])
    _measure_fused(state, key)
    plan = state.budgets.plan_sets.plan(key)
    if plan is not None:
        state.reports.on_plan_hit(plan)
        state.calls.effects.met()
        return plan
    device, setup = state.memory.device, state.setup
    rates = require_self_check(device, setup.config, setup.settings.memory_budget, setup.settings.gpus)
    state.calls.effects.admit(key[0].state, model_state(model).difference)
    state.memory.abandon_active()
    # A forward in another thread may wait for it to read a weight, and the trace waits for that forward.
    state.updates.settle()
    state.placement.gather()
    state.budgets.grant.claim_all()
    if backend_of(device).separate_memory:
        # Ops are measured in memory of their own, which the budget covers too.
        state.memory.unload()
    try:
        step = _made(state, model, contexts, lambda options: compiler(replace(options, link_rates=rates)), what)
    except CaptureError as error:
        state.budgets.grant.give_back()
        if not met_shortage(error):
            state.calls.refused[key] = str(error)
        raise
    except BudgetTooSmall as error:
        state.budgets.grant.give_back()
        if not setup.sizes.rounded:
            raise
        more = f"; fp32 masters and moments take {format_size(setup.sizes.beside)} more there"
        raise error.with_parts(error.parts + more) from error
    # What the forward changed it has changed: this plan was for the state before.
    found_again, plans = not state.calls.effects.lasting, state.memory.plans
    plans[(*key, step.budget.total) if found_again else (*key, len(plans), step.budget.total)] = step
    state.budgets.plan_sets.keep(key, step, found_again=found_again)
    state.reports.on_plan(step)
    return step


def _measure_fused(state: Session, key: Hashable) -> None:
    """Between two steps: compare and time fused kernels that were compiled meanwhile, for plans under ``key``."""
    plan_sets = state.budgets.plan_sets
    if not plan_sets.kernels_arrived(key):
        return
    if backend_of(state.memory.device).separate_memory:
        # In memory of their own, which the budget covers too.
        state.memory.unload()
    plan_sets.use_fused(key)


def _gates(model: torch.nn.Module) -> list[Gate]:
    """Of ``model``, and of prepared models inside it, whose weights a trace replaces too."""
    states = (module.__dict__.get(STATE) for module in model.modules())
    return [state.calls.gate for state in states if state is not None]


def _made(
    state: Session,
    model: torch.nn.Module,
    contexts: Callable[[], Sequence[ContextFactory]],
    compiler: Compile,
    what: str,
) -> CompiledStep:
    options = _compile_options(state, (functools.partial(state.calls.effects.of_trace, model), *contexts()))
    # In this order: whoever waits for forwards of other threads must not hold what those may wait for.
    with (
        collector_paused(),
        typed_out_of_memory("preparing the step"),
        state.reports.messages.making(what) as stage,
        ExitStack() as gates,
    ):
        for gate in _gates(model):
            gates.enter_context(gate.tracing())
        with capturing(), state.calls.effects.of_capture():
            # Within the one capture at a time: a traced forward must not wait for another's modules.
            gates.enter_context(modules_wait(model))
            step = compiler(replace(options, say=stage, captured=gates.close))
    return step


def _compile_options(state: Session, contexts: Sequence[ContextFactory]) -> CompileOptions:
    if state.setup.config.without_effect:
        state.reports.say_once(state.setup.config.without_effect)
    first = next(iter(state.memory.plans.values()), None)
    return CompileOptions(
        memory=state.budgets.grant.total,
        others=state.budgets.plan_sets.largest_outside,
        host_memory=state.setup.settings.host_memory,
        rounded=state.setup.sizes.rounded,
        planner=state.setup.config.planner,
        policy=state.setup.config.policy,
        plan_seconds=state.setup.config.deadline,
        engine=replace(
            EngineOptions(
                device=str(state.memory.device),
                devices=state.setup.settings.gpus,
                lookahead=state.setup.config.lookahead,
                launch_graphs=state.setup.config.launch_graphs == "auto",
                link_bandwidth=state.setup.settings.link_bandwidth,
                compute_threads=_compute_threads(state),
                host_threads=threads_beside(state.memory.device.type, state.setup.config.compute_threads),
            ),
            **state.engine,
        ),
        plan_cache=state.setup.config.plan_cache,
        contexts=contexts,
        gather=state.placement.gather,
        trained=HOST_UPDATED if state.setup.trained_on_host else FOREIGN,
        devices=state.setup.settings.devices,
        chunks=state.setup.config.chunks,
        recompute=state.setup.config.recompute,
        fuse=state.setup.config.fuse == "auto",
        boundary={} if first is None else boundary_of(first.captured, first.plan),
    )


def _compute_threads(state: Session) -> int | None:
    """Devices in host memory share PyTorch's threads."""
    if state.setup.config.compute_threads is not None or state.setup.settings.devices == 1:
        return state.setup.config.compute_threads
    return max(1, torch.get_num_threads() // state.setup.settings.devices)


def with_shards(state: Session, model: torch.nn.Module, options: CompileOptions, parallel: str) -> CompileOptions:
    """``options``, with the weights that devices share if they do: in ``parallel`` steps of ``tensor``."""
    if state.setup.settings.devices == 1 or parallel != "tensor":
        return options
    shards = state.setup.frontend.tensor_plan(model, state.setup.settings.devices)
    if state.loader.shards is None:
        state.loader.shards = ShardMemory(state.memory.device)
    return replace(options, shards=shards, shard_memory=state.loader.shards)


def with_more(state: Session, model: torch.nn.Module, step: CompiledStep) -> CompiledStep:
    """``step``, or the step that begins with the deferred update of the weights, where there is one; or the step that
    adds to the gradients, where there are some."""
    norms = state.gradients.norms
    with typed_out_of_memory("preparing the update"):
        what = "the same step with the update of its weights at its head"
        making, wanted = functools.partial(state.reports.messages.making, what), norms.wanted
        updated = state.updates.step_for(model, step, making, wanted)
        if updated is not step:
            state.budgets.plan_sets.note_kind(updated)
            return updated
        what = "the same step, which adds to the gradients in .grad"
        making = functools.partial(state.reports.messages.making, what)
        likely = wanted or (norms.possible and not state.updates.seen)
        more = state.gradients.accumulation.step_for(step, making, likely)
        if more is not step:
            state.budgets.plan_sets.note_kind(more)
        return more
