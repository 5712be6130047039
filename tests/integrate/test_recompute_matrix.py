"""Recomputation as a choice of the plan in every family: eager's bits from the least budget to twice of all.

Each case trains with accumulation under five budgets. *All* is what a step takes with every weight on the device and
nothing computed twice: the peak of a plan whose budget has room for much more. The others are shares of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.budgets import Make, differing, least, planned, trained
from tests.support.models import TEN_FAMILIES, family_full, family_lora

Record = Callable[[str, object], None]
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {},
    "recomputed": {"checkpointing": True},
    "reentrant": {"checkpointing": True, "checkpoint_options": {"use_reentrant": True}},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    *itertools.product(TEN_FAMILIES, DTYPES, CHECKPOINTING, (0.1,)),
    *itertools.product(("llama", "gpt2", "qwen3_moe"), ("float32",), CHECKPOINTING, (0.0,)),
]
_SHARES = {"half": 0.5, "three fifths": 0.6, "all": 1.0, "twice": 2.0}
_MUCH = 1 << 26
_SLOW_LINK = 200 * 10**6
"""In bytes/s: it takes longer to copy a value of a layer than to compute it again."""


def depth(family: str) -> dict[str, int]:
    return {"n_layer" if family == "gpt2" else "num_hidden_layers": 2}


def lora(family: str, dtype: str, checkpointing: str, dropout: float) -> Make:
    kinds = {"dtype": DTYPES[dtype], "dropout": dropout, "lora_dropout": dropout, **CHECKPOINTING[checkpointing]}
    return functools.partial(family_lora, family, **kinds, **depth(family))


def full(family: str, checkpointing: str) -> torch.nn.Module:
    """All weights are trained, with dropout."""
    probability = "resid_pdrop" if family == "gpt2" else "attention_dropout"
    model: Any = family_full(family, **{probability: 0.1}, **depth(family))
    if checkpointing != "none":
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def compare(make: Make, by: type[torch.optim.Optimizer], record: Record, **keys: Any) -> dict[str, dict[str, Any]]:
    """Return the figures of each budget, all of which gave eager's bits. With twice of all, nothing ran twice."""
    want = trained(make(), by)
    everything = planned(make, _MUCH, **keys)[1]["peak_bytes"]
    budgets = {"least": least(make, **keys)} | {name: int(share * everything) for name, share in _SHARES.items()}
    assert budgets["least"] < budgets["half"]
    figures: dict[str, dict[str, Any]] = {}
    for name, budget in budgets.items():
        got, figures[name] = planned(make, budget, by, link_bandwidth=_SLOW_LINK, **keys)
        assert not differing(got, want), name
        assert not figures[name]["fallbacks"] and not figures[name]["steps_eager"], name
        record(name, figures[name]["recomputation"])
    again = figures["twice"]["recomputation"]
    assert again["dropped"] == again["seconds"] > 0 and not again["offloaded_bytes"]
    return figures


@pytest.mark.parametrize(("family", "dtype", "checkpointing", "dropout"), CASES)
def test_every_budget_of_every_family_has_eagers_bits(
    family: str, dtype: str, checkpointing: str, dropout: float, record_property: Record
) -> None:
    """With little memory layers are computed again, whether the script says so or not."""
    optimizer = torch.optim.AdamW if dtype == "float32" else torch.optim.SGD
    figures = compare(lora(family, dtype, checkpointing, dropout), optimizer, record_property)
    again = {name: each["recomputation"] for name, each in figures.items()}
    if checkpointing == "none":
        # What the script repeats by itself, such as a cast, is no layer.
        shares = [1 - (each["dropped"] + each["written"]) / each["seconds"] for each in again.values()]
        assert max(shares) > 0.001, "layers that are computed again"
    else:
        assert again["least"]["dropped"] < again["least"]["seconds"]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_every_budget_has_eagers_bits_where_plans_add_gradients(
    family: str, checkpointing: str, record_property: Record
) -> None:
    """The host has the optimizer of all weights. The second micro-batch runs from a plan of its own, which adds."""
    make = functools.partial(full, family, checkpointing)
    figures = compare(make, torch.optim.AdamW, record_property, optimizer="host")
    assert figures["twice"]["steps_accumulated"] == 2
    assert figures["least"]["recomputation"]["dropped"] < figures["least"]["recomputation"]["seconds"]
