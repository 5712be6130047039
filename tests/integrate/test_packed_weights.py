"""4-bit weights by hand, dequantised in forward, recomputation and backward: planned steps have eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.step import capture_step
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.dequantise_again import dequantise_again
from disco_accel.graph.recompute_again import recompute_again
from disco_accel.graph.value_numbering import clones, without
from tests.support.packed_linear import PackedLayers

STEPS = 5


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(number)).bfloat16()


def trained(model: torch.nn.Module) -> list[torch.Tensor]:
    """Losses, gradients and parameters of some steps."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05)
    seen: list[torch.Tensor] = []
    for number in range(STEPS):
        loss = model(batch(number))
        loss.backward()
        gradients = [p.grad.clone() for p in trainable if p.grad is not None]
        seen += [loss.detach(), *gradients]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in trainable)]


def planned(budget: int, **kinds: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = prepare(PackedLayers(**kinds), DiscoConfig(memory_budget=budget, device="cpu", plan_cache=None))
    return trained(model), stats(model)


@pytest.mark.parametrize(("checkpointed", "saves"), [(False, False), (True, False), (False, True)])
def test_planned_steps_have_eagers_bits_from_the_least_budget_to_all(checkpointed: bool, saves: bool) -> None:
    """In memory for all each weight is dequantised once, and nothing is computed that nobody reads; in the least memory
    also a weight is dequantised again that autograd has saved, and activations are computed again."""
    kinds = {"checkpointed": checkpointed, "saves": saves}
    want = trained(PackedLayers(**kinds))
    with pytest.raises(BudgetTooSmall) as error:
        planned(1, **kinds)
    model = PackedLayers(**kinds)
    captured = capture_step(model, {"x": batch(0)}, forward=model.forward).graph
    graph = dequantise_again(captured)
    assert saves == (len(graph.ops) > len(captured.ops))
    most = len(dequantise_again(recompute_again(graph)).ops)
    found = clones(graph)
    values = sum(sum(v.sizes) for v in graph.vertices)
    for budget in (error.value.needed, values // 2, 2 * values):
        got, numbers = planned(budget, **kinds)
        assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert numbers["steps_compiled"] == STEPS and not numbers["fallbacks"]
        assert numbers["kernels"] <= most
    figures = numbers["recomputation"]
    assert figures["kernels"] >= len(found) >= 7
    assert figures["dropped"] == figures["seconds"]
    assert numbers["kernels"] == len(without(graph, found).ops) < 0.8 * len(graph.ops)
    weights = 4 * 2 * 128 * 512 * 2
    assert 0.8 * weights <= figures["kept_bytes"] and figures["offloaded_bytes"] == 0
