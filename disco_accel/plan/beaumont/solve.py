"""Everything about one instance of weight offloading: the greedy answers, the baseline, the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from disco_accel.plan.beaumont.judge import check_schedule
from disco_accel.plan.beaumont.milp import lower_bound
from disco_accel.plan.beaumont.schedule import EFFORT, Schedule, best_schedule
from disco_accel.plan.beaumont.selection import Instance, WeightGap, select, without_superfluous

_ROUNDING = 1e-9
_MOST = 4
"""Choices that are scheduled with all cuts."""


@dataclass(frozen=True, slots=True)
class _Solution:
    """Schedules that the judge has accepted, each with its gaps in the order of choice.

    ``star`` follows Beaumont's greedy without the discount, ``greedy`` is the best found; ``bound``: seconds than which
    no step of any choice of gaps is shorter; ``optimal``: that is the program's optimum, or ``greedy`` attains it."""

    instance: Instance
    greedy: Schedule
    star: Schedule
    bound: float
    optimal: bool

    def as_dict(self) -> dict[str, Any]:
        """The output of ``disco-accel weights``: seconds. In ``chosen`` layers count from 1, and the second number is 1
        for a gap across steps, 0 for one inside a step."""
        chosen = [[gap.layer + 1, int(gap.across)] for gap in self.greedy.chosen]
        return {
            "sum_u": self.instance.sum_u,
            "l2l": self.instance.l2l,
            "greedy": {"time": self.greedy.period, "chosen": chosen},
            "greedy_star": self.star.period,
            "lower_bound": min(self.bound, self.greedy.period),
            "optimal": self.optimal,
        }


def solve(instance: Instance, milp_seconds: float) -> _Solution:
    """Choose and schedule, and spend up to ``milp_seconds`` on the bound."""
    star = _scheduled(instance, _fitting(instance, select(instance, discount=False)))
    best = star
    choices = _choices(instance)
    if len(choices) > _MOST:
        # Few cuts at first: no choice gains much more than another by the remaining ones.
        brief = [best_schedule(instance, choice, EFFORT // 50).period for choice in choices]
        choices = [choices[i] for i in sorted(range(len(choices)), key=brief.__getitem__)[:_MOST]]
    for choice in choices:
        if best.period <= instance.sum_u * (1 + _ROUNDING):
            break
        greedy = _scheduled(instance, choice)
        if greedy.period < best.period * (1 - _ROUNDING):
            best = greedy
    for answer in (star, best):
        check_schedule(instance, answer)
    return _Solution(instance, best, star, *lower_bound(instance, milp_seconds, best.period))


def _choices(instance: Instance) -> list[list[WeightGap]]:
    """Choices of gaps worth a schedule.

    With spare memory for weights that arrive while a layer runs, which keeps the compute busy, and without, which
    copies fewer bytes. With writes priced, and as if they were free, which is right where the other direction of the
    link is busier. All gaps, which copies most but never waits for memory.
    """
    choices = []
    for priced in (instance,) if instance.frozen else (instance, replace(instance, frozen=True)):
        for spare in (1.0, 0.5, 0.0):
            chosen = _fitting(instance, select(priced, spare=spare))
            choices += [chosen, without_superfluous(instance, chosen, spare)]
    choices.append(instance.gaps())
    return list(map(list, dict.fromkeys(map(tuple, choices))))


def _fitting(instance: Instance, chosen: Sequence[WeightGap]) -> list[WeightGap]:
    """``chosen``, and all other gaps where ``chosen`` leaves an op without enough memory."""
    if not (instance.excess(chosen) > instance.memory * _ROUNDING).any():
        return list(chosen)
    return [*chosen, *(gap for gap in instance.gaps() if gap not in set(chosen))]


def _scheduled(instance: Instance, chosen: Sequence[WeightGap]) -> Schedule:
    return replace(best_schedule(instance, chosen), chosen=tuple(chosen))
