"""The free list of one arena: which bytes may be reused, and which vertices must finish first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from disco_accel.plan.common.device_copy import DeviceCopy, FreeBlock

Rank = Callable[[DeviceCopy], float]
"""The eviction rank of a cached copy: the larger, the sooner it is overwritten."""

_COMPARED_RUNS = 64
"""Runs whose ages are compared, the smallest ones that are large enough: the free list of a large graph has thousands,
and of so many one that is old enough is among the first."""


@dataclass(frozen=True, slots=True)
class AddressRange:
    """Free bytes ``[start, end)`` that a search proposes for an allocation."""

    start: int
    end: int


class FreeList:
    """The free blocks of one arena, sorted by address; adjacent blocks can serve one allocation together.

    Every byte keeps its own release set, so an allocation across several blocks waits for all of them. A cached copy is
    one block; once a byte of it is allocated, its other bytes are free like any others.

    Invariants, on which the searches rely: blocks do not overlap, and ``_starts`` are their starts. A *run* is a
    longest range of bytes in adjacent blocks none of which holds a cached copy; ``_run_starts``, ``_run_ends`` and
    ``_run_sizes`` list the runs by address and by size. ``_cached`` lists the cached blocks by falling rank. With these
    indexes no search looks at every block.

    ``static_ranks``: ranks do not change while a copy is cached. ``oldest_first``: outputs of kernels, too, go where
    the release set is oldest, of the runs that are compared.
    """

    def __init__(self, size: int, static_ranks: bool = False, oldest_first: bool = False) -> None:
        self.blocks: list[FreeBlock] = []
        self.bytes = 0
        self.version = 0
        """Counts the calls that freed bytes: a search that failed need not be repeated before this grows."""
        self._static_ranks = static_ranks
        self._oldest_first = oldest_first
        self._unused = [(0, size)]
        """Ranges that were never allocated."""
        self._starts: list[int] = []
        self._run_starts: list[int] = []
        self._run_ends: list[int] = []
        self._run_sizes: list[tuple[int, int]] = []
        self._oldest_by_run: dict[int, dict[int, tuple[int, int]]] = {}
        """Start of a run → size → its oldest range of that size, as (last use, -start). Valid while the run lives."""
        self._cached: list[tuple[float, int]] = []
        if size:
            self.free([FreeBlock(0, size, (), -1)])

    def free(self, blocks: Iterable[FreeBlock]) -> None:
        """Add ``blocks``, none of whose bytes is free, to the list."""
        self.version += 1
        for block in blocks:
            self.bytes += block.end - block.start
            if block.cached is None:
                self._add_plain(block)
            elif block.cached.value.cached is not block.cached:
                # The value has a newer copy, so nobody will take this one back.
                self._add_plain(FreeBlock(block.start, block.end, block.release, block.last_use))
            else:
                self._insert(bisect_right(self._starts, block.start), block)
                insort(self._cached, (-block.rank, block.start))

    def allocate(self, start: int, end: int) -> list[FreeBlock]:
        """Remove the bytes ``[start, end)``, all of which are free, and return them as the blocks they were."""
        self.bytes -= end - start
        self._unused = [part for begin, stop in self._unused for part in _difference(begin, stop, start, end)]
        blocks = self.blocks
        first = bisect_right(self._starts, start) - 1
        last = first
        while blocks[last].end < end:
            last += 1
        allocated = blocks[first : last + 1]
        remaining: list[FreeBlock] = []
        head = allocated[0]
        if head.start < start:
            remaining.append(_part(head, head.start, start))
            allocated[0] = _part(head, start, head.end)
        tail = allocated[-1]
        if end < tail.end:
            remaining.append(_part(tail, end, tail.end))
            allocated[-1] = _part(tail, tail.start, end)
        # A cached copy that is overwritten in part is lost: all of its bytes join a run before the range is cut out.
        for block in blocks[first : last + 1]:
            if block.cached is not None:
                self._remove_cached(block)
                self._extend_runs(block.start, block.end)
        self._cut_runs(start, end)
        blocks[first : last + 1] = remaining
        self._starts[first : last + 1] = [block.start for block in remaining]
        return allocated

    def holds(self, copy: DeviceCopy) -> bool:
        """Whether every byte of ``copy``, freed as a cached copy, is still free and unwritten."""
        at = bisect_left(self._starts, copy.addr)
        return at < len(self.blocks) and self.blocks[at].cached is copy

    def forget(self, copy: DeviceCopy) -> None:
        """Treat the bytes of ``copy`` as any free bytes, if it still is cached: nobody will take it back."""
        if self.holds(copy):
            block = self.blocks[bisect_left(self._starts, copy.addr)]
            self._remove_cached(block)
            self._extend_runs(block.start, block.end)
            block.cached = None

    def is_free(self, start: int, end: int) -> bool:
        """Whether every byte of ``[start, end)`` is free."""
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self.blocks) and start < end and self.blocks[at].start <= start < self.blocks[at].end:
            start = self.blocks[at].end
            at += 1
        return start >= end

    def first_fit(self, size: int, rank: Rank) -> AddressRange | None:
        """Return the range for a kernel's output of ``size`` bytes: the lowest one, cached copies spared.

        Low, because reloads land high: the two then leave large holes to each other. The age of the release set does
        not matter on a single device, since kernels of a stream wait for each other anyway.
        """
        for begin, end in self._unused:
            if self._oldest_first and end - begin >= size:
                return AddressRange(begin, begin + size)
        if self._oldest_first:
            return self._oldest(size, rank)
        ranges = self._large_runs(size) or self._cheapest(size, rank)
        start = min((begin for begin, _ in ranges), default=None)
        return None if start is None else AddressRange(start, start + size)

    def oldest_fit(self, size: int, rank: Rank) -> AddressRange | None:
        """Return the range for a reload of ``size`` bytes: cached copies spared, oldest release set first, then high.

        A reload should start long before its use, so it goes where it waits the least.
        """
        return self._oldest(size, rank)

    def lowest_fit(self, size: int, below: int) -> AddressRange | None:
        """Return the lowest range of ``size`` bytes that ends by ``below`` and holds no cached copy."""
        for begin, end in zip(self._run_starts, self._run_ends, strict=True):
            if begin + size > below:
                break
            if end - begin >= size:
                return AddressRange(begin, begin + size)
        return None

    def highest_fit(self, size: int) -> AddressRange | None:
        """Return the highest range of ``size`` bytes that holds no cached copy."""
        for begin, end in zip(reversed(self._run_starts), reversed(self._run_ends), strict=True):
            if end - begin >= size:
                return AddressRange(end - size, end)
        return None

    def _oldest(self, size: int, rank: Rank) -> AddressRange | None:
        """Return the range with the oldest release set, of these the highest; within runs if one is large enough."""
        runs = self._large_runs(size, _COMPARED_RUNS)
        if runs:
            oldest = [self._oldest_in_run(begin, end, size) for begin, end in runs]
        else:
            oldest = [min(self._candidates(begin, end, size)) for begin, end in self._cheapest(size, rank)]
        best = min(oldest, default=None)
        return None if best is None else AddressRange(-best[1], -best[1] + size)

    def _oldest_in_run(self, begin: int, end: int, size: int) -> tuple[int, int]:
        by_size = self._oldest_by_run.setdefault(begin, {})
        best = by_size.get(size)
        if best is None:
            best = by_size[size] = min(self._candidates(begin, end, size))
        return best

    def _large_runs(self, size: int, most: int | None = None) -> list[tuple[int, int]]:
        """Return the runs of at least ``size`` bytes, the ``most`` smallest of them."""
        sizes = self._run_sizes
        first = bisect_left(sizes, (size, -1))
        return [(begin, begin + length) for length, begin in sizes[first : None if most is None else first + most]]

    def _cheapest(self, size: int, rank: Rank) -> list[tuple[int, int]]:
        """Return the free ranges of at least ``size`` bytes that overwrite the least valuable cached copies.

        Cached copies are given up in order of falling rank until a range is large enough, and then all others of that
        same rank. Any other range of this size would overwrite a copy that should be kept longer.
        """
        if self.bytes < size:
            return []
        entries: Iterable[tuple[float, int]] = self._cached
        if not self._static_ranks:
            entries = sorted((-rank(block.cached), block.start) for block in self.blocks if block.cached is not None)
        # Invariant: ends (begin → end) and begins (end → begin) hold the same ranges, each a longest one made of copies
        # given up so far and of the runs beside them. Each new copy is merged with its neighbours on both sides.
        ends: dict[int, int] = {}
        begins: dict[int, int] = {}
        enough: float | None = None
        for cost, start in entries:
            if enough is not None and cost > enough:
                break
            low, high = start, self.blocks[bisect_left(self._starts, start)].end
            low, high = self._start_of_range_before(low, begins, ends), self._end_of_range_after(high, begins, ends)
            ends[low], begins[high] = high, low
            if high - low >= size:
                enough = cost
        return sorted((low, high) for low, high in ends.items() if high - low >= size)

    def _start_of_range_before(self, low: int, begins: dict[int, int], ends: dict[int, int]) -> int:
        """Return where the range begins that ends at ``low``, be it one given up or a run; ``low`` if none does."""
        if low in begins:
            begin = begins.pop(low)
            del ends[begin]
            return begin
        at = bisect_left(self._run_ends, low)
        return self._run_starts[at] if at < len(self._run_ends) and self._run_ends[at] == low else low

    def _end_of_range_after(self, high: int, begins: dict[int, int], ends: dict[int, int]) -> int:
        """Return where the range ends that begins at ``high``, be it one given up or a run; ``high`` if none does."""
        if high in ends:
            end = ends.pop(high)
            del begins[end]
            return end
        at = bisect_left(self._run_starts, high)
        return self._run_ends[at] if at < len(self._run_starts) and self._run_starts[at] == high else high

    def _candidates(self, begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (last use, -start) of the ranges of ``size`` bytes in ``[begin, end)`` that begin or end with a block.

        No other range can be older: the blocks under a range change only where one of its ends passes a block's end,
        and among ranges over the same blocks the two extreme ones are enough.
        """
        first = bisect_left(self._starts, begin)
        blocks = self.blocks
        latest: deque[int] = deque()
        """Of blocks[first : index + 1], those that were used later than all that come behind them."""
        for index in range(first, len(blocks)):
            block = blocks[index]
            if block.start >= end:
                return
            while latest and blocks[latest[-1]].last_use <= block.last_use:
                latest.pop()
            latest.append(index)
            # Invariant: blocks[first : index] together are too small, so each (first, index) reached below is the
            # shortest sequence of blocks from first on that holds size bytes.
            while block.end - blocks[first].start >= size:
                start = blocks[first].start
                while latest[0] < first:
                    latest.popleft()
                last_use = blocks[latest[0]].last_use
                yield last_use, -start
                # The same blocks may also hold a range that ends where the last of them ends.
                if block.end - size > start and (first == index or block.end - size < blocks[first].end):
                    yield last_use, size - block.end
                first += 1
                if first > index:
                    break

    def _insert(self, at: int, block: FreeBlock) -> None:
        self.blocks.insert(at, block)
        self._starts.insert(at, block.start)

    def _add_plain(self, block: FreeBlock) -> None:
        """Add a block without a cached copy, merged with neighbours that have the same release set."""
        blocks, starts = self.blocks, self._starts
        self._extend_runs(block.start, block.end)
        at = bisect_right(starts, block.start)
        start, end, last_use = block.start, block.end, block.last_use
        if at < len(blocks) and starts[at] == end and _mergeable(block, blocks[at]):
            end, last_use = blocks[at].end, blocks[at].last_use
            del blocks[at], starts[at]
        if at and blocks[at - 1].end == start and _mergeable(blocks[at - 1], block):
            at -= 1
            start = starts[at]
            del blocks[at], starts[at]
        if (start, end) != (block.start, block.end):
            block = FreeBlock(start, end, block.release, last_use)
        self._insert(at, block)

    def _remove_cached(self, block: FreeBlock) -> None:
        del self._cached[bisect_left(self._cached, (-block.rank, block.start))]

    def _extend_runs(self, start: int, end: int) -> None:
        """Add ``[start, end)`` to the runs, as one with the runs that touch it."""
        at = bisect_left(self._run_starts, start)
        if at < len(self._run_starts) and self._run_starts[at] == end:
            end = self._remove_run(at)[1]
        if at and self._run_ends[at - 1] == start:
            at -= 1
            start = self._remove_run(at)[0]
        self._add_run(at, start, end)

    def _cut_runs(self, start: int, end: int) -> None:
        """Remove ``[start, end)``, which lies in one run, from the runs."""
        at = bisect_right(self._run_starts, start) - 1
        begin, stop = self._remove_run(at)
        if end < stop:
            self._add_run(at, end, stop)
        if begin < start:
            self._add_run(at, begin, start)

    def _add_run(self, at: int, start: int, end: int) -> None:
        self._run_starts.insert(at, start)
        self._run_ends.insert(at, end)
        insort(self._run_sizes, (end - start, start))

    def _remove_run(self, at: int) -> tuple[int, int]:
        start, end = self._run_starts.pop(at), self._run_ends.pop(at)
        self._oldest_by_run.pop(start, None)
        del self._run_sizes[bisect_left(self._run_sizes, (end - start, start))]
        return start, end


def _difference(begin: int, end: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[begin, end)`` outside ``[start, stop)``."""
    if begin < min(end, start):
        yield begin, min(end, start)
    if max(begin, stop) < end:
        yield max(begin, stop), end


def _part(block: FreeBlock, start: int, end: int) -> FreeBlock:
    """Return ``[start, end)`` of ``block`` as a block; a part of a cached copy is no copy."""
    return FreeBlock(start, end, block.release, block.last_use)


def _mergeable(left: FreeBlock, right: FreeBlock) -> bool:
    return left.cached is None and right.cached is None and left.release == right.release
