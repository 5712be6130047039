"""How many plans forwards without gradients get in a row, each for shapes that had none."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from disco_accel.errors import CaptureError

_MOST = 8
_REMEMBERED = 256


@dataclass
class NewShapes:
    """After ``_MOST`` new plans in a row forwards run without one, until the same shapes come again: a plan takes
    seconds to make."""

    _in_a_row: int = 0
    _waiting: deque[Hashable] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def met(self) -> None:
        """There is a plan."""
        self._in_a_row = 0

    def admit(self, key: Hashable) -> None:
        """A plan is wanted for ``key``. Raises CaptureError where there were too many such in a row."""
        if key in self._waiting:
            self._waiting.remove(key)
            return
        self._in_a_row += 1
        if self._in_a_row > _MOST:
            self._waiting.append(key)
            raise CaptureError(
                f"shapes: the last {_MOST} forwards without gradients had other shapes each, and each took a plan of "
                "its own; such shapes get a plan when they come again. Pad to few lengths (pad_to_multiple_of of the "
                "data collator)"
            )
