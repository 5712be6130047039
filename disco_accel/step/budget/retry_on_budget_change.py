"""The beginning of a step, under the budget as it is when the step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from disco_accel.errors import BudgetTooSmall
from disco_accel.step.budget.grant_source import GrantRising, GrantWithdrawn
from disco_accel.step.budget.moving_budget import MovingBudget

T = TypeVar("T")


def retry_on_budget_change(budgets: MovingBudget, step: Callable[[], T]) -> T:
    """What ``step``, the beginning of a step of one session, returns, under the budget as it is when it succeeds.

    Raises:
        BudgetTooSmall: it needs more than the budget, and nobody grants as much in time.
    """
    while True:
        budgets.follow_if_changed()
        try:
            return step()
        except GrantRising as rising:
            budgets.grant.wait_to_rise(rising.total, rising.seconds)
        except GrantWithdrawn:
            continue
        except BudgetTooSmall as error:
            if not budgets.wait_for(error):
                raise
