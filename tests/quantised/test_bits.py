"""Steps on quantised weights have the bits of the library's own eager step, at the least budget, half and all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.quantised.children import lines_of

SAMPLE = (
    ("bitsandbytes NF4, double", "llama", True),
    ("bitsandbytes int8", "llama", False),
    ("bitsandbytes NF4 experts", "qwen3_moe", True),
    ("torchao int8", "qwen3", True),
    ("hqq 4 bits", "phi3", True),
    ("quanto int4", "llama", False),
)
"""Form, family, activation checkpointing, for a process each. ``make quantised`` runs all of them with each other."""


@pytest.mark.parametrize(("form", "family", "checkpointing"), SAMPLE)
def test_quantised_steps_have_the_bits_of_eager_at_three_budgets(form: str, family: str, checkpointing: bool) -> None:
    """Losses, gradients, weights and the generator after accumulation, dropout and AdamW, in random order of dispatch.

    Reloads move packed bytes, and nothing is allocated outside the plan.
    """
    case = {"form": form, "family": family, "checkpointing": checkpointing, "layers": 1}
    (result,) = lines_of("steps.py", json.dumps([case]))
    assert result["form"] == form
    check(result)


def check(result: dict[str, Any]) -> None:
    """``result``: a line of ``steps.py``."""
    assert "error" not in result, result["error"]
    budgets = result["budgets"]
    assert budgets.keys() == {"least", "half", "all"}
    for budget in budgets.values():
        assert budget["equal"] and budget["packed_reloads"], result
        assert budget["planned"] > 0 and budget["eager"] == 0 and budget["allocations"] == 0
    assert budgets["all"]["reloaded"] == 0 < budgets["least"]["reloaded"]
    assert any(name.endswith((".absmax", "scale", "SCB", "._scale")) for name in result["parts"]), result["parts"]
