"""The self-check and ``verify_steps`` on the run's device: they pass where all is well, and find what is planted."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import SelfCheckFailed
from disco_accel.native.backend import workspace_bytes
from disco_accel.native.host_backend import HostBackend
from disco_accel.selfcheck import first_use
from disco_accel.selfcheck.orders import CASES
from disco_accel.selfcheck.outcome import identity_of, kept_outcome, key_of
from disco_accel.selfcheck.self_check import check
from disco_accel.selfcheck.subject import Subject, make_subject
from disco_accel.selfcheck.trial import Trial
from disco_accel.step.compile import device_check

LINK = 4 << 20


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has checked nothing yet, and that checks the host device as it would a GPU."""
    monkeypatch.setattr(first_use, "_answers", {})
    monkeypatch.setattr(HostBackend, "needs_self_check", True)
    monkeypatch.setattr(device_check, "LINK_BYTES", LINK)
    yield


def lora(device: torch.device, checkpointing: bool, dropout: float = 0.0) -> Any:
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=device)
    return with_adapter(base, rank=4, checkpointing=checkpointing, dropout=dropout)


def config(device: torch.device, folder: Path | None, **changes: Any) -> DiscoConfig:
    budget = (4 << 20) + 3 * workspace_bytes(device)
    cache = None if folder is None else str(folder)
    return DiscoConfig(**{"memory_budget": budget, "device": device.type, "plan_cache": cache} | changes)


def test_this_device_passes(device: torch.device) -> None:
    """Bits, order under delays, memory and link; the caller's generators stay where they are."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    outcome = check(device, link_bytes=LINK)
    assert outcome.passed, [str(difference) for difference in outcome.differences]
    assert outcome.figures["compared"] == "bits"
    assert outcome.figures["plan"]["offloads"] and outcome.figures["plan"]["reloads"]
    if device.type == "cuda":
        assert outcome.figures["orders"] == list(CASES)
        assert set(outcome.figures["link"]) == {"h2d", "d2h", "both"}
    after = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


def test_all_memory_of_the_check_goes_back(cuda: torch.device) -> None:
    check(cuda, link_bytes=LINK)
    # What tests before this one have left in circles of references goes now, not in the second check.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(cuda)
    check(cuda, link_bytes=LINK)
    assert torch.cuda.memory_reserved(cuda) == before


def test_what_says_who_this_device_is(cuda: torch.device) -> None:
    found = identity_of(cuda)
    assert {"device", "uuid", "capability", "driver", "cuda", "torch", "sources", "allocator"} <= found.keys()
    assert all(found.values()) and found["device"] == torch.cuda.get_device_name(cuda)


def test_the_first_plan_asks_and_a_fault_refuses(
    device: torch.device, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that arrives with one bit flipped: nothing is planned, the report says what came, a repair trains."""

    def corrupted(where: torch.device, **options: Any) -> Subject:
        subject = make_subject(where, **options)
        vertex, data = next((v, t) for v, t in subject.clean.items() if t.numel() >= 1 << 18)
        flipped = data.clone()
        flipped[-1] ^= 0x40
        return replace(subject, clean={**subject.clean, vertex: flipped})

    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    model = prepare(lora(device, True), config(device, tmp_path))
    with monkeypatch.context() as planted:
        planted.setattr(first_use, "make_subject", corrupted)
        with pytest.raises(SelfCheckFailed, match=r"steps as planned.*attach .* to a bug report") as raised:
            model(**batch)
    assert raised.value.report is not None
    assert json.loads(raised.value.report.read_text())["differences"][0]["apart"]
    monkeypatch.setattr(first_use, "_answers", {})
    model(**batch).loss.backward()
    assert stats(model)["steps_compiled"] == 1
    assert kept_outcome(str(tmp_path), key_of(identity_of(device)))


def test_results_that_are_read_too_early_are_found(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss's gradient is handed in before the caller's stream has made it, as without the wait in deliver."""
    real = Trial.end

    def early(self: Trial, tangent: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            real(self, torch.full_like(tangent, 2.0))

    monkeypatch.setattr(Trial, "end", early)
    outcome = check(cuda, link_bytes=LINK)
    assert not outcome.passed


@pytest.mark.parametrize("checkpointing", [True, False])
def test_verified_steps_agree_and_stay_within_the_budget(
    device: torch.device, checkpointing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With dropout; the unplanned steps save nothing on the device that the budget has no room for."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    plain = lora(device, checkpointing, dropout=0.1).to(device)
    model = prepare(lora(device, checkpointing, dropout=0.1), config(device, None, self_check="off", verify_steps=2))
    seen = []
    with caplog.at_level("INFO", "disco_accel"):
        for one in (plain, model):
            torch.manual_seed(3)
            one.zero_grad()
            for _ in range(3):
                loss = one(**batch).loss
                loss.backward()
            seen.append([loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert "verify_steps: the first planned 2 steps and the same without a plan agree bit for bit" in caplog.text
