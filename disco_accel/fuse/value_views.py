"""Views of a value, found again from how it lies in memory: a graph keeps the layout of a view alone.

A compiler of kernels needs the view as steps (reshape, slice, permute, expand), for then the value need not lie in
memory at all.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disco_accel.graph.taskgraph import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _View:
    """Steps from a tensor to its view, in this order: ``permute`` makes it contiguous; a reshape to ``sizes``; of each
    dimension the elements ``begin`` to ``end``. Then a reshape to ``kept`` drops dimensions of one element; ``order``
    permutes; a reshape to ``unsqueezed``; an expansion to ``shape``."""

    permute: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    kept: tuple[int, ...]
    order: tuple[int, ...]
    unsqueezed: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """``tensor``, which lies as the base does, through this view."""
        found = tensor.permute(self.permute).reshape(self.sizes)
        for dim, (begin, end) in enumerate(zip(self.begin, self.end, strict=True)):
            if (begin, end) != (0, self.sizes[dim]):
                found = found.narrow(dim, begin, end - begin)
        return found.reshape(self.kept).permute(self.order).reshape(self.unsqueezed).expand(self.shape)


@functools.lru_cache(4096)
def view_of(base: TensorSpec, target: TensorSpec) -> _View | None:
    """The steps from a tensor laid out as ``base`` to one laid out as ``target`` over the same storage.

    None: the base has gaps, or the target overlaps, reads another dtype, or is no such view."""
    if base.dtype != target.dtype or base.offset != 0 or 0 in base.shape or 0 in target.shape:
        return None
    permute = sorted(range(len(base.shape)), key=lambda d: (-base.stride[d], -base.shape[d]))
    expected = 1
    for d in reversed(permute):
        if base.shape[d] != 1 and base.stride[d] != expected:
            return None
        expected *= base.shape[d]
    cut = _cut(target, expected)
    if cut is None:
        return None
    sizes, begin, end, dims = cut
    # Dimensions of ``target`` from the widest stride to the narrowest, as ``sizes`` has them.
    memory_order = tuple(reversed(dims))
    wanted = [d for d in range(len(target.shape)) if d in dims]
    return _View(
        permute=tuple(permute),
        sizes=sizes,
        begin=begin,
        end=end,
        kept=tuple(target.shape[d] for d in memory_order),
        order=tuple(memory_order.index(d) for d in wanted),
        unsqueezed=tuple(target.shape[d] if d in dims else 1 for d in range(len(target.shape))),
        shape=target.shape,
    )


_Cut = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _cut(target: TensorSpec, elements: int) -> _Cut | None:
    """``sizes``, ``begin`` and ``end`` of the dimensions that contiguous ``elements`` are cut into, widest first, and
    the dimensions of ``target`` that are among them, narrowest first."""
    dims = sorted(
        (d for d in range(len(target.shape)) if target.shape[d] > 1 and target.stride[d] != 0),
        key=lambda d: target.stride[d],
    )
    sizes: list[int] = []
    lengths: list[int] = []
    reached = 1
    for number, d in enumerate(dims):
        stride = target.stride[d]
        following = target.stride[dims[number + 1]] if number + 1 < len(dims) else elements
        if stride % reached or following % stride or following // stride < target.shape[d]:
            return None
        if stride > reached:
            sizes.append(stride // reached)
            lengths.append(1)
        sizes.append(following // stride)
        lengths.append(target.shape[d])
        reached = following
    if not dims:
        sizes, lengths = [elements], [1]
    begin: list[int] = []
    left = target.offset
    for size in sizes:
        begin.append(left % size)
        left //= size
    end = [b + n for b, n in zip(begin, lengths, strict=True)]
    if left or any(e > size for e, size in zip(end, sizes, strict=True)) or math.prod(sizes) != elements:
        return None
    return tuple(reversed(sizes)), tuple(reversed(begin)), tuple(reversed(end)), tuple(dims)
