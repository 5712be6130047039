"""The uses of the outputs of steps, which decide on the outputs of the next ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from disco_accel.step.state.step_key import StepKey

Outputs = tuple[str, ...]
"""Fields of a model's output. The first is the one that a plan differentiates, the others are read."""

HABIT = 2
"""Reads of a field after which steps that have a plan are planned anew to return it."""


@dataclass
class OutputUsage:
    """The seen uses of the outputs of steps of one key; before the first, the guess that they are those of the steps
    before it."""

    differentiated: str | None = None
    read: Counter[str] = field(default_factory=Counter)
    usual: frozenset[str] = frozenset()
    """Fields that are returned although they were not read so often."""
    read_in_step: set[str] = field(default_factory=set)
    """Fields that were read of the last step."""
    returns_reads: bool = True
    """False once no plan could be made that returns more than is differentiated."""
    fields: tuple[str, ...] | None = None
    """Names in the model's own output, once it was seen."""

    def outputs(self, batch: Mapping[str, Any]) -> Outputs:
        """The fields that the next step is planned to return: no more than are used, since logits cost memory."""
        first = self.differentiated or ("logits" if batch.get("labels") is None else "loss")
        often = {name for name, times in self.read.items() if times >= HABIT}
        return (first, *(sorted((often | self.usual) - {first}) if self.returns_reads else ()))

    def was_read(self, name: str) -> None:
        """Field ``name`` of a step that does not return it."""
        self.read[name] += 1
        self.read_in_step.add(name)

    def differentiates(self, name: str) -> None:
        """Field ``name`` is differentiated from now on; its plan returns the fields read of this step, too."""
        if self.differentiated != name:
            self.differentiated = name
            self.usual |= self.read_in_step

    def for_another(self, batch: Mapping[str, Any]) -> OutputUsage:
        """The guess for steps of another key, from the uses of the last one of this."""
        return OutputUsage(self.differentiated, usual=frozenset(self.read_in_step).union(self.outputs(batch)[1:]))

    def returns_less(self) -> bool:
        """No plan can be made that returns so much: return less from now on. Whether there was more to return."""
        often = {name for name, times in self.read.items() if times >= HABIT} - {self.differentiated}
        if self.returns_reads and self.usual - often - {self.differentiated}:
            self.usual = frozenset()
        elif self.returns_reads and often:
            self.returns_reads = False
        else:
            return False
        return True


class UsageByStep:
    """The uses of the outputs of steps, by key."""

    def __init__(self, usual: Callable[[Mapping[str, Any]], Outputs]) -> None:
        """``usual``: the likely uses of the outputs of the first step of a kind; () if nothing is known."""
        self._usual = usual
        self._by_key: dict[StepKey, OutputUsage] = {}
        self._last: dict[Hashable, OutputUsage] = {}
        self._used: dict[Hashable, set[str]] = {}
        self.usual_field: str | None = None
        """The field that is differentiated of outputs without loss and logits."""

    def of(self, key: StepKey, batch: Mapping[str, Any]) -> OutputUsage:
        """The usage of steps of ``key``, one of which begins; at first that of the last one of its kind."""
        call = _call(batch)
        self._used[call] = self.used(batch)
        kinds: tuple[Hashable, ...] = ((call, key.state), call)
        usage = self._by_key.get(key)
        if usage is None:
            last = next((self._last[kind] for kind in kinds if kind in self._last), None)
            usage = self._by_key[key] = self._first(batch) if last is None else last.for_another(batch)
        usage.read_in_step = set()
        self._last.update(dict.fromkeys(kinds, usage))
        return usage

    def used(self, batch: Mapping[str, Any]) -> set[str]:
        """All fields that steps of this kind were used for."""
        call = _call(batch)
        last = self._last.get(call)
        return self._used.get(call, set()) | (set() if last is None else last.read_in_step.union(last.outputs(batch)))

    def _first(self, batch: Mapping[str, Any]) -> OutputUsage:
        first, *others = self._usual(batch) or (self.usual_field if batch.get("labels") is None else None,)
        return OutputUsage(first, usual=frozenset(filter(None, others)))


def _call(batch: Mapping[str, Any]) -> Hashable:
    """The kind of a call: lengths make no other one, be they those of tensors or numbers."""
    return tuple((n, v if v is None or isinstance(v, (bool, str)) else type(v)) for n, v in batch.items())
