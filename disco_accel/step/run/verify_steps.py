"""``verify_steps: N``: how many of the first planned steps were compared with unplanned ones, and what came of it."""

from __future__ import annotations

import logging

from disco_accel.selfcheck.agreement import Agreement

logger = logging.getLogger("disco_accel")


class StepVerifier:
    """Compares the first ``wanted`` planned steps of one prepared model, and says once that they agree."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._done = 0
        self._seconds = 0.0
        self._farthest: Agreement | None = None

    @property
    def active(self) -> bool:
        """Whether the next step is compared."""
        return self._done < self._wanted

    def agreed(self, name: str, seconds: float, found: Agreement, gradients: int) -> None:
        """One step more was compared, and ``found`` to agree with unplanned ones."""
        self._done += 1
        self._seconds += seconds
        if self._farthest is None or found.farthest > self._farthest.farthest:
            self._farthest = found
        if self.active:
            return
        widest = self._farthest
        how = "bit for bit" if widest.bits else f"to {widest.farthest:.2g} of the norm"
        if widest.spread:
            how += f" (eager runs to {widest.spread:.2g} with each other)"
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
