"""Which field of a model's output a step is planned for, where it has neither a loss nor logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from disco_accel.capture.returned_fields import NoSuchOutput
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.shortage import met_shortage
from disco_accel.step.budget.moving_budget import MovingBudget
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.compile.refusals import advised
from disco_accel.step.run.model_calls import ModelCalls
from disco_accel.step.run.output_usage import OutputUsage
from disco_accel.step.run.step_compiler import StepCompiler
from disco_accel.step.state.step_key import StepKey

if TYPE_CHECKING:
    import torch


class Planning(Protocol):
    """What makes plans for one model's steps."""

    @property
    def compiler(self) -> StepCompiler: ...

    @property
    def budgets(self) -> MovingBudget: ...

    @property
    def calls(self) -> ModelCalls: ...


def compiled_for_use(
    state: Planning, model: torch.nn.Module, fitted: FittedBatch, usage: OutputUsage, key: StepKey
) -> CompiledStep:
    """The plan of this step for what is differentiated: of outputs without loss and logits the first field that can be,
    as models that make embeddings return them. Who differentiates another one gets it planned at the first backward.

    Raises:
        CaptureError: no field can be, or the step cannot be captured; says what would work, where that is known.
    """
    try:
        return _compiled(state, model, fitted, usage, key)
    except NoSuchOutput:
        raise
    except CaptureError as error:
        advice = advised(model, error)
        if advice is error:
            # Raised from itself it would lose its cause, which tells a shortage of memory.
            raise
        raise advice from error


def _compiled(
    state: Planning, model: torch.nn.Module, fitted: FittedBatch, usage: OutputUsage, key: StepKey
) -> CompiledStep:
    try:
        return planned_for(state, model, fitted, usage, key)
    except NoSuchOutput as error:
        first, before = error, usage.differentiated
    for name in first.fields:
        usage.differentiated = name
        try:
            step = planned_for(state, model, fitted, usage, key)
        except NoSuchOutput:
            continue
        state.calls.usage.usual_field = name
        return step
    usage.differentiated = before
    raise first


def planned_for(
    state: Planning, model: torch.nn.Module, fitted: FittedBatch, usage: OutputUsage, key: StepKey | None = None
) -> CompiledStep:
    """The plan of this step for its ``usage``, less what is only read where no plan can be made that returns it, too.

    Raises as ``StepCompiler.compiled``.
    """
    while True:
        try:
            return state.compiler.compiled(model, fitted, usage.outputs(fitted.batch), key)
        except (BudgetTooSmall, CaptureError) as error:
            waits = isinstance(error, BudgetTooSmall) and state.budgets.may_wait(error)
            if waits or met_shortage(error) or not usage.returns_less():
                raise
