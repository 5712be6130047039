"""How a value is cut into chunks: by lengths of memory, so that every view of it can be followed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_accel.graph.taskgraph import TensorSpec

Range = tuple[int, int]
"""First index, and the one behind the last."""

Ranges = Mapping[int, Range]
"""Dimension → the part of it that is meant; all of a dimension that is not named."""


class Unaligned(Exception):
    """A view has no part of its dimensions that lies in one chunk alone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a value of ``dtype`` that fills its memory: blocks of ``period`` elements, each in pieces of ``piece``
    elements, the last perhaps a shorter one. Chunk j is the j-th pieces of all blocks, one behind the other. Rows of a
    matrix are pieces of one block; heads of (tokens, heads, size) are pieces of one block for each token."""

    dtype: str
    period: int
    piece: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.period // self.piece)

    def length(self, chunk: int) -> int:
        """Elements that ``chunk`` has of each block."""
        return min(self.piece, self.period - chunk * self.piece)


def narrowed(spec: TensorSpec, ranges: Ranges) -> TensorSpec:
    """``spec`` with nothing but ``ranges`` of its dimensions."""
    shape = tuple(ranges[d][1] - ranges[d][0] if d in ranges else n for d, n in enumerate(spec.shape))
    offset = spec.offset + sum(begin * spec.stride[d] for d, (begin, _) in ranges.items())
    return replace(spec, shape=shape, offset=offset)


def ranges_in(spec: TensorSpec, cut: Cut, chunk: int) -> dict[int, Range] | None:
    """Return the ranges of ``spec``, a view of a whole value, that lie in ``chunk``; None if nothing of it does. Raises
    Unaligned: no ranges are just that part."""
    if spec.dtype != cut.dtype:
        # Its strides count other elements.
        raise Unaligned
    inner = [d for d, (n, s) in enumerate(zip(spec.shape, spec.stride, strict=True)) if n > 1 and s % cut.period]
    inner.sort(key=lambda d: -spec.stride[d])
    base = spec.offset % cut.period
    span = sum((spec.shape[d] - 1) * spec.stride[d] for d in inner)
    if base + span >= cut.period:
        raise Unaligned
    low = chunk * cut.piece
    high = low + cut.length(chunk)
    made: dict[int, Range] = {}
    for dim in inner:
        if low <= base and base + span < high:
            return made
        if base + span < low or base >= high:
            return None
        length, stride = spec.shape[dim], spec.stride[dim]
        rest = span - (length - 1) * stride
        if base % stride + rest >= stride:
            # Two of its indices overlap.
            raise Unaligned
        first = base // stride
        if cut.piece % stride == 0:
            begin, end = max(0, low // stride - first), min(length, -(-high // stride) - first)
            if begin >= end:
                return None
            return made | ({} if (begin, end) == (0, length) else {dim: (begin, end)})
        if stride % cut.piece:
            raise Unaligned
        # All of the piece lies in one index of this dimension.
        index = low // stride - first
        if not 0 <= index < length:
            return None
        made[dim] = index, index + 1
        base, span = base + index * stride, rest
    return made if low <= base < high else None


def in_chunk(spec: TensorSpec, cut: Cut, chunk: int) -> TensorSpec | None:
    """Return how the part of ``spec`` that is in ``chunk`` lies there; None if nothing of it is. Raises Unaligned."""
    ranges = ranges_in(spec, cut, chunk)
    if ranges is None:
        return None
    part, length = narrowed(spec, ranges), cut.length(chunk)
    block, base = divmod(part.offset, cut.period)
    stride = tuple(s if s % cut.period else s // cut.period * length for s in part.stride)
    return replace(part, stride=stride, offset=block * length + base - chunk * cut.piece)


def cut_along(spec: TensorSpec, parts: Sequence[Ranges]) -> Cut | None:
    """Return the cut whose chunks have ``parts`` of a value that ``spec`` shows whole; None if there is none."""
    dims = [d for d in parts[0] if spec.shape[d] > 1]
    if not dims:
        return None
    last = min(dims, key=lambda d: spec.stride[d])
    begin, end = parts[0][last]
    period = max(spec.shape[d] * spec.stride[d] for d in dims)
    cut = Cut(spec.dtype, period, (end - begin) * spec.stride[last])
    if begin or cut.piece <= 0 or cut.count != len(parts):
        return None
    try:
        # Every piece begins where a multiple of the first one's length does, so a few tell for all.
        fits = all(ranges_in(spec, cut, j) == without_whole(spec, parts[j]) for j in samples(len(parts)))
    except Unaligned:
        return None
    return cut if fits else None


def samples(count: int) -> list[int]:
    """Chunks that stand for all ``count``: the first two, and the last, which may be a shorter one."""
    return sorted({0, min(1, count - 1), count - 1})


def without_whole(spec: TensorSpec, ranges: Ranges) -> dict[int, Range]:
    """``ranges`` less those that are all of a dimension."""
    return {d: r for d, r in ranges.items() if r != (0, spec.shape[d])}


def fills_memory(spec: TensorSpec) -> bool:
    """Whether ``spec`` has each element of its memory once, from the first on."""
    if spec.offset:
        return False
    expected = 1
    for stride, length in sorted((s, n) for n, s in zip(spec.shape, spec.stride, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether elements follow each other in memory in the order of their indices."""
    expected = 1
    for length, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def elements(spec: TensorSpec) -> int:
    """Number of elements that ``spec`` shows."""
    return math.prod(spec.shape)


def same_layout(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two views of one shape go through memory alike; the stride of a dimension of length 1 means nothing."""
    if (one.dtype, one.shape, one.offset) != (other.dtype, other.shape, other.offset):
        return False
    return all(a == b for n, a, b in zip(one.shape, one.stride, other.stride, strict=True) if n != 1)


def dense(dtype: str, shape: Sequence[int], order: Iterable[int]) -> TensorSpec:
    """A tensor that fills its memory, with its dimensions in ``order`` from the outermost on."""
    stride, length = [1] * len(shape), 1
    for dim in reversed(list(order)):
        stride[dim] = length
        length *= max(shape[dim], 1)
    return TensorSpec(dtype, tuple(shape), tuple(stride))
