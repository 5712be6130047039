"""Forwards without gradients of a prepared model and of its eager twin, compared part by part, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, stats


def prepared(eager: torch.nn.Module, budget: int | str = "32MiB", **keys: Any) -> torch.nn.Module:
    """A prepared copy of ``eager``. ``keys``: of a config."""
    usual = {"device": "cpu", "planner": "build", "plan_cache": None, "buckets": "off"}
    return prepare(copy.deepcopy(eager), DiscoConfig(memory_budget=budget, **(usual | keys)))


def assert_equal(got: Any, want: Any, path: str = "result") -> None:
    """``got`` is of the classes of ``want``, has its parts, and its tensors have the same bits."""
    assert type(got) is type(want), path
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want), path
        assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad), path
        # A view of a larger tensor comes alone, dense.
        if want.untyped_storage().nbytes() == want.nbytes:
            assert got.stride() == want.stride(), path
        assert got.is_inference() == want.is_inference(), path
    elif hasattr(want, "layers"):
        assert_equal(got.get_seq_length(), want.get_seq_length(), path)
        for index, (ours, theirs) in enumerate(zip(got.layers, want.layers, strict=True)):
            assert type(ours) is type(theirs)
            assert_equal(ours.get_seq_length(), theirs.get_seq_length(), path)
            assert torch.equal(ours.keys, theirs.keys), f"{path}.{index}.keys"
            assert torch.equal(ours.values, theirs.values), f"{path}.{index}.values"
    elif hasattr(want, "self_attention_cache"):
        assert_equal(got.self_attention_cache, want.self_attention_cache, path)
        assert_equal(got.cross_attention_cache, want.cross_attention_cache, path)
    elif isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            assert_equal(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), path
        for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            assert_equal(ours, theirs, f"{path}.{index}")
    else:
        assert got == want, path


def compare(planned: torch.nn.Module, eager: torch.nn.Module, *args: Any, **batch: Any) -> Any:
    """Both forwards on the same arguments, equal; the planned one's result."""
    with torch.no_grad():
        got, want = planned(*args, **batch), eager(*args, **batch)
    assert_equal(got, want)
    return got


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """(planned, unplanned) forwards without gradients so far."""
    seen = stats(model)
    return seen["forwards_planned"], seen["forwards_unplanned"]


class Plain(torch.nn.Module):
    """A frozen product, a trained scale, and ``result``: module, batch and their value → what the forward returns."""

    def __init__(self, result: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.rand(8))
        self.linear = torch.nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("table", torch.rand(8))
        self.plain = torch.rand(8)
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(self, x, self.linear(x) * self.scale)


def rows(seed: int = 0, count: int = 4) -> torch.Tensor:
    return torch.rand(count, 8, generator=torch.Generator().manual_seed(seed))
