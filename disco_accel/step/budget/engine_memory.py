"""One prepared model's engine and arenas, which all its plans share, and the step that runs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable

import torch

from disco_accel.errors import ExecutionError
from disco_accel.native.backend import backend_of
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.store.shared_budgets import HostClaims

PlanKey = tuple[Hashable, ...]
"""All that a plan depends on."""


class EngineMemory:
    """The arenas, the step that has them, and the step that runs. ``lock``: the session's."""

    def __init__(self, device: torch.device, gpus: tuple[int, ...], host_claims: HostClaims | None) -> None:
        """``gpus``: indices of the devices of a step, first that of ``device``; none on host devices.
        ``host_claims`` tells a store of memory held on the host, if one counts it."""
        self.device, self.gpus, self.host_claims = device, gpus, host_claims
        self.lock = threading.RLock()
        self.plans: dict[PlanKey, CompiledStep] = {}
        self.current: CompiledStep | None = None
        self.arenas: dict[int, torch.Tensor] = {}
        """By device of the plans, all of which share them."""
        self._active: weakref.WeakMethod[Callable[[], None]] | None = None
        """Ends the run of the pending step, which then runs again from its inputs if its backward comes."""
        self._engine_process: int | None = None

    def abandon_active(self) -> None:
        """Let another run take the engine."""
        suspend = self._active() if self._active is not None else None
        if suspend is not None:
            suspend()
        self._active = None
        # A step whose owner was interrupted, or freed by another thread, may still run.
        if self.current is not None and self.current.loaded is not None:
            self.current.executor.abandon()

    def take_engine(self, suspend: Callable[[], None]) -> None:
        """The step whose method ``suspend`` is runs from now on, in the place of any other."""
        self.abandon_active()
        # Weak: the autograd graph alone keeps a step alive, so that dropping the loss frees the engine.
        self._active = weakref.WeakMethod(suspend)

    def release_engine(self, suspend: Callable[[], None]) -> None:
        """The step whose method ``suspend`` is does not run any more."""
        if self._active is not None and self._active() == suspend:
            self._active = None

    def runs(self) -> bool:
        """Whether a step is in its forward or its backward, or between them."""
        return self._active is not None and self._active() is not None

    @property
    def in_own_process(self) -> bool:
        """Whether this process is none that was forked after the engine had started."""
        return self._engine_process in (None, os.getpid())

    def require_own_process(self) -> None:
        """Raises ExecutionError in a process that was forked after the engine had started."""
        # Before any lock is taken: a thread that held it may not exist here.
        if not self.in_own_process:
            raise ExecutionError(
                f"this model's engine runs in process {self._engine_process}, from which this process was forked; "
                "call restore(model) to use the model here, or start workers with 'spawn'"
            )

    def load(self, step: CompiledStep) -> None:
        """Make the executor of ``step``, in the arenas."""
        step.load(self.arenas)
        self._engine_process = os.getpid()

    def unload(self) -> None:
        """Free every executor and the arena; the plans stay."""
        self.abandon_active()
        for step in self.plans.values():
            step.unload()
        self.arenas, self.current = {}, None
        # PyTorch may keep what was freed in pieces of that size, for which the next arena is too large.
        backend_of(self.device).release_memory()
        if self.host_claims is not None:
            self.host_claims.drop("offloaded values")

    def close(self) -> None:
        """The session is over, and all of its memory freed."""
        if self.host_claims is not None:
            self.host_claims.close()
        self._engine_process = None
