"""These tests run on the device that ``GPU_TESTS_ON`` names (cpu to test the tests), by default on CUDA."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda" if torch.cuda.is_available() else "")


@pytest.fixture
def device() -> torch.device:
    """The device with its index, or a skip."""
    if not DEVICE:
        pytest.skip("no GPU: DEVICE=cpu make gpu runs these tests on the host device")
    from disco_accel.native.backend import run_device

    return run_device(DEVICE)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, if it is a GPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device
