"""What a user does with the outputs of steps, which decides what the next ones return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from disco_accel.step.step_key import StepKey

Outputs = tuple[str, ...]
"""Fields of a model's output. The first is the one that a plan differentiates, the others are read."""

HABIT = 2
"""Reads of a field after which steps that have a plan are planned anew to return it."""


@dataclass
class OutputUsage:
    """What the user does with the outputs of steps of one key, as far as was seen, and until then the guess that it is
    what was done with those before it."""

    differentiated: str | None = None
    read: Counter[str] = field(default_factory=Counter)
    usual: frozenset[str] = frozenset()
    """Fields that are returned although they were not read so often."""
    read_in_step: set[str] = field(default_factory=set)
    """Fields that were read of the last step."""
    returns_reads: bool = True
    """False once no plan could be made that returns more than is differentiated."""
    fields: tuple[str, ...] | None = None
    """What the model's own output has, once it was seen."""

    def outputs(self, batch: Mapping[str, Any]) -> Outputs:
        """What the next step is planned to return: no more than is used, since logits cost memory."""
        first = self.differentiated or ("logits" if batch.get("labels") is None else "loss")
        often = {name for name, times in self.read.items() if times >= HABIT}
        return (first, *(sorted((often | self.usual) - {first}) if self.returns_reads else ()))

    def was_read(self, name: str) -> None:
        """Field ``name`` of a step that does not return it."""
        self.read[name] += 1
        self.read_in_step.add(name)

    def differentiates(self, name: str) -> None:
        """Field ``name`` is differentiated from now on; its plan returns what this step was read for, too."""
        if self.differentiated != name:
            self.differentiated = name
            self.usual |= self.read_in_step

    def without_reads(self, batch: Mapping[str, Any]) -> bool:
        """From now on return what is differentiated alone; whether more was returned."""
        more = len(self.outputs(batch)) > 1
        self.returns_reads = self.returns_reads and not more
        return more


class UsageByStep:
    """What the user does with the outputs of steps of each key."""

    def __init__(self) -> None:
        self._by_key: dict[StepKey, OutputUsage] = {}
        self._last: dict[Hashable, OutputUsage] = {}
        self.usual_field: str | None = None
        """What is differentiated of outputs without loss and logits."""

    def of(self, key: StepKey, batch: Mapping[str, Any]) -> OutputUsage:
        """The usage of steps of ``key``, one of which begins; at first what was done with the last one of its kind."""
        # Lengths in numbers make no other kind of call, as those in shapes make none.
        call = tuple((n, v if v is None or isinstance(v, (bool, str)) else type(v)) for n, v in batch.items())
        kinds: tuple[Hashable, ...] = ((call, key.state), call)
        usage = self._by_key.get(key)
        if usage is None:
            last = next((self._last[kind] for kind in kinds if kind in self._last), None)
            usage = self._by_key[key] = OutputUsage(self.usual_field if batch.get("labels") is None else None)
            if last is not None:
                usage.differentiated = last.differentiated or usage.differentiated
                usage.usual = last.read_in_step.union(last.outputs(batch)[1:])
        usage.read_in_step = set()
        self._last.update(dict.fromkeys(kinds, usage))
        return usage
