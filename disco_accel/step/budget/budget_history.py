"""What a moving budget has been: for ``stats``, and for a picture."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from pathlib import Path

MOST_HISTORY = 1024
"""Entries of a history; the oldest go."""


class BudgetHistory:
    """Bytes granted and held, each time that one of them changed, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._entries: deque[tuple[float, int, int]] = deque(maxlen=MOST_HISTORY)

    def note(self, granted: int, held: int) -> None:
        """So it is now."""
        self._entries.append((time.monotonic() - self._began, granted, held))

    def entries(self) -> list[tuple[float, int, int]]:
        """Seconds since the beginning, bytes granted, bytes held."""
        return list(self._entries)

    def draw(self, path: Path, moves: int) -> None:
        """Write a picture, if matplotlib is installed. ``moves``: how often memory was given back."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        from disco_accel.observe.budget_plot import draw_budget

        draw_budget(path, self.entries(), title=f"memory budget, moved {moves} times")
