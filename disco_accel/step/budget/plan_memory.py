"""One prepared model's engine and arenas, which all its plans share, and the step that has them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch

from disco_accel.errors import ExecutionError, StoreFull
from disco_accel.execute.arenas import places_of
from disco_accel.execute.executor import arena_bytes
from disco_accel.native.arena import device_arena
from disco_accel.native.backend import backend_of, release_workspaces
from disco_accel.native.host_memory import HostMemory, WatchedTensors
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.step.budget.grant_source import GrantWithdrawn
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.placement.gradient_memory import GradientMemory
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.shard_memory import ShardMemory
from disco_accel.step.update.planned_updates import PlannedUpdates
from disco_accel.step.update.updated_step import StepWithUpdate
from disco_accel.store.shared_budgets import HostClaims, Piece

PlanKey = tuple[Hashable, ...]
"""All that a plan depends on."""


class Suspendable(Protocol):
    """A step that runs, and that can give the engine up: it runs again from its inputs if its backward comes."""

    def suspend(self) -> None:
        """End the run."""


class PlanMemory:
    """The arenas, the step that has them, and the step that runs. ``budgets`` says how large they may be."""

    placement: Placement
    gradients: GradientMemory
    budgets: MovingBudget
    updates: PlannedUpdates

    def __init__(self, device: torch.device, gpus: tuple[int, ...]) -> None:
        """``gpus``: indices of the devices of a step, first that of ``device``; none on host devices."""
        self.device, self._gpus = device, gpus
        self.lock = threading.RLock()
        self.plans: dict[PlanKey, CompiledStep] = {}
        self.current: CompiledStep | None = None
        self.arenas: dict[int, torch.Tensor] = {}
        """By device of the plans, all of which share them."""
        self.shards: ShardMemory | None = None
        """Parts of weights that devices share."""
        self.weights_seen = WatchedTensors([])
        self.host_claims: HostClaims | None = None
        """Tells a store what is held on the host, if one is to know."""
        self._active: weakref.ref[Suspendable] | None = None
        self._engine_process: int | None = None

    def abandon_active(self) -> None:
        """Let another run take the engine; the pending step reruns from its inputs if its backward comes."""
        pending = self._active() if self._active is not None else None
        if pending is not None:
            pending.suspend()
        self._active = None
        # A step whose owner was interrupted, or freed by another thread, may still run.
        if self.current is not None and self.current.loaded is not None:
            self.current.executor.abandon()

    def take_engine(self, pending: Suspendable) -> None:
        """``pending`` runs from now on, in the place of any other step."""
        self.abandon_active()
        # Weak: the autograd graph alone keeps a step alive, so that dropping the loss frees the engine.
        self._active = weakref.ref(pending)

    def release_engine(self, pending: Suspendable) -> None:
        """``pending`` does not run any more."""
        if self._active is not None and self._active() is pending:
            self._active = None

    def require_own_process(self) -> None:
        """Raises ExecutionError in a process that was forked after the engine had started."""
        # Before any lock is taken: a thread that held it may not exist here.
        if self._engine_process not in (None, os.getpid()):
            raise ExecutionError(
                f"this model's engine runs in process {self._engine_process}, from which this process was forked; "
                "call restore(model) to use the model here, or start workers with 'spawn'"
            )

    @typed_out_of_memory("giving the step its memory")
    def make_current(self, model: torch.nn.Module, step: CompiledStep, *, check_ends_later: bool = False) -> None:
        """Give ``step`` the arena, its residents as the host holds them now.

        All plans share one arena, because the budget holds for the model and not for each plan. ``check_ends_later``:
        the caller asks ``weights_seen.finish_check`` before what ``step`` has made leaves it.
        """
        if not isinstance(step, StepWithUpdate):
            self.updates.settle()
        if self.current is step and step.loaded is not None and not step.trained_moved(model):
            self.hold_host()
            check = self.weights_seen.begin_check if check_ends_later else self.weights_seen.changed
            if not check():
                return
            self.placement.note_writes(model)
            if not self.weights_seen.moved():
                self._refresh_shards()
                step.executor.invalidate()
                self.weights_seen = WatchedTensors(step.watched_of(model))
                return
        self.placement.leave_written(model)
        self.abandon_active()
        frozen = step.frozen_of(model)
        if step.moved(frozen) or step.trained_moved(model):
            # PEFT's merge of some adapters and the user's ``.data = `` put other tensors in the place of weights.
            self.placement.gather(step.captured.constants.values())
            step.follow(model)
        needed = {device.id: arena_bytes(step.plan, device.id) for device in step.plan.devices if not device.host}
        self._claim(step, max(needed.values()))
        if not self._arenas_do(needed):
            self.unload()
        if step.loaded is None:
            self._claim_host(step)
        if not self._arenas_do(needed):
            places = places_of(step.plan, backend_of(self.device).others(self._gpus, len(needed)))
            self.arenas = {device: device_arena(size, places[device]) for device, size in needed.items()}
        if step.loaded is None:
            step.load(self.arenas)
            self._engine_process = os.getpid()
        self._refresh_shards()
        step.executor.invalidate()
        self.weights_seen = WatchedTensors(step.watched_of(model))
        # Products in eager mode have left workspaces on other streams and threads.
        release_workspaces(self.device)
        self.current = step

    def make_current_again(self, model: torch.nn.Module, step: CompiledStep) -> CompiledStep:
        """As ``make_current``, for a step that runs again from its inputs: by another plan, which is returned, if the
        budget has become too small for its own. Raises BudgetTooSmall."""
        while True:
            step = self.budgets.fitting(step)
            try:
                self.make_current(model, step)
            except GrantWithdrawn:
                self.budgets.follow()
            else:
                return step

    def _claim(self, step: CompiledStep, arena: int) -> None:
        """Room within the budget for ``step`` with an arena of so many bytes, or with the one that is there. Raises
        GrantWithdrawn."""
        there = max((memory.numel() for memory in self.arenas.values()), default=0)
        if step.budget.outside + max(arena, there) > self.budgets.total:
            self.unload()
            there = 0
        self.budgets.claim(step.budget.outside, max(arena, there))

    def _arenas_do(self, needed: Mapping[int, int]) -> bool:
        return all(device in self.arenas and self.arenas[device].numel() >= size for device, size in needed.items())

    def _claim_host(self, step: CompiledStep) -> None:
        """Room on the host for what ``step`` offloads, if need be in the place of other plans. Raises StoreFull."""
        try:
            self.hold_host(step)
        except StoreFull:
            self.unload()
            self.hold_host(step)

    def hold_host(self, more: CompiledStep | None = None) -> None:
        """Tell a store what is held on the host now, and what ``more`` takes as it is loaded. Raises StoreFull."""
        if self.host_claims is None:
            return
        pieces: dict[Piece, int] = {}
        held: dict[str, Sequence[HostMemory]] = {
            "weights": self.placement.own_arenas(),
            "gradients": self.gradients.memory,
            "packed columns": [] if self.shards is None else self.shards.memory,
        }
        for what, memories in held.items():
            pieces |= {(what, id(memory)): memory.nbytes for memory in memories if memory.nbytes}
        loaded = [step for step in self.plans.values() if step.loaded is not None]
        for step in loaded if more is None else [*loaded, more]:
            if step.plan.host_memory:
                pieces["offloaded values", id(step)] = step.plan.host_memory
        self.host_claims.hold(pieces)

    def follow_budget(self) -> None:
        """Between two steps: the budget is from now on what is granted."""
        if not self.budgets.unchanged():
            with self.lock:
                self.budgets.follow()

    def runs(self) -> bool:
        """Whether a step is in its forward or its backward, or between them."""
        return self._active is not None and self._active() is not None

    def _refresh_shards(self) -> None:
        """Copies of parts of weights have the bytes that the weights have."""
        if self.shards is not None:
            self.shards.refresh()

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
