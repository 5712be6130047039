"""These tests run on the device that ``GPU_TESTS_ON`` names (cpu to test the tests), by default on CUDA."""

from __future__ import annotations

import os

import pytest
import torch

EMULATED = "emulated"
"""Part of the name of a device that has no kernels of its own, in small letters."""
DEVICE = os.environ.get("GPU_TESTS_ON", "cuda" if torch.cuda.is_available() else "")


@pytest.fixture
def device() -> torch.device:
    """The device with its index, or a skip."""
    if not DEVICE:
        pytest.skip("no GPU: DEVICE=cpu make gpu runs these tests on the host device")
    from disco_accel.execute.cuda import run_device

    return run_device(DEVICE)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, if it is a GPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated device has no spinning kernel; products, one after another, keep its stream as busy."""
    if not torch.cuda.is_available() or EMULATED not in torch.cuda.get_device_name().lower():
        return
    operands: dict[int, torch.Tensor] = {}

    def busy(_: int) -> None:
        index = torch.cuda.current_device()
        operand = operands.setdefault(index, torch.ones(512, 512, device=f"cuda:{index}"))
        result = torch.empty_like(operand)
        for _ in range(30):
            torch.mm(operand, operand, out=result)

    monkeypatch.setattr(torch.cuda, "_sleep", busy)
