"""``prepare(model, config)``: patch a model's forward on the instance so that its steps run from plans."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from disco_accel.capture.autocast import autocast_state
from disco_accel.capture.parts import run_first_forward_changes
from disco_accel.config.budget_why import budget_why
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError, StoreFull
from disco_accel.integrate.accelerate.trainer_runs import follow_trainers
from disco_accel.integrate.hf import generation
from disco_accel.integrate.hf.hf_frontend import HuggingFace
from disco_accel.integrate.hf.merge_watch import watch_merges
from disco_accel.integrate.hf.planned_forward import planned_forward
from disco_accel.integrate.hf.step_output import StepOutput
from disco_accel.native.backend import run_device
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.observe.log_to_stderr import say
from disco_accel.shortage import met_shortage
from disco_accel.step.budget.moving_budget import retry_on_budget_change
from disco_accel.step.capture_lock import in_capture
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.compile.refusals import require_known_weights, require_plain_autograd
from disco_accel.step.dynamo import not_compiled, plain_model
from disco_accel.step.optimizer_home import keeps_masters, optimizer_home, update_asked
from disco_accel.step.run.inner_forwards import own_forward_runs, watch_inner_forwards
from disco_accel.step.run.observer import Fallback
from disco_accel.step.run.pending import run_step
from disco_accel.step.run.rerun import Rerun
from disco_accel.step.run.session import STATE, Session, find_state
from disco_accel.step.run.shared_batches import shared_out
from disco_accel.step.run.step_inputs import generator_state
from disco_accel.step.run.step_plans import compiled_for_use, with_more
from disco_accel.step.state.step_key import forget_state, step_key
from disco_accel.step.update.deferral import Deferral
from disco_accel.step.update.master_weights import MasterWeights

logger = logging.getLogger("disco_accel")


@not_compiled
def _forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The patched forward: planned for training steps with a loss, the model's own for everything else."""
    state: Session | None = self.__dict__.get(STATE)
    if state is None:
        return type(self).forward(self, *args, **kwargs)
    if in_capture():
        return _own_forward(state, args, kwargs)
    if not torch.is_grad_enabled() or state.frozen is not None:
        return _without_gradients(state, self, args, kwargs)
    state.memory.require_own_process()
    try:
        require_plain_autograd()
        batch = state.calls.bind(args, kwargs)
        if batch.get("return_dict") is False:
            raise CaptureError("return_dict: False is not supported in a planned step; leave it out")
        with state.placement.hidden():
            return retry_on_budget_change(state.budgets, lambda: _padded_or_not(state, self, batch))
    except CaptureError as error:
        return _eager(state, error, args, kwargs)


def _padded_or_not(state: Session, model: torch.nn.Module, batch: Mapping[str, Any]) -> StepOutput | torch.Tensor:
    fitted = shared_out(state, model, state.setup.frontend.fit(model, batch, state.calls.usage.used(batch)))
    try:
        return _planned(state, model, fitted)
    except BudgetTooSmall as error:
        # Bits must not hang on what other jobs have at the moment.
        if fitted.length is None or state.budgets.may_wait(error):
            raise
        return _planned(state, model, shared_out(state, model, state.setup.frontend.give_up(fitted, batch)))


def _planned(state: Session, model: torch.nn.Module, fitted: FittedBatch) -> StepOutput | torch.Tensor:
    """The forward of a planned step on ``fitted``."""
    with state.memory.lock, state.updates.taking():
        key = step_key(model, fitted.batch)
        fallback = state.calls.last_fallback
        if fallback is not None and fallback[0] == key:
            raise CaptureError(fallback[1])
        usage = state.calls.usage.of(key, fitted.batch)
        try:
            step = compiled_for_use(state, model, fitted, usage, key)
        except CaptureError as error:
            if state.setup.config.on_unsupported == "eager" and not met_shortage(error):
                state.calls.last_fallback = key, str(error)
            raise
        if state.calls.effects.lasting:
            key = step_key(model, fitted.batch)
        together = state.calls.casts.forward_of(step)
        running = with_more(state, model, step)
        # An update cannot be taken back: weights are looked at before it, not beside it.
        state.loader.make_current(model, running, check_ends_later=running is step)
        generator = generator_state(step)
        compare = state.calls.verifier.comparison(model, fitted, step, generator)
        values, inputs = run_step(state, model, running, fitted.batch, together, compare)
        state.calls.casts.planned(together, inputs)
        state.reports.on_step(running)
    if step.captured.bare:
        return values[0]
    rerun = Rerun(state, model, fitted, step, usage, generator, autocast_state(), key, inputs, together)
    first, *others = ((output.name, value) for output, value in zip(step.captured.outputs, values, strict=True))
    outputs = dict([first, *((n, rerun.differentiable(n, v)) for n, v in others)])
    return StepOutput({n: fitted.cut(n, v) for n, v in outputs.items()}, rerun)


