"""The last step that fell back to eager mode, known again without a full look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from disco_accel.integrate.guards import StepKey, seems

FIRST_SIGHTS = 15


class LastFallback:
    """Which step it was, and why. Eager mode is right whatever has changed since, so a full look every sixteenth time
    is enough to find that a plan is possible after all."""

    def __init__(self) -> None:
        self._key: StepKey | None = None
        self._reason = ""
        self._left = 0

    def keep(self, key: StepKey, reason: str) -> None:
        """After a full look, whose ``key`` was refused for ``reason``."""
        self._key, self._reason, self._left = key, reason, FIRST_SIGHTS

    def again(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> str | None:
        """The reason if, at first sight, the step about to run is that one; None if a full look is due."""
        if self._key is None or self._left == 0 or not seems(model, batch, self._key):
            return None
        self._left -= 1
        return self._reason
