"""Host memory that the system locks in pieces, or in part: the bits of eager mode, and one line about it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.native import cuda_backend, host_memory
from disco_accel.observe import doctor
from disco_accel.observe.doctor_words import checks_of
from disco_accel.selfcheck.first_use import kept_answers
from disco_accel.step.run.session import find_state
from tests.emulated import device
from tests.emulated.models import CUDA, assert_same, least, step

KIB = 1 << 10
PIECE = 128 * KIB
"""Of the largest weight."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_memory, "_MOST_LOCKED_AT_ONCE", PIECE)
    monkeypatch.setattr(cuda_backend, "_refusals", [])
    yield


def batch() -> dict[str, torch.Tensor]:
    return batch_for(SMALL["vocab_size"], 2, 16, CUDA)


def lora() -> Any:
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=CUDA)
    for parameter in base.parameters():
        # Out of the arena that the model came in, so that ``prepare`` makes one.
        parameter.data = parameter.data.clone()
    model = with_adapter(base, rank=4, checkpointing=True)
    gc.collect()
    return model


def eagers(model: Any) -> dict[str, torch.Tensor]:
    result = step(copy.deepcopy(model).to(CUDA), batch())
    # What it had page-locked counts no more.
    gc.collect()
    return result


def locked_frozen(model: Any) -> tuple[int, int]:
    """How many frozen weights are page-locked, of how many."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(p.is_pinned() for p in frozen), len(frozen)


def test_what_is_refused_at_once_is_locked_in_pieces() -> None:
    model = lora()
    expected = eagers(model)
    with device.pin_limit(PIECE + 8 * KIB):
        model = least(model, lambda m: step(m, batch()))
        assert_same(step(model, batch()), expected)
    locked, count = locked_frozen(model)
    assert locked == count > 4


@pytest.mark.parametrize("more", [1, 3 * PIECE], ids=["nothing", "a part"])
def test_a_rest_that_cannot_be_locked_runs_all_the_same(more: int, caplog: pytest.LogCaptureFixture) -> None:
    """Of weights, of offloaded values, and in steps that run without a plan."""
    model = lora()
    expected = eagers(model)
    with device.pin_limit(more=more):
        model = least(model, lambda m: step(m, batch()))
        for _ in range(2):
            assert_same(step(model, batch()), expected)
        state = find_state(model)
        assert state is not None and stats(model)["reload_bytes"] > 0
        with torch.no_grad():
            there = model(**batch()).loss
    assert torch.equal(there, expected["loss"])
    locked, count = locked_frozen(model)
    assert locked < count
    (told,) = [r.message for r in caplog.records if "page-locked" in r.message]
    assert "of host memory are locked, and no more can be" in told and "ulimit -l" in told
    assert (": 0B of " in told) == (more == 1)
    restore(model)
    assert not any(p.is_pinned() for p in model.parameters())


def test_doctor_tells_of_the_gpu_and_of_the_largest_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries pieces from 4 GiB down, and has given all of them back."""
    monkeypatch.setattr(doctor, "_COPY_BYTES", 1 << 20)
    with device.pin_limit(5 << 20):
        report = doctor.report({"self_checks": kept_answers})
    checks = {check["check"]: check for check in checks_of(report)}
    assert checks["GPU 0"]["status"] == "ok" and "Emulated" in checks["GPU 0"]["found"]
    assert {"GPU 0 self-check", "CUDA headers", "link"} <= checks.keys()
    assert checks["locked memory"]["status"] == "problem" and "one call locks 4MiB" in checks["locked memory"]["found"]
    assert report["host"]["largest_lock"]["bytes"] == 4 << 20


def test_gradients_and_trained_weights_that_cannot_be_locked(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    eager = copy.deepcopy(model).to(CUDA)
    x = torch.ones(4, 64, device=CUDA)
    with device.pin_limit(more=PIECE):
        prepare(model, DiscoConfig(memory_budget="128MiB", device="cuda", optimizer="host"))
        for one in (model, eager):
            one(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad.cpu(), theirs.grad.cpu())
    assert sum("page-locked" in r.message for r in caplog.records) == 1
