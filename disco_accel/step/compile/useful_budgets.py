"""Budgets that are worth setting beyond one, and the gain of a little more memory.

Both go by the straight line from a plan to ``ample_memory``, so that they cost no search.
"""

from __future__ import annotations

from typing import Any

from disco_accel.plan.bound.ample_memory import ALL_STAYS, HALF_LOADS, _Ample
from disco_accel.step.compile.budget_parts import Budget

_NEAR = 1.1
"""Nothing is named beyond a memory from which ample memory is only so many times away."""

_STEP, _SMALL, _SHARE = 1 << 30, 2 << 30, 10
"""Bytes more that a forecast is about. Of a budget below the second, one part in so many of it."""


def useful_budgets(ample: _Ample, budget: Budget, arena: int) -> dict[str, int]:
    """Whole budgets, in bytes, beyond the one that leaves ``arena`` to a plan: ``half_loads``, about half as much is
    loaded each step; ``all_stays``, all values stay on the device and nothing is computed again."""
    if ample.memory < _NEAR * arena:
        return {}
    arenas = {HALF_LOADS: ample.halfway(arena), ALL_STAYS: ample.memory}
    return {name: budget.total_for(size) for name, size in arenas.items()}


def next_gib(ample: _Ample, budget: Budget, loads: int, seconds: float) -> dict[str, Any]:
    """The gain of 1 GiB, or of a tenth of a budget below 2 GiB: ``more_bytes`` says which.

    ``loads``: bytes that a step of the plan in ``budget`` loads, ``seconds`` that it takes in simulated time. The
    result has ``loads_saved_bytes`` and ``seconds`` by the line, and ``seconds_at_most``: no step is shorter than its
    kernels, each run once.
    """
    more = _STEP if budget.total >= _SMALL else budget.total // _SHARE
    left = ample.rest(budget.within(budget.total + more).arena, budget.arena)
    above = max(0.0, seconds - ample.seconds)
    return {
        "more_bytes": more,
        "loads_saved_bytes": int(max(0, loads - ample.loads) * (1.0 - left)),
        "seconds": above * (1.0 - left),
        "seconds_at_most": above,
    }
