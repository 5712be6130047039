"""What the self-check found, as data: differences, figures, and one JSON document of all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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


def compare(
    part: str, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], tolerance: float = 0.0
) -> list[Difference]:
    """A difference for each tensor of ``expected``, by name, that ``got`` has not.

    ``tolerance``: of the norm of their difference, as a part of the norm; 0 = the same bits.
    """
    differences = []
    for name, wanted in expected.items():
        came = got.get(name)
        apart = "nothing came" if came is None else _apart(wanted, came, tolerance)
        if apart:
            shown = "nothing" if came is None else _first(came)
            differences.append(Difference(part, name, _first(wanted), shown, apart))
    return differences


def _apart(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> str:
    """How far two fp32 tensors are apart, in words; "" where they are equal."""
    if (expected.shape, expected.dtype, expected.device) != (got.shape, got.dtype, got.device):
        return f"{tuple(got.shape)} of {got.dtype} on {got.device} instead of {tuple(expected.shape)} of " + (
            f"{expected.dtype} on {expected.device}"
        )
    wrong = int((_bits(expected) != _bits(got)).sum())
    if not wrong:
        return ""
    distance = float((expected.double() - got.double()).norm() / expected.double().norm().clamp_min(1e-300))
    # Not a number is no distance.
    if distance <= tolerance:
        return ""
    return f"{wrong} of {expected.numel()} elements differ in their bits, by {distance:.3g} of the norm"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def _first(tensor: torch.Tensor) -> str:
    """The first elements, and how many there are."""
    values = tensor.detach().reshape(-1)[:_SHOWN].tolist()
    return f"{values} of {tensor.numel()}" if tensor.numel() > _SHOWN else str(values)
