"""Defers an optimizer's ``step()`` to the next forward of its model, and does it by hand when anybody may look.

``step()`` itself runs, with nothing to do: before it, the gradients of the model's weights are taken away, and given
back behind it. The update is *pending* from then on. A planned step takes it over; any other read or write of the
weights or moments *settles* it first (``pending_reads.py``), and so does the next ``step()``.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disco_accel.errors import ExecutionError, StatesTorn
from disco_accel.native.host_memory import WatchedTensors, expect_rewrite, writes_are_watched
from disco_accel.step.placement.trained_weights import before_updates
from disco_accel.step.update.pending_reads import PendingReads, SettlingHooks, not_intercepted, reads_of
from disco_accel.step.update.pending_update import GradientsAway, ParameterUpdate, PendingUpdate, parts_of

_TORN = (
    "update: deferred: a forward ended in the middle of the update of the step before: some weights have it and others "
    "do not. Load a checkpoint of the model and of its optimizer (load_state_dict)"
)

_deferring: weakref.WeakSet[Deferral] = weakref.WeakSet()


@dataclass(frozen=True)
class _OwnTensors:
    """``on_host``: whether a tensor is a trained weight of ``model``; ``watchable``: whether the system can tell that a
    gradient was written to."""

    model: weakref.ref[torch.nn.Module]
    on_host: Callable[[torch.Tensor], bool]
    watchable: Callable[[torch.Tensor], bool]

    def name(self, parameter: torch.Tensor) -> str:
        """Of a parameter, for a message."""
        model = self.model()
        names = () if model is None else (name for name, p in model.named_parameters() if p is parameter)
        return next(iter(names), "a parameter")


class Deferral:
    """The deferred updates of one prepared model. Used under the session's lock, which ``lock`` is."""

    def __init__(
        self,
        model: torch.nn.Module,
        on_host: Callable[[torch.Tensor], bool],
        watchable: Callable[[torch.Tensor], bool],
        lock: Any,
        say: Callable[[str], None],
        ready: Callable[[torch.optim.Optimizer], object] | None = None,
        asked: str = "deferred",
    ) -> None:
        """``on_host``, ``watchable``: as of ``_OwnTensors``. ``ready`` prepares an optimizer's state for its next
        update. ``asked``: ``update`` in the config."""
        self._ours, self._lock, self._ready = _OwnTensors(weakref.ref(model), on_host, watchable), lock, ready
        self._tell: Callable[[str], None] = lambda reason: say(
            f"update: {asked} defers nothing: {reason}; optimizer.step() updates as it is called"
        )
        self.paused = False
        """Whether ``optimizer.step()`` updates as it is called."""
        self.deferring = True
        """Whether the last ``optimizer.step()`` was deferred, the first one aside, which makes moments."""
        self.seen = False
        """Whether an optimizer's ``step()`` was."""
        self.counts = {"updates_planned": 0, "updates_settled": 0, "clips_deferred": 0}
        """Updates done by plans and by hand, and clippings whose products were left to updates."""
        self.pending: PendingUpdate | None = None
        self.reads = PendingReads(self.settle, lock)
        self._watch: WatchedTensors | None = None
        """The parameters and gradients of the pending update, which nobody may write to."""
        self._away, self._clipped = GradientsAway(), _ClippedGradients()
        self._torn, self._hooks = _TornStates(), SettlingHooks(model, self.settle, self.loads)
        _deferring.add(self)
        _hook_all_optimizers()

    def settle(self) -> None:
        """Do the update that is pending now.

        Raises:
            ExecutionError: a tensor of it was changed since; that update is lost.
            StatesTorn: an update before ended in the middle.
        """
        self._torn.require_whole()
        if self.pending is None:
            return
        with self._lock:
            self.reads.open()
            try:
                pending = self.checked()
                if pending is not None:
                    self.pending = None
                    pending.run()
                    self._clipped.multiply()
                    self.counts["updates_settled"] += 1
            finally:
                self.reads.lift()

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Around code that reads weights and moments as they are and may do the pending update; under the lock.
        Other threads wait for its end."""
        if self.reads.opened_here():
            yield
            return
        self.reads.open()
        try:
            yield
        finally:
            if self.pending is None:
                self.reads.lift()
            else:
                self.reads.close()

    def checked(self) -> PendingUpdate | None:
        """The pending update, whose weights are about to be written. Raises as ``settle``."""
        self._torn.require_whole()
        pending = self.pending
        if pending is None:
            return None
        watch, self._watch = self._watch, None
        try:
            pending.check()
            if watch is not None and watch.changed():
                raise ExecutionError(
                    "update: deferred: a weight or a gradient was written to after optimizer.step() and before the "
                    "next forward, when its update runs: write behind the next forward, clear gradients by "
                    "zero_grad(set_to_none=True), or use update: step"
                )
        except ExecutionError:
            self.pending = None
            raise
        expect_rewrite([tensor for part in pending.parts for tensor in (part.parameter, part.gradient)])
        return pending

    def taken(self) -> None:
        """A plan has done the update that is pending."""
        self.pending = None
        self._clipped.multiply()
        self.counts["updates_planned"] += 1

    def torn(self) -> None:
        """A plan has done some of the pending update and will not do the rest."""
        self.pending = None
        self._torn.tear()

    def loads(self, loaded: torch.nn.Module | torch.optim.Optimizer) -> None:
        """``loaded`` is about to load weights or moments: all of its own, if it is the model itself or an optimizer."""
        self._torn.loads(loaded, self._ours.model())
        if not self._torn.weights:
            self.settle()

    def remove(self) -> None:
        """Settle, and defer nothing any more."""
        _deferring.discard(self)
        self._hooks.remove()
        self.settle()
        self.multiply_clipped()

    def updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` has weights of this model."""
        return any(self._has(p) for group in optimizer.param_groups for p in group["params"])

    def _has(self, parameter: torch.Tensor) -> bool:
        # To ask where it lies would be a read of one whose update is pending.
        pending = reads_of(parameter)
        return self._ours.on_host(parameter) if pending is None else pending is self.reads

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """``optimizer.step()`` is about to run."""
        if not self.updates(optimizer):
            return
        self.seen = True
        with self._lock:
            self._torn.require_whole(optimizer)
            self.settle()
            self._clipped.expected = frozenset()
            if self.paused:
                self.deferring = False
                self._clipped.multiply()
                return
            if self._ready is not None and not closure:
                self._ready(optimizer)
            parts = "its step() is given a closure" if closure else parts_of(optimizer, self._ours.on_host)
            if parts and not isinstance(parts, str):
                coefficients = self._clipped.coefficients()
                parts = tuple(replace(part, coefficient=coefficients.get(id(part.gradient))) for part in parts)
                parts = self._fenced(parts)
            self.deferring = not isinstance(parts, str)
            if isinstance(parts, str):
                self._clipped.multiply()
                self._tell(parts)
                return
            self._clipped.expected = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
            if not parts:
                self._clipped.multiply()
                return
            self._hooks.add(optimizer)
            self._torn.begins(optimizer)
            with not_intercepted():
                torch._foreach_add_([part.steps for part in parts], 1)
                self._defer(parts)
            self.reads.close()
            self._away.take(parts)

    def _fenced(self, parts: tuple[ParameterUpdate, ...]) -> tuple[ParameterUpdate, ...] | str:
        """``parts``, whose tensors this thread alone may read; or why their update cannot be deferred."""
        kept = [(part.parameter, tensor) for part in parts for tensor in (*part.changed, part.steps)]
        held = self.reads.fence(tensor for _, tensor in kept)
        if held < 0:
            return parts
        self.reads.lift()
        return (
            f"something else holds the memory of {self._ours.name(kept[held][0])} or of its moments, as .data, a "
            "state_dict or a NumPy array that was kept does, and may read it at any time"
        )

    def _defer(self, parts: Sequence[ParameterUpdate]) -> None:
        self.pending = PendingUpdate.of(parts)
        if writes_are_watched():
            gradients = [part.gradient for part in parts if self._ours.watchable(part.gradient)]
            # Accumulation has written to them since the watch of the step before.
            expect_rewrite(gradients)
            self._watch = WatchedTensors([*(part.parameter for part in parts), *gradients])

    def clip(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> list[torch.Tensor]:
        """Leave the product of gradients with ``coefficient``, of no dimension, to the next update.

        Returns the parameters whose gradients are to be multiplied now: those whose next update is not expected to be
        deferred, and those of gradients in other memory than ours.
        """
        with self._lock:
            if self.pending is not None:
                self.settle()
            expected = [p for p in parameters if id(p) in self._clipped.expected]
            left = {id(p) for p in expected if self._ours.on_host(p) and self._may_wait(p.grad)}
            self._clipped.note((p for p in parameters if id(p) in left), coefficient)
            self.counts["clips_deferred"] += bool(left)
            return [p for p in parameters if id(p) not in left]

    def _may_wait(self, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and not gradient.requires_grad and self._ours.watchable(gradient)

    def multiply_clipped(self) -> None:
        """Multiply the gradients whose product clipping has left to the update."""
        with self._lock:
            self._clipped.multiply()


class _ClippedGradients:
    """Gradients of one model that are still to be multiplied by the coefficient of their clipping."""

    def __init__(self) -> None:
        self._noted: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Parameter, gradient, coefficient of no dimension."""
        self.expected: frozenset[int] = frozenset()
        """Ids of parameters whose next update is deferred if it is as the last one was."""

    def note(self, parameters: Iterable[torch.Tensor], coefficient: torch.Tensor) -> None:
        """The gradients of ``parameters`` are to be multiplied by ``coefficient``."""
        self._noted += [(p, p.grad, coefficient) for p in parameters if p.grad is not None]

    def coefficients(self) -> dict[int, torch.Tensor]:
        """By id of a gradient."""
        return {id(gradient): coefficient for _, gradient, coefficient in self._noted}

    def multiply(self) -> None:
        """Multiply those that their parameters still have, as PyTorch does; forget all."""
        noted = [(g, c) for parameter, g, c in self._noted if parameter.grad is g]
        self._noted.clear()
        expect_rewrite([gradient for gradient, _ in noted])
        with torch.no_grad():
            for gradient, coefficient in noted:
                gradient.mul_(coefficient)


class _TornStates:
    """Weights and moments of one model of which an update has changed some and will not change the rest, until others
    are loaded."""

    def __init__(self) -> None:
        self.weights = False
        """Whether weights are torn."""
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those whose moments are torn."""
        self._updating: weakref.ref[torch.optim.Optimizer] | None = None

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The next update is one of ``optimizer``."""
        self._updating = weakref.ref(optimizer)

    def tear(self) -> None:
        """The update has ended in the middle."""
        self.weights = True
        optimizer = None if self._updating is None else self._updating()
        if optimizer is not None:
            self._optimizers.add(optimizer)

    def loads(self, loaded: torch.nn.Module | torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        """``loaded`` is about to load weights or moments: all of its own, if it is ``model`` or an optimizer."""
        if loaded is model:
            self.weights = False
        elif isinstance(loaded, torch.optim.Optimizer):
            self._optimizers.discard(loaded)

    def require_whole(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise StatesTorn if weights are torn, or moments of ``optimizer``."""
        if self.weights or (optimizer is not None and optimizer in self._optimizers):
            raise StatesTorn(_TORN)


@functools.cache
def _hook_all_optimizers() -> None:
    before_updates.append(_settle_before)
    register_optimizer_step_pre_hook(_before_step)


def _before_fork() -> None:
    # The child would find its copy of the pages written to, and has not the threads that update.
    for deferral in list(_deferring):
        if not deferral.reads.opened_here():
            deferral.reads.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _settle_before(optimizer: torch.optim.Optimizer) -> None:
    for deferral in list(_deferring):
        if deferral.updates(optimizer) and deferral.pending is not None:
            deferral.settle()


def _before_step(optimizer: torch.optim.Optimizer, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    # The first of the arguments is the optimizer itself.
    closure = next(iter((*args, None)[1:]), None) or kwargs.get("closure")
    for deferral in list(_deferring):
        deferral.before_step(optimizer, closure is not None)
