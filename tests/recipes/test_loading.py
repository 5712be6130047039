"""A loaded model has aligned weights of its own, an adapter in the asked dtype, and checkpointing as asked."""

from __future__ import annotations

import pytest
import torch

from recipes.loading import load_model
from recipes.settings import parse_recipe


@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
def test_the_base_keeps_the_checkpoints_dtype_and_the_adapter_gets_its_own(values, adapter_dtype):
    model = load_model(parse_recipe({**values, "adapter_dtype": adapter_dtype}))
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {str(p.dtype) for p in model.parameters() if p.requires_grad} == {f"torch.{adapter_dtype}"}


def test_every_weight_is_aligned_wherever_the_file_has_it(values):
    assert all(p.data_ptr() % 64 == 0 for p in load_model(parse_recipe(values)).parameters())


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_is_as_the_recipe_says(values, on):
    model = load_model(parse_recipe({**values, "gradient_checkpointing": on}))
    layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    assert layers
    assert any(layer.gradient_checkpointing for layer in layers) is on


def test_all_linear_reaches_every_projection_but_the_head(values):
    names = {n.split(".")[-4] for n, p in load_model(parse_recipe(values)).named_parameters() if p.requires_grad}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
