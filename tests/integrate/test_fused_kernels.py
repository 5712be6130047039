"""Training with fused kernels: eager's bits in every step, while they are compiled and when they are used."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.fuse import kernels
from disco_accel.measure import fused_kernels
from tests.support.models import random_batch, tiny_lora

PATIENCE = 300.0
"""Seconds for the compiler on a machine that does other things."""


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps as small as these are left alone otherwise; nothing was compiled before."""
    monkeypatch.setattr(fused_kernels, "WORTH_SECONDS", 0.0)
    fused_kernels.fusing_on.cache_clear()
    monkeypatch.setattr(kernels, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_known", {})


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().clone(), **gradients}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def until_fused(model: torch.nn.Module, batch: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    end = time.monotonic() + PATIENCE
    while not stats(model)["fused"]:
        assert time.monotonic() < end, "no fused plan came"
        assert same(step(model, batch), expected)
        time.sleep(0.2)


def test_steps_have_eagers_bits(tmp_path: Path) -> None:
    """In the memory of all, and in less. In fp32 some ops round otherwise when compiled: runs are made without them."""
    batch = random_batch()
    model = tiny_lora(checkpointing=True, layers=1)
    expected = step(model, batch)
    prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, compute_threads=1))
    assert same(step(model, batch), expected)
    before = stats(model)["kernels"]
    until_fused(model, batch, expected)
    found = stats(model)
    assert found["kernels"] + 40 < before
    assert found["fused"] > 10
    assert same(step(model, batch), expected)
    assert len(list(tmp_path.glob("fused-*"))) > 0
    set_memory_budget(model, "600KiB")
    assert same(step(model, batch), expected)
    assert stats(model)["steps_eager"] == 0


def test_a_machine_without_a_compiler_trains_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, once."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    batch, model = random_batch(batch=1, length=12), tiny_lora(layers=1, hidden=32)
    expected = step(model, batch)
    with caplog.at_level(logging.WARNING, "disco_accel"):
        prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, compute_threads=1))
        end = time.monotonic() + PATIENCE
        while "without fused kernels" not in caplog.text:
            assert time.monotonic() < end
            assert same(step(model, batch), expected)
    assert same(step(model, batch), expected)
    assert stats(model)["fused"] == 0
    assert caplog.text.count("without fused kernels") == 1


def test_fuse_off_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a step whose runs take too little time."""
    monkeypatch.setattr(fused_kernels.Fusing, "begin", lambda *_: pytest.fail("compiles"))
    batch, model = random_batch(), tiny_lora()
    prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None, fuse="off"))
    step(model, batch)
    assert stats(model)["fused"] == 0
