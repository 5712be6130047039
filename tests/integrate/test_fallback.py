"""Steps that fall back to eager mode: what is said, and how soon a plan is made once one is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import CaptureError
from tests.support.models import random_batch, tiny_lora

EAGER = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None, on_unsupported="eager")
ERROR = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None)


class Normed(nn.Module):
    """Frozen layers with batch normalization, and a trainable head."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, **norm), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def steps(model: nn.Module, count: int = 1) -> tuple[int, int]:
    """Run some; those that were planned and those that fell back so far."""
    for _ in range(count):
        if isinstance(model, Normed):
            model(torch.ones(4, 8)).sum().backward()
        else:
            model(**random_batch()).loss.backward()
    seen = stats(model)
    return seen["steps_compiled"], seen["steps_eager"]


def keeping_copies(layer: Any, *args: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):
        return checkpoint(layer, *args, use_reentrant=False)


def of_their_own() -> Any:
    """A model whose checkpoint function cannot be captured."""
    model: Any = tiny_lora(layers=1, hidden=32)
    model.enable_input_require_grads()
    model.base_model.model._set_gradient_checkpointing(True, keeping_copies)
    return model


def test_batch_normalization_is_named_with_the_ways_out() -> None:
    """Of an error as of a warning: the module, what it does, what would work."""
    ways = r"module body\.1 changes .*batch normalization.*eval mode.*track_running_stats=False"
    with pytest.raises(CaptureError, match=ways):
        steps(prepare(Normed(), ERROR))
    model = prepare(Normed(), EAGER)
    assert steps(model, 2) == (0, 2)
    [reason] = stats(model)["fallbacks"]
    assert "module body.1" in reason and "track_running_stats=False" in reason


@pytest.mark.parametrize("way", ["eval", "no statistics"])
def test_each_way_out_of_batch_normalization_is_planned(way: str) -> None:
    model = prepare(Normed(track_running_stats=way == "eval"), ERROR)
    if way == "eval":
        model.get_submodule("body.1").eval()
    assert steps(model, 2) == (2, 0)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "mode of one module": (Normed, lambda m: m.body[1].eval()),
    "checkpointing": (of_their_own, lambda m: m.gradient_checkpointing_enable({"use_reentrant": False})),
    "no checkpointing": (of_their_own, lambda m: m.gradient_checkpointing_disable()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_what_models_go_through_the_next_step_is_planned(change: str) -> None:
    make, mend = CHANGES[change]
    model = prepare(make(), EAGER)
    assert steps(model, 3) == (0, 3)
    mend(model)
    assert steps(model) == (1, 3)


def test_disabled_adapters_fall_back_and_enabled_ones_do_not() -> None:
    """In turn: the one is never taken for the other."""
    model: Any = prepare(tiny_lora(layers=1, hidden=32), EAGER)
    for turn in range(1, 3):
        with model.disable_adapter():
            model(**random_batch())
            model(**random_batch())
        assert steps(model) == (turn, 2 * turn)


def test_a_module_replaced_ends_the_fallback_at_once() -> None:
    model: Any = prepare(Normed(), EAGER)
    assert steps(model, 2) == (0, 2)
    model.body[1] = nn.LayerNorm(16).requires_grad_(False)
    assert steps(model, 2) == (2, 2)


def test_a_refusal_is_never_taken_for_granted_where_it_is_an_error() -> None:
    model: Any = prepare(Normed(), ERROR)
    with pytest.raises(CaptureError):
        steps(model)
    model.body[1] = nn.LayerNorm(16).requires_grad_(False)
    assert steps(model) == (1, 0)
