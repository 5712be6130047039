"""Puts an optimizer's ``step()`` off until the next forward of its model, and does it by hand when anybody may look.

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
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from disco_accel.errors import ExecutionError, StatesTorn
from disco_accel.native.host_memory import WatchedTensors, expect_rewrite, writes_are_watched
from disco_accel.step.capture_lock import in_capture
from disco_accel.step.placement.trained_weights import before_updates
from disco_accel.step.update.clipping import ClippedGradients
from disco_accel.step.update.pending_reads import PendingReads, not_intercepted, reads_of
from disco_accel.step.update.pending_update import ParameterUpdate, PendingUpdate, parts_of

_TORN = (
    "update: deferred: a forward ended in the middle of the update of the step before: some weights have it and others "
    "do not. Load a checkpoint of the model and of its optimizer (load_state_dict)"
)

_deferring: weakref.WeakSet[Deferral] = weakref.WeakSet()


class Deferral:
    """The updates of one prepared model that are put off. ``on_host``: whether a tensor is one of its trained weights;
    ``watchable``: whether the system can tell that a gradient was written to.

    Used under the session's lock, which ``lock`` is.
    """

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
        """``ready`` makes an optimizer's state what its next update needs. ``asked``: ``update`` in the config."""
        self._on_host, self._watchable, self._lock, self._say = on_host, watchable, lock, say
        self._ready, self._asked = ready, asked
        self.paused = False
        """Whether ``optimizer.step()`` updates as it is called."""
        self.deferring = True
        """Whether the last ``optimizer.step()`` was put off, the first one aside, which makes moments."""
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters whose gradients are away while ``step()`` runs, with these."""
        self.pending: PendingUpdate | None = None
        self.planned = self.by_hand = 0
        """Updates that plans did, and that were settled."""
        self.seen = False
        """Whether an optimizer's ``step()`` was."""
        self.reads = PendingReads(self.settle, lock)
        self._watch: WatchedTensors | None = None
        """The parameters and gradients of the pending update, which nobody may write to."""
        self._updating: weakref.ref[torch.optim.Optimizer] | None = None
        """Whose update is pending, or was the last to be."""
        self._clipped = ClippedGradients()
        self._expected: frozenset[int] = frozenset()
        """Ids of parameters whose next update is put off if it is as the last one was."""
        self.clips = 0
        """Clippings whose products were left to updates."""
        self._torn = False
        """Whether an update has changed some weights, will not change the rest, and none were loaded since."""
        self._torn_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those whose moments such an update has left, and that have not loaded any since."""
        settle, loads = _Hook(self), _Hook(self, loads=True)
        self._model = weakref.ref(model)
        for module in model.modules():
            # Weights that an update has left torn are not saved.
            self._handles.append(module.register_state_dict_pre_hook(settle))
            self._handles.append(module.register_load_state_dict_pre_hook(loads))
            # The model's own forward settles where it does not run from a plan.
            own = module is not model and any(p.requires_grad for p in module.parameters(recurse=False))
            if own:
                self._handles.append(module.register_forward_pre_hook(settle))
        _deferring.add(self)
        _hook_all_optimizers()

    def settle(self) -> None:
        """Do the update that is pending now.

        Raises:
            ExecutionError: what it needs was changed since; that update is lost.
            StatesTorn: an update before ended in the middle.
        """
        if self._torn:
            raise StatesTorn(_TORN)
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
                    self.by_hand += 1
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
        if self._torn:
            raise StatesTorn(_TORN)
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
        self.planned += 1

    def torn(self) -> None:
        """A plan has done some of the pending update and will not do the rest."""
        self.pending = None
        self._torn = True
        optimizer = None if self._updating is None else self._updating()
        if optimizer is not None:
            self._torn_optimizers.add(optimizer)

    def loads(self, loaded: torch.nn.Module | torch.optim.Optimizer) -> None:
        """``loaded`` is about to load weights or moments: all of its own, if it is the model itself or an optimizer."""
        if loaded is self._model():
            self._torn = False
        elif isinstance(loaded, torch.optim.Optimizer):
            self._torn_optimizers.discard(loaded)
        if not self._torn:
            self.settle()

    def remove(self) -> None:
        """Settle, and put nothing off any more."""
        _deferring.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle()
        self.multiply_clipped()

    def updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` has weights of this model."""
        return any(self._has(p) for group in optimizer.param_groups for p in group["params"])

    def _has(self, parameter: torch.Tensor) -> bool:
        # To ask where it lies would be a read of one whose update is pending.
        pending = reads_of(parameter)
        return self._on_host(parameter) if pending is None else pending is self.reads

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """``optimizer.step()`` is about to run."""
        if not self.updates(optimizer):
            return
        self.seen = True
        with self._lock:
            if optimizer in self._torn_optimizers:
                raise StatesTorn(_TORN)
            self.settle()
            self._expected = frozenset()
            if self.paused:
                self.deferring = False
                self._clipped.multiply()
                return
            if self._ready is not None and not closure:
                self._ready(optimizer)
            parts = "its step() is given a closure" if closure else parts_of(optimizer, self._on_host)
            if parts and not isinstance(parts, str):
                coefficients = self._clipped.coefficients()
                parts = tuple(replace(part, coefficient=coefficients.get(id(part.gradient))) for part in parts)
                parts = self._fenced(parts)
            self.deferring = not isinstance(parts, str)
            if isinstance(parts, str):
                self._clipped.multiply()
                self._say(f"update: {self._asked} defers nothing: {parts}; optimizer.step() updates as it is called")
                return
            self._expected = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
            if not parts:
                self._clipped.multiply()
                return
            self._hook(optimizer)
            self._updating = weakref.ref(optimizer)
            with not_intercepted():
                torch._foreach_add_([part.steps for part in parts], 1)
                self._put_off(parts)
            self.reads.close()
            self._gradients = [(part.parameter, part.gradient) for part in parts]
            for parameter, _ in self._gradients:
                parameter.grad = None

    def _fenced(self, parts: tuple[ParameterUpdate, ...]) -> tuple[ParameterUpdate, ...] | str:
        """``parts``, whose tensors this thread alone may read; or why their update cannot be put off."""
        kept = [(part.parameter, tensor) for part in parts for tensor in (*part.changed, part.steps)]
        held = self.reads.fence(tensor for _, tensor in kept)
        if held < 0:
            return parts
        self.reads.lift()
        model, parameter = self._model(), kept[held][0]
        names = () if model is None else (name for name, p in model.named_parameters() if p is parameter)
        return (
            f"something else holds the memory of {next(iter(names), 'a parameter')} or of its moments, as .data, a "
            "state_dict or a NumPy array that was kept does, and may read it at any time"
        )

    def _put_off(self, parts: Sequence[ParameterUpdate]) -> None:
        self.pending = PendingUpdate.of(parts)
        if writes_are_watched():
            gradients = [part.gradient for part in parts if self._watchable(part.gradient)]
            # Accumulation has written to them since the watch of the step before.
            expect_rewrite(gradients)
            self._watch = WatchedTensors([*(part.parameter for part in parts), *gradients])

    def clip(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> list[torch.Tensor]:
        """Leave the product of gradients with ``coefficient``, of no dimension, to the next update; returns the
        parameters whose next update is not expected to be put off, and those of gradients in other memory than ours."""
        with self._lock:
            if self.pending is not None:
                self.settle()
            left = {id(p) for p in parameters if id(p) in self._expected and self._on_host(p) and self._is_ours(p.grad)}
            self._clipped.note((p for p in parameters if id(p) in left), coefficient)
            self.clips += bool(left)
            return [p for p in parameters if id(p) not in left]

    def _is_ours(self, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and not gradient.requires_grad and self._watchable(gradient)

    def multiply_clipped(self) -> None:
        """Multiply the gradients whose product clipping has left to the update."""
        with self._lock:
            self._clipped.multiply()

    def after_step(self) -> None:
        """``optimizer.step()`` has run."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._handles.append(optimizer.register_state_dict_pre_hook(_Hook(self)))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(_Hook(self, loads=True)))


class _Hook:
    """A hook that settles; that of a copied or stored module does nothing."""

    def __init__(self, deferral: Deferral | None = None, *, loads: bool = False) -> None:
        """``loads``: the call that it hooks loads weights or moments."""
        self._deferral = None if deferral is None else weakref.ref(deferral)
        self._loads = loads

    def __call__(self, owner: Any = None, *_: Any, **__: Any) -> None:
        deferral = None if self._deferral is None else self._deferral()
        if deferral is None or in_capture():
            return
        if self._loads:
            deferral.loads(owner)
        else:
            deferral.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def settles(hook: object) -> bool:
    """Whether ``hook`` of a module is one of a ``Deferral``."""
    return isinstance(hook, _Hook)


@functools.cache
def _hook_all_optimizers() -> None:
    before_updates.append(_settle_before)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


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


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    del optimizer
    for deferral in list(_deferring):
        deferral.after_step()
