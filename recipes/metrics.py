"""What a run leaves behind for machines: losses at full precision, seconds per step, statistics of the plan."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from disco_accel.graph.files import write_atomically

METRICS_NAME = "metrics.json"


@dataclass(frozen=True, slots=True)
class _StepRecord:
    """One optimizer step: ``loss`` is the sum over its micro-batches of what each backward started from."""

    step: int
    loss: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss, "loss_hex": self.loss.hex(), "seconds": self.seconds}


@dataclass
class Ledger:
    """Collects the losses of micro-batches until their step ends."""

    steps: list[_StepRecord] = field(default_factory=list)
    _pending: list[torch.Tensor] = field(default_factory=list)

    def micro_batch(self, loss: torch.Tensor) -> None:
        """Remember a micro-batch's loss without waiting for the device."""
        self._pending.append(loss.detach())

    def end_step(self, step: int, seconds: float) -> _StepRecord:
        """Close step ``step``; waits for the device."""
        record = _StepRecord(step, sum(float(loss) for loss in self._pending), seconds)
        self._pending.clear()
        self.steps.append(record)
        return record


def earlier_steps(path: Path, before: int) -> list[dict[str, Any]]:
    """The steps up to ``before`` of the run that is being resumed; none if it left no metrics."""
    if not path.is_file():
        return []
    steps: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    return [step for step in steps if step["step"] <= before]


def write_metrics(path: Path, contents: Mapping[str, Any]) -> None:
    """Write ``contents`` as JSON, all or nothing."""
    write_atomically(path, (json.dumps(contents, indent=1, sort_keys=True) + "\n").encode())


def resident_set_bytes() -> int:
    """Bytes of physical memory this process has now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_set_bytes() -> int:
    """The most physical memory this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_stats(model: torch.nn.Module) -> dict[str, Any]:
    """``disco_accel.stats(model)``; empty in a run that uses no plan, which then loads no planner either."""
    plugin = sys.modules.get("disco_accel.integrate.prepare")
    return {} if plugin is None else plugin.stats(model)
