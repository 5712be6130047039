"""Whether one loop thread keeps eight devices busy: a section of ``disco-accel bench engine``.

The engine launches kernels of assumed time, which nobody computes, to devices that it asks what has ended, as it asks
GPUs: so two cores show eight devices. A launch takes the loop thread nothing, or the few microseconds that one takes
on a GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.subjects import Times
from benchmarks.engine.core_program import build, numbers_of

KERNELS = 15_000
"""On each device; every hundredth waits for a copy from another device."""


@dataclass(frozen=True, slots=True)
class Case:
    """``devices`` with kernels of ``kernel`` seconds, whose launches take the loop thread ``launch`` seconds each."""

    devices: int
    kernel: float
    launch: float


@dataclass(frozen=True, slots=True)
class Row:
    """Steps of ``kernels`` on each device."""

    case: Case
    kernels: int
    step: Times

    @property
    def per_kernel(self) -> float:
        """Seconds of the median step for each kernel of all devices."""
        return self.step.median / (self.kernels * self.case.devices)

    @property
    def over_own(self) -> float | None:
        """The median step over the time of one device's kernels; None where they take none."""
        own = self.kernels * self.case.kernel
        return self.step.median / own if own else None


def rows_of(steps: Sequence[Sequence[float]], kernels: int) -> list[Row]:
    """One row for each case of what bench_loop prints."""
    seconds: dict[Case, list[float]] = {}
    for devices, kernel, launch, step in steps:
        seconds.setdefault(Case(int(devices), kernel * 1e-6, launch * 1e-6), []).append(step * 1e-6)
    return [Row(case, kernels, Times(tuple(taken))) for case, taken in seconds.items()]


def measure(rounds: int, kernels: int = KERNELS) -> list[Row]:
    """``rounds`` steps of each case, after one that warms up."""
    with tempfile.TemporaryDirectory() as folder:
        program = build("bench_loop", Path(folder) / "build")
        return rows_of(numbers_of([str(program), str(kernels), str(rounds)]), kernels)


HEADER = """| devices | kernels each | kernel, us | launch, us | step, ms | us per kernel | step / kernels' own time |
|---|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    """One line of the table."""
    case, own = row.case, row.over_own
    cells = [case.devices, row.kernels, f"{case.kernel * 1e6:g}", f"{case.launch * 1e6:g}"]
    cells += [f"{row.step.median * 1e3:.1f} ±{row.step.spread * 1e3:.1f}", f"{row.per_kernel * 1e6:.3f}"]
    cells.append("" if own is None else f"{own:.3f}")
    return f"| {' | '.join(map(str, cells))} |"
