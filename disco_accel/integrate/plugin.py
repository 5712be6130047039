"""``prepare(model, config)``: patch a model's forward on the instance so that training steps run from a plan."""

from __future__ import annotations

import functools
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from disco_accel.capture.autocast import autocast_state
from disco_accel.config import DiscoConfig
from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError, ExecutionError
from disco_accel.execute.arena import device_arena
from disco_accel.execute.cuda import release_workspaces, run_device
from disco_accel.execute.executor import EngineOptions, arena_bytes
from disco_accel.execute.hostmem import WatchedTensors
from disco_accel.execute.out_of_memory import typed_out_of_memory
from disco_accel.integrate import generation
from disco_accel.integrate.again import Again, Outputs, Uses
from disco_accel.integrate.arguments import Arguments, signature_of
from disco_accel.integrate.buckets import Buckets, Fitted
from disco_accel.integrate.capturing import Gate, capturing, in_capture
from disco_accel.integrate.compiled import CompiledStep, CompileOptions, compile_step
from disco_accel.integrate.dynamo import compiled_note, not_compiled, plain_model
from disco_accel.integrate.effects import Effects
from disco_accel.integrate.fallback import LastFallback
from disco_accel.integrate.generator import generator_state
from disco_accel.integrate.guards import StepKey, forget_state, model_state, step_key
from disco_accel.integrate.hf import ContextFactory, training_contexts
from disco_accel.integrate.inner import InnerForwards, own_forward_runs
from disco_accel.integrate.main_field import compiled_for_use, uses_of
from disco_accel.integrate.messages import show_messages
from disco_accel.integrate.output import StepOutput
from disco_accel.integrate.pending import PendingStep, run_step
from disco_accel.integrate.placement import Placement
from disco_accel.integrate.refusals import require_plain_autograd, require_plain_weights
from disco_accel.integrate.self_check import require_self_check
from disco_accel.integrate.trainer_log import keep_planning_apart
from disco_accel.integrate.verify_steps import StepVerifier
from disco_accel.integrate.voice import Voice, batch_text
from disco_accel.observe.report import write_report
from disco_accel.shortage import met_shortage
from disco_accel.taskgraph import VertexKind

logger = logging.getLogger("disco_accel")

_STATE = "_disco_state"
_WARM_STEPS = 2
PlanKey = tuple[Hashable, ...]
"""All that a plan depends on."""


