"""The modules that are traced in a model's place: a whole step, or a forward alone, as one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from disco_accel.capture.autocast import AutocastState, autocast_region, kept_casts
from disco_accel.capture.returned_fields import REAL_DTYPES, NoSuchOutput, loss_of, tensor_of
from disco_accel.capture.storages import storage_key
from disco_accel.capture.trace_log import active_log
from disco_accel.errors import CaptureError

Forward = Callable[..., Mapping[str, torch.Tensor]]
"""A model's forward that returns its tensors by name."""

UNREACHED = "requires_grad: no trainable parameter reaches the"
"""How the refusal of a step begins that has nothing to differentiate."""


class StepModule(torch.nn.Module):
    """Outputs and gradients in one call, so that parameters swapped in reach the recomputation too."""

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        autocast: AutocastState,
        outputs: Sequence[str],
        differentiated: int,
    ) -> None:
        super().__init__()
        self.model = model
        self._call = forward
        self._autocast = autocast
        self._outputs = outputs
        self._differentiated = differentiated
        self.bare = False
        self.kept_casts: Mapping[str, str] = {}

    def forward(self, batch: Mapping[str, Any], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        with autocast_region(self._autocast):
            output = self._call(**batch)
            self.bare = isinstance(output, torch.Tensor)
            values = [loss_of(output) if name == "loss" else tensor_of(output, name) for name in self._outputs]
            wanted = values[: self._differentiated]
            if tangents and self._autocast.cache:
                self.kept_casts = self._find_kept_casts(wanted)
        for name, value in zip(self._outputs, wanted, strict=False):
            if value.dtype not in REAL_DTYPES:
                raise CaptureError(f"{name}: a {value.dtype} has no gradient")
        if not tangents:
            return list(wanted)
        # As in eager mode, a field that no trainable parameter reaches adds nothing to the gradients of others.
        pairs = [(v, t) for v, t in zip(wanted, self._matching(wanted, tangents), strict=True) if v.requires_grad]
        if not pairs:
            raise NoSuchOutput(f"{UNREACHED} {self._outputs[0]}", None)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad([v for v, _ in pairs], trainable, [t for _, t in pairs], allow_unused=True)
        if all(gradient is None for gradient in gradients):
            # Ops without a formula for autograd make outputs that want a gradient and pass none on.
            raise NoSuchOutput(f"{UNREACHED} {self._outputs[0]}", None)
        return [*values, *gradients]

    def _find_kept_casts(self, wanted: Sequence[torch.Tensor]) -> Mapping[str, str]:
        """As ``CapturedStep.kept_casts``."""
        weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        log = active_log()
        # Each reentrant segment casts anew in its recomputation, and adds what it gets to ``.grad`` itself.
        recast = log.reentrant_leaves if log is not None else ()
        kept = kept_casts(wanted, weights)
        return {name: "float32" if storage_key(weights[name]) in recast else dtype for name, dtype in kept.items()}

    def _matching(self, wanted: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tangent of each: of several for a loss, as ``step.py`` makes them, the one of its dtype."""
        if self._outputs[0] != "loss":
            return tangents
        return [next(t for t in tangents if t.dtype is wanted[0].dtype)]


class ForwardModule(torch.nn.Module):
    """A forward in the same terms as ``StepModule``. ``outputs``: the names of the last call's results."""

    def __init__(self, model: torch.nn.Module, forward: Forward, autocast: AutocastState) -> None:
        super().__init__()
        self.model = model
        self._call = forward
        self._autocast = autocast
        self.outputs: tuple[str, ...] = ()

    def forward(self, batch: Mapping[str, Any], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with autocast_region(self._autocast):
            found = self._call(**batch)
        self.outputs = tuple(found)
        return list(found.values())
