"""Free memory of one arena: which bytes may be reused, and which vertices must finish first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from disco_accel.plan.common.device_copy import Piece, Stay

Rank = Callable[[Stay], float]
"""How gladly a cached copy is given up: the larger, the sooner it is overwritten."""

_RUNS = 64
"""Runs whose ages are compared, the smallest ones: free memory of a large graph has thousands, and of so many one that
is old enough is among the first."""


@dataclass(frozen=True, slots=True)
class Window:
    """A place for an allocation: an address range made of free bytes."""

    start: int
    end: int


class FreeSpace:
    """The free pieces of one arena, sorted by address; touching pieces can serve one allocation together.

    Every byte keeps its own release set, so an allocation across several pieces waits for all of them. A cached copy
    is one piece; once a byte of it is taken, what is left of it is free like any other. Pieces that hold no cached
    copy form *runs*, which have an index of their own, as have the cached copies by rank: searches do not grow with
    the number of pieces. ``timeless``: ranks do not change while a copy is cached. ``aged``: outputs of kernels, too,
    go where the release set is oldest, of the places that are looked at.
    """

    def __init__(self, size: int, timeless: bool = False, aged: bool = False) -> None:
        self.pieces: list[Piece] = []
        self.bytes = 0
        self.version = 0
        """Counts the times that bytes became free: a search that failed need not be repeated before it grows."""
        self._timeless = timeless
        self._aged = aged
        self._unused = [(0, size)]
        """Ranges that nothing was ever put into."""
        self._starts: list[int] = []
        self._run_starts: list[int] = []
        self._known: dict[int, dict[int, tuple[int, int]]] = {}
        """By the begin of a run and a size: its oldest window, (newest release, -start)."""
        self._run_ends: list[int] = []
        self._run_sizes: list[tuple[int, int]] = []
        self._cached: list[tuple[float, int]] = []
        if size:
            self.give([Piece(0, size, (), -1)])

    def give(self, pieces: Iterable[Piece]) -> None:
        """Return ``pieces`` to the free space."""
        self.version += 1
        for piece in pieces:
            self.bytes += piece.end - piece.start
            if piece.cached is None:
                self._give_plain(piece)
            elif piece.cached.value.cached is not piece.cached:
                # The value has another copy by now.
                self._give_plain(Piece(piece.start, piece.end, piece.release, piece.newest))
            else:
                self._insert(bisect_right(self._starts, piece.start), piece)
                insort(self._cached, (-piece.rank, piece.start))

    def take(self, start: int, end: int) -> list[Piece]:
        """Remove the bytes ``[start, end)``, all of which are free, and return them as the pieces they were."""
        self.bytes -= end - start
        self._unused = [part for begin, stop in self._unused for part in _without(begin, stop, start, end)]
        pieces = self.pieces
        first = bisect_right(self._starts, start) - 1
        last = first
        while pieces[last].end < end:
            last += 1
        taken = pieces[first : last + 1]
        kept: list[Piece] = []
        head = taken[0]
        if head.start < start:
            kept.append(self._split(head, head.start, start))
            taken[0] = self._split(head, start, head.end)
        tail = taken[-1]
        if end < tail.end:
            kept.append(self._split(tail, end, tail.end))
            taken[-1] = self._split(tail, tail.start, end)
        for piece in pieces[first : last + 1]:
            if piece.cached is not None:
                self._uncache(piece)
                self._join(piece.start, piece.end)
        self._cut(start, end)
        pieces[first : last + 1] = kept
        self._starts[first : last + 1] = [piece.start for piece in kept]
        return taken

    def holds(self, stay: Stay) -> bool:
        """Whether every byte of ``stay``, given back as a cached copy, is still free and unwritten."""
        at = bisect_left(self._starts, stay.addr)
        return at < len(self.pieces) and self.pieces[at].cached is stay

    def forget(self, stay: Stay) -> None:
        """Stop sparing ``stay``, if it still is there: nobody will take it back."""
        if self.holds(stay):
            piece = self.pieces[bisect_left(self._starts, stay.addr)]
            self._uncache(piece)
            self._join(piece.start, piece.end)
            piece.cached = None

    def is_free(self, start: int, end: int) -> bool:
        """Whether every byte of ``[start, end)`` is free."""
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self.pieces) and start < end and self.pieces[at].start <= start < self.pieces[at].end:
            start = self.pieces[at].end
            at += 1
        return start >= end

    def first_fit(self, size: int, rank: Rank) -> Window | None:
        """Return where a kernel's output of ``size`` bytes goes: the lowest hole, cached copies spared.

        Low, because copies land high: the two then leave large holes to each other. The age of the release set does
        not matter on a single device, since kernels of a stream wait for each other anyway.
        """
        for begin, end in self._unused:
            if self._aged and end - begin >= size:
                return Window(begin, begin + size)
        if self._aged:
            return self._oldest(size, rank)
        ranges = self._large_runs(size) or self._cheapest(size, rank)
        start = min((begin for begin, _ in ranges), default=None)
        return None if start is None else Window(start, start + size)

    def oldest_fit(self, size: int, rank: Rank) -> Window | None:
        """Return where a copy of ``size`` bytes lands: cached copies spared, then the oldest release set, then high.

        A copy should start long before its use, so it goes where it waits the least.
        """
        return self._oldest(size, rank)

    def lowest_fit(self, size: int, below: int) -> Window | None:
        """Return the lowest free place for ``size`` bytes that ends by ``below`` and holds no cached copy."""
        for begin, end in zip(self._run_starts, self._run_ends, strict=True):
            if begin + size > below:
                break
            if end - begin >= size:
                return Window(begin, begin + size)
        return None

    def highest_fit(self, size: int) -> Window | None:
        """Return the highest free place for ``size`` bytes that holds no cached copy."""
        for begin, end in zip(reversed(self._run_starts), reversed(self._run_ends), strict=True):
            if end - begin >= size:
                return Window(end - size, end)
        return None

    def _oldest(self, size: int, rank: Rank) -> Window | None:
        """Return the window with the oldest release set, of these the highest, in runs if there is one."""
        runs = self._large_runs(size, _RUNS)
        if runs:
            found = [self._oldest_in_run(begin, end, size) for begin, end in runs]
        else:
            found = [min(self._windows(begin, end, size)) for begin, end in self._cheapest(size, rank)]
        best = min(found, default=None)
        return None if best is None else Window(-best[1], -best[1] + size)

    def _oldest_in_run(self, begin: int, end: int, size: int) -> tuple[int, int]:
        known = self._known.setdefault(begin, {})
        best = known.get(size)
        if best is None:
            best = known[size] = min(self._windows(begin, end, size))
        return best

    def _large_runs(self, size: int, most: int | None = None) -> list[tuple[int, int]]:
        """Return the runs of at least ``size`` bytes, the ``most`` smallest of them."""
        sizes = self._run_sizes
        first = bisect_left(sizes, (size, -1))
        return [(begin, begin + length) for length, begin in sizes[first : None if most is None else first + most]]

    def _cheapest(self, size: int, rank: Rank) -> list[tuple[int, int]]:
        """Return the free ranges of at least ``size`` bytes that cost the least cached copies can cost.

        Copies are given up one after another, the gladdest first, until a range is large enough.
        """
        if self.bytes < size:
            return []
        entries: Iterable[tuple[float, int]] = self._cached
        if not self._timeless:
            entries = sorted((-rank(piece.cached), piece.start) for piece in self.pieces if piece.cached is not None)
        ends: dict[int, int] = {}
        begins: dict[int, int] = {}
        enough: float | None = None
        for cost, start in entries:
            if enough is not None and cost > enough:
                break
            low, high = start, self.pieces[bisect_left(self._starts, start)].end
            low, high = self._below(low, begins, ends), self._above(high, begins, ends)
            ends[low], begins[high] = high, low
            if high - low >= size:
                enough = cost
        return sorted((low, high) for low, high in ends.items() if high - low >= size)

    def _below(self, low: int, begins: dict[int, int], ends: dict[int, int]) -> int:
        """Return where the range begins that ends at ``low``: one of those given up, or a run."""
        if low in begins:
            begin = begins.pop(low)
            del ends[begin]
            return begin
        at = bisect_left(self._run_ends, low)
        return self._run_starts[at] if at < len(self._run_ends) and self._run_ends[at] == low else low

    def _above(self, high: int, begins: dict[int, int], ends: dict[int, int]) -> int:
        """Return where the range ends that begins at ``high``."""
        if high in ends:
            end = ends.pop(high)
            del begins[end]
            return end
        at = bisect_left(self._run_starts, high)
        return self._run_ends[at] if at < len(self._run_starts) and self._run_starts[at] == high else high

    def _windows(self, begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (newest release, -start) of the windows in ``[begin, end)`` that begin or end with a piece."""
        first = bisect_left(self._starts, begin)
        pieces = self.pieces
        for index in range(first, len(pieces)):
            piece = pieces[index]
            if piece.start >= end:
                return
            while piece.end - pieces[first].start >= size:
                start = pieces[first].start
                newest = piece.newest if first == index else max(p.newest for p in pieces[first : index + 1])
                yield newest, -start
                # The same pieces may also serve a window that ends where the last of them ends.
                if piece.end - size > start and (first == index or piece.end - size < pieces[first].end):
                    yield newest, size - piece.end
                first += 1
                if first > index:
                    break

    def _insert(self, at: int, piece: Piece) -> None:
        self.pieces.insert(at, piece)
        self._starts.insert(at, piece.start)

    def _give_plain(self, piece: Piece) -> None:
        pieces, starts = self.pieces, self._starts
        self._join(piece.start, piece.end)
        at = bisect_right(starts, piece.start)
        start, end, newest = piece.start, piece.end, piece.newest
        if at < len(pieces) and starts[at] == end and _same(piece, pieces[at]):
            end, newest = pieces[at].end, pieces[at].newest
            del pieces[at], starts[at]
        if at and pieces[at - 1].end == start and _same(pieces[at - 1], piece):
            at -= 1
            start = starts[at]
            del pieces[at], starts[at]
        if (start, end) != (piece.start, piece.end):
            piece = Piece(start, end, piece.release, newest)
        self._insert(at, piece)

    def _split(self, piece: Piece, start: int, end: int) -> Piece:
        return Piece(start, end, piece.release, piece.newest)

    def _uncache(self, piece: Piece) -> None:
        del self._cached[bisect_left(self._cached, (-piece.rank, piece.start))]

    def _join(self, start: int, end: int) -> None:
        """Add ``[start, end)`` to the runs."""
        at = bisect_left(self._run_starts, start)
        if at < len(self._run_starts) and self._run_starts[at] == end:
            end = self._drop_run(at)[1]
        if at and self._run_ends[at - 1] == start:
            at -= 1
            start = self._drop_run(at)[0]
        self._add_run(at, start, end)

    def _cut(self, start: int, end: int) -> None:
        """Remove ``[start, end)``, which lies in one run, from the runs."""
        at = bisect_right(self._run_starts, start) - 1
        begin, stop = self._drop_run(at)
        if end < stop:
            self._add_run(at, end, stop)
        if begin < start:
            self._add_run(at, begin, start)

    def _add_run(self, at: int, start: int, end: int) -> None:
        self._run_starts.insert(at, start)
        self._run_ends.insert(at, end)
        insort(self._run_sizes, (end - start, start))

    def _drop_run(self, at: int) -> tuple[int, int]:
        start, end = self._run_starts.pop(at), self._run_ends.pop(at)
        self._known.pop(start, None)
        del self._run_sizes[bisect_left(self._run_sizes, (end - start, start))]
        return start, end


def _without(begin: int, end: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield what ``[start, stop)`` leaves of ``[begin, end)``."""
    if begin < min(end, start):
        yield begin, min(end, start)
    if max(begin, stop) < end:
        yield max(begin, stop), end


def _same(left: Piece, right: Piece) -> bool:
    return left.cached is None and right.cached is None and left.release == right.release
