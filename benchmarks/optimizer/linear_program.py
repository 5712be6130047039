"""A linear program that is written down term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

INFINITE = float("inf")

Term = tuple[float, int]
"""Factor and variable."""


@dataclass(slots=True)
class _Rows:
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    factor: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[Term], right: float) -> None:
        for factor, variable in terms:
            self.row.append(len(self.right))
            self.column.append(variable)
            self.factor.append(factor)
        self.right.append(right)


@dataclass(slots=True)
class LinearProgram:
    """Minimise the sum of ``cost`` times variable; all variables are at least 0."""

    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    _equal: _Rows = field(default_factory=_Rows)
    _at_most: _Rows = field(default_factory=_Rows)

    def variable(self, least: float = 0.0, most: float = INFINITE, cost: float = 0.0) -> int:
        """Add one; its number."""
        self.least.append(least)
        self.most.append(most)
        self.cost.append(cost)
        return len(self.cost) - 1

    def equal(self, terms: Sequence[Term], right: float) -> None:
        """The sum of ``terms`` is ``right``."""
        self._equal.add(terms, right)

    def at_most(self, terms: Sequence[Term], right: float) -> None:
        """The sum of ``terms`` is at most ``right``."""
        self._at_most.add(terms, right)

    def solve(self) -> tuple[float, Sequence[float]]:
        """The least cost, and the variables. Raises ValueError if there is no solution."""
        from scipy.optimize import linprog
        from scipy.sparse import csc_array

        def matrix(rows: _Rows) -> csc_array:
            return csc_array((rows.factor, (rows.row, rows.column)), shape=(len(rows.right), len(self.cost)))

        solved = linprog(
            self.cost,
            A_ub=matrix(self._at_most),
            b_ub=self._at_most.right,
            A_eq=matrix(self._equal),
            b_eq=self._equal.right,
            bounds=np.array([self.least, self.most]).T,
            method="highs-ipm",
        )
        if solved.x is None:
            raise ValueError(f"no solution: {solved.message}")
        return float(solved.fun), list(solved.x)
