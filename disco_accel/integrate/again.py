"""A planned step's forward once more, for outputs that its plan does not have or cannot differentiate."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from disco_accel.capture.autocast import AutocastState, autocast_region, outside_autocast
from disco_accel.execute.hostmem import WatchedTensors
from disco_accel.integrate.buckets import Fitted
from disco_accel.integrate.compiled import CompiledStep
from disco_accel.integrate.generator import generator_from
from disco_accel.integrate.output import with_gradient
from disco_accel.integrate.pending import PendingStep, externals_of

if TYPE_CHECKING:
    from disco_accel.integrate.plugin import PreparedModel

logger = logging.getLogger("disco_accel")

Outputs = tuple[str, ...]
"""Fields of a model's output. The first is the one that a plan differentiates, the others are read."""

_HABIT = 2
"""Who has read a field so many times is expected to go on."""


@dataclass
class Uses:
    """What the user does with the outputs of steps of one kind, as far as was seen."""

    differentiated: str | None = None
    read: Counter[str] = field(default_factory=Counter)

    def outputs(self, batch: Mapping[str, Any]) -> Outputs:
        """What the next step is planned to return: no more than is used, since logits cost memory."""
        first = self.differentiated or ("logits" if batch.get("labels") is None else "loss")
        return (first, *sorted(name for name, times in self.read.items() if times >= _HABIT and name != first))


@dataclass
class Again:
    """What a forward was given, and what came of running it again as the model's own."""

    state: PreparedModel
    model: torch.nn.Module
    fitted: Fitted
    step: CompiledStep
    uses: Uses
    generator: torch.Tensor | None
    autocast: AutocastState
    versions: dict[str, int]
    frozen: WatchedTensors
    own: Any = None

    @property
    def batch(self) -> Mapping[str, Any]:
        """As the step got it."""
        return self.fitted.batch

    def read(self, name: str) -> Any:
        """Field ``name`` of the model's own output. Raises AttributeError if it has none."""
        if name == "loss" and self.batch.get("labels") is None:
            return None
        if self.own is None:
            # The draws are those of the step's own forward, and the user's generator does not notice.
            with torch.no_grad(), generator_from(self.step, self.generator), self._circumstances():
                self.own = self.state.original_forward(**self.batch)
        value = getattr(self.own, name)
        if not isinstance(value, torch.Tensor):
            return value
        self.uses.read[name] += 1
        if self.uses.read[name] == _HABIT:
            logger.info("the model's %s are read: steps are planned with them from now on", name)
        return self.differentiable(name, value)

    def differentiable(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value`` with the way back that eager's has."""
        parameters = self.step.parameters
        if parameters is None or not value.is_floating_point() or not torch.is_grad_enabled():
            return value
        return with_gradient(value, parameters, functools.partial(self._gradients, name))

    def _gradients(self, name: str, tangent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Runs the step that differentiates ``name``, from this forward's inputs."""
        if self.uses.differentiated != name:
            logger.info("%s: a gradient is asked for; steps are planned for it from now on", name)
        self.uses.differentiated = name
        with self.state.lock:
            with torch.enable_grad(), self._circumstances():
                step = self.state.compiled(self.model, self.fitted, self.uses.outputs(self.batch))
            externals = externals_of(self.state, self.model, step, self.batch)
            pending = PendingStep(self.state, self.model, step, externals)
            # As if it had been made at the forward: its backward refuses what has changed since.
            pending.generator, pending.frozen = self.generator, self.frozen
            pending.versions |= {b.vertex: self.versions[b.name] for b in step.externals if b.name in self.versions}
            return pending.backward(tangent)

    @contextmanager
    def _circumstances(self) -> Iterator[None]:
        """Autocast as it was at the forward, whatever it is now."""
        with outside_autocast(), autocast_region(self.autocast):
            yield
