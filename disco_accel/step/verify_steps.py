"""``verify_steps: N``: how many of the first planned steps were compared with unplanned ones, and what came of it."""

from __future__ import annotations

import logging

logger = logging.getLogger("disco_accel")


class StepVerifier:
    """Compares the first ``wanted`` planned steps of one prepared model, and says once that they agree."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._done = 0
        self._seconds = 0.0
        self._widest = 0.0

    @property
    def active(self) -> bool:
        """Whether the next step is compared."""
        return self._done < self._wanted

    def agreed(self, name: str, seconds: float, apart: float, gradients: int) -> None:
        """One step more was compared: its gradients are at most ``apart`` from the unplanned ones."""
        self._done += 1
        self._seconds += seconds
        self._widest = max(self._widest, apart)
        if self.active:
            return
        how = "bit for bit" if self._widest == 0 else f"to {self._widest:.2g} of the norm"
        steps = "step" if self._done == 1 else f"{self._done} steps"
        logger.info(
            "%s: verify_steps: the first planned %s and the same without a plan agree %s, loss and %d gradients; "
            "comparing took %.1f s",
            name,
            steps,
            how,
            gradients,
            self._seconds,
        )

    @property
    def number(self) -> int:
        """Of the step that is compared, from 1."""
        return self._done + 1
