"""What would work for models whose forward cannot be captured, where more can be said than what failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from disco_accel.errors import CaptureError

_EAGER = "set on_unsupported: eager to train it without a plan"


def advised(model: torch.nn.Module, error: CaptureError) -> CaptureError:
    """``error`` with the way out for this kind of model, if there is a known one."""
    text = str(error)
    for applies, remedy in _REMEDIES:
        if applies(text, model):
            return CaptureError(f"{text}: {remedy}")
    return error


def _in_text(pattern: str) -> Callable[[str, torch.nn.Module], bool]:
    return lambda text, _: re.search(pattern, text) is not None


def _configs(model: torch.nn.Module) -> Iterator[Any]:
    return (c for m in model.modules() if (c := getattr(m, "config", None)) is not None)


def _sees_images(text: str, model: torch.nn.Module) -> bool:
    by_value = "depends on the data" in text or "masked_scatter" in text
    return by_value and any(getattr(c, "vision_config", None) is not None for c in _configs(model))


_REMEDIES: list[tuple[Callable[[str, torch.nn.Module], bool], str]] = [
    (
        _in_text(r"\(modeling_deberta.*label_index"),
        "the loss picks rows by the labels' values; set model.config.problem_type to 'single_label_classification' "
        "(or 'regression') before prepare()",
    ),
    (
        _in_text(r"\(modeling_.*labels\.max\(\)"),
        "the model looks at the labels before its CTC loss; leave labels out and compute the loss from logits with "
        f"torch.nn.functional.ctc_loss, or {_EAGER}",
    ),
    (
        _in_text(r"flex_attention|BlockMask|create_block_mask"),
        'flex attention builds its mask from values; load the model with attn_implementation="sdpa"',
    ),
    (
        _in_text(r"lazily conjugated|complex"),
        f"plans hold no complex numbers, by which this model's rotary embedding turns (as Llama 4's does); {_EAGER}",
    ),
    (
        _sees_images,
        "where images stand among the tokens, and of which size, is read from the batch's values, which no plan can "
        f"know; {_EAGER}, or train on batches of text alone, without pixel_values",
    ),
]
