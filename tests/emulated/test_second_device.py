"""Work on another device than the first, with several visible: nothing of it happens on the first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.native.backend import workspace_bytes
from tests.emulated.build import ROOT
from tests.emulated.models import assert_same, least, step

LAST = torch.device("cuda", max(torch.cuda.device_count(), 1) - 1)


@pytest.fixture(autouse=True)
def on_the_last() -> Any:
    assert torch.cuda.device_count() > 1, "run it with more than one device"
    with torch.cuda.device(LAST):
        yield


def llama(where: torch.device) -> Any:
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=where)
    return with_adapter(base, rank=4, checkpointing=True)


def train(where: torch.device, steps: int = 3) -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, where)
    eager = llama(where).to(where)
    planned = least(llama(where), lambda m: step(m, batch), where)
    for _ in range(steps):
        assert_same(step(planned, batch), step(eager, batch))
    assert stats(planned)["steps_eager"] == 0
    assert all(p.device == where for p in planned.parameters() if p.requires_grad)


def test_steps_on_the_last_device_are_eagers_there() -> None:
    train(LAST)


def test_the_engine_leaves_the_callers_device_current() -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, LAST)
    planned = least(llama(LAST), lambda m: step(m, batch), LAST)
    expected = step(planned, batch)
    with torch.cuda.device(0):
        got = step(planned, batch)
        assert torch.cuda.current_device() == 0
    assert_same(got, expected)


def test_a_plan_that_is_made_while_another_device_is_current() -> None:
    """Its streams, events and pages are those of the device that the model was prepared for."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, LAST)
    expected = step(llama(LAST).to(LAST), batch)
    budget = 2 * workspace_bytes(LAST) + (8 << 20)
    planned = prepare(llama(LAST), DiscoConfig(memory_budget=budget, device="cuda"))
    with torch.cuda.device(0):
        got = step(planned, batch)
        assert torch.cuda.current_device() == 0
    assert_same(got, expected)


@pytest.mark.parametrize("how", ["torch.cuda.set_device({0})\nif True:", "with torch.cuda.device({0}):"])
def test_the_first_device_gets_no_memory_and_no_context(how: str) -> None:
    """In a process of its own, whose first call is about the last device."""
    program = f"""
import torch
{how.format(LAST.index)}
    from tests.emulated import device, test_second_device as tests
    tests.train(tests.LAST)
torch.cuda.synchronize({LAST.index})
assert device.live_bytes({LAST.index}) > 0 and device.has_context({LAST.index})
assert device.live_bytes(0, peak=True) == 0, "memory on the first device"
assert not device.has_context(0), "a context on the first device"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_train_on_a_device_each(tmp_path: Path) -> None:
    """DDP over gloo, through accelerate's launcher."""
    from tests.emulated.test_processes import check_ddp

    check_ddp(tmp_path, devices=2)
