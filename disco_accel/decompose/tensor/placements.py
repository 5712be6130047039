"""How a value of a step on one device lies on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank has the value, with the same bits."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum of what the ranks have."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank has a run of dimension ``dim``. With ``outer`` > 1 that dimension counts ``outer`` times the one that
    is cut, as batch x heads does where a rank has some heads of each row."""

    dim: int
    outer: int = 1


Placement = Replicated | Partial | Shard

REPLICATED = Replicated()
PARTIAL = Partial()


class OfRank(int):
    """A number that each rank has another of: rank r ``first + r * step``. As an int it is that of rank 0."""

    step: int

    def __new__(cls, first: int, step: int) -> OfRank:
        """Rank 0 has ``first``."""
        made = super().__new__(cls, first)
        made.step = step
        return made

    def of(self, rank: int) -> int:
        """The number that ``rank`` has."""
        return int(self) + rank * self.step


def refactored(before: Sequence[int], after: Sequence[int], shard: Shard, ranks: int) -> Shard | None:
    """Where ``shard`` of a tensor of shape ``before`` is in a view of it of shape ``after``, both of all ranks
    together; None where each rank's part is no run of one dimension there."""
    lead = math.prod(before[: shard.dim]) * shard.outer
    ahead = 1
    for dim, length in enumerate(after):
        if lead < ahead * length:
            outer = lead // ahead
            even = lead % ahead == 0 and length % (outer * ranks) == 0
            return Shard(dim, outer) if even else None
        ahead *= length
    return None


def local_shape(shape: Sequence[int], shard: Shard, ranks: int) -> list[int]:
    """What one rank has of a tensor of ``shape``, cut as ``shard`` says."""
    return [length // ranks if dim == shard.dim else length for dim, length in enumerate(shape)]


_LIBRARY = torch.library.Library("disco_decompose", "DEF")
_LIBRARY.define("all_reduce(Tensor x, str op) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, int dim) -> Tensor")

# What stands for an exchange between ranks in the graph of one of them. Never run: ranks.py writes them out.
ALL_REDUCE: torch._ops.OpOverload = torch.ops.disco_decompose.all_reduce.default
ALL_GATHER: torch._ops.OpOverload = torch.ops.disco_decompose.all_gather.default
