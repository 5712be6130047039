"""``optimizer: host`` on the emulated device: the bits of an eager model there with an optimizer on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, settle, stats
from disco_accel.capture.leaving_gradients import leaving_by
from disco_accel.native import cuda_backend
from disco_accel.native.arena import is_arena
from disco_accel.native.backend import workspace_bytes
from disco_accel.step.run.session import current_step, find_state
from disco_accel.step.update import update_choice
from tests.emulated import device
from tests.emulated.models import CUDA, assert_same, step
from tests.support.models import family_full, random_batch

pytestmark = pytest.mark.usefixtures("random_order")
RATE = 2.0**-7
"""The same number in float32, in which a GPU's kernel takes it."""


_ROUNDING = 8 << 10
"""Bytes by which blocks of the allocator are larger than tiny batches, outputs and adapters in them."""


def beside_graphs(nbytes: int) -> int:
    """The budget that has so many bytes beside the 64th part for launch graphs, and the rest of the allocator's
    blocks."""
    return (nbytes + _ROUNDING) * 64 // 63 + 64


def batch(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in random_batch(length=20, seed=seed).items()}


class OnCpu:
    """AdamW on the CPU over copies of the parameters of a model elsewhere."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.copies = [torch.nn.Parameter(p.detach().cpu()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.copies, lr=RATE, fused=True)

    def update(self) -> None:
        with torch.no_grad():
            for mine, parameter in zip(self.copies, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                mine.grad = parameter.grad.cpu()
            torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
            self.optimizer.step()
            for mine, parameter in zip(self.copies, self.model.parameters(), strict=True):
                parameter.copy_(mine)
                parameter.grad = None


def on_host(result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What eager mode gave, with gradients where the planned step has them."""
    return {name: t if name == "loss" else t.cpu() for name, t in result.items()}