def _eager(state: Session, error: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if state.setup.config.on_unsupported != "eager":
        raise error
    state.reports.on_fallback(Fallback.STEP, str(error))
    state.reports.say_once(f"this step runs in eager mode, outside the memory budget: {error}")
    return _own_forward(state, args, kwargs)


def _without_gradients(state: Session, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward without gradients, from a plan; one that cannot have one runs as it is, counted, and told once."""
    try:
        batch = state.calls.bind(args, kwargs)
        state.calls.casts.own_forward()
        return planned_forward(state, model, batch)
    except (CaptureError, BudgetTooSmall) as error:
        state.reports.on_fallback(Fallback.FORWARD, str(error))
        state.reports.say_once(f"a forward without gradients runs without a plan, outside the memory budget: {error}")
    return _own_forward(state, args, kwargs)


def _own_forward(state: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own forward, on its weights as they are after all updates."""
    if not in_capture():
        state.updates.settle()
        state.calls.casts.own_forward()
        if torch.is_grad_enabled():
            # Its backward may add to gradients.
            state.updates.multiply_clipped()
    args, kwargs = state.placement.batch((args, kwargs))
    with state.calls.gate.eager(), own_forward_runs(), state.placement.visiting():
        return state.calls.forward(*args, **kwargs)


@typed_out_of_memory("preparing the model")
def prepare(model: torch.nn.Module, config: DiscoConfig) -> torch.nn.Module:
    """Patch ``model`` in place so that its training steps, and its forwards without gradients, run from memory plans;
    returns the same object.

    The frozen weights move into one host arena (names, ``state_dict`` and saving keep working), the trainable ones to
    the device that steps run on. A model that is frozen as a whole has forwards alone, also outside of
    ``torch.no_grad()``. Nothing is captured until the first step. Preparing twice is harmless; a different config
    replaces the first.

    Raises:
        ConfigError: a key of ``config`` does not fit this machine, or weights are quantised (with ``on_unsupported:
            eager`` such a model is left as it is).
    """
    if not config.enabled:
        return model
    if plain_model(model) is not model:
        prepare(plain_model(model), config)
        return model
    state: Session | None = model.__dict__.get(STATE)
    if state is not None:
        if state.setup.config == config and (state.frozen is None or not (state.frozen or trains(model))):
            return model
        restore(model)
    try:
        require_known_weights(model)
    except ConfigError as error:
        if config.on_unsupported != "eager":
            raise
        logger.warning("the model is left as it is, outside the memory budget: %s", error)
        return model
    if not trains(model):
        prepare_frozen(model, config)
        return model
    state = _session(model, config)
    run_first_forward_changes(model, state.memory.device, gradients=True)
    _attach(state, model)
    return model


def trains(model: torch.nn.Module) -> bool:
    """Whether a parameter of ``model`` is not frozen."""
    return any(parameter.requires_grad for parameter in model.parameters())


def prepare_frozen(model: torch.nn.Module, config: DiscoConfig) -> Session:
    """As ``prepare``, for a model that is not going to be trained: all its parameters are frozen until ``restore``.

    Raises:
        ConfigError: a key of ``config`` does not fit this machine, or weights are quantised.
    """
    require_known_weights(model)
    state = _session(model, config, trains=False)
    run_first_forward_changes(model, state.memory.device, gradients=False)
    state.frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in state.frozen:
        parameter.requires_grad_(False)
    _attach(state, model)
    return state


def optimizer_of(model: torch.nn.Module, config: DiscoConfig) -> str:
    """``device`` or ``host``: where ``prepare`` would have the trained weights of ``model`` updated.

    Raises:
        ConfigError: as ``prepare``.
    """
    settings = config.resolve()
    return optimizer_home(model, config, settings, run_device(settings.device)).value


def _session(model: torch.nn.Module, config: DiscoConfig, *, trains: bool = True) -> Session:
    _drop_copied_patch(model)
    return Session(model, config, HuggingFace(config.buckets), trains=trains)


def _drop_copied_patch(model: torch.nn.Module) -> None:
    """A copy of a prepared model has its patched forward, which must not be taken for the model's own."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is _forward:
        del model.__dict__["forward"]


def _attach(state: Session, model: torch.nn.Module) -> None:
    setup = state.setup
    budget, masters = setup.settings.memory_budget, keeps_masters(setup.config)
    state.reports.messages.prepared(model, budget, setup.device, setup.optimizer, masters, state.budget_why)
    if setup.trained_on_host and setup.config.optimizer == "auto":
        state.reports.messages.host_by_size()
    state.placement.apply()
    try:
        state.loader.hold_host()
    except StoreFull:
        state.close()
        state.placement.undo()
        raise
    if state.frozen is None:
        _follow_optimizers(state, model)
    model.__dict__[STATE] = state
    generation.install(state, model)
    state.on_restore += [watch_inner_forwards(state.reports, model), watch_merges(model)]
    patched = functools.update_wrapper(functools.partial(_forward, model), state.calls.forward)
    model.forward = patched


def _follow_optimizers(state: Session, model: torch.nn.Module) -> None:
    """Do from now on to optimizers as ``master_weights`` and ``update`` ask."""
    ready = None
    config = state.setup.config
    if keeps_masters(config):
        masters = MasterWeights(model, state.memory.lock, state.reports.say_once)
        state.on_restore.append(masters.remove)
        ready = masters.ready
    asked = update_asked(config)
    if asked == "step" or not state.setup.trained_on_host:
        return
    holds, said = (state.placement.holds, state.gradients.memory.holds), state.reports.say_once
    make = functools.partial(Deferral, model, *holds, state.memory.lock, said, ready, asked)
    state.updates.defer(make, when_told=asked == "auto")
    if "transformers.trainer" in sys.modules:
        follow_trainers(sys.modules["transformers.trainer"])


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undo ``prepare``: the model's own forward and ordinary storages for its weights, values kept."""
    if plain_model(model) is not model:
        restore(plain_model(model))
        return model
    state: Session | None = model.__dict__.pop(STATE, None)
    if state is None:
        return model
    state.updates.remove()
    state.close()
    forget_state(model)
    generation.remove(model)
    for undo in state.on_restore:
        undo()
    state.placement.undo()
    for parameter in state.frozen or ():
        parameter.requires_grad_(True)
    original = state.calls.forward
    if isinstance(original, types.MethodType) and original.__func__ is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original
    return model


def settle(model: torch.nn.Module) -> None:
    """Do a pending update of the weights, which ``update: deferred`` leaves to the next step, so that ``parameters()``
    shows the true ones. Does nothing where none is pending, or for a model that is not prepared.

    Raises:
        ExecutionError: weights or gradients were written to since ``optimizer.step()``.
        StatesTorn: a forward ended in the middle of an update.
    """
    state = find_state(model)
    if state is not None:
        state.updates.settle()
        state.updates.multiply_clipped()


def set_memory_budget(model: torch.nn.Module, budget: int | str) -> None:
    """Give a prepared model another ``memory_budget``: bytes, a size such as ``"6GiB"``, a share, or auto.

    It holds from the model's next step on; a step that waits for its backward is not touched. A smaller one gives
    memory back at once, or where a step is under way as its backward ends. For a larger one a plan is made while steps
    go on by the old one. Losses and gradients keep their bits. May be called in any thread.

    Raises:
        ConfigError: the model is not prepared, the size makes no sense or is larger than the device, or the budget is
            ``shared``, which a store decides on.
    """
    state = find_state(model)
    if state is None:
        raise ConfigError("set_memory_budget: the model is not prepared: call prepare(model, config) first")
    config = state.setup.config
    if config.memory_budget == "shared" or budget == "shared":
        raise ConfigError(
            f"memory_budget: {budget} cannot be set on a model that runs with {config.memory_budget}: shared "
            "budgets are what a store grants; prepare(model, config) again with the other one"
        )
    asked = replace(config, memory_budget=budget)
    settings = asked.resolve()
    state.budget_why = budget_why(asked, settings)
    if state.budget_why:
        say(f"{state.reports.messages.name}: {state.budget_why}")
    state.budgets.grant.set(settings.memory_budget)
    state.budgets.shrink_if_idle()


def stats(model: torch.nn.Module) -> dict[str, Any]:
    """Counts, sizes (bytes) and times (seconds) of a prepared model; ``{}`` if it is not prepared."""
    state = find_state(model)
    return {} if state is None else state.stats()
