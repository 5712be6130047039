"""Hugging Face's side of a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from disco_accel.integrate.accelerate.trainer_runs import keep_planning_apart
from disco_accel.integrate.hf.batch_parts import in_parts
from disco_accel.integrate.hf.buckets import Buckets
from disco_accel.integrate.hf.tensor_plan import tensor_plan
from disco_accel.integrate.hf.tracing import training_contexts
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run.frontend import ContextFactory
from disco_accel.step.run.observer import Observer
from disco_accel.step.run.output_usage import Outputs
from disco_accel.step.run.reports import RunCounts

_FUSED_HEAD = ("log_probs", "entropy", "is_top1", "label_mask")


class HuggingFace:
    """Traces of Hugging Face models, and the lengths that their batches are padded to."""

    def __init__(self, buckets: str | tuple[int, ...]) -> None:
        """``buckets``: as in ``disco_config``."""
        self.buckets = Buckets(buckets)
        self.forward_buckets = Buckets(buckets)
        """Of forwards without gradients: the bits of training do not hang on the lengths of an evaluation."""

    def contexts(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> list[ContextFactory]:
        """As ``training_contexts``."""
        return training_contexts(model, batch)

    def fit(self, model: torch.nn.Module, batch: Mapping[str, Any], used: Collection[str]) -> FittedBatch:
        """``batch`` padded to its bucket, or as it is."""
        return self.buckets.fit(model, batch, used)

    def give_up(self, fitted: FittedBatch, batch: Mapping[str, Any]) -> FittedBatch:
        """``batch`` as it is: its bucket does not fit the budget."""
        return self.buckets.give_up(fitted, batch)

    def fit_forward(self, model: torch.nn.Module, batch: Mapping[str, Any], fields: Collection[str]) -> FittedBatch:
        """As ``fit``, for a forward without gradients."""
        return self.forward_buckets.fit(model, batch, fields)

    def keep_length(self, fitted: FittedBatch, batch: Mapping[str, Any], reason: str | None) -> FittedBatch:
        """``batch`` as it is, after ``fit_forward``."""
        if reason is None:
            return self.forward_buckets.give_up(fitted, batch)
        return self.forward_buckets.keep_length(fitted, batch, reason)

    def in_parts(self, model: torch.nn.Module, fitted: FittedBatch, count: int) -> FittedBatch | str:
        """As ``batch_parts.in_parts``."""
        return in_parts(model, fitted, count)

    def usual_outputs(self, batch: Mapping[str, Any]) -> Outputs:
        """Those of the head that TRL's trainers put in the place of a model's own, which has no logits."""
        return _FUSED_HEAD if batch.get("fused_lm_head") is True else ()

    def tensor_plan(self, model: torch.nn.Module, count: int) -> dict[str, int]:
        """As ``tensor_plan.tensor_plan``."""
        return tensor_plan(model, count)

    def observer(self, counts: RunCounts) -> Observer:
        """Reports the figures of bucketing, and keeps the time that plans take out of a Trainer's speed."""
        return _Observer(self.buckets, counts)

    def stats(self) -> dict[str, Any]:
        """The figures of bucketing."""
        return {"buckets": self.buckets.as_dict(), "forward_buckets": self.forward_buckets.as_dict()}


class _Observer(Observer):
    def __init__(self, buckets: Buckets, counts: RunCounts) -> None:
        self._buckets, self._counts = buckets, counts

    def on_step(self, step: CompiledStep) -> None:
        """Say once, after enough steps, the figures of bucketing."""
        self._buckets.summarise(self._counts.plans, self._counts.plan_hits, self._counts.steps_compiled)

    def on_plan(self, step: CompiledStep) -> None:
        """Keep the time that the plan took out of a Trainer's speed."""
        keep_planning_apart()
