"""Is what a plan computes what eager PyTorch computes, where eager PyTorch may not repeat its own bits?

Some kernels of GPUs add in any order, such as the backwards of flash and memory-efficient attention. So the rule, here
and wherever results are compared with eager ones: **where eager runs have the same bits, ours has them; else ours is no
farther from the nearest of three eager runs than they are from each other.** Distances are parts of each tensor's norm;
that of a whole step is their root mean square. Three runs show them only roughly: a fourth eager run is outside of the
three in 7 of 100 simulated steps when it is judged as a whole, and in some tensor of 300 in each. So ``WHOLE`` and
``SINGLE`` times as much is allowed: then none of 500 simulated fourth runs of 300 tensors was refused whose noise has 8
independent parts or more in each tensor, and 29 of those with 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

RUNS = 3
WHOLE = 1.5
"""A whole step may be so many times as far from the nearest eager run as eager runs are from each other."""
SINGLE = 3.0
"""The same of a tensor alone."""
_FEW = 16
"""Tensors of fewer elements are judged with the whole step where eager runs differ: by chance, they agree on such."""
WHOLE_STEP = "the whole step"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Compared:
    """``wrong``: by name, how far each tensor is from the nearest eager run, of those that are too far, as a part of
    the norm; infinite where shapes differ or one is missing. ``widest``: the same of the whole step. ``spread``:
    the largest such distance of two eager runs; 0 where their bits are the same, or one is known."""

    wrong: Mapping[str, float]
    widest: float
    spread: float

    @property
    def equal(self) -> bool:
        """Whether the rule holds."""
        return not self.wrong

    @property
    def bits(self) -> bool:
        """Whether all bits are those of an eager run."""
        return self.equal and self.widest == 0

    @property
    def words(self) -> str:
        """``bits``, or how far."""
        if self.bits:
            return "bits"
        spread = f"eager runs {self.spread:.2g} apart" if self.spread else "eager's runs have the same bits"
        if self.equal:
            return f"to {self.widest:.2g} ({spread})"
        name = max(self.wrong, key=lambda name: self.wrong[name])
        return f"no: {name} {self.wrong[name]:.2g}, {len(self.wrong)} in all ({spread})"


def eager_runs(run: Callable[[], Tensors], first: Tensors | None = None) -> Iterator[Tensors]:
    """``RUNS`` results of ``run``, eager PyTorch's, ``first`` being one that is there already; two if their bits are
    the same."""
    runs = [run() if first is None else first]
    yield runs[0]
    while len(runs) < RUNS and (len(runs) < 2 or not same_bits(runs[0], runs[1])):
        runs.append(run())
        yield runs[-1]


def compare(got: Tensors, runs: Sequence[Tensors]) -> Compared:
    """``got`` by the rule beside ``runs``, one eager run or more with the same names. Tensors of one name are on one
    device."""
    odd = [name for name in got.keys() | runs[0].keys() if not _alike(got.get(name), runs[0].get(name))]
    if odd:
        return Compared(dict.fromkeys(odd, math.inf), math.inf, 0.0)
    if any(same_bits(run, got) for run in runs):
        return Compared({}, 0.0, 0.0)
    # Of each run from ours, and of runs from each other, by name.
    ours = [_distances(run, got) for run in runs]
    theirs = [_distances(a, b) for a, b in itertools.combinations(runs, 2)]
    widest = min(_mean(apart) for apart in ours)
    spread = max((_mean(apart) for apart in theirs), default=0.0)
    wrong = {}
    for name, tensor in got.items():
        if spread and tensor.numel() < _FEW:
            continue
        nearest = min(apart[name] for apart in ours)
        # What eager runs agree on, ours must have.
        if not nearest <= SINGLE * max((apart[name] for apart in theirs), default=0.0):
            wrong[name] = nearest
    if not wrong and not widest <= WHOLE * spread:
        wrong[WHOLE_STEP] = widest
    return Compared(wrong, widest, spread)


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Whether both have the same names, dtypes, shapes and bits; 0.0 is not -0.0."""
    return a.keys() == b.keys() and all(_alike(a[n], b[n]) and torch.equal(_bytes(a[n]), _bytes(b[n])) for n in a)


def _alike(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return False
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _distances(a: Tensors, b: Tensors) -> dict[str, float]:
    return {name: distance(a[name], b[name]) for name in a}


def distance(expected: torch.Tensor, got: torch.Tensor | None) -> float:
    """The norm of the difference as a part of the norm; 0 for the same bits, infinite where no distance makes sense."""
    if got is None or not _alike(expected, got):
        return math.inf
    if torch.equal(_bytes(expected), _bytes(got)):
        return 0.0
    a, b = expected.detach().double(), got.detach().double()
    relative = float((a - b).norm() / a.norm().clamp_min(1e-300))
    # Zeros of two signs are no distance apart, and yet not the same bits.
    return math.inf if math.isnan(relative) else max(relative, 1e-150)


def _mean(apart: Mapping[str, float]) -> float:
    return math.sqrt(sum(far * far for far in apart.values()) / len(apart))
