"""Gives steps of one prepared model the engine's arenas, with the bytes that weights have on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from disco_accel.errors import ExecutionError, StoreFull
from disco_accel.execute.arenas import places_of
from disco_accel.execute.executor import arena_bytes
from disco_accel.native.arena import device_arena
from disco_accel.native.backend import backend_of, release_workspaces
from disco_accel.native.host_memory import HostMemory, WatchedTensors
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.step.budget.engine_memory import EngineMemory
from disco_accel.step.budget.grant_source import GrantChanged
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.placement.gradient_memory import GradientMemory
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.shard_memory import ShardMemory
from disco_accel.step.update.planned_updates import PlannedUpdates
from disco_accel.step.update.updated_step import StepWithUpdate
from disco_accel.store.shared_budgets import Piece


class PlanLoader:
    """Loads plans into ``memory``, within ``budgets``. Used under the session's lock."""

    def __init__(
        self,
        memory: EngineMemory,
        placement: Placement,
        gradients: GradientMemory,
        budgets: MovingBudget,
        updates: PlannedUpdates,
    ) -> None:
        self._memory, self._placement, self._gradients = memory, placement, gradients
        self._budgets, self._updates = budgets, updates
        self.shards: ShardMemory | None = None
        """Parts of weights that devices share."""
        self.weights_seen = WatchedTensors([])

    @typed_out_of_memory("giving the step its memory")
    def make_current(self, model: torch.nn.Module, step: CompiledStep, *, check_ends_later: bool = False) -> None:
        """Give ``step`` the arena, its residents as the host holds them now. Those that the plan before has left there
        are not loaded again.

        All plans share one arena, because the budget holds for the model and not for each plan. ``check_ends_later``:
        the caller asks ``weights_seen.finish_check`` before results of ``step`` leave it.
        """
        if not isinstance(step, StepWithUpdate):
            self._updates.settle()
        if self._memory.current is step and step.loaded is not None and not step.trained_moved(model):
            self.hold_host()
            check = self.weights_seen.begin_check if check_ends_later else self.weights_seen.changed
            if not check():
                return
            self._placement.note_writes(model)
            if not self.weights_seen.moved():
                self._start_anew(model, step, step.frozen_of(model))
                return
        self._placement.leave_written(model)
        before = self._left_whole(step)
        self._memory.abandon_active()
        frozen = step.frozen_of(model)
        if step.moved(frozen) or step.trained_moved(model):
            # PEFT's merge of some adapters and the user's ``.data = `` put other tensors in the place of weights.
            self._placement.gather(step.captured.constants.values())
            step.follow(model)
            frozen = step.frozen_of(model)
        needed = {
            device.id: arena_bytes(step.plan, device.id) for device in step.plan.devices if not device.is_host_device
        }
        self._placement.give_way()
        self._claim(step, max(needed.values()))
        if not self._arenas_do(needed):
            self._memory.unload()
        if step.loaded is None:
            self._claim_host(step)
        if not self._arenas_do(needed):
            places = places_of(step.plan, backend_of(self._memory.device).others(self._memory.gpus, len(needed)))
            self._memory.arenas = {device: device_arena(size, places[device]) for device, size in needed.items()}
        if step.loaded is None:
            self._memory.load(step)
        # What was unloaded meanwhile has left nothing.
        self._start_anew(model, step, frozen, before if before is self._memory.current else None)
        self._memory.current = step
        # Products in eager mode have left workspaces on other streams and threads.
        release_workspaces(self._memory.device)

    def make_current_again(self, model: torch.nn.Module, step: CompiledStep) -> CompiledStep:
        """As ``make_current``, for a step that runs again from its inputs: by another plan, which is returned, if the
        budget has become too small for its own. Raises BudgetTooSmall."""
        while True:
            step = self._budgets.plan_sets.fitting(step)
            try:
                self.make_current(model, step)
            except GrantChanged:
                self._budgets.follow()
            else:
                return step

    def _claim(self, step: CompiledStep, arena: int) -> None:
        """Room within the budget for ``step`` with an arena of so many bytes, or with the one that is there. Raises
        GrantChanged."""
        there = max((memory.numel() for memory in self._memory.arenas.values()), default=0)
        if step.budget.outside + max(arena, there) > self._budgets.grant.total:
            if self._memory.arenas:
                self._budgets.plan_sets.displaced(step)
            self._memory.unload()
            there = 0
        self._budgets.grant.claim(step.budget.outside, max(arena, there))

    def _arenas_do(self, needed: Mapping[int, int]) -> bool:
        arenas = self._memory.arenas
        return all(device in arenas and arenas[device].numel() >= size for device, size in needed.items())

    def _claim_host(self, step: CompiledStep) -> None:
        """Room on the host for values that ``step`` offloads, perhaps in the place of other plans. Raises StoreFull."""
        try:
            self.hold_host(step)
        except StoreFull:
            self._memory.unload()
            self.hold_host(step)

    def hold_host(self, more: CompiledStep | None = None) -> None:
        """Tell a store the memory held on the host now, and that of ``more``, about to be loaded. Raises StoreFull."""
        if self._memory.host_claims is None:
            return
        pieces: dict[Piece, int] = {}
        held: dict[str, Sequence[HostMemory]] = {
            "weights": self._placement.own_arenas(),
            "gradients": self._gradients.memory,
            "packed columns": [] if self.shards is None else self.shards.memory,
        }
        for what, memories in held.items():
            pieces |= {(what, id(memory)): memory.nbytes for memory in memories if memory.nbytes}
        loaded = [step for step in self._memory.plans.values() if step.loaded is not None]
        for step in loaded if more is None else [*loaded, more]:
            if step.plan.host.memory:
                pieces["offloaded values", id(step)] = step.plan.host.memory
        self._memory.host_claims.hold(pieces)

    def _left_whole(self, step: CompiledStep) -> CompiledStep | None:
        """The step that has the arena, if it leaves weights there in which ``step`` begins; None if it has ended early
        or waits at its gate. Waits for the residents that a forward still brings home."""
        before = self._memory.current
        if before is None or before is step or before.loaded is None or self._memory.runs():
            return None
        if not step.in_place_after(before):
            return None
        # Its outputs have left. What is torn is loaded, and a device that hangs is told of by whoever needs it.
        with suppress(ExecutionError):
            before.settle()
        return before if before.executor.holds_residents() else None

    def _start_anew(
        self,
        model: torch.nn.Module,
        step: CompiledStep,
        frozen: Sequence[torch.Tensor],
        before: CompiledStep | None = None,
    ) -> None:
        """The next run of ``step`` loads its residents as the host holds them now, but for those that ``before`` has
        left in place. Writes are watched from here on. ``frozen``: as ``frozen_of`` returns them now."""
        if self.shards is not None:
            self.shards.refresh()
        # Watched before the older watch is asked: between the two no write goes by.
        seen, watch = self.weights_seen, WatchedTensors(step.watched_of(model, frozen))
        found = [] if before is None else step.in_place_after(before)
        worth = sum(step.clean[vertex].numel() for vertex in found) > seen.hashed_bytes
        step.executor.invalidate(found if worth and not seen.changed() else ())
        self.weights_seen = watch
