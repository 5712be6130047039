"""What cannot be captured says so: the op, the module, and what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from disco_accel.capture.step import capture_step
from disco_accel.errors import CaptureError
from disco_accel.step.compile.refusals import advised
from tests.capture.steps import assert_same_bits, capture, run_captured
from tests.support.models import random_batch, tiny_lora


class Branch(nn.Module):
    """Does ``rule`` to its input."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(x)


class Toy(nn.Module):
    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.picky = Branch(rule)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.picky(self.first(x)).sum()}


@pytest.mark.parametrize(
    ("rule", "op"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense|is_nonzero"),
        (lambda x: x[x > 0], "nonzero"),
    ],
    ids=["item", "branch", "mask index"],
)
def test_the_op_and_the_module_are_named(rule: Any, op: str) -> None:
    with pytest.raises(CaptureError, match=rf"({op}).*module picky"):
        capture_step(Toy(rule), {"x": torch.ones(2, 4)})


def test_an_input_changed_in_place_is_refused() -> None:
    """A weight or a batch that the step writes would differ at the next step."""

    class Writes(Toy):
        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.picky(self.first(x)).sum() + seen.add_(1).sum()}

    model = Writes(lambda x: x)
    with pytest.raises(CaptureError, match=r"add_.*changes an input of the step \(batch\)"):
        capture_step(model, {"x": torch.ones(2, 4), "seen": torch.zeros(2)})


def test_a_temporary_changed_in_place_keeps_eagers_bits() -> None:
    """The change is a vertex written over the storage it changes."""
    model = Toy(lambda x: x.exp().detach().clone().mul_(3).clamp_(max=5) * x)
    batch = {"x": torch.arange(8.0).view(2, 4)}
    step = capture_step(model, batch)
    assert [v.op for v in step.graph.vertices if v.inplace] == ["aten::mul_", "aten::clamp_"]
    loss = model(**batch)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert_same_bits(run_captured(step, model, batch), (loss.detach(), grads))  # type: ignore[arg-type]


def test_a_step_without_labels_or_trainable_parameters_is_refused() -> None:
    model, batch = tiny_lora(hidden=32), random_batch()
    with pytest.raises(CaptureError, match="labels"):
        capture(model, {k: v for k, v in batch.items() if k != "labels"})
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(CaptureError, match="requires_grad"):
        capture(model, batch)


def test_a_given_cache_is_refused() -> None:
    model, batch = tiny_lora(hidden=32), random_batch()
    with pytest.raises(CaptureError, match="past_key_values"):
        capture(model, {**batch, "past_key_values": object()})


def test_an_error_of_the_model_itself_keeps_its_text_and_names_the_module() -> None:
    toy = Toy(lambda x: x @ torch.ones(3, 3))
    with pytest.raises(CaptureError, match="module picky failed") as caught:
        capture_step(toy, {"x": torch.ones(2, 4)})
    assert caught.value.__cause__ is not None


def test_other_bytes_under_a_weight_are_refused() -> None:
    """What autograd does not see a trace does not see either: the plan would go on with the bytes before."""

    class Replaces(Toy):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.first.bias.data = self.first.bias.data * 2
            return super().forward(x)

    model = Replaces(lambda x: x)
    before = model.first.bias.detach().clone()
    with pytest.raises(CaptureError, match=r"puts other data into a tensor of shape"):
        capture_step(model, {"x": torch.ones(2, 4)})
    assert torch.equal(model.first.bias, before)


@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_that_is_no_op_is_refused(backward: bool) -> None:
    """One of Triton or of an extension takes addresses, which fake tensors lack, and its results would be missing in
    the graph."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if backward or x.data_ptr() else x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 if not backward or gradient.data_ptr() else gradient

    toy = Toy(Kernel.apply)
    with pytest.raises(CaptureError, match="Cannot access data pointer") as caught:
        capture_step(toy, {"x": torch.ones(2, 4)})
    assert "register it with torch.library.custom_op" in str(advised(toy, caught.value))


def test_a_step_without_any_gradient_is_refused() -> None:
    """An op may make an output that wants a gradient, and pass none on."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> None:
            return None

    with pytest.raises(CaptureError, match="no trainable parameter reaches the loss"):
        capture_step(Toy(Silent.apply), {"x": torch.ones(2, 4)})


def test_a_gradient_that_no_op_makes_is_refused() -> None:
    """The sum of a parameter hands the output's gradient on as it is; what the message says to do works."""

    class Summed(Toy):
        def forward(self, x: torch.Tensor, factor: float | None = None) -> dict[str, torch.Tensor]:
            total = self.first.bias.sum()
            return {"loss": (self.first.weight * x).sum() + (total if factor is None else total * factor)}

    model = Summed(lambda x: x)
    batch = {"x": torch.ones(4, 4)}
    with pytest.raises(CaptureError, match=r"first\.bias: its gradient is that of the output .* by 1\.0"):
        capture_step(model, batch)
    step = capture_step(model, {**batch, "factor": 1.0})
    assert {gradient.name for gradient in step.gradients} == {"first.weight", "first.bias"}
