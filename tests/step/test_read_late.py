"""A field that is computed after its step is the forward's own value, or an error: never one of changed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel.errors import ExecutionError
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.observer import Observer, observe_all
from disco_accel.step.run.step_inputs import _NormSnapshot
from tests.integrate.twins import batch, pair

Change = Callable[[Any, dict[str, torch.Tensor]], object]


class Backwards(Observer):
    """Counts the planned ones."""

    count = 0

    def on_backward(self, step: CompiledStep) -> None:
        self.count += 1


def _adapters(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _optimizer(model: Any, _: Any) -> None:
    torch.optim.SGD(_adapters(model), lr=0.5).step()


def _through_data(model: Any, _: Any) -> None:
    """As ZeRO does: the parameters are views of one buffer, and the optimizer writes to that."""
    flat = torch.cat([p.data.flatten() for p in _adapters(model)])
    start = 0
    for parameter in _adapters(model):
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    flat.data.add_(0.25)


def _written_in_place_through_data(model: Any, _: Any) -> None:
    for parameter in _adapters(model):
        parameter.data.mul_(1.5).add_(0.25)


def _base(model: Any, _: Any) -> None:
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).mul_(2)


def _evaluation(model: Any, _: Any) -> None:
    model.eval()


def _labels(_: Any, given: dict[str, torch.Tensor]) -> None:
    given["input_ids"].zero_()


CHANGES: list[tuple[Change, str]] = [
    (_optimizer, r"logits: .*lora_A.* was changed since .*read output\.logits before optimizer\.step\(\)"),
    (_through_data, r"logits: a trainable parameter was changed"),
    (_written_in_place_through_data, r"logits: a trainable parameter was changed"),
    (_base, r"logits: a frozen weight was changed"),
    (_evaluation, r"logits: the model's mode, an adapter"),
    (_labels, r"logits: input_ids was changed"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_a_field_that_would_be_computed_from_changed_values_is_refused(change: Change, said: str) -> None:
    """Whatever changed, and however it was written; who goes on gets the field planned, with eager's bits."""
    model, eager = pair(dropout=0.1)
    given = batch()
    output = model(**given)
    output.loss.backward()
    change(model, given)
    with pytest.raises(ExecutionError, match=said):
        _ = output.logits
    if change is not _base:
        eager.load_state_dict(model.state_dict())
        model.train()
        outputs = []
        for one in (model, eager):
            torch.manual_seed(1)
            outputs.append(one(**given))
        _optimizer(model, given)
        assert torch.equal(outputs[0].logits, outputs[1].logits), "planned, so it was there before the change"


def test_a_field_that_was_read_in_time_stays_readable() -> None:
    model, eager = pair()
    output, expected = model(**batch()), eager(**batch())
    early = output.logits
    output.loss.backward()
    _optimizer(model, None)
    assert output.logits is early and torch.equal(early, expected.logits)


def test_a_backward_through_a_late_field_sees_writes_that_versions_miss() -> None:
    model, _ = pair()
    loss = model(**batch()).logits.float().sum()
    _written_in_place_through_data(model, None)
    with pytest.raises(
        ExecutionError, match="changed in place between this step's forward and the backward of its log"
    ):
        loss.backward()


def test_a_step_that_is_run_again_sees_writes_that_versions_miss() -> None:
    """Another forward took the engine; running the first again would give gradients of other weights."""
    model, _ = pair()
    first = model(**batch()).loss
    model(**batch(1)).loss.backward()
    _written_in_place_through_data(model, None)
    with pytest.raises(ExecutionError, match="a trainable parameter was changed in place"):
        first.backward()


def test_norms_tell_a_change_and_nothing_else() -> None:
    """What stands in for a look at the words where tensors are on a device; NaN and mixed dtypes included."""
    tensors = [torch.randn(7, 5), torch.randn(3).bfloat16(), torch.full((2,), float("nan"))]
    norms = _NormSnapshot(tensors)
    assert not norms.changed()
    tensors[1].data.mul_(2)
    assert norms.changed()


def test_a_gradient_that_autograd_leaves_out_costs_no_run() -> None:
    """As in eager, where a node behind the loss passes none on: parameters keep their grad of None."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, tangent: torch.Tensor) -> None:  # type: ignore[override]
            return None

    model, eager = pair()
    backwards = Backwards()
    stop = observe_all(backwards)
    try:
        for one in (model, eager):
            loss = one(**batch()).loss
            Nothing.apply(loss).backward()
            assert all(p.grad is None for p in one.parameters())
        assert backwards.count == 0
        loss = model(**batch()).loss
        loss.backward()
        assert backwards.count == 1
    finally:
        stop()
