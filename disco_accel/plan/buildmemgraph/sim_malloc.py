"""SIMMALLOC and its siblings (Figure 11): device memory as the planner simulates it while it walks the serial order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from disco_accel.eviction import Candidate, Policy, belady, fifo, lru
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref
from disco_accel.plan.common.device_copy import DeviceCopy, FreeBlock, ValueState
from disco_accel.plan.common.free_list import AddressRange, FreeList, Rank
from disco_accel.plan.common.plan_log import PlanLog
from disco_accel.plan.infeasible import Infeasible


@dataclass(frozen=True, slots=True)
class Repairs:
    """Additions to the paper's figures without which plans are wrong; see README.md. Tests switch one off."""

    spare_inputs: bool = True
    """Never evict an input of the vertex being executed."""
    revoke: bool = True
    """Cancel reloads planned ahead that nobody has read yet, where their memory is needed sooner."""
    consumers_before_exec: bool = True
    """A victim's earlier consumers are those before ``exec_horizon``, not those before the vertex allocated for."""
    release_every_byte: bool = True
    """An allocation waits for all former users of all its bytes, not only of the first block."""
    end_vertex: bool = True
    """Kept values are read by a virtual vertex at the end."""
    shorten_lookahead: bool = True
    """An infeasible plan is tried again with less look-ahead; if that fails, a budget that suffices is searched for."""


COPY_LATENCY_BYTES = 200_000
"""The fixed cost of a copy in bytes: 10 microseconds at 20 GB/s."""

