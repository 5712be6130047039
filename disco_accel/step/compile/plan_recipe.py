"""What is needed to plan a captured step again, for another budget, without capturing or measuring it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.compile.budget_parts import Budget, BudgetBytes
from disco_accel.step.compile.pipeline import CostedStep, PlannedStep, PlannerSettings, PlanStore, plan_step


@dataclass(frozen=True, eq=False)
class PlanRecipe:
    """``costed``: the step, each kernel on its device, in the chunks of its first plan. ``facts``: what its first
    budget was for. It holds no tensor, and planning by it touches none, so that any thread may."""

    costed: CostedStep
    facts: BudgetBytes
    settings: PlannerSettings
    store: PlanStore | None

    def planned(
        self, total: int, *, seconds: float | None = None, elsewhere: PlanningProcess | None = None
    ) -> PlannedStep:
        """The verified plan within ``total`` bytes, by a search of at most ``seconds`` if they are given, and
        ``elsewhere``. Raises as ``plan_step``."""
        settings = self.settings
        if seconds is not None:
            limit = settings.plan_seconds
            settings = replace(settings, plan_seconds=seconds if limit is None else min(seconds, limit))
        facts = replace(self.facts, total=total)
        return plan_step(self.costed, facts, settings, store=self.store, elsewhere=elsewhere)

    def budget(self, total: int, others: int = 0) -> Budget:
        """The parts of ``total`` bytes, with ``others`` as of ``BudgetBytes``."""
        costs = self.costed.costs
        return replace(self.facts, total=total, others=others).split(costs.workspaces, in_blocks=costs.in_blocks)
