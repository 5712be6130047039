"""Free memory of one arena: which bytes may be reused, and which vertices must finish first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disco_accel.plan.stay import Stay

_FREE = float("-inf")

Rank = Callable[[Stay], float]
"""How gladly a cached copy is given up: the larger, the sooner it is overwritten."""


@dataclass(slots=True)
class Piece:
    """Free bytes ``[start, end)`` that may be written once every vertex of ``release`` has finished.

    ``newest`` is the serial position of the latest of them (-1 if none). ``cached``: these bytes still hold that copy,
    which the host has too: it can be taken back as long as nothing else was written there.
    """

    start: int
    end: int
    release: tuple[int, ...]
    newest: int
    cached: Stay | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A place for an allocation: an address range made of free bytes."""

    start: int
    end: int


class FreeSpace:
    """The free pieces of one arena, sorted by address; touching pieces can serve one allocation together.

    Every byte keeps its own release set, so an allocation across several pieces waits for all of them.
    """

    def __init__(self, size: int) -> None:
        self.pieces: list[Piece] = [Piece(0, size, (), -1)] if size else []
        self.bytes = size
        self.version = 0
        """Counts the times that bytes became free: a search that failed need not be repeated before it grows."""

    def give(self, pieces: Iterable[Piece]) -> None:
        """Return ``pieces`` to the free space."""
        self.version += 1
        for piece in pieces:
            self.bytes += piece.end - piece.start
            at = bisect_right(self.pieces, piece.start, key=_start)
            if at < len(self.pieces) and _same(piece, self.pieces[at]) and piece.end == self.pieces[at].start:
                piece = Piece(piece.start, self.pieces[at].end, piece.release, piece.newest, piece.cached)
                del self.pieces[at]
            if at and _same(self.pieces[at - 1], piece) and self.pieces[at - 1].end == piece.start:
                at -= 1
                piece = Piece(self.pieces[at].start, piece.end, piece.release, piece.newest, piece.cached)
                del self.pieces[at]
            self.pieces.insert(at, piece)

    def take(self, start: int, end: int) -> list[Piece]:
        """Remove the bytes ``[start, end)``, all of which are free, and return them as the pieces they were."""
        self.bytes -= end - start
        first = bisect_right(self.pieces, start, key=_start) - 1
        last = first
        while self.pieces[last].end < end:
            last += 1
        taken = self.pieces[first : last + 1]
        kept: list[Piece] = []
        head, tail = taken[0], taken[-1]
        if head.start < start:
            kept.append(Piece(head.start, start, head.release, head.newest, head.cached))
            taken[0] = Piece(start, head.end, head.release, head.newest, head.cached)
        if end < tail.end:
            kept.append(Piece(end, tail.end, tail.release, tail.newest, tail.cached))
            tail = taken[-1]
            taken[-1] = Piece(tail.start, end, tail.release, tail.newest, tail.cached)
        self.pieces[first : last + 1] = kept
        return taken

    def holds(self, stay: Stay) -> bool:
        """Whether every byte of ``stay``, given back as a cached copy, is still free and unwritten."""
        at = bisect_right(self.pieces, stay.addr, key=_start) - 1
        if at < 0:
            return False
        position, end = stay.addr, stay.addr + stay.block
        while position < end:
            if at == len(self.pieces):
                return False
            piece = self.pieces[at]
            if piece.cached is not stay or piece.start > position:
                return False
            position = piece.end
            at += 1
        return True

    def is_free(self, start: int, end: int) -> bool:
        """Whether every byte of ``[start, end)`` is free."""
        at = max(0, bisect_right(self.pieces, start, key=_start) - 1)
        while at < len(self.pieces) and start < end and self.pieces[at].start <= start < self.pieces[at].end:
            start = self.pieces[at].end
            at += 1
        return start >= end

    def first_fit(self, size: int, rank: Rank) -> Window | None:
        """Return where a kernel's output of ``size`` bytes goes: the lowest hole, cached copies spared.

        Low, because copies land high: the two then leave large holes to each other. The age of the release set does
        not matter here, since kernels of a stream wait for each other anyway.
        """
        for begin, end in self._runs():
            if end - begin >= size:
                return Window(begin, begin + size)
        best = min(((cost, start) for cost, _, start in self._windows(size, rank, both_ends=False)), default=None)
        return None if best is None else Window(best[1], best[1] + size)

    def oldest_fit(self, size: int, rank: Rank) -> Window | None:
        """Return where a copy of ``size`` bytes lands: cached copies spared, then the oldest release set, then high.

        A copy should start long before its use, so it goes where it waits the least.
        """
        best: tuple[float, int, int] | None = None
        for cost, newest, start in self._windows(size, rank, both_ends=True):
            if best is None or (cost, newest, -start) < best:
                best = (cost, newest, -start)
        return None if best is None else Window(-best[2], -best[2] + size)

    def lowest_fit(self, size: int, below: int) -> Window | None:
        """Return the lowest free place for ``size`` bytes that ends by ``below`` and holds no cached copy."""
        for begin, end in self._runs():
            if min(end, below) - begin >= size:
                return Window(begin, begin + size)
        return None

    def highest_fit(self, size: int) -> Window | None:
        """Return the highest free place for ``size`` bytes that holds no cached copy."""
        ends = [end for begin, end in self._runs() if end - begin >= size]
        return Window(ends[-1] - size, ends[-1]) if ends else None

    def _runs(self) -> Iterable[tuple[int, int]]:
        """Yield maximal ranges of touching pieces that hold no cached copy."""
        begin = end = -1
        for piece in self.pieces:
            if piece.cached is not None:
                continue
            if piece.start == end:
                end = piece.end
                continue
            if end > begin:
                yield begin, end
            begin, end = piece.start, piece.end
        if end > begin:
            yield begin, end

    def _windows(self, size: int, rank: Rank, both_ends: bool) -> Iterable[tuple[float, int, int]]:
        """Yield (cost of the cached copies lost, newest release, start) of windows that begin (or end) with a piece."""
        pieces = self.pieces
        costs = [_FREE if piece.cached is None else -rank(piece.cached) for piece in pieces]
        newest = [piece.newest for piece in pieces]
        first = 0
        for index, piece in enumerate(pieces):
            if index and pieces[index - 1].end != piece.start:
                first = index
            while piece.end - pieces[first].start >= size:
                start = pieces[first].start
                yield max(costs[first : index + 1]), max(newest[first : index + 1]), start
                # The same pieces may also serve a window that ends where the last of them ends.
                if both_ends and piece.end - size > start and (first == index or piece.end - size < pieces[first].end):
                    yield max(costs[first : index + 1]), max(newest[first : index + 1]), piece.end - size
                first += 1
                if first > index:
                    break


def _start(piece: Piece) -> int:
    return piece.start


def _same(left: Piece, right: Piece) -> bool:
    return left.cached is right.cached and left.release == right.release