class PreparedModel:
    """All that ``prepare`` keeps for one model: its original forward, host weights, plans and the pending step."""

    def __init__(self, model: torch.nn.Module, config: DiscoConfig) -> None:
        show_messages(config.quiet)
        self.config = config
        self.settings = config.resolve()
        self.device = run_device(self.settings.device)
        self.placement = Placement(model, self.device)
        _drop_copied_patch(model)
        self.original_forward = model.forward
        self.arguments = Arguments(signature_of(model))
        self.plans: dict[PlanKey, CompiledStep] = {}
        self.refused: dict[PlanKey, str] = {}
        self.effects = Effects()
        self.last_fallback = LastFallback()
        self.uses: dict[StepKey, Uses] = {}
        self.usual_field: str | None = None
        self.active: weakref.ref[PendingStep] | None = None
        self.current: CompiledStep | None = None
        self.arena: torch.Tensor | None = None
        self.lock = threading.RLock()
        self.gate = Gate()
        self.engine_process: int | None = None
        self.weights_seen = WatchedTensors([])
        self.counts = {"steps_compiled": 0, "steps_eager": 0, "plan_hits": 0, "prefills": 0, "inner_forwards": 0}
        self.fallbacks: list[str] = []
        self.without_gradient: list[str] = []
        self.said: set[str] = set()
        self.frozen_here: list[torch.nn.Parameter] | None = None
        """What ``prepare_frozen`` froze; None in training."""
        self.reports_left = 1 if config.report_dir is not None else 0
        self.buckets = Buckets(config.buckets)
        self.voice = Voice(model)
        self.verifier = StepVerifier(config.verify_steps)
        self.inner: InnerForwards | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of a prepared model is an unprepared model: it must never train the original.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())

    def compiled(
        self,
        model: torch.nn.Module,
        fitted: Fitted,
        outputs: Outputs,
        seen: StepKey | None = None,
        differentiated: int = 1,
    ) -> CompiledStep:
        """The plan for this batch, made on first sight of its key, which is ``seen`` if that is known already."""
        batch, cut = fitted.batch, fitted.length is not None and outputs != ("loss",)
        return self.plan_of(
            model,
            (seen or step_key(model, batch), outputs, differentiated, cut),
            lambda: self._training_contexts(model, batch),
            lambda options: compile_step(
                model,
                batch,
                forward=self.original_forward,
                options=options,
                outputs=outputs,
                differentiated=differentiated,
                cut=cut,
            ),
            f"a training step on {batch_text(batch, fitted.length)}",
        )

    def _training_contexts(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> list[ContextFactory]:
        if (note := compiled_note(model)) is not None:
            self.say_once(note)
        return training_contexts(model, batch)

    def plan_of(
        self,
        model: torch.nn.Module,
        key: tuple[StepKey, *PlanKey],
        contexts: Callable[[], Sequence[ContextFactory]],
        compiler: Callable[[CompileOptions], CompiledStep],
        what: str,
    ) -> CompiledStep:
        """The plan under ``key``, made by ``compiler`` on first sight. ``what`` it is for is told to the user."""
        if key in self.refused:
            raise CaptureError(self.refused[key])
        found = self.plans.get(key)
        if found is not None:
            self.counts["plan_hits"] += 1
            self.effects.met()
            return found
        require_self_check(self.device, self.config, self.settings.memory_budget)
        self.effects.admit(key[0].state, model_state(model).difference)
        self.abandon_active()
        self.placement.gather()
        if self.device.type == "cuda":
            # Ops are measured in memory of their own, which the budget covers too.
            self.unload()
        try:
            watched = functools.partial(self.effects.of_trace, model)
            options = self._compile_options((watched, *contexts()))
            # In this order: whoever waits for forwards of other threads must not hold what those may wait for.
            with typed_out_of_memory("preparing the step"), self.voice.making(what) as stage, ExitStack() as gates:
                for gate in self.gates():
                    gates.enter_context(gate.tracing())
                with capturing(), self.effects.of_capture():
                    step = compiler(replace(options, say=stage, captured=gates.close))
        except CaptureError as error:
            if not met_shortage(error):
                self.refused[key] = str(error)
            raise
        # What the forward changed it has changed: this plan was for the state before.
        self.plans[(*key, len(self.plans)) if self.effects.lasting else key] = step
        self.voice.planned(step)
        keep_planning_apart(find_state)
        return step

    def gates(self) -> list[Gate]:
        """Of the model and of prepared models inside it, whose weights a trace replaces too."""
        model = self.placement.model
        states = [m.__dict__[_STATE] for m in model.modules() if _STATE in m.__dict__] if model is not None else []
        return [state.gate for state in states]

    def _compile_options(self, contexts: Sequence[ContextFactory]) -> CompileOptions:
        if self.config.without_effect:
            self.say_once(self.config.without_effect)
        return CompileOptions(
            memory=self.settings.memory_budget,
            host_memory=self.settings.host_memory,
            planner=self.config.planner,
            policy=self.config.policy,
            plan_seconds=self.config.deadline,
            engine=EngineOptions(
                device=str(self.device),
                lookahead=self.config.lookahead,
                dispatch=self.config.dispatch,
                link_bandwidth=self.settings.link_bandwidth,
                link_latency=self.config.link_latency,
                compute_threads=self.config.compute_threads,
            ),
            plan_cache=self.config.plan_cache,
            contexts=contexts,
            gather=self.placement.gather,
        )

    def say_once(self, warning: str) -> None:
        """Log ``warning`` the first time."""
        if warning not in self.said:
            self.said.add(warning)
            logger.warning("%s", warning)

    def abandon_active(self) -> None:
        """Let another run take the engine; the pending step reruns from its inputs if its backward comes."""
        pending = self.active() if self.active is not None else None
        if pending is not None:
            pending.suspend()
        self.active = None
        # A step whose owner was interrupted, or freed by another thread, may still run.
        if self.current is not None and self.current.loaded is not None:
            self.current.executor.abandon()

    def require_own_process(self) -> None:
        """Raises ExecutionError in a process that was forked after the engine had started."""
        # Before any lock is taken: a thread that held it may not exist here.
        if self.engine_process not in (None, os.getpid()):
            raise ExecutionError(
                f"this model's engine runs in process {self.engine_process}, from which this process was forked; "
                "call restore(model) to use the model here, or start workers with 'spawn'"
            )

    @typed_out_of_memory("giving the step its memory")
    def make_current(self, model: torch.nn.Module, step: CompiledStep, *, check_ends_later: bool = False) -> None:
        """Give ``step`` the arena, its residents as the host holds them now.

        All plans share one arena, because the budget holds for the model and not for each plan. ``check_ends_later``:
        the caller asks ``weights_seen.finish_check`` before what ``step`` has made leaves it.
        """
        if self.current is step:
            check = self.weights_seen.begin_check if check_ends_later else self.weights_seen.changed
            if not check():
                return
            if not self.weights_seen.moved():
                step.executor.invalidate()
                self.weights_seen = WatchedTensors(step.watched_of(model))
                return
        self.abandon_active()
        frozen = step.frozen_of(model)
        if step.moved(frozen):
            # PEFT's merge of some adapters and the user's ``.data = `` put other tensors in the place of weights.
            self.placement.gather(step.captured.constants.values())
            step.follow(model)
        needed = arena_bytes(step.plan)
        if self.arena is None or self.arena.numel() < needed:
            self.unload()
            self.arena = device_arena(needed, self.device)
        if step.loaded is None:
            step.load(self.arena)
            self.engine_process = os.getpid()
        step.executor.invalidate()
        self.weights_seen = WatchedTensors(step.watched_of(model))
        # Products in eager mode have left workspaces on other streams and threads.
        release_workspaces(self.device)
        self.current = step

    def trace_wanted(self) -> bool:
        """Whether the step about to start is the one that ``report_dir`` shows: the first in steady state."""
        return self.reports_left > 0 and self.counts["steps_compiled"] >= _WARM_STEPS

    def report(self, model: torch.nn.Module, step: CompiledStep) -> None:
        """Write plan, trace, numbers and picture of the step that just ran into ``report_dir``."""
        self.reports_left -= 1
        assert self.config.report_dir is not None
        write_report(self.config.report_dir, step.plan, step.executor.events(), stats(model))

    def unload(self) -> None:
        """Free every executor and the arena; the plans stay."""
        self.abandon_active()
        for step in self.plans.values():
            step.unload()
        self.arena = self.current = None
        if self.device.type == "cuda":
            # PyTorch keeps what was freed in pieces of that size, for which the next arena is too large.
            torch.cuda.empty_cache()


def _nothing() -> None:
    return None


@not_compiled
def _forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The patched forward: planned for training steps with a loss, the model's own for everything else."""
    state: PreparedModel | None = self.__dict__.get(_STATE)
    if state is None:
        return type(self).forward(self, *args, **kwargs)
    if not torch.is_grad_enabled() or state.frozen_here is not None or in_capture():
        with state.gate.eager(), own_forward_runs():
            return state.original_forward(*args, **kwargs)
    state.require_own_process()
    try:
        require_plain_autograd()
        batch = state.arguments.bind(args, kwargs)
        if batch.get("return_dict") is False:
            raise CaptureError("return_dict: False is not supported in a planned step; leave it out")
        fitted = state.buckets.fit(self, batch)
        try:
            return _planned(state, self, fitted)
        except BudgetTooSmall:
            if fitted.length is None:
                raise
            return _planned(state, self, state.buckets.give_up(fitted, batch))
    except CaptureError as error:
        return _eager(state, error, args, kwargs)


def _planned(state: PreparedModel, model: torch.nn.Module, fitted: Fitted) -> StepOutput | torch.Tensor:
    """The forward of a planned step on ``fitted``."""
    with state.lock:
        key = step_key(model, fitted.batch)
        reason = state.last_fallback.reason_of(key)
        if reason is not None:
            raise CaptureError(reason)
        uses = uses_of(state, key, fitted)
        try:
            step = compiled_for_use(state, model, fitted, uses, key)
        except CaptureError as error:
            if state.config.on_unsupported == "eager" and not met_shortage(error):
                state.last_fallback.keep(key, str(error))
            raise
        if state.effects.lasting:
            key = step_key(model, fitted.batch)
        state.make_current(model, step, check_ends_later=True)
        generator = generator_state(step)
        compare = state.verifier.comparison(state, model, fitted, step, generator)
        values, seen = run_step(state, model, step, fitted.batch, compare)
        state.voice.stepped(step, state.settings.link_bandwidth)
    state.counts["steps_compiled"] += 1
    state.buckets.summarise(len(state.plans), state.counts["plan_hits"], state.counts["steps_compiled"])
    if step.captured.bare:
        return values[0]
    again = Again(state, model, fitted, step, uses, generator, autocast_state(), key, seen)
    first, *others = ((output.name, value) for output, value in zip(step.captured.outputs, values, strict=True))
    outputs = dict([first, *((n, again.differentiable(n, v)) for n, v in others)])
    return StepOutput({n: fitted.cut(n, v) for n, v in outputs.items()}, again)


def _eager(state: PreparedModel, error: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if state.config.on_unsupported != "eager":
        raise error
    if str(error) not in state.fallbacks:
        state.fallbacks.append(str(error))
    state.say_once(f"this step runs in eager mode, outside the memory budget: {error}")
    state.counts["steps_eager"] += 1
    with state.gate.eager(), own_forward_runs():
        return state.original_forward(*args, **kwargs)


@typed_out_of_memory("preparing the model")
def prepare(model: torch.nn.Module, config: DiscoConfig) -> torch.nn.Module:
    """Patch ``model`` in place so that its training steps run from a memory plan; returns the same object.

    The frozen weights move into one host arena (names, ``state_dict`` and saving keep working), the trainable ones to
    the device that steps run on. Nothing is captured until the first training step. Preparing twice is harmless; a
    different config replaces the first.

    Raises:
        ConfigError: a key of ``config`` does not fit this machine; no parameter can be trained; or weights are
            quantised (with ``on_unsupported: eager`` such a model is left as it is).
    """
    if not config.enabled:
        return model
    if plain_model(model) is not model:
        prepare(plain_model(model), config)
        return model
    state: PreparedModel | None = model.__dict__.get(_STATE)
    if state is not None:
        if state.config == config and state.frozen_here is None:
            return model
        restore(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "the model has no trainable parameter; add a LoRA adapter (peft.get_peft_model) before prepare()"
        )
    try:
        require_plain_weights(model)
    except ConfigError as error:
        if config.on_unsupported != "eager":
            raise
        logger.warning("the model is left as it is, outside the memory budget: %s", error)
        return model
    _attach(PreparedModel(model, config), model)
    return model


def prepare_frozen(model: torch.nn.Module, config: DiscoConfig) -> PreparedModel:
    """As ``prepare``, for a model that is not going to be trained: all its parameters are frozen until ``restore``.

    Raises:
        ConfigError: a key of ``config`` does not fit this machine, or weights are quantised.
    """
    require_plain_weights(model)
    state = PreparedModel(model, config)
    state.frozen_here = [p for p in model.parameters() if p.requires_grad]
    for parameter in state.frozen_here:
        parameter.requires_grad_(False)
    _attach(state, model)
    return state


def _drop_copied_patch(model: torch.nn.Module) -> None:
    """A copy of a prepared model has its patched forward, which must not be taken for the model's own."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is _forward:
        del model.__dict__["forward"]


def _attach(state: PreparedModel, model: torch.nn.Module) -> None:
    state.voice.prepared(model, state.settings.memory_budget, state.device)
    state.placement.apply()
    model.__dict__[_STATE] = state
    generation.install(state, model)
    state.inner = InnerForwards(state, model)
    patched = functools.update_wrapper(functools.partial(_forward, model), state.original_forward)
    model.forward = patched  # type: ignore[method-assign]


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undo ``prepare``: the model's own forward and ordinary storages for its weights, values kept."""
    if plain_model(model) is not model:
        restore(plain_model(model))
        return model
    state: PreparedModel | None = model.__dict__.pop(_STATE, None)
    if state is None:
        return model
    state.unload()
    release_workspaces(state.device)
    forget_state(model)
    state.engine_process = None
    generation.remove(model)
    if state.inner is not None:
        state.inner.remove()
    state.placement.undo()
    for parameter in state.frozen_here or ():
        parameter.requires_grad_(True)
    original = state.original_forward
    if isinstance(original, types.MethodType) and original.__func__ is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original  # type: ignore[method-assign]
    return model


def stats(model: torch.nn.Module) -> dict[str, Any]:
    """Counts, sizes (bytes) and times (seconds) of a prepared model; ``{}`` if it is not prepared."""
    state: PreparedModel | None = find_state(model)
    if state is None:
        return {}
    result: dict[str, Any] = dict(state.counts)
    result |= {"fallbacks": list(state.fallbacks), "plans": len(state.plans)}
    result["without_gradient"] = list(state.without_gradient)
    result["buckets"] = state.buckets.as_dict()
    result["budget_bytes"] = state.settings.memory_budget
    step = state.current
    if step is None:
        return result
    step.settle()
    counters = step.executor.counters()
    result |= {
        "arena_bytes": counters["arena_bytes"],
        "peak_bytes": step.budget.outside + int(counters["touched_bytes"]),
        "resident_weight_bytes": step.resident_bytes,
        "offload_bytes": counters["offload_bytes"],
        "reload_bytes": counters["reload_bytes"],
        "step_seconds": counters["step_seconds"],
        "bound_seconds": step.bound_seconds(state.settings.link_bandwidth),
        "compute_seconds": step.compute_seconds,
        "compile_seconds": dict(step.seconds),
        "plan_cache": step.plan_cache,
        "budget": step.budget.as_dict(),
        "kernels": sum(v.kind is VertexKind.KERNEL for v in step.plan.vertices),
        "engine": counters,
    }
    return result


def current_step(model: torch.nn.Module) -> CompiledStep | None:
    """The captured step, plan and executor behind the last planned step of ``model``; None before the first."""
    state = find_state(model)
    return None if state is None else state.current


def find_state(model: torch.nn.Module) -> PreparedModel | None:
    """The state of ``model`` or of the module that DDP, ``torch.compile`` or another wrapper holds."""
    seen = model
    while True:
        state: PreparedModel | None = seen.__dict__.get(_STATE)
        if state is not None:
            return state
        inner = seen._modules.get("module", seen._modules.get("_orig_mod"))
        if inner is None:
            return None
        seen = inner
