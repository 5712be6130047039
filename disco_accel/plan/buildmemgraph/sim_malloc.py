"""SIMMALLOC and its siblings (Figure 11): device memory as the planner simulates it while it walks the serial order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disco_accel.graph.taskgraph import Device, Ref
from disco_accel.plan.buildmemgraph.eviction import Candidate, Policy, belady, fifo, lru
from disco_accel.plan.common.device_copy import Piece, Stay, Value
from disco_accel.plan.common.free_list import FreeSpace, Rank, Window
from disco_accel.plan.common.plan_log import PlanLog
from disco_accel.plan.infeasible import Infeasible


@dataclass(frozen=True, slots=True)
class Repairs:
    """What BUILDMEMGRAPH needs beyond the paper's figures. All on; tests switch one off to show what it is for."""

    spare_inputs: bool = True
    """Never evict an input of the vertex being executed."""
    revoke: bool = True
    """Take back memory reserved ahead for copies not made yet, instead of evicting what does not exist."""
    consumers_before_exec: bool = True
    """A victim's earlier consumers are those before ``exec_horizon``, not those before the vertex allocated for."""
    release_every_byte: bool = True
    """An allocation waits for all former users of all its bytes, not only of the first piece."""
    end_vertex: bool = True
    """Kept values are read by a virtual vertex at the end."""
    shorten_lookahead: bool = True
    """An infeasible plan is tried again with less look-ahead, and the budget that would do is searched for."""


_TIMELESS = (belady, fifo, lru)
"""Policies whose rank of a copy does not change while the copy is not used."""


