"""Whether a batch of a causal language model may be shared out by rows, and how its loss is the sum of its parts'."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run.arguments import base_model

_BY_ROWS = frozenset(
    ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "shift_labels")
)
_ITEMS = "num_items_in_batch"
_IGNORED = -100


def in_parts(model: torch.nn.Module, fitted: FittedBatch, count: int) -> FittedBatch | str:
    """``fitted`` in ``count`` parts of equally many rows, or why not, in words that end a sentence.

    The loss of a causal language model is a mean over tokens. With ``num_items_in_batch`` each part's is a sum divided
    by the items of the whole batch, so that parts with more padding than others count for less, as they should.
    """
    batch = fitted.batch
    rows = {value.shape[0] for name, value in batch.items() if name in _BY_ROWS and _is_table(value)}
    many = max(rows, default=0)
    if many % count or not many:
        return f"its {many} rows are not a multiple of {count}"
    base = base_model(model)
    if base.loss_function is not ForCausalLMLoss or not _takes_items(base):
        return f"{type(base).__name__} has a loss of its own, which may not be the sum of its parts'"
    if getattr(base.config, "output_router_logits", False) or batch.get("output_router_logits"):
        return "output_router_logits adds a loss that counts tokens of the whole batch"
    divided = set()
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            if isinstance(value, Mapping | list | tuple):
                return f"{name} is a {type(value).__name__}"
        elif name in _BY_ROWS and value.dim() and value.shape[0] == many:
            divided.add(name)
        elif value.dim() and not (name in _BY_ROWS and value.shape[0] == 1):
            return f"it is not known whether the first dimension of {name} counts rows"
    if batch.get(_ITEMS) is None:
        if batch.get("labels") is None and batch.get("shift_labels") is None:
            return "it has no labels"
        batch = {**batch, _ITEMS: _items(batch)}
    return replace(fitted, batch=batch, parts=count, divided=frozenset(divided))


def _is_table(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _takes_items(model: torch.nn.Module) -> bool:
    """As a Trainer tells whether a model's forward hands ``num_items_in_batch`` on to its loss."""
    if getattr(model, "accepts_loss_kwargs", None) is not None:
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _items(batch: Mapping[str, Any]) -> torch.Tensor:
    """How many labels count, those of the first position of each row aside, which no token predicts."""
    shifted = batch.get("shift_labels")
    labels: torch.Tensor = batch["labels"][..., 1:] if shifted is None else shifted
    return (labels != _IGNORED).sum()
