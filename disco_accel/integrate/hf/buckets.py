"""Batches of many lengths, padded on the right up to few, so that few plans serve them all.

In a causal model no token sees those to its right, so padding there changes no other token's value; labels of -100 keep
it out of the loss. Where that cannot be told of a model or a batch, the batch stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from disco_accel.step.compile.fitted_batch import CUT, FittedBatch
from disco_accel.step.run.arguments import base_model
from disco_accel.step.state.step_key import is_packed, state_number

logger = logging.getLogger("disco_accel")

_EXACT_LENGTHS = 2
"""So many lengths get plans of their own before ``auto`` pads: training at one length, or at two, stays as it is."""
_SMALLEST_STEP = 16
_STEPS_BEFORE_SUMMARY = 100
# What padding is in each argument. A mask of ones keeps every padded row free to see itself, and a full mask full.
_PADDING = {"input_ids": 0, "labels": -100, "attention_mask": 1}
_INDEPENDENT = frozenset(
    ("num_items_in_batch", "use_cache", "return_dict", "output_attentions", "output_hidden_states")
)
_CAUSAL_LMS = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


class Buckets:
    """Which length each batch of one model is padded to, with counts of all batches."""

    def __init__(self, setting: str | tuple[int, ...]) -> None:
        """``setting``: auto, off, or lengths in ascending order."""
        self._setting = setting
        self._exact_lengths: list[int] = []
        self._lengths: set[int] = set()
        self._targets: set[int] = set()
        self._too_large: set[tuple[int, int]] = set()
        self._reasons: set[str] = set()
        self._obstacle: tuple[int, str | None] = (-1, None)
        self._steps = self._tokens = self._padding = 0

    def fit(self, model: torch.nn.Module, batch: Mapping[str, Any], used: Collection[str] = ()) -> FittedBatch:
        """``batch`` padded to its bucket, or as it is; why, where that may surprise, is logged once. ``used``: the
        fields of its output that somebody may want without padding."""
        ids = batch.get("input_ids")
        if self._setting == "off" or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.numel() == 0:
            return FittedBatch(batch)
        rows, length = ids.shape
        self._lengths.add(length)
        target = self._target(model, length)
        if target == length or (rows, target) in self._too_large:
            return FittedBatch(batch)
        reason = self._model_obstacle(model) or _batch_obstacle(model, batch, target)
        if reason is None and not CUT.issuperset(used):
            reason = f"{min(set(used) - CUT)}: read of steps like it, and padding could not be taken out of it"
        if reason is not None:
            self._say(f"this batch gets a plan for its own length, {length}: {reason}")
            return FittedBatch(batch)
        if not self._targets:
            self._say("batches differ in length: they are padded to few lengths (buckets), each with one plan")
        self._targets.add(target)
        self._steps += 1
        self._tokens += rows * target
        self._padding += rows * (target - length)
        return FittedBatch({name: _padded(name, value, target - length) for name, value in batch.items()}, length)

    def give_up(self, fitted: FittedBatch, batch: Mapping[str, Any]) -> FittedBatch:
        """``batch`` as it is: ``fitted`` does not fit the budget, and no batch padded like it will be tried again."""
        rows, target = fitted.batch["input_ids"].shape
        self._too_large.add((rows, target))
        return self.keep_length(
            fitted,
            batch,
            f"{rows} x {target} tokens exceed memory_budget: what would be padded so keeps its own length",
        )

    def keep_length(self, fitted: FittedBatch, batch: Mapping[str, Any], reason: str) -> FittedBatch:
        """``batch`` as it is: ``fitted`` did not run, for ``reason``, which is logged once."""
        rows, target = fitted.batch["input_ids"].shape
        self._say(reason)
        self._steps -= 1
        if not self._steps:
            self._targets.clear()
        self._tokens -= rows * target
        self._padding -= rows * (target - batch["input_ids"].shape[1])
        return FittedBatch(batch)

    def as_dict(self) -> dict[str, Any]:
        """``lengths`` seen, those ``padded_to``, ``padded_steps``, and the share of ``padding`` in their tokens."""
        return {
            "lengths": len(self._lengths),
            "padded_to": sorted(self._targets),
            "padded_steps": self._steps,
            "padding": self._padding / self._tokens if self._tokens else 0.0,
        }

    def summarise(self, plans: int, hits: int, steps: int) -> None:
        """Say once, after enough steps, the figures of bucketing in this training."""
        if self._steps == _STEPS_BEFORE_SUMMARY:
            self._say(
                f"buckets: {len(self._lengths)} lengths run from {plans} plans, {hits / max(1, steps):.0%} of steps "
                f"found theirs; padding is {self.as_dict()['padding']:.1%} of the tokens"
            )

    def _say(self, text: str) -> None:
        if text not in self._reasons:
            self._reasons.add(text)
            logger.info("%s", text)

    def _target(self, model: torch.nn.Module, length: int) -> int:
        if isinstance(self._setting, tuple):
            target = next((n for n in self._setting if n >= length), length)
        elif length in self._exact_lengths:
            return length
        elif len(self._exact_lengths) < _EXACT_LENGTHS:
            self._exact_lengths.append(length)
            return length
        else:
            target = next_length(length)
        limit = _position_limit(model)
        return target if limit is None else max(length, min(target, limit))

    def _model_obstacle(self, model: torch.nn.Module) -> str | None:
        state = state_number(model)
        if self._obstacle[0] != state:
            self._obstacle = state, next(_model_obstacles(model), None)
        return self._obstacle[1]


def next_length(length: int) -> int:
    """The first of the lengths that ``auto`` pads to which is not below ``length``: four in each doubling."""
    step = max(_SMALLEST_STEP, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def _position_limit(model: torch.nn.Module) -> int | None:
    config = getattr(base_model(model), "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _model_obstacles(model: torch.nn.Module) -> Iterator[str]:
    """Why padding on the right might change the model's results for other tokens."""
    if any(getattr(c, "is_prompt_learning", False) for c in getattr(model, "peft_config", {}).values()):
        yield "prompt tuning puts tokens of its own before each row"
    base = base_model(model)
    kind = type(base)
    if kind.__name__ not in _CAUSAL_LMS or not kind.__module__.startswith("transformers."):
        yield f"{kind.__name__} is not a causal language model of transformers, so padding might change its results"
    elif base.loss_function is not ForCausalLMLoss:
        yield "its loss function is not that of a causal language model, so padding might count"
    causal = [m.is_causal for m in base.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    if not causal or not all(causal) or getattr(base.config, "is_causal", True) is False:
        yield f"not every attention of {kind.__name__} says that it is causal"
    for module in base.modules():
        rope = getattr(module, "rope_type", "")
        for name in rope.values() if isinstance(rope, Mapping) else [rope]:
            if "dynamic" in str(name) or name == "longrope":
                yield f"rope_type: {name} depends on the length of the batch"


def _batch_obstacle(model: torch.nn.Module, batch: Mapping[str, Any], target: int) -> str | None:
    """Why this batch cannot be padded to ``target``, if so."""
    if getattr(base_model(model).config, "output_router_logits", False):
        return "output_router_logits: the router's loss counts padding"
    shape = batch["input_ids"].shape
    for name, value in batch.items():
        if value is None or value is False or name in _INDEPENDENT:
            continue
        if name not in _PADDING and name != "position_ids":
            return f"{name}: not known what padding it would take"
        if not isinstance(value, torch.Tensor) or value.shape[-1:] != shape[1:] or value.dim() != 2:
            return f"{name}: not of the shape of input_ids"
    positions = batch.get("position_ids")
    if positions is None:
        return None
    if is_packed(batch):
        return "position_ids: rows are packed, or do not count up"
    limit = _position_limit(model)
    if limit is not None and int(positions.max()) + target - shape[1] >= limit:
        return f"position_ids: padding would go beyond the model's {limit} positions"
    return None


def _padded(name: str, value: Any, extra: int) -> Any:
    if name == "position_ids" and value is not None:
        onwards = torch.arange(1, extra + 1, dtype=value.dtype, device=value.device)
        return torch.cat([value, value[:, -1:] + onwards], dim=1)
    return F.pad(value, (0, extra), value=_PADDING[name]) if name in _PADDING and value is not None else value
