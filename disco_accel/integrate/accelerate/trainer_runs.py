"""Runs of transformers' Trainer: ``update: auto``, clipping, and the seconds of plans. Updates are deferred where no
code of others runs between ``optimizer.step()`` and the next forward, since it may read parameters. There clipping
leaves its product to such updates, too.

Looked at before each event of a Trainer's callbacks: one that is added in the middle of training finds its weights
updated when it is called first.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from disco_accel.step.run.session import Session, find_state
from disco_accel.step.update.pending_reads import settles
from disco_accel.step.update.planned_updates import clip_grad_norm

_OURS = ("transformers", "disco_accel")
"""Packages whose trainers and callbacks read no parameter between a step and the next forward."""
_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
"""Those of trl's; others hand weights to engines that generate."""

_PLAIN_GRADIENTS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Of accelerate's ``DistributedType``: gradients are plain tensors, whole in each process."""

KEY = "disco_planning_seconds"
_RUNTIME = "train_runtime"
_SPEEDS = ("train_samples_per_second", "train_steps_per_second", "train_tokens_per_second")

_running: list[Any] = []
"""Trainers whose ``train()`` has begun and not ended, in this order."""


def follow_trainers(module: ModuleType) -> None:
    """From now on runs of the ``Trainer`` in ``module`` (transformers.trainer) decide about ``update: auto``, and end
    with all updates done."""
    cls, handler = module.Trainer, module.CallbackHandler
    if hasattr(cls.train, "_disco"):
        return
    train, call_event = cls.train, handler.call_event
    _clip_in_updates(module.Accelerator)

    @functools.wraps(train)
    def train_followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        _running.append(self)
        try:
            result = train(self, *args, **kwargs)
        except BaseException as error:
            _end(self, error)
            raise
        _end(self)
        return result

    @functools.wraps(call_event)
    def call_decided(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = next((t for t in reversed(_running) if t.callback_handler is self), None)
        if trainer is not None:
            _decide(trainer)
        return call_event(self, *args, **kwargs)

    train_followed._disco = True  # type: ignore[attr-defined]
    cls.train, handler.call_event = train_followed, call_decided


def _clip_in_updates(cls: Any) -> None:
    """From now on the ``Accelerator`` of a Trainer leaves the product of clipping to deferred updates."""
    clip = cls.clip_grad_norm_

    @functools.wraps(clip)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        trainer = next((t for t in reversed(_running) if t.accelerator is self), None)
        state = None if trainer is None else _state(trainer)
        plain = self.distributed_type.value in _PLAIN_GRADIENTS and self.scaler is None
        if state is None or state.updates.deferral is None or not plain or next(_reasons(trainer), None) is not None:
            return clip(self, parameters, max_norm, norm_type)
        return clip_grad_norm(parameters, max_norm, norm_type, state.updates)

    cls.clip_grad_norm_ = clip_grad_norm_


def _state(trainer: Any) -> Session | None:
    return find_state(trainer.model) if isinstance(trainer.model, torch.nn.Module) else None


def _decide(trainer: Any) -> None:
    state = _state(trainer)
    if state is None:
        return
    reason = next(_reasons(trainer), None)
    if reason is not None:
        state.updates.multiply_clipped()
    if not state.updates.told:
        return
    if reason is not None:
        state.reports.say_once(
            f"update: auto is step here: {reason} may read weights behind optimizer.step(); if it does not, update: "
            "deferred hides updates behind the next forward"
        )
    state.updates.set_deferring(reason is None)


def _end(trainer: Any, error: BaseException | None = None) -> None:
    """``trainer.train()`` has ended, with ``error`` if any: weights are read from the parameters from here on."""
    _running.remove(trainer)
    state = _state(trainer)
    if state is None:
        return
    try:
        state.updates.set_deferring(False)
        state.updates.settle()
        state.updates.multiply_clipped()
    except Exception as other:
        if error is None:
            raise
        error.add_note(f"the last update of the weights was not done: {other}")


def _reasons(trainer: Any) -> Iterator[str]:
    """Code of others that may run between a step and the next forward, named for the user."""
    cls = type(trainer)
    if not _known(cls) and not (_package(cls) == "trl" and cls.__name__ in _TRL):
        yield f"trainer {cls.__qualname__} ({cls.__module__})"
    for name, value in vars(trainer).items():
        if callable(value) and callable(getattr(cls, name, None)):
            yield f"{cls.__qualname__}.{name}, which was replaced,"
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if not _known(kind) or any(name.startswith("on_") for name in vars(callback)):
            yield f"callback {kind.__qualname__} ({kind.__module__})"
    for model in {id(m): m for m in (trainer.model_wrapped, trainer.model)}.values():
        if any(not settles(hook) for hook in model._forward_pre_hooks.values()):
            yield f"a forward pre-hook of {type(model).__qualname__}"


def _known(cls: type) -> bool:
    return _package(cls) in _OURS


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def keep_planning_apart() -> None:
    """From now on ``Trainer.log`` counts ``train_runtime`` and the speeds of a prepared model without the seconds in
    which plans were made, which it logs as ``disco_planning_seconds``; their sum is the time on the clock.

    For a Trainer that is imported already: called when a plan is made, by a training that runs. Trainer treats the time
    that it takes to prepare a model for evaluation in the same way.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None or hasattr(module.Trainer.log, "_disco"):
        return
    log = module.Trainer.log

    @functools.wraps(log)
    def log_apart(self: Any, logs: dict[str, Any], start_time: float | None = None) -> None:
        state = find_state(self.model)
        if state is not None and start_time is not None:
            planning = state.reports.messages.seconds_since(start_time)
            if round(planning, 4) != getattr(self, "_disco_logged", 0.0):
                self._disco_logged = logs[KEY] = round(planning, 4)
            start_time += planning
        elif state is not None and _RUNTIME in logs:
            _without(logs, state.reports.messages.seconds_since(time.time() - logs[_RUNTIME]))
        log(self, logs, start_time)

    log_apart._disco = True  # type: ignore[attr-defined]
    module.Trainer.log = log_apart


def _without(metrics: dict[str, Any], planning: float) -> None:
    """``metrics`` of a whole training, as if it had taken so many seconds less. In place: they are its result too."""
    runtime = metrics[_RUNTIME]
    if not 0 < planning < runtime:
        return
    metrics[_RUNTIME] = round(runtime - planning, 4)
    metrics |= {name: round(metrics[name] * runtime / (runtime - planning), 3) for name in _SPEEDS if name in metrics}
    metrics[KEY] = round(planning, 4)
