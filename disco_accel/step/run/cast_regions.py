"""Which forwards share the casts that autocast keeps of trained weights, and whether these are stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from disco_accel.capture.autocast import cast_generation
from disco_accel.errors import CaptureError
from disco_accel.native.host_memory import WatchedTensors
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.one_backward import CastRegion
from disco_accel.step.state.input_snapshot import InputSnapshot

_STALE = (
    "autocast: the region spans an update: its casts are stale. Weights were changed since a forward in this region, "
    "and PyTorch goes on with casts of the old ones, where a plan has the new ones; open a region for each step, or "
    "pass cache_enabled=False to torch.autocast"
)


class CastRegions:
    """Those of one prepared model, one after the other."""

    def __init__(
        self, model: torch.nn.Module, updating: Callable[[], bool], tell: Callable[[str], None] | None
    ) -> None:
        """``updating``: whether an update of the weights is to be done by the next step. ``tell`` hears of stale casts
        where the model's own forward may go on with others; without it that is an error too."""
        self._model = model
        self._updating, self._tell = updating, tell
        self._generation = -1
        self._region = CastRegion()
        self._inputs: InputSnapshot | None = None
        """What the first forward of the region that casts weights has found."""

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
        try:
            region = self._enter()
        except CaptureError as error:
            if self._tell is None:
                raise
            self._tell(f"this forward casts the weights as they are now: {error}")
            return
        if region is not None and self._inputs is None:
            self._inputs = InputSnapshot(self._cast_weights(), {}, WatchedTensors([]))

    def _cast_weights(self) -> Mapping[str, torch.Tensor]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad and p.dtype is torch.float32}

    def _enter(self) -> CastRegion | None:
        generation = cast_generation()
        if generation is None:
            return None
        if generation != self._generation:
            self._generation, self._region, self._inputs = generation, CastRegion(), None
        elif self._inputs is not None and (self._updating() or self._inputs.weights_changed()):
            raise CaptureError(_STALE)
        return self._region
