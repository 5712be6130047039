"""Which forwards share the casts that autocast keeps of trained weights, and whether these are older than the weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch

from disco_accel.capture.autocast import cast_generation
from disco_accel.errors import CaptureError
from disco_accel.step.compiled_step import CompiledStep
from disco_accel.step.input_snapshot import InputSnapshot, versions_of
from disco_accel.step.one_backward import CastRegion

_STALE = (
    "autocast: the region spans an update: its casts are stale. Weights were changed since a forward in this region, and "
    "PyTorch goes on with casts of the old ones, where a plan has the new ones; open a region for each step, or pass "
    "cache_enabled=False to torch.autocast"
)


class CastRegions:
    """Those of one prepared model. Each step asks which one it is in; what steps read is that of the planned weights."""

    def __init__(self, model: torch.nn.Module, updating: Callable[[], bool]) -> None:
        """``updating``: whether an update of the weights is to be done by the next step."""
        self._model = weakref.ref(model)
        self._updating = updating
        self._generation = -1
        self._region = CastRegion()
        self._weights: Mapping[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._inputs: InputSnapshot | None = None
        """What the first forwards of the region found: one of the model's own, and a planned one."""

    def region_of(self, step: CompiledStep) -> CastRegion | None:
        """The region that ``step`` is about to run in; None where nothing is cast that a region keeps.

        Raises:
            CaptureError: weights were changed since the first forward of the region.
        """
        return self._enter() if step.captured.kept_casts else None

    def planned(self, region: CastRegion | None, inputs: InputSnapshot) -> None:
        """A step has run in ``region``, on ``inputs``."""
        if region is not None and region is self._region and self._inputs is None:
            self._inputs = inputs

    def own_forward(self) -> None:
        """The model's own forward is about to run. Raises as ``region_of``."""
        if self._enter() is not None and not self._versions:
            self._weights = self._cast_weights()
            self._versions = versions_of(self._weights)

    def _cast_weights(self) -> Mapping[str, torch.Tensor]:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and p.dtype is torch.float32}

    def _enter(self) -> CastRegion | None:
        generation = cast_generation()
        if generation is None:
            return None
        if generation != self._generation:
            self._generation, self._region = generation, CastRegion()
            self._versions, self._inputs = {}, None
        elif self._spans_update():
            raise CaptureError(_STALE)
        return self._region

    def _spans_update(self) -> bool:
        if self._inputs is None and not self._versions:
            return False
        if self._updating() or (self._versions and self._versions != versions_of(self._weights)):
            return True
        return self._inputs is not None and self._inputs.weights_changed()
