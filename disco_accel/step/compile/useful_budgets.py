"""Budgets that are worth setting beyond one, and the gain of a little more memory, without a search."""

from __future__ import annotations

from typing import Any

from disco_accel.plan.bound.larger_memory import ALL_STAYS, HALF_LOADS, _LargerMemory
from disco_accel.step.compile.budget_parts import Budget

_NEAR = 1.1
"""Nothing is named beyond a memory of which ample memory is only so many times as much."""

_STEP, _SMALL, _SHARE = 1 << 30, 2 << 30, 10
"""Bytes more that a forecast is about. Of a budget below the second, one part in so many of it."""


def gains_of_memory(larger: _LargerMemory, budget: Budget, loads: int, seconds: float) -> dict[str, Any]:
    """``useful_budgets`` and ``next_gib`` of a plan in ``budget``, by name."""
    return {
        "useful_budgets": useful_budgets(larger, budget, budget.arena),
        "next_gib": next_gib(larger, budget, loads, seconds),
    }


def useful_budgets(larger: _LargerMemory, budget: Budget, arena: int) -> dict[str, int]:
    """Whole budgets in bytes, beyond the one that leaves ``arena`` to a plan. In ``half_loads`` a step needs about half
    of its loads. In ``all_stays`` all values stay on the device, and nothing is computed again."""
    if larger.ample < _NEAR * arena:
        return {}
    arenas = {HALF_LOADS: larger.half_loads(arena), ALL_STAYS: larger.ample}
    return {name: budget.total_for(size) for name, size in arenas.items()}


def next_gib(larger: _LargerMemory, budget: Budget, loads: int, seconds: float) -> dict[str, Any]:
    """The gain of 1 GiB, or of a tenth of a budget below 2 GiB: ``more_bytes`` says which.

    ``loads``: bytes that a step of the plan in ``budget`` loads, ``seconds`` that it takes in simulated time. The
    result has ``loads_saved_bytes``, the same part of these as of the loads that a step needs, and ``seconds``: the
    longer of loads and kernels, or that part of all waiting. ``seconds_at_most``: no step is shorter than its kernels,
    each run once.
    """
    more = _STEP if budget.total >= _SMALL else budget.total // _SHARE
    (link, needed), (_, rest) = (larger.loads(within.arena) for within in (budget, budget.within(budget.total + more)))
    left = rest / needed if needed else 1.0
    link *= loads / needed if needed else 0.0
    kernels, at_most = larger.kernel_seconds, max(0.0, seconds - larger.least_seconds)
    longer = max(link, kernels)
    saved = seconds * (1.0 - max(left * link, kernels) / longer) if longer else 0.0
    return {
        "more_bytes": more,
        "loads_saved_bytes": int(loads * (1.0 - left)),
        "seconds": min(max(saved, at_most * (1.0 - left)), at_most),
        "seconds_at_most": at_most,
    }
