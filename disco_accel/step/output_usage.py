"""What a user does with the outputs of steps, which decides what the next ones return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disco_accel.step.step_key import StepKey

Outputs = tuple[str, ...]
"""Fields of a model's output. The first is the one that a plan differentiates, the others are read."""

HABIT = 2
"""Reads of a field after which steps are planned to return it."""


@dataclass
class OutputUsage:
    """What the user does with the outputs of steps of one kind, as far as was seen."""

    differentiated: str | None = None
    read: Counter[str] = field(default_factory=Counter)
    fields: tuple[str, ...] | None = None
    """What the model's own output has, once it was seen."""

    def outputs(self, batch: Mapping[str, Any]) -> Outputs:
        """What the next step is planned to return: no more than is used, since logits cost memory."""
        first = self.differentiated or ("logits" if batch.get("labels") is None else "loss")
        return (first, *sorted(name for name, times in self.read.items() if times >= HABIT and name != first))


class UsageByStep:
    """What the user does with the outputs of steps of each key."""

    def __init__(self) -> None:
        self._by_key: dict[StepKey, OutputUsage] = {}
        self.usual_field: str | None = None
        """What is differentiated of outputs without loss and logits."""

    def of(self, key: StepKey, batch: Mapping[str, Any]) -> OutputUsage:
        """The usage of steps of ``key``; at first what was done with those of other shapes."""
        usual = self.usual_field if batch.get("labels") is None else None
        return self._by_key.setdefault(key, OutputUsage(differentiated=usual))
