"""The beginning of a step, under the budget as it is when the step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from disco_accel.errors import BudgetTooSmall
from disco_accel.step.budget.grant_source import GrantRising, GrantWithdrawn
from disco_accel.step.budget.moving_budget import MovingBudget

T = TypeVar("T")


class Session(Protocol):
    """What has a moving budget, and looks at it between its steps."""

    budgets: MovingBudget

    def follow_budget(self) -> None:
        """Go by the budget as it is now."""


def in_moving_budget(session: Session, step: Callable[[], T]) -> T:
    """What ``step``, the beginning of a step of ``session``, returns, under the budget as it is when it succeeds.

    Raises:
        BudgetTooSmall: it needs more than the budget, and nobody grants as much in time.
    """
    while True:
        session.follow_budget()
        try:
            return step()
        except GrantRising as rising:
            session.budgets.wait_to_rise(rising.seconds)
        except GrantWithdrawn:
            continue
        except BudgetTooSmall as error:
            if not session.budgets.wait_for(error):
                raise
