"""Linear programs, row by row, whose answer is a lower bound with any tolerances of a solver."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Index = NDArray[np.int64]


class Program:
    """A sum of costs to be made least, over variables in boxes. Every box must be finite and hold an optimum."""

    def __init__(self) -> None:
        self._cost: list[NDArray[np.float64]] = []
        self._low: list[NDArray[np.float64]] = []
        self._high: list[NDArray[np.float64]] = []
        self._entries: list[tuple[Index, Index, NDArray[np.float64]]] = []
        self._least: list[NDArray[np.float64]] = []
        self._equal: list[NDArray[np.bool_]] = []
        self._whole: list[Index] = []
        self.variables = self.rows = 0

    def add(self, count: int, low: ArrayLike = 0.0, high: ArrayLike = 1.0, cost: ArrayLike = 0.0) -> Index:
        """Return the indices of ``count`` more variables."""
        for kept, given in ((self._low, low), (self._high, high), (self._cost, cost)):
            kept.append(np.broadcast_to(np.asarray(given, np.float64), (count,)))
        self.variables += count
        return np.arange(self.variables - count, self.variables)

    def add_whole(self, most: int) -> Index:
        """Return the index of one more variable, a whole number up to ``most`` for ``solve_whole``."""
        self._whole.append(self.add(1, 0.0, most))
        return self._whole[-1]

    def require(self, count: int, least: ArrayLike, *, equal: bool = False) -> Index:
        """Return the indices of ``count`` more rows whose sums are at least ``least``, or ``equal`` to it."""
        self._least.append(np.broadcast_to(np.asarray(least, np.float64), (count,)))
        self._equal.append(np.full(count, equal))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def put(self, rows: Index, variables: Index, entries: ArrayLike) -> None:
        """Add ``entries`` times ``variables`` to the sums of ``rows``."""
        shape = np.broadcast_shapes(rows.shape, variables.shape)
        entry = np.broadcast_to(np.asarray(entries, np.float64), shape)
        self._entries.append((np.broadcast_to(rows, shape), np.broadcast_to(variables, shape), entry))

    def solve(self) -> tuple[float, NDArray[np.float64] | None]:
        """Return a lower bound of the least cost, within rounding, and the variables that a solver found (None: none).

        For any multipliers y of the rows, the costs less y times the sums, least over the boxes, plus y times the
        required sums, is a lower bound (Neumaier and Shcherbina 2004). So the solver's tolerances cost some of the
        bound and never make it too high.
        """
        from scipy.optimize import linprog

        cost, low, high, least, equal, matrix = self._arrays()
        solved = linprog(
            cost,
            A_ub=-matrix[~equal],
            b_ub=-least[~equal],
            A_eq=matrix[equal],
            b_eq=least[equal],
            bounds=np.column_stack((low, high)),
            method="highs",
        )
        if solved.x is None:
            return 0.0, None
        multipliers = np.zeros(self.rows)
        multipliers[~equal] = np.maximum(0.0, -solved.ineqlin.marginals)
        multipliers[equal] = solved.eqlin.marginals
        reduced = cost - matrix.T @ multipliers
        return float(multipliers @ least + np.minimum(reduced * low, reduced * high).sum()), solved.x

    def solve_whole(self, limit: float) -> float:
        """Return the least cost where ``add_whole``'s variables are whole numbers, as far as a search of ``limit``
        seconds finds (infinity: nothing), within a thousandth."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        cost, low, high, least, equal, matrix = self._arrays()
        whole = np.zeros(self.variables)
        whole[[int(each[0]) for each in self._whole]] = 1
        rows = LinearConstraint(matrix, least, np.where(equal, least, np.inf))
        options = {"time_limit": limit, "mip_rel_gap": 1e-3}
        found = milp(cost, integrality=whole, bounds=Bounds(low, high), constraints=rows, options=options)
        return float("inf") if found.x is None else float(found.fun)

    def _arrays(self) -> tuple[Any, ...]:
        from scipy.sparse import csr_array

        cost, low, high = (np.concatenate(parts) for parts in (self._cost, self._low, self._high))
        row, column, entry = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        matrix = csr_array((entry, (row, column)), shape=(self.rows, self.variables))
        return cost, low, high, np.concatenate(self._least), np.concatenate(self._equal), matrix
