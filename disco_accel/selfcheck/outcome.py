"""What the self-check found, as data: differences, figures, and one JSON document of all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from disco_accel.selfcheck.agreement import Tensors, agreement, distance

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """In ``part`` of the check ``what`` was to be ``expected``, and ``got`` came. ``apart``: how far, for tensors."""

    part: str
    what: str
    expected: str
    got: str
    apart: str = ""

    def __str__(self) -> str:
        if self.apart:
            return f"{self.part}: {self.what}: {self.apart}"
        return f"{self.part}: {self.what} is {self.got} instead of {self.expected}"

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class Outcome:
    """``figures``: what was measured, rates in bytes/s. ``seconds``: of the whole check."""

    identity: Mapping[str, str]
    differences: list[Difference] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing differed."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "identity": dict(self.identity),
            "figures": self.figures,
            "differences": [difference.as_dict() for difference in self.differences],
        }


def compare(part: str, eager: Iterable[Tensors], got: Tensors) -> list[Difference]:
    """A difference for each tensor of ``got``, by name, that does not agree with ``eager``'s runs, made as needed."""
    runs: list[Tensors] = []
    found = agreement(got, _noted(eager, runs), outputs=("loss",))
    beside = f" of plain PyTorch's, which is up to {found.spread:.3g} from itself" if found.spread else ""
    differences = []
    for name in found.wrong:
        wanted, came = runs[0].get(name), got.get(name)
        apart = _apart(wanted, came)
        differences.append(Difference(part, name, _first(wanted), _first(came), apart + beside))
    return differences


def _noted(eager: Iterable[Tensors], runs: list[Tensors]) -> Iterator[Tensors]:
    for run in eager:
        runs.append(run)
        yield run


def _apart(expected: torch.Tensor | None, got: torch.Tensor | None) -> str:
    """How far two fp32 tensors that are not equal are apart, in words."""
    if expected is None or got is None:
        return "nothing came" if got is None else "nothing was to come"
    if (expected.shape, expected.dtype, expected.device) != (got.shape, got.dtype, got.device):
        return f"{tuple(got.shape)} of {got.dtype} on {got.device} instead of {tuple(expected.shape)} of " + (
            f"{expected.dtype} on {expected.device}"
        )
    wrong = int((_bits(expected) != _bits(got)).sum())
    return f"{wrong} of {expected.numel()} elements differ in their bits, by {distance(expected, got):.3g} of the norm"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def _first(tensor: torch.Tensor | None) -> str:
    """The first elements, and how many there are."""
    if tensor is None:
        return "nothing"
    values = tensor.detach().reshape(-1)[:_SHOWN].tolist()
    return f"{values} of {tensor.numel()}" if tensor.numel() > _SHOWN else str(values)
