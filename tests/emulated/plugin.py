"""``pytest -p tests.emulated.plugin``: a test fails on any complaint, race or kernel that was not emulated."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disco_accel.measure import fused_kernels
from disco_accel.native import cuda_backend
from tests.emulated import device

_SHOWN = 20

# Copies of tests are smaller than a piece usually is.
cuda_backend.GPU_COPY_PIECE = int(os.environ.get("EMULATED_COPY_PIECE", cuda_backend.GPU_COPY_PIECE))
# Kernels take long here, and nothing runs code that is compiled for a GPU; tests/emulated/fused.py has C++ instead.
fused_kernels.WORTH_SECONDS = math.inf


@pytest.fixture(autouse=True)
def nothing_to_complain_about() -> Iterator[None]:
    """Whatever a test leaves running is waited for."""
    assert device.EMULATED, "start pytest with python -m tests.emulated.run"
    device.reset()
    yield
    device.release()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    found = device.complaints() + device.unemulated() + _of_children()
    assert not found, "\n".join(found[:_SHOWN])


def _of_children() -> list[str]:
    """What processes that the test started left behind."""
    reports = sorted(Path(os.environ["EMULATED_REPORTS"]).glob("*.txt"))
    texts = [path.read_text() for path in reports]
    for path in reports:
        path.unlink()
    return texts
