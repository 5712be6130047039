"""Everything that a step loads from the host lies in page-locked memory, and follows what the user does to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gpu.models import SMALL, batch_for
from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import CaptureError
from disco_accel.step.run.session import find_state
from tests.gpu.test_steps import expect, lora, roomy, step, tight


class Scaled(nn.Module):
    """A trainable layer between frozen ones, with buffers, tied and shared, and tensors in attributes."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.trained = nn.Linear(8, 8)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.randn(8))
        self.last = scale[4:]
        self.table = torch.randn(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        scale = torch.linspace(0.5, 1.5, 8)
        self.layers = nn.ModuleList(Scaled(scale) for _ in range(2))
        self.frozen = self.layers[0].frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.trained(layer.frozen(x)) * layer.scale + layer.bias + layer.table.to(x)
            x = x + torch.cat([layer.last.to(x)] * 2) * torch.tensor([1.0, 2.0, 3.0, 4.0] * 2).to(x)
        return x.square().mean()


def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(eager: Any, planned: Any, x: torch.Tensor) -> None:
    for wanted, got in zip(run(eager, x), run(planned, x), strict=True):
        expect(wanted, got, "loss or gradient")


def pageable(model: Any) -> list[str]:
    """Inputs of the plan that runs whose host bytes a device cannot copy from at once."""
    state = find_state(model)
    assert state is not None and state.memory.current is not None
    clean = state.memory.current.clean
    assert clean
    names = {b.vertex: f"{b.source} {b.name}" for b in state.memory.current.captured.bindings}
    return [names[vertex] for vertex, tensor in clean.items() if tensor.numel() and not tensor.is_pinned()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_language_model_copies_from_page_locked_memory_alone(cuda: torch.device, dtype: torch.dtype) -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, cuda)
    model = tight(lora(cuda, dtype, "sdpa", True), batch, cuda)
    step(model, batch)
    assert not pageable(model)


def test_buffers_attributes_and_constants_are_page_locked_and_followed(cuda: torch.device) -> None:
    x = torch.randn(4, 8, device=cuda)
    eager, model = Model(), Model()
    prepare(model, roomy(cuda))
    eager.to(cuda)
    for layer in eager.layers:
        layer.scale = eager.layers[0].scale  # moving a module unties its buffers
        layer.last = layer.scale[4:]
    first, second = model.layers
    assert first.scale is second.scale and first.last.data_ptr() == first.scale.data_ptr() + 16
    for _ in range(2):
        check(eager, model, x)
    assert not pageable(model)
    made = stats(model)["steps_compiled"]

    def both(change: Any) -> None:
        """The same change to both models; the next steps see it."""
        for one in (eager, model):
            change(one)
        for _ in range(2):
            check(eager, model, x)

    def write(one: Model) -> None:
        one.layers[0].scale[5] += 1
        one.layers[0].bias.data[2] = 7
        one.layers[1].table.mul_(2)

    def replace(one: Model) -> None:
        old = one.layers[1].bias
        one.layers[1].bias = torch.full((8,), 0.25, device=old.device)

    def put(one: Model) -> None:
        one.layers[0].bias.data = torch.full((8,), 0.75, device=one.layers[0].bias.device)

    both(write)
    both(replace)
    both(put)
    assert not pageable(model) and stats(model)["steps_eager"] == 0
    assert stats(model)["steps_compiled"] > made
    restore(model)
    assert first.scale is second.scale and first.last.data_ptr() == first.scale.data_ptr() + 16
    assert not any(b.is_pinned() for b in model.buffers())
    for name, buffer in eager.named_buffers():
        assert torch.equal(buffer.cpu(), model.get_buffer(name)), name
    assert torch.equal(eager.layers[1].table.cpu(), second.table)


def test_buffers_of_a_model_on_the_device_return_there(cuda: torch.device) -> None:
    """Tied ones as one tensor, views of them as views, with the values that they have by then."""
    model = Model().to(cuda)
    first, second = model.layers
    scale = second.scale = first.scale
    first.last = second.last = scale[4:]
    x = torch.randn(4, 8, device=cuda)
    wanted = run(model, x)
    prepare(model, roomy(cuda))
    assert scale is first.scale and scale.device.type == "cpu"
    for one, other in zip(wanted, run(model, x), strict=True):
        expect(one, other, "loss or gradient")
    assert not pageable(model)
    first.scale[7] = 9.0
    restore(model)
    assert scale is first.scale is second.scale and scale.device == cuda
    assert float(first.last[3]) == 9.0 and first.last.data_ptr() == scale.data_ptr() + 16


def test_a_plain_tensor_on_the_device_is_refused_by_name(cuda: torch.device) -> None:
    """Nothing says when it is written to."""
    model = prepare(Model(), roomy(cuda))
    model.layers[1].table = model.layers[1].table.to(cuda)
    with pytest.raises(CaptureError, match=r"layers.1.table: is on cuda:0 .* make it a buffer"):
        model(torch.randn(4, 8, device=cuda))


_VALUES = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.where(x > 0, torch.tensor(0.0, device=x.device, dtype=x.dtype), x),
        lambda x: x * torch.tensor(_VALUES, device=x.device).mul_(2) + x.new_tensor(_VALUES),
        lambda x: x * torch.tensor(_VALUES).to(x.device) + torch.as_tensor(np.arange(4.0), device=x.device),
        lambda x: x + torch.zeros(4, device=x.device).fill_(3) * torch.full((4,), 0.5, device=x.device),
        lambda x: x[..., [0, 2]] * torch.tensor(2, device=x.device),
    ],
    ids=["where", "written", "moved", "filled", "index"],
)
def test_what_a_forward_makes_on_the_device_is_a_value_of_its_step(cuda: torch.device, make: Any) -> None:
    """Nobody else has it, so that nobody writes to it between steps; numbers that it is made of are followed."""

    class Maker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.factor = nn.Linear(4, 4), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (make(self.layer(x)) * torch.tensor(self.factor, device=x.device)).square().mean()

    x, eager, model = torch.randn(3, 4, device=cuda), Maker().to(cuda), prepare(Maker(), roomy(cuda))
    for factor in (1.0, 1.0, 2.0):
        eager.factor = model.factor = factor
        check(eager, model, x)
    assert stats(model)["steps_eager"] == 0


def test_eager_steps_use_them_too(cuda: torch.device) -> None:
    """What has no plan runs with buffers visiting the device."""
    x = torch.randn(4, 8, device=cuda)
    eager = Model().to(cuda)
    model = prepare(Model(), DiscoConfig(memory_budget=roomy(cuda).memory_budget, device="cuda"))
    with torch.no_grad():
        expect(eager(x), model(x), "an evaluation")
