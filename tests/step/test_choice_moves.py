"""Steps of each kind choose anew which values to compute again, whenever the budget moves: eager's bits in each."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.measure import record
from disco_accel.plan.plan_cache import PlanCacheUse
from disco_accel.step.compile.budget_parts import host_memory_parts
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.accumulating_step import AccumulatingStep
from disco_accel.step.update.updated_step import StepWithUpdate
from tests.step.moving_budgets import assert_same, plan_here, session_of, until

WIDTH, ROWS, LAYERS = 64, 512, 6
LARGE, SMALL = 16 << 20, 2 << 20
"""In the small one no plan keeps all that a backward reads, on a link that takes 13 ms for 128 KiB."""


class _Layers(torch.nn.Module):
    """Products with 16 KiB of weights, each before four activations of 128 KiB."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        kinds = (torch.nn.GELU, torch.nn.Tanh, torch.nn.SiLU, torch.nn.Sigmoid)
        layers = [[torch.nn.Linear(WIDTH, WIDTH), *(kind() for kind in kinds)] for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(*layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in self.layers:
            x = again(layer, x) if self.checkpointing else layer(x)
        return x.square().mean()


def _grads(model: torch.nn.Module, eager: torch.nn.Module, seed: int) -> None:
    """A backward of each, whose gradients are compared, added to those that are there."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    for each in (model, eager):
        each(x).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)


def _of_kind(model: torch.nn.Module, kind: type[CompiledStep], budget: int) -> CompiledStep:
    """The step of ``kind`` for ``budget``."""
    plans = session_of(model).memory.plans.values()
    return next(step for step in plans if isinstance(step, kind) and step.budget.total == budget and step.runs)


@pytest.fixture(autouse=True)
def _planned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_here(monkeypatch)
    # Of every kernel: no choice hangs by what else runs on this machine.
    monkeypatch.setattr(record, "rounded", lambda _: 1e-3)


def _prepared(budget: int, checkpointing: bool, **keys: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model whose weights are trained on the host, and an eager one."""
    usual = {"plan_cache": None, "quiet": True, "optimizer": "host", "link_bandwidth": "0.01GB/s", "device": "cpu"}
    config = DiscoConfig(memory_budget=budget, **(usual | keys))
    return prepare(_Layers(checkpointing), config), _Layers(checkpointing)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("budgets", [(LARGE, SMALL), (SMALL, LARGE)], ids=["smaller", "larger"])
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_what_fits_is_kept_whichever_budget_came_first(
    update: str, budgets: tuple[int, int], checkpointing: bool
) -> None:
    model, eager = _prepared(budgets[0], checkpointing, update=update)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (model, eager)]
    for number, budget in enumerate([budgets[0], budgets[0], *budgets, budgets[1]]):
        set_memory_budget(model, budget)
        for part in range(3):
            _grads(model, eager, 10 * number + part)
            until(lambda: session_of(model).budgets.plan_sets.maker.idle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    session_of(model).updates.settle()
    assert_same(model, eager)
    assert stats(model)["steps_eager"] == 0
    for kind in (AccumulatingStep, StepWithUpdate) if update == "deferred" else (AccumulatingStep,):
        large, small = (_of_kind(model, kind, budget).recomputation for budget in (LARGE, SMALL))
        assert large is not None and large.dropped == large.seconds > 0, kind
        assert small is not None and small.dropped < small.seconds, kind


def test_a_stored_plan_of_sums_has_its_choice(tmp_path: Path) -> None:
    """Not that of the plain step, which has more memory."""
    found = []
    for use in (PlanCacheUse.MISS, PlanCacheUse.HIT):
        model, eager = _prepared(SMALL, True, plan_cache=str(tmp_path))
        for seed in range(3):
            _grads(model, eager, seed)
        step = _of_kind(model, AccumulatingStep, SMALL)
        assert step.plan_cache is use and step.recomputation is not None
        assert 0 < step.recomputation.dropped < step.recomputation.seconds
        found.append(step)
    assert found[0].graph == found[1].graph and found[0].recomputation == found[1].recomputation


def test_a_stored_plan_that_takes_too_much_of_the_host_is_made_anew(tmp_path: Path) -> None:
    """Less is kept there then, and more computed again."""
    found: list[CompiledStep] = []
    for room in ("1GiB", None, "1GiB"):
        if room is None:
            parts = host_memory_parts(found[0].captured.graph, copies=found[0].captured.copies)
            room = sum(parts.values()) + found[0].plan.host.memory // 2
        model, eager = _prepared(SMALL, True, plan_cache=str(tmp_path), host_memory=room, link_bandwidth="10GB/s")
        _grads(model, eager, 0)
        found.append(_of_kind(model, CompiledStep, SMALL))
    large, small, again = found
    assert [step.plan_cache for step in found] == [PlanCacheUse.MISS] * 2 + [PlanCacheUse.HIT]
    assert 0 < small.plan.host.memory <= large.plan.host.memory // 2
    assert again.plan == small.plan


def test_fp32_masters_leave_less_of_the_host_to_kept_values() -> None:
    """A plan that takes what they need is not refused where one that computes more again has room."""

    def planned(room: int | str) -> CompiledStep:
        config = DiscoConfig(
            memory_budget=SMALL,
            plan_cache=None,
            quiet=True,
            optimizer="host",
            master_weights="fp32",
            link_bandwidth="10GB/s",
            device="cpu",
            host_memory=room,
        )
        model = prepare(_Layers(True).bfloat16(), config)
        x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
        model(x).backward()
        return _of_kind(model, CompiledStep, SMALL)

    first = planned("1GiB")
    rounded = first.settings.rounded
    parts = host_memory_parts(first.captured.graph, rounded=rounded, copies=first.captured.copies)
    assert parts["masters"] > 0 and first.plan.host.memory > parts["masters"]
    second = planned(sum(parts.values()) + first.plan.host.memory - 256)
    assert second.plan.host.memory < first.plan.host.memory
