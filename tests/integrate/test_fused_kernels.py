"""Training with fused kernels: eager's bits in every step, while they are compiled and when they are used."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from benchmarks.common.any_plan import wait_for_plans
from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.fuse import kernels
from disco_accel.measure import fused_kernels
from disco_accel.step.compile import pipeline

PATIENCE = 1500.0
"""Seconds for the compiler on a machine that does other things."""


class Gated(torch.nn.Module):
    """Two frozen gated products and a trained scale; a layer's pointwise ops are one run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.rand(64, dtype=torch.bfloat16))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 128, dtype=torch.bfloat16) for _ in range(2))
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            gate, up = layer(x * self.scale).chunk(2, -1)
            x = x + 0.5 * (gate.tanh() * up).float().to(torch.bfloat16)
        return x.float().square().mean()


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler_of_our_priority: None) -> None:
    """Steps as small as these are left alone otherwise; nothing was compiled before."""
    monkeypatch.setattr(fused_kernels, "WORTH_SECONDS", 0.0)
    fused_kernels.fusing_on.cache_clear()
    monkeypatch.setattr(kernels, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_known", {})


def step(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, 16 * 64, dtype=torch.bfloat16).reshape(16, 64))
    loss.backward()
    return {
        "loss": loss.detach().clone(),
        **{n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad},
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def next_process() -> torch.nn.Module:
    """The model as another process prepares it, which knows the kernels that are on disk."""
    fused_kernels.fusing_on.cache_clear()
    kernels._known.clear()
    model = Gated()
    prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, compute_threads=1))
    return model


def test_steps_have_eagers_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the memory of all, and in less, with the kernels of this process and with those that are on disk. The next
    process has them in its first step, or else soon, for no step waits for a long search."""
    model = Gated()
    expected = step(model)
    prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, compute_threads=1))
    assert same(step(model), expected)
    before, end = stats(model)["kernels"], time.monotonic() + PATIENCE
    while not stats(model)["fused"]:
        assert time.monotonic() < end, "no fused plan came"
        assert same(step(model), expected)
        time.sleep(0.5)
    found = stats(model)
    assert found["kernels"] < before
    assert same(step(model), expected)
    assert len(list(tmp_path.glob("fused-*"))) > 0
    set_memory_budget(model, "60KiB")
    assert same(step(model), expected)
    assert stats(model)["steps_eager"] == 0
    again = next_process()
    assert same(step(again), expected)
    assert stats(again)["fused"] == found["fused"]
    monkeypatch.setattr(pipeline, "plan_soon", lambda *_: (None, False))
    again = next_process()
    assert same(step(again), expected)
    assert stats(again)["fused"] == 0
    assert same(step(again), expected)
    wait_for_plans(again)
    assert same(step(again), expected)
    assert stats(again)["fused"] == found["fused"]


def test_a_machine_without_a_compiler_trains_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, once."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    model = Gated()
    expected = step(model)
    with caplog.at_level(logging.WARNING, "disco_accel"):
        prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, compute_threads=1))
        end = time.monotonic() + PATIENCE
        while "without fused kernels" not in caplog.text:
            assert time.monotonic() < end
            assert same(step(model), expected)
    assert same(step(model), expected)
    assert stats(model)["fused"] == 0
    assert caplog.text.count("without fused kernels") == 1


def test_fuse_off_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started."""
    monkeypatch.setattr(fused_kernels.Fusing, "begin", lambda *_: pytest.fail("compiles"))
    model = Gated()
    prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, fuse="off"))
    step(model)
    assert stats(model)["fused"] == 0
