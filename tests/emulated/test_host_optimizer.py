"""``optimizer: host`` on the emulated device: the bits of an eager model there with an optimizer on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.native.backend import workspace_bytes
from disco_accel.step.session import find_state
from disco_accel.testing.models import family_full, random_batch
from tests.emulated.models import CUDA, assert_same, step


def batch(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in random_batch(length=20, seed=seed).items()}


class OnCpu:
    """AdamW on the CPU over copies of the parameters of a model elsewhere."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.copies = [torch.nn.Parameter(p.detach().cpu()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-2, fused=True)

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
        memory_budget=2 * workspace_bytes(CUDA) + 5 * weights // 4,
        device="cuda",
        optimizer="host",
        on_unsupported="eager",
        dispatch="random",
    )
    prepare(model, config)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    model.to(CUDA)
    optimizer, reference = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), OnCpu(eager)
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
    for (name, mine), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad.is_cpu and torch.equal(mine.grad, other.grad.cpu()), name
    state = find_state(model)
    restore(model)
    assert state is not None and not any(state.placement.holds(p) for p in model.parameters())