@pytest.mark.parametrize(
    ("family", "dtype", "checkpointing"),
    [("llama", torch.bfloat16, True), ("gpt2", torch.float32, False)],
)
def test_steps_evaluation_and_fallbacks_are_eagers(family: str, dtype: torch.dtype, checkpointing: bool) -> None:
    """Three updates in little more memory than the weights, then a step without a plan: gradients are on the host."""
    model: Any = family_full(family, dtype=dtype, checkpointing=checkpointing)
    eager = copy.deepcopy(model).to(CUDA)
    weights = sum(p.nbytes for p in model.parameters())
    config = DiscoConfig(
        memory_budget=beside_graphs(2 * workspace_bytes(CUDA) + 5 * weights // 4),
        device="cuda",
        optimizer="host",
        on_unsupported="eager",
    )
    prepare(model, config)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    model.to(CUDA)
    optimizer, reference = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True), OnCpu(eager)
    for seed in range(3):
        assert_same(step(model, batch(seed)), on_host(step(eager, batch(seed))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        reference.update()
        with torch.no_grad():
            assert torch.equal(model(**batch(9)).logits, eager(**batch(9)).logits)
    for mine, parameter in zip(reference.copies, model.parameters(), strict=True):
        assert torch.equal(mine, parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], reference.optimizer.state[mine][key])
    found = stats(model)
    assert found["steps_eager"] == 0 and found["optimizer"] == "host" and found["reload_bytes"] > 0
    losses = [m(**batch(5), return_dict=False)[0] for m in (model, eager)]
    assert stats(model)["steps_eager"] == 1
    for of, loss in zip((model, eager), losses, strict=True):
        of.zero_grad()
        loss.backward()
    assert_same_gradients(model, eager)
    state = find_state(model)
    restore(model)
    assert state is not None and not any(state.placement.holds(p) for p in model.parameters())


def trained() -> tuple[Any, Any]:
    """(prepared, eager) on the device."""
    model: Any = family_full("llama", dtype=torch.float32)
    eager = copy.deepcopy(model).to(CUDA)
    weights = sum(p.nbytes for p in model.parameters())
    budget = beside_graphs(2 * workspace_bytes(CUDA) + 5 * weights // 4)
    config = DiscoConfig(memory_budget=budget, device="cuda", optimizer="host", plan_cache=None)
    return prepare(model, config), eager


def assert_same_gradients(model: Any, eager: Any) -> None:
    for (name, mine), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad.is_cpu and torch.equal(mine.grad, other.grad.cpu()), name


def test_gradients_have_page_locked_memory_of_their_own() -> None:
    """Accumulated, held and let go: right bits, and the same memory again; the step itself takes them there."""
    model, eager = trained()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    places = []
    for seed in range(5):
        for of in (model, eager):
            of.zero_grad()
            for part in range(1 + seed % 2):
                of(**batch(10 * seed + part)).loss.backward()
        assert_same_gradients(model, eager)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert mine.grad.is_pinned() and is_arena(mine.grad)
            if seed == 1:
                kept.append((mine.grad, other.grad.clone()))
        places.append([p.grad.data_ptr() for p in model.parameters()])
    assert all(torch.equal(mine, other.cpu()) for mine, other in kept)
    assert places[0] == places[1] and not set(places[1]) & set(places[2])
    figures = stats(model)
    assert figures["steps_eager"] == 0
    state = find_state(model)
    weights = sum(p.nbytes for p in model.parameters())
    assert state is not None and weights <= state.gradients.memory.nbytes <= 2.1 * weights
    assert len(_leaving_by_the_plan(model)) == len(list(model.parameters())), "all leave"
    assert sum(_leaving_by_the_plan(model)) == weights
    before = device.counts()
    model.zero_grad()
    model(**batch(90)).loss.backward()
    assert device.counts().get("copy d2h pageable", 0) == before.get("copy d2h pageable", 0)
    eager.zero_grad()
    eager(**batch(90)).loss.backward()
    restore(model)
    assert_same_gradients(model, eager)


class Twins(torch.nn.Module):
    """Two weights whose gradient is one tensor: it stays where it is, and is copied twice when the step has ended."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both = torch.nn.ParameterList(torch.randn(1 << 14) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.both[0] + self.both[1]) * x).sum()


def test_gradients_that_stay_are_copied_before_they_are_handed_out() -> None:
    """The processor adds the second one to the first at once."""
    model, eager = Twins(), Twins().to(CUDA)
    budget = 2 * workspace_bytes(CUDA) + (1 << 22)
    prepare(model, DiscoConfig(memory_budget=budget, device="cuda", optimizer="host", plan_cache=None))
    for seed in range(4):
        x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(seed)).to(CUDA)
        for of in (model, eager):
            of.zero_grad()
            for _ in range(2):
                of(x).backward()
        assert_same_gradients(model, eager)
    assert not _leaving_by_the_plan(model) and stats(model)["steps_eager"] == 0


def test_a_gradient_that_is_being_copied_is_not_overwritten() -> None:
    """To a device, on a busy stream of the user's."""
    model, eager = trained()
    name = "model.embed_tokens.weight"
    for of in (model, eager):
        of(**batch(0)).loss.backward()
    gradient = model.get_parameter(name).grad
    moved, busy = torch.zeros_like(gradient, device=CUDA), torch.zeros(1, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    model.zero_grad()
    loss = model(**batch(1)).loss
    with torch.cuda.stream(stream):
        for _ in range(100):
            busy.add_(1)
        moved.copy_(gradient, non_blocking=True)
    del gradient
    loss.backward()
    stream.synchronize()
    assert torch.equal(moved, eager.get_parameter(name).grad)


def _leaving_by_the_plan(model: Any) -> list[int]:
    """Bytes of each gradient that the plan takes to its place."""
    compiled = current_step(model)
    assert compiled is not None
    transfers = set(leaving_by(compiled.graph).values())
    return [v.sizes[0] for v in compiled.plan.vertices if v.id in transfers]


def test_memory_that_cannot_be_locked_is_told_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Enough is for the weights, and not for gradients."""
    monkeypatch.setattr(cuda_backend, "_refusals", [])
    model, eager = trained()
    losses = [of(**batch(1)).loss for of in (model, eager)]
    with device.pin_limit(1):
        for of, loss in zip((model, eager), losses, strict=True):
            loss.backward()
            of(**batch(2)).loss.backward()
    assert_same_gradients(model, eager)
    assert sum("page-locked" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32)])
def test_updates_run_beside_the_forward_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, update_on: str
) -> None:
    """Weights change on the processors and go to the device behind that, in little more memory than they take; or they
    change on the device, with moments that come and go. Its kernel is the processors' here."""
    monkeypatch.setattr(update_choice, "_PART_OF_ARENA", 1)
    model: Any = family_full(family, dtype=dtype)
    eager = copy.deepcopy(model).to(CUDA)
    weights = sum(p.nbytes for p in model.parameters())
    budget = beside_graphs(2 * workspace_bytes(CUDA) + 5 * weights // 4)
    keys = {"device": "cuda", "optimizer": "host", "update": "deferred", "plan_cache": None}
    prepare(model, DiscoConfig(memory_budget=budget, update_on=update_on, **keys))
    optimizer, reference = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True), OnCpu(eager)
    for seed in range(4):
        assert_same(step(model, batch(seed)), on_host(step(eager, batch(seed))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        reference.update()
    assert stats(model)["updates_planned"] == 2 and stats(model)["steps_eager"] == 0
    step_with_update: Any = current_step(model)
    assert len(step_with_update.updated.on_device) == (len(optimizer.state) if update_on == "device" else 0)
    moments = list(optimizer.state_dict()["state"].values())
    for mine, parameter, state in zip(reference.copies, model.parameters(), moments, strict=True):
        assert torch.equal(mine, parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], reference.optimizer.state[mine][key])


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_gradients_are_summed_on_the_device(update: str) -> None:
    """They come back over the link, and the sums leave for the same memory; norms of sums are made there as well."""
    model: Any = family_full("llama", dtype=torch.float32)
    eager = copy.deepcopy(model).to(CUDA)
    weights = sum(p.nbytes for p in model.parameters())
    budget = beside_graphs(2 * workspace_bytes(CUDA) + 3 * weights // 2)
    keys = {"optimizer": "host", "update": update, "plan_cache": None}
    prepare(model, DiscoConfig(memory_budget=budget, device="cuda", **keys))
    ours = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    theirs = OnCpu(eager)
    for seed in range(5):
        for of in (model, eager):
            for part in range(3):
                of(**batch(10 * seed + part)).loss.backward()
        assert_same_gradients(model, eager)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours.step()
        ours.zero_grad()
        theirs.update()
    settle(model)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, other.cpu())
    figures, state = stats(model), find_state(model)
    assert figures["steps_eager"] == 0 and figures["steps_accumulated"] == 10
    assert figures.get("norms_planned", 0) == (4 if update == "deferred" else 0)
    assert state is not None and state.gradients.memory.nbytes <= 1.1 * weights
