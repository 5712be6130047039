"""Does a run agree with eager PyTorch, which on a GPU does not always repeat its own bits? The one rule for it.

A run agrees if it has the bits of an eager run. If it has not, eager runs again, from the same state: where two eager
runs have the same bits, bits were asked for. Else three eager runs say how far apart eager is from itself, and

- no tensor may be further from the nearest of them than ``MARGIN`` times the largest distance between two of them in
  that tensor. A tensor in which this is small by chance has a floor: the middle one of these distances over all tensors
  that differ, and one rounding of its dtype. It is the largest of them where three draws say little: in a tensor of
  less than ``FEW`` elements, and in one in which the three happened to agree;
- over all tensors the middle ratio of these two distances may be ``MIDDLE`` at most;
- the forward's results have the bits of eager if the three runs' forwards have the same bits.

How often a run of eager itself would be refused, and how small an error is found: docs/selfcheck.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from statistics import median

import torch

RUNS = 3
"""Of eager at most."""
MARGIN = 2.0
"""Times eager's largest own distance in a tensor. With ``MIDDLE`` it refused none of 300 simulated steps."""
MIDDLE = 1.25
"""Times eager's own distance, in the middle tensor: an error in all tensors shows below ``MARGIN``."""
FEW = 16
"""Elements of a tensor in which three draws say little."""
_LEAST_TENSORS = 10
"""From this many tensors on that eager does not repeat, the middle one is looked at."""
_CHUNK = 1 << 24
_SIGNS = 1e-200
"""More than the distance of zeros of two signs, which are no distance apart, and yet not the same bits."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Agreement:
    """``runs``: of eager that were needed. ``distances``: of each tensor from the nearest of them, as a part of the
    norm; 0 = the same bits, infinite for another shape, dtype or device, and for a tensor that only one side has.
    ``limits``: what was allowed. ``spread``: the largest distance between two eager runs in any tensor, 0 = they have
    the same bits, None if one was enough. ``middle``: the middle ratio of distance and spread, None for few tensors."""

    runs: int
    distances: Mapping[str, float]
    limits: Mapping[str, float]
    spread: float | None = None
    middle: float | None = None

    @property
    def wrong(self) -> dict[str, float]:
        """Distances of the tensors that do not agree, by name; all those that differ if it is the middle one."""
        apart = {name: far for name, far in self.distances.items() if not far <= self.limits[name]}
        if not apart and self.middle is not None and not self.middle <= MIDDLE:
            return {name: far for name, far in self.distances.items() if far}
        return apart

    @property
    def bits(self) -> bool:
        """Whether every tensor has the bits of an eager run."""
        return not any(self.distances.values())

    @property
    def farthest(self) -> float:
        """The largest distance of any tensor."""
        return max(self.distances.values(), default=0.0)

    def __str__(self) -> str:
        if self.bits:
            return "bits"
        if not self.spread:
            return f"{self.farthest:.2g} of the norm apart"
        return f"{self.farthest:.2g} of the norm apart, eager from itself {self.spread:.2g}"


def agreement(
    ours: Tensors, eager: Iterable[Tensors], *, outputs: Collection[str] = (), allowance: float = 0.0
) -> Agreement:
    """Compare ``ours`` with up to three runs that ``eager`` yields, each of the same state; no more than needed are
    taken from it.

    ``outputs``: names of the forward's results. ``allowance``: distance that is expected beside that of eager from
    itself, where ours rounds otherwise by design.
    """
    taken = iter(eager)
    first = next(taken)
    names = list(dict.fromkeys([*first, *ours]))
    unlike = {name for name in names if not _alike(first.get(name), ours.get(name))}
    distances = {name: math.inf if name in unlike else distance(first[name], ours[name]) for name in names}
    if unlike:
        return Agreement(1, distances, {name: 0.0 if name in unlike else math.inf for name in names})
    once = Agreement(1, distances, dict.fromkeys(names, allowance))
    if not once.wrong:
        return once
    # The host keeps them: the device's memory has been promised to others.
    runs = [_kept(first)]
    del first
    for run in islice(taken, RUNS - 1):
        runs.append(_kept(run))
        if len(runs) == 2 and _same_bits(runs[0], runs[1]):
            break
    return _against(ours, runs, names, outputs, allowance)


def _against(
    ours: Tensors, runs: Sequence[Tensors], names: Sequence[str], outputs: Collection[str], allowance: float
) -> Agreement:
    nearest: dict[str, float] = {}
    spread: dict[str, float] = {}
    for name in names:
        drawn = [run.get(name) for run in runs]
        there = [tensor for tensor in drawn if tensor is not None]
        where = ours[name].device
        scale = max(_norm(tensor, where) for tensor in there)
        nearest[name] = min(_over(_gap(tensor, ours[name], where), scale) for tensor in there)
        gaps = [_over(_gap(a, b, where), scale) for a, b in combinations(there, 2)]
        spread[name] = math.inf if len(there) < len(drawn) else max(gaps, default=0.0)
    widest = max(spread.values(), default=0.0)
    noisy = [name for name in names if _SIGNS < spread[name] < math.inf]
    repeated = [name for name in outputs if name in spread] if widest else names
    exact = () if any(spread[name] for name in repeated) else repeated
    seen = [spread[name] for name in noisy]
    limits = {n: allowance + (0.0 if n in exact else _limit(spread[n], ours[n], seen)) for n in names}
    ratios = [max(0.0, nearest[name] - allowance) / spread[name] for name in noisy]
    middle = median(ratios) if len(ratios) >= _LEAST_TENSORS else None
    return Agreement(len(runs), nearest, limits, widest, middle)


def _limit(spread: float, tensor: torch.Tensor, noisy: Sequence[float]) -> float:
    rounding = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    few = spread == 0 or tensor.numel() < FEW
    floor = (max if few else median)(noisy) if noisy else 0.0
    return MARGIN * max(spread, floor, rounding)


def distance(expected: torch.Tensor, got: torch.Tensor | None) -> float:
    """The norm of the difference as a part of the norm; 0 for the same bits, infinite where no distance makes sense."""
    if got is None or not _alike(expected, got):
        return math.inf
    return _over(_gap(expected, got, got.device), _norm(expected, got.device))


def _over(gap: float, scale: float) -> float:
    return gap if gap <= _SIGNS else gap / max(scale, 1e-300)


def _alike(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _kept(run: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in run.items()}


def _same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _gap(a: torch.Tensor, b: torch.Tensor, where: torch.device) -> float:
    """The norm of ``a - b``; 0 for the same bits alone, infinite where one has a value that is not finite alone."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return math.inf
    a, b = a.to(where), b.to(where)
    if _equal(a, b):
        return 0.0
    total = 0.0
    for x, y in zip(_numbers(a), _numbers(b), strict=True):
        same = (x == y) | (x.isnan() & y.isnan())
        total += float((x - y).masked_fill(same, 0.0).square().sum())
    return max(math.sqrt(total), 1e-300) if math.isfinite(total) else math.inf


def _norm(tensor: torch.Tensor, where: torch.device) -> float:
    finite = (part.masked_fill(~part.isfinite(), 0.0) for part in _numbers(tensor.to(where)))
    return math.sqrt(sum(float(part.square().sum()) for part in finite))


def _numbers(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """All elements in float64, some at a time: whole tensors would take up to eight times their memory."""
    flat = tensor.detach().contiguous()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    return (part.double() for part in flat.split(_CHUNK))