_STATIC_RANKS = (belady, fifo, lru)
"""Policies whose rank of a copy does not change while the copy is not used."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """Bytes from ``begin`` to ``end``: free ones, or those of a copy that may leave. Of a copy: its ``rank`` (the
    larger, the sooner it leaves), whether it is ``kept`` (needed only at the step's end), bytes to ``offload``."""

    begin: int
    end: int
    rank: float = float("inf")
    kept: bool = False
    offload: int = 0


class DeviceMemory:
    """The arena of one device during planning, with its two horizons.

    ``exec_horizon`` is the position being executed; copies are allocated up to ``alloc_horizon``, as far ahead as
    memory allows. Outputs of kernels are allocated when they are executed: kernels of a stream follow each other
    anyway, so allocating those early would gain nothing and take memory that reloads can use.

    Every byte of the arena is either in the free list or in one copy. A copy is permanent, or reserved for its next use
    (``_reserved``, by furthest next use), or one of ``held``, which only an eviction takes off the device. ``pinned``
    are the inputs of the vertex being executed.
    """

    def __init__(
        self, device: Space, policy: Policy, repairs: Repairs, plan: PlanLog, slack: float | None = None
    ) -> None:
        self.align = device.alignment
        size = device.memory // device.alignment * device.alignment
        self.free_list = FreeList(size, policy in _STATIC_RANKS, oldest_first=slack is not None)
        self.slack = int((slack or 0.0) * size)
        self.policy = policy
        self.repairs = repairs
        self.plan = plan
        self.exec_horizon = 0
        self.alloc_horizon = 0
        self.lowest_resident_offset = self.free_list.bytes
        self.has_resident_offsets = False
        self.pinned: set[Ref] = set()
        self.held: dict[Ref, DeviceCopy] = {}
        self._reserved: list[tuple[int, int, ValueState]] = []
        self._tick = 0

    def aligned(self, size: int) -> int:
        """Return ``size`` rounded up to the alignment."""
        return -(-size // self.align) * self.align

    def rank(self, copy: DeviceCopy) -> float:
        """Return the eviction rank of ``copy``: the larger, the sooner it leaves."""
        now, size = self.exec_horizon, copy.aligned_size
        cost = copies_cost(size, clean=copy.value.host is not None)
        return self.policy(Candidate(size, copy.made_at, copy.last_use, now, copy.value.next_use - now, cost))

    def sim_malloc(self, size: int, until_end: bool = False) -> list[FreeBlock]:
        """Allocate an output of the vertex being executed, evicting if need be. Raises Infeasible.

        ``until_end``: it lives to the step's end, so it should not lie on the offset of a resident that must come back.
        """
        aligned_size = self.aligned(size)
        if until_end:
            fit = self.free_list.lowest_fit(aligned_size, self.lowest_resident_offset)
            while fit is None and self._revoke():
                fit = self.free_list.lowest_fit(aligned_size, self.lowest_resident_offset)
            if fit is not None:
                return self.free_list.allocate(fit.start, fit.end)
        return self._force(aligned_size, self.free_list.first_fit)

    def compact(self, values: Iterable[ValueState], sizes: Iterable[int]) -> list[list[FreeBlock]]:
        """Allocate outputs of ``sizes`` when the free bytes suffice but lie in pieces between the vertex's own inputs.

        ``values``, its inputs, leave the device, and the caller reloads them after. Raises Infeasible.
        """
        for value in values:
            copy = value.copy
            if copy is None or copy.permanent or value.out:
                continue
            if copy.planned is not None and not copy.readers:
                self._cancel_reload(value, copy)
                continue
            if value.host is None:
                self.sim_malloc_offload(value)
            self._cache(value)
        return [self._force(self.aligned(size), self.free_list.first_fit) for size in sizes]

    def sim_malloc_reload(self, value: ValueState, force: bool) -> bool:
        """Bring ``value`` to the device for its next use: take back the intact copy, or allocate and add a reload.

        Without ``force`` nothing is evicted and no reservation is revoked; False if the free bytes do not suffice.
        """
        if self._take_back(value):
            return True
        aligned_size = self.aligned(value.size)
        blocks = self._allocate_resident_offset(value, aligned_size)
        if blocks is not None:
            pass
        elif value.needed_only_at_step_end or (not force and value.serves_rest_and_end):
            # Reloaded elsewhere it would need another reload to its resident offset: it waits until that is free.
            return False
        elif force:
            blocks = self._force(aligned_size, self.free_list.oldest_fit)
        else:
            enough = self.free_list.bytes >= aligned_size + self.slack
            fit = self.free_list.oldest_fit(aligned_size, self.rank) if enough else None
            if fit is None:
                return False
            blocks = self.free_list.allocate(fit.start, fit.end)
        value.copy = self._reload_into(value, blocks)
        self.reserve(value)
        return True

    def sim_malloc_copy(self, value: ValueState) -> DeviceCopy:
        """Make a second copy of ``value`` for a vertex that overwrites it while the first must live on."""
        if value.host is None:
            self.sim_malloc_offload(value)
        return self._reload_into(value, self._force(self.aligned(value.size), self.free_list.oldest_fit))

    def _reload_into(self, value: ValueState, blocks: list[FreeBlock]) -> DeviceCopy:
        """Add a reload of ``value`` into ``blocks`` and return the copy it makes."""
        assert value.host is not None
        copy = self.copy_in(value, blocks)
        copy.planned = self.plan.reload(value, release_of(blocks, self.repairs), copy.addr)
        copy.producer = copy.planned.vertex.id
        copy.ref = (copy.producer, 0)
        copy.reserved_blocks = blocks
        return copy

    def copy_in(self, value: ValueState, blocks: list[FreeBlock]) -> DeviceCopy:
        """Return a copy of ``value`` in the adjacent ``blocks``, still without a producer."""
        start, end = blocks[0].start, blocks[-1].end
        return DeviceCopy(value, value.ref, start, end - start, None, self.exec_horizon, made_at=self.exec_horizon)

    def sim_malloc_offload(self, value: ValueState) -> None:
        """Give ``value`` a copy on the host. It waits for the producer alone, so it can run well before eviction."""
        copy = value.copy
        assert copy is not None and value.host is None
        offload = self.plan.offload(value, copy)
        copy.readers.append(offload)
        value.host = (offload, 0)

    def sim_free(self, copy: DeviceCopy, cached: bool = False, more: Iterable[int] = ()) -> None:
        """Free the memory of ``copy``; its readers, or its producer if it has none, must finish before reuse.

        ``cached``: the host has the value too, so the copy may be taken back until its bytes are allocated again.
        ``more``: further vertices that must finish before reuse.
        """
        self.held.pop(copy.value.ref, None)
        if copy.permanent:
            return
        users = (*copy.readers, *more)
        if not users and copy.producer is not None:
            users = (copy.producer,)
        release = tuple(dict.fromkeys(users))
        block = FreeBlock(copy.addr, copy.addr + copy.aligned_size, release, copy.last_use)
        if cached:
            block.cached, block.rank = copy, self.rank(copy)
        self.free_list.free([block])

    def retire(self, value: ValueState) -> None:
        """Free, cache or reserve the copy of ``value`` after the vertex being executed has used it."""
        copy = value.copy
        if copy is None or copy.permanent:
            return
        off_resident_offset = value.needed_only_at_step_end and copy.addr != value.resident_offset
        if off_resident_offset:
            # It must be reloaded to its resident offset, so the look-ahead has to pass its last use again.
            self.alloc_horizon = min(self.alloc_horizon, value.next_use)
        if value.next_use == value.after_last or off_resident_offset:
            value.copy = None
            value.reserved = False
            self.sim_free(copy)
        elif value.host is not None and not value.out:
            from_exec = self.repairs.consumers_before_exec
            reach = self.exec_horizon if from_exec else max(self.exec_horizon, self.alloc_horizon - 1)
            if value.use_after(reach) < self.alloc_horizon:
                # The look-ahead has passed its next use and will not ask for it again.
                self.reserve(value)
            else:
                self._cache(value, () if from_exec else self.plan.readers_until(value, reach))

    def reserve(self, value: ValueState) -> None:
        """Hold ``value`` on the device for its next use, until a nearer use needs its memory."""
        value.reserved = True
        self._tick += 1
        heapq.heappush(self._reserved, (-value.next_use, self._tick, value))

    def _cache(self, value: ValueState, more: Iterable[int] = ()) -> None:
        copy = value.copy
        assert copy is not None
        value.copy = None
        value.reserved = False
        value.cached = copy
        self.sim_free(copy, cached=True, more=more)

    def _allocate_resident_offset(self, value: ValueState, aligned_size: int) -> list[FreeBlock] | None:
        """Allocate the bytes where ``value`` must be at the end anyway; None if it has none or they are not free."""
        start = value.resident_offset
        if start is None or not self.free_list.is_free(start, start + aligned_size):
            return None
        return self.free_list.allocate(start, start + aligned_size)

    def _take_back(self, value: ValueState) -> bool:
        """Use the cached copy of ``value`` again if its bytes are intact and may serve the next use."""
        copy = value.cached
        if copy is None:
            return False
        value.cached = None
        if value.needed_only_at_step_end and copy.addr != value.resident_offset:
            self.free_list.forget(copy)
            return False
        if not self.free_list.holds(copy):
            return False
        self.free_list.allocate(copy.addr, copy.addr + copy.aligned_size)
        value.copy = copy
        self.reserve(value)
        return True

    def _force(self, aligned_size: int, search: Callable[[int, Rank], AddressRange | None]) -> list[FreeBlock]:
        """Allocate by ``search``; while that fails revoke reservations, which are only for later, and at last evict."""
        fit = search(aligned_size, self.rank) if self.free_list.bytes >= aligned_size else None
        while fit is None and self._revoke():
            fit = search(aligned_size, self.rank) if self.free_list.bytes >= aligned_size else None
        if fit is None:
            fit = self._evict(aligned_size)
        return self.free_list.allocate(fit.start, fit.end)

    def _revoke(self) -> bool:
        """Give up the reservation with the furthest next use; False if there is none that may be given up."""
        # Entries are never changed in the heap: one whose value was used, freed or evicted since is stale (its next use
        # is not the value's), and is dropped when it comes to the top.
        pinned: list[tuple[int, int, ValueState]] = []
        furthest = None
        while self._reserved and furthest is None:
            entry = heapq.heappop(self._reserved)
            value = entry[2]
            if not value.reserved or value.next_use != -entry[0] or value.copy is None or value.copy.permanent:
                continue
            unread_reload = value.copy.planned is not None and not value.copy.readers
            needed_now = value.ref in self.pinned and (unread_reload or self.repairs.spare_inputs)
            if needed_now or (unread_reload and not self.repairs.revoke):
                pinned.append(entry)
            else:
                furthest = value
        # Inputs of the vertex being executed are reserved still, for the vertices after it.
        for entry in pinned:
            heapq.heappush(self._reserved, entry)
        if furthest is None:
            return False
        # The look-ahead has to pass this use again, or nobody would bring the value back.
        self.alloc_horizon = min(self.alloc_horizon, furthest.next_use)
        copy = furthest.copy
        assert copy is not None
        if copy.planned is not None and not copy.readers:
            self._cancel_reload(furthest, copy)
        else:
            self._cache(furthest)
        return True

    def _cancel_reload(self, value: ValueState, copy: DeviceCopy) -> None:
        """Remove the reload of ``copy``, which nobody has read, from the plan, and free its blocks as they were."""
        assert copy.planned is not None
        value.copy = None
        value.reserved = False
        copy.planned.alive = False
        self.free_list.free(copy.reserved_blocks)

    def _evict(self, aligned_size: int) -> AddressRange:
        """Evict held copies so that they and free blocks make ``aligned_size`` adjacent bytes, and return these.

        Ranges without a value that is needed only at the step's end come first. Of these the one wins whose lowest
        rank, that of the policy's least willing victim, is the highest; then the fewest bytes to offload; then the
        lowest address. Raises Infeasible.
        """
        victims = {copy.addr: copy for copy in self.held.values() if self._may_evict(copy)}
        extents = [_Extent(block.start, block.end) for block in self.free_list.blocks]
        extents += [self._extent(copy) for copy in victims.values()]
        extents.sort(key=lambda extent: extent.begin)
        found = _adjacent_victims(extents, aligned_size)
        if found is None:
            raise Infeasible(self.exec_horizon)
        first, behind = found
        for victim in [victims[each.begin] for each in extents[first:behind] if each.begin in victims]:
            value = victim.value
            if value.host is None:
                self.sim_malloc_offload(value)
                # The offload ends later than any kernel before it, so these bytes count as used now.
                victim.last_use = self.exec_horizon
            # The look-ahead has to pass the victim's next use again to reload it.
            self.alloc_horizon = min(self.alloc_horizon, value.next_use)
            self._cache(value)
        start = extents[first].begin
        return AddressRange(start, start + aligned_size)

    def _extent(self, copy: DeviceCopy) -> _Extent:
        """Return the bytes of ``copy``, which may be evicted."""
        kept = copy.value.next_use == copy.value.after_last - 1
        offload = copy.aligned_size if copy.value.host is None else 0
        return _Extent(copy.addr, copy.addr + copy.aligned_size, self.rank(copy), kept, offload)

    def _may_evict(self, copy: DeviceCopy) -> bool:
        if copy.permanent or copy.value.out:
            return False
        return not (copy.value.ref in self.pinned and self.repairs.spare_inputs)


def copies_cost(size: int, clean: bool) -> int:
    """Return the cost of eviction and reload, in bytes copied: a ``clean`` value, which the host has, once."""
    return (1 if clean else 2) * (size + COPY_LATENCY_BYTES)


def release_of(blocks: list[FreeBlock], repairs: Repairs) -> tuple[int, ...]:
    """Return the ids of all vertices that must finish before ``blocks`` are written."""
    if not repairs.release_every_byte:
        blocks = blocks[:1]
    return tuple(dict.fromkeys(vertex for block in blocks for vertex in block.release))


def _adjacent_victims(extents: Sequence[_Extent], size: int) -> tuple[int, int] | None:
    """Return the first of ``extents`` and the one behind the last that give ``size`` adjacent bytes; None if none do.

    ``extents`` ascend and do not overlap. Of all ranges: one without a copy that is kept, then the one whose lowest
    rank is the highest, then the fewest bytes to offload, then the lowest address. Only those that begin with an extent
    are compared: any other one, moved down to the start of its first extent, has the same copies or fewer.
    """
    kept_before, offload_before = [0], [0]
    for extent in extents:
        kept_before.append(kept_before[-1] + extent.kept)
        offload_before.append(offload_before[-1] + extent.offload)
    best: tuple[tuple[bool, float, int, int], int, int] | None = None
    lowest: deque[int] = deque()
    """Extents of the range, each with a lower rank than all that come behind it."""
    last = 0
    # A range grows by whole adjacent extents until it is large enough. None ends before that from the start before
    # does, so both ends only move up.
    for first, extent in enumerate(extents):
        while last < len(extents) and (last <= first or _grows(extents, extent.begin, last, size)):
            while lowest and extents[lowest[-1]].rank >= extents[last].rank:
                lowest.pop()
            lowest.append(last)
            last += 1
        while lowest[0] < first:
            lowest.popleft()
        if extents[last - 1].end - extent.begin < size:
            continue
        kept = kept_before[last] > kept_before[first]
        offload = offload_before[last] - offload_before[first]
        candidate = kept, -extents[lowest[0]].rank, offload, extent.begin
        if best is None or candidate < best[0]:
            best = candidate, first, last
    return None if best is None else best[1:]


def _grows(extents: Sequence[_Extent], begin: int, last: int, size: int) -> bool:
    """Whether the range from ``begin`` to before extent ``last`` is too small and ``last`` is next to it: between two
    extents lies a copy that may not leave."""
    end = extents[last - 1].end
    return end - begin < size and extents[last].begin == end