class DeviceMemory:
    """The arena of one device during planning, with its two horizons.

    ``exec_horizon`` is the position being executed; copies are allocated up to ``alloc_horizon``, as far ahead as
    memory allows. Outputs of kernels get their place when they are executed: kernels of a stream follow each other
    anyway, so allocating those early would gain nothing and take the room that copies can use.
    """

    def __init__(
        self, device: Device, policy: Policy, repairs: Repairs, plan: PlanLog, slack: float | None = None
    ) -> None:
        self.align = device.alignment
        size = device.memory // device.alignment * device.alignment
        self.space = FreeSpace(size, policy in _TIMELESS, aged=slack is not None)
        self.slack = int((slack or 0.0) * size)
        self.policy = policy
        self.repairs = repairs
        self.plan = plan
        self.exec_horizon = 0
        self.alloc_horizon = 0
        self.home_floor = self.space.bytes
        self.has_homes = False
        self.pinned: set[Ref] = set()
        self.held: dict[Ref, Stay] = {}
        self._reserved: list[tuple[int, int, Value]] = []
        self._tick = 0

    def block(self, size: int) -> int:
        """Return ``size`` rounded up to the alignment."""
        return -(-size // self.align) * self.align

    def rank(self, stay: Stay) -> float:
        """Return how gladly ``stay`` is evicted."""
        value = stay.value
        clean = value.host is not None
        candidate = Candidate(stay.block, stay.born, stay.newest, value.next_use, self.exec_horizon, clean)
        return self.policy(candidate)

    def sim_malloc(self, size: int, stays: bool = False) -> list[Piece]:
        """Take room for an output of the vertex being executed, evicting if need be. Raises Infeasible.

        ``stays``: it is kept to the end, so it should not lie where a resident must come back to.
        """
        block = self.block(size)
        if stays:
            window = self.space.lowest_fit(block, self.home_floor)
            while window is None and self._revoke():
                window = self.space.lowest_fit(block, self.home_floor)
            if window is not None:
                return self.space.take(window.start, window.end)
        return self._force(block, self.space.first_fit)

    def compact(self, values: Iterable[Value], sizes: Iterable[int]) -> list[list[Piece]]:
        """Take room for outputs of ``sizes`` when inputs of the same vertex lie in the way.

        ``values``, its inputs, leave the device for a moment and are to be reloaded. Raises Infeasible.
        """
        for value in values:
            stay = value.stay
            if stay is None or stay.permanent or value.out:
                continue
            if stay.planned is not None and not stay.readers:
                self._unmake(value, stay)
                continue
            if value.host is None:
                self.sim_malloc_offload(value)
            self._cache(value)
        return [self._force(self.block(size), self.space.first_fit) for size in sizes]

    def sim_malloc_reload(self, value: Value, force: bool) -> bool:
        """Bring ``value`` to the device for its next use: take back the intact copy, or reserve room and add a reload.

        Without ``force`` nothing that is held or needed sooner is moved, and False says that there was no room.
        """
        if self._take_back(value):
            return True
        block = self.block(value.size)
        taken = self._go_home(value, block)
        if taken is not None:
            pass
        elif value.only_at_home or (not force and value.last_call):
            return False
        elif force:
            taken = self._force(block, self.space.oldest_fit)
        else:
            enough = self.space.bytes >= block + self.slack
            window = self.space.oldest_fit(block, self.rank) if enough else None
            if window is None:
                return False
            taken = self.space.take(window.start, window.end)
        value.stay = self._reload_into(value, taken)
        self.reserve(value)
        return True

    def sim_malloc_copy(self, value: Value) -> Stay:
        """Make a second copy of ``value`` for a vertex that overwrites it while the first must live on."""
        if value.host is None:
            self.sim_malloc_offload(value)
        return self._reload_into(value, self._force(self.block(value.size), self.space.oldest_fit))

    def _reload_into(self, value: Value, taken: list[Piece]) -> Stay:
        """Add a reload of ``value`` into ``taken`` and return the copy it makes."""
        assert value.host is not None
        stay = self.stay_at(value, taken)
        stay.planned = self.plan.reload(value, taken_release(taken, self.repairs), stay.addr)
        stay.producer = stay.planned.vertex.id
        stay.ref = (stay.producer, 0)
        stay.taken = taken
        return stay

    def stay_at(self, value: Value, taken: list[Piece]) -> Stay:
        """Return a copy of ``value`` in ``taken``, still without a producer."""
        start, end = taken[0].start, taken[-1].end
        return Stay(value, value.ref, start, end - start, None, self.exec_horizon, born=self.exec_horizon)

    def sim_malloc_offload(self, value: Value) -> None:
        """Give ``value`` a copy on the host. It waits for the producer alone, so it can run well before eviction."""
        stay = value.stay
        assert stay is not None and value.host is None
        offload = self.plan.offload(value, stay)
        stay.readers.append(offload)
        value.host = (offload, 0)

    def sim_free(self, stay: Stay, cached: bool = False, more: Iterable[int] = ()) -> None:
        """Give back the memory of ``stay``; its readers, or its producer if there is none, must finish before reuse.

        ``cached``: the bytes are still good, should they be wanted again before something else is put there.
        """
        self.held.pop(stay.value.ref, None)
        if stay.permanent:
            return
        users = (*stay.readers, *more)
        if not users and stay.producer is not None:
            users = (stay.producer,)
        release = tuple(dict.fromkeys(users))
        piece = Piece(stay.addr, stay.addr + stay.block, release, stay.newest)
        if cached:
            piece.cached, piece.rank = stay, self.rank(stay)
        self.space.give([piece])

    def retire(self, value: Value) -> None:
        """Decide what becomes of ``value`` after the vertex being executed has used it."""
        stay = value.stay
        if stay is None or stay.permanent:
            return
        astray = value.only_at_home and stay.addr != value.home
        if astray:
            # It is to be loaded once more, so the look-ahead has to pass its end again.
            self.alloc_horizon = min(self.alloc_horizon, value.next_use)
        if value.next_use == value.after_last or astray:
            value.stay = None
            value.reserved = False
            self.sim_free(stay)
        elif value.host is not None and not value.out:
            spared = self.repairs.consumers_before_exec
            reach = self.exec_horizon if spared else max(self.exec_horizon, self.alloc_horizon - 1)
            if value.use_after(reach) < self.alloc_horizon:
                self.reserve(value)
            else:
                self._cache(value, () if spared else self.plan.serial_ids(value, reach))

    def reserve(self, value: Value) -> None:
        """Hold ``value`` on the device for its next use, until something nearer needs the room."""
        value.reserved = True
        self._tick += 1
        heapq.heappush(self._reserved, (-value.next_use, self._tick, value))

    def _cache(self, value: Value, more: Iterable[int] = ()) -> None:
        stay = value.stay
        assert stay is not None
        value.stay = None
        value.reserved = False
        value.cached = stay
        self.sim_free(stay, cached=True, more=more)

    def _go_home(self, value: Value, block: int) -> list[Piece] | None:
        """Take the place where ``value`` must be at the end anyway, if it has one and that is free."""
        if value.home is None or not self.space.is_free(value.home, value.home + block):
            return None
        return self.space.take(value.home, value.home + block)

    def _take_back(self, value: Value) -> bool:
        stay = value.cached
        if stay is None:
            return False
        value.cached = None
        if value.only_at_home and stay.addr != value.home:
            self.space.forget(stay)
            return False
        if not self.space.holds(stay):
            return False
        self.space.take(stay.addr, stay.addr + stay.block)
        value.stay = stay
        self.reserve(value)
        return True

    def _force(self, block: int, search: Callable[[int, Rank], Window | None]) -> list[Piece]:
        window = search(block, self.rank) if self.space.bytes >= block else None
        while window is None and self._revoke():
            window = search(block, self.rank) if self.space.bytes >= block else None
        if window is None:
            window = self._evict(block)
        return self.space.take(window.start, window.end)

    def _revoke(self) -> bool:
        """Give up the reservation that is needed last; False if there is none that may be given up."""
        spared: list[tuple[int, int, Value]] = []
        found = None
        while self._reserved and found is None:
            entry = heapq.heappop(self._reserved)
            value = entry[2]
            if not value.reserved or value.next_use != -entry[0] or value.stay is None or value.stay.permanent:
                continue
            unmade = value.stay.planned is not None and not value.stay.readers
            needed_now = value.ref in self.pinned and (unmade or self.repairs.spare_inputs)
            if needed_now or (unmade and not self.repairs.revoke):
                spared.append(entry)
            else:
                found = value
        for entry in spared:
            heapq.heappush(self._reserved, entry)
        if found is None:
            return False
        self.alloc_horizon = min(self.alloc_horizon, found.next_use)
        stay = found.stay
        assert stay is not None
        if stay.planned is not None and not stay.readers:
            self._unmake(found, stay)
        else:
            self._cache(found)
        return True

    def _unmake(self, value: Value, stay: Stay) -> None:
        assert stay.planned is not None
        value.stay = None
        value.reserved = False
        stay.planned.alive = False
        self.space.give(stay.taken)

    def _evict(self, block: int) -> Window:
        """Make a hole of ``block`` bytes out of free pieces and held values, those that the policy ranks first."""
        victims = [stay for stay in self.held.values() if self._may_go(stay)]
        ranks = {id(stay): self.rank(stay) for stay in victims}
        spans: list[tuple[int, int, Stay | None]] = [(piece.start, piece.end, None) for piece in self.space.pieces]
        spans += [(stay.addr, stay.addr + stay.block, stay) for stay in victims]
        spans.sort(key=lambda span: span[0])
        best: tuple[bool, float, int, int, list[Stay]] | None = None
        for first, (start, _, _) in enumerate(spans):
            chosen: list[Stay] = []
            kept, rank, moved, reach = False, float("inf"), 0, start
            for index in range(first, len(spans)):
                begin, end, stay = spans[index]
                if begin != reach or reach - start >= block:
                    break
                reach = end
                if stay is not None:
                    chosen.append(stay)
                    kept = kept or stay.value.next_use == stay.value.after_last - 1
                    rank = min(rank, ranks[id(stay)])
                    moved += stay.block if stay.value.host is None else 0
            found = (kept, -rank, moved, start, chosen)
            if reach - start >= block and (best is None or found[:4] < best[:4]):
                best = found
        if best is None:
            raise Infeasible(self.exec_horizon)
        for victim in best[4]:
            value = victim.value
            if value.host is None:
                self.sim_malloc_offload(value)
                # The copy out ends later than any kernel before it: a younger release set than theirs.
                victim.newest = self.exec_horizon
            self.alloc_horizon = min(self.alloc_horizon, value.next_use)
            self._cache(value)
        return Window(best[3], best[3] + block)

    def _may_go(self, stay: Stay) -> bool:
        if stay.permanent or stay.value.out:
            return False
        return not (stay.value.ref in self.pinned and self.repairs.spare_inputs)


def taken_release(taken: list[Piece], repairs: Repairs) -> tuple[int, ...]:
    """Return all vertices that must finish before ``taken`` is written."""
    if not repairs.release_every_byte:
        taken = taken[:1]
    return tuple(dict.fromkeys(vertex for piece in taken for vertex in piece.release))
