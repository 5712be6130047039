"""Recomputation as a choice of the plan: eager's bits with a script's checkpointing or without, in every budget."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import copies_bytes
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.step.run.session import current_step
from tests.support.models import family_lora, random_batch

_STEPS = 2


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Losses and gradients of some steps, each with its own numbers for dropout."""
    torch.manual_seed(7)
    model.train()
    got: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        loss = model(**random_batch(batch=2, length=24, seed=step)).loss
        loss.backward()
        got[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                got[f"{step} {name}"] = parameter.grad.clone()
        model.zero_grad()
    return got


def prepared(budget: int, recompute: str, **kinds: Any) -> torch.nn.Module:
    config = DiscoConfig(memory_budget=budget, recompute=recompute, device="cpu", plan_cache=None, buckets="off")
    return prepare(family_lora("llama", **kinds), config)


def planned(budget: int, recompute: str, **kinds: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = prepared(budget, recompute, **kinds)
    return trained(model), stats(model)


def least(recompute: str, **kinds: Any) -> int:
    with pytest.raises(BudgetTooSmall) as error:
        planned(4096, recompute, **kinds)
    return error.value.needed


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
def test_every_budget_has_eagers_bits(checkpointing: bool) -> None:
    """From the least to all; with dropout in adapters and attention. With all, nothing is computed twice."""
    torch.set_num_threads(1)
    kinds: dict[str, Any] = {"checkpointing": checkpointing, "dropout": 0.1, "lora_dropout": 0.1}
    want = trained(family_lora("llama", **kinds))
    smallest = least("auto", **kinds)
    for budget in (smallest, 2 * smallest, 20 * smallest):
        got, figures = planned(budget, "auto", **kinds)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want), budget
        assert not figures["fallbacks"]
    assert figures["recomputation"]["dropped"] == figures["recomputation"]["seconds"] > 0


def test_seconds_of_kernels_are_those_of_the_kernels_that_run() -> None:
    """Copies may have the numbers of kernels that the plan leaves out."""
    model = prepared(3 * least("auto"), "auto")
    trained(model)
    step = current_step(model)
    assert step is not None and any(v.id in step.records for v in step.plan.vertices if copies_bytes(v))
    kernels = [vertex.id for vertex in step.plan.vertices if vertex.kind is VertexKind.KERNEL]
    assert step.compute_seconds == pytest.approx(sum(step.records[kernel].seconds for kernel in kernels))


def test_as_written_computes_twice_what_the_script_does() -> None:
    budget = 20 * least("auto", checkpointing=True)
    (_, auto), (_, written) = (planned(budget, way, checkpointing=True) for way in ("auto", "as-written"))
    assert written["recomputation"]["dropped"] == 0 < auto["recomputation"]["dropped"]
    assert written["kernels"] > 1.2 * auto["kernels"]


@torch.library.custom_op("disco_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """An op of the user's own, of which nobody knows that it makes the same of the same."""
    return x * 1.5


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda context, gradient: gradient * 1.5)


class _Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(
                lambda value, own=layer: noisy(own(value)).sin().cos(), x, use_reentrant=False, preserve_rng_state=False
            )
        return x.sum()


def test_ops_of_others_run_as_often_as_the_script_says() -> None:
    model = _Noisy()
    want = model(torch.ones(4, 16))
    prepare(model, DiscoConfig(memory_budget="4MiB", device="cpu", plan_cache=None))
    got = model(torch.ones(4, 16))
    got.backward()
    step = current_step(model)
    assert step is not None and torch.equal(got, want)
    names = Counter(call.name for call in step.graph.ops.values())
    assert names["disco_tests::noisy"] == 4
