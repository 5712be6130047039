"""Planned steps with fused kernels on the emulated GPU: launched by the driver on the engine's stream, eager's bits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from tests.emulated.fused import fused_on_emulated_gpu
from tests.emulated.models import CUDA, assert_same, assert_steady, step

_BUDGET = "68MiB"
"""Twice the least arena; two workspaces of cuBLAS take most of it."""
PATIENCE = 600.0
"""Seconds for the compiler."""


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with fused_on_emulated_gpu():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_steps_have_eagers_bits(dtype: torch.dtype) -> None:
    """While kernels are compiled and with them; no order of streams reads a wrong byte."""
    base, _ = arena_llama(SMALL, dtype=dtype, attention="eager", source=CUDA)
    model = with_adapter(base.to(CUDA), rank=4, checkpointing=True).to(CUDA)
    batch = batch_for(SMALL["vocab_size"], 2, 16, CUDA)
    expected = step(model, batch)
    prepare(model, DiscoConfig(memory_budget=_BUDGET, device="cuda", plan_cache=None))
    assert_same(step(model, batch), expected)
    end, own = time.monotonic() + PATIENCE, torch.cuda.Stream()
    while not stats(model)["fused"]:
        assert time.monotonic() < end, "no fused plan came"
        # Kernels are measured at the beginning of a step, whatever stream it is on.
        with torch.cuda.stream(own):
            found = step(model, batch)
        torch.cuda.synchronize()
        assert_same(found, expected)
        time.sleep(0.1)
    assert_same(step(model, batch), expected)
    assert stats(model)["steps_eager"] == 0
    assert_steady(lambda: step(model, batch))
