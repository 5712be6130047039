"""No plan in this memory, as the planners tell each other."""

from __future__ import annotations


class Infeasible(Exception):
    """The vertex at ``position`` needs memory that no plan has for it."""

    def __init__(self, position: int) -> None:
        super().__init__(f"no place for the vertex at position {position}")
        self.position = position
