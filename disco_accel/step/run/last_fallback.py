"""The last step that fell back to eager mode."""

from __future__ import annotations

from disco_accel.step.state.step_key import StepKey


class LastFallback:
    """Which step it was, and why: it is known again before anything is tried."""

    def __init__(self) -> None:
        self._key: StepKey | None = None
        self._reason = ""

    def note(self, key: StepKey, reason: str) -> None:
        """The step of this key was refused for ``reason``."""
        self._key, self._reason = key, reason

    def known_reason(self, key: StepKey) -> str | None:
        """Why the step of this key falls back, if it is that one."""
        return self._reason if key == self._key else None
