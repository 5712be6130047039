"""No plan in this memory, as the planners tell each other."""

from __future__ import annotations


class Infeasible(Exception):
    """No place can be made for what the vertex at ``position`` needs."""

    def __init__(self, position: int) -> None:
        super().__init__(f"no place for the vertex at position {position}")
        self.position = position
