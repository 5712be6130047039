"""A ``GradScaler`` of the run's device beside gradients and an optimizer in host memory, which wait for its copies."""

from __future__ import annotations

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.native.backend import workspace_bytes

WIDTH, STEPS = 32, 8
SCALE = {"init_scale": 2.0**120, "growth_interval": 2, "backoff_factor": 2.0**-50}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def batch(device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def update(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, clip: bool) -> float:
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("when", ["step", "deferred"])
def test_infinite_gradients_skip_the_update(device: torch.device, when: str, clip: bool, fused: bool) -> None:
    """fp16 under autocast: scales and weights are those of eager mode beside an optimizer and a scaler on the CPU."""
    model, eager, copies = Net(), Net().to(device), Net()
    budget = 2 * workspace_bytes(device) + (1 << 22)
    keys = {"optimizer": "host", "update": when, "plan_cache": None}
    prepare(model, DiscoConfig(memory_budget=budget, device=device.type, **keys))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=2.0**-7, fused=fused) for m in (model, copies))
    scaler, on_cpu = torch.amp.GradScaler(device.type, **SCALE), torch.amp.GradScaler("cpu", **SCALE)
    scales = []
    for seed in range(STEPS):
        x = batch(device, seed)
        with torch.autocast(device.type, torch.float16):
            loss, expected = model(x), eager(x)
        scaler.scale(loss).backward()
        (expected * on_cpu.scale(torch.ones(())).to(device)).backward()
        for copied, other in zip(copies.parameters(), eager.parameters(), strict=True):
            assert other.grad is not None
            copied.grad, other.grad = other.grad.cpu(), None
        scales.append(update(scaler, ours, clip))
        assert scales[-1] == update(on_cpu, theirs, clip)
        eager.load_state_dict(copies.state_dict())
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in copies.state_dict().items()), seed
    assert scales[0] < SCALE["init_scale"] and max(scales) > min(scales), "some are skipped, and some are not"
    assert stats(model)["steps_eager"] == 0
