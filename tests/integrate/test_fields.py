"""Gradients through any field of an output, tuples of tensors included, are eager's: none is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers.utils import ModelOutput

from disco_accel import prepare, stats
from disco_accel.errors import ExecutionError
from tests.integrate.twins import SMALL, batch, config
from tests.support.models import tiny_lora

Loss = Callable[[Any], torch.Tensor]


def _square(value: torch.Tensor) -> torch.Tensor:
    return (value.float() ** 2).mean()


def _read_without_gradient(output: Any) -> torch.Tensor:
    with torch.no_grad():
        _ = output.hidden_states, output.logits
    with torch.inference_mode():
        _ = output["hidden_states"][1].sum()
    loss: torch.Tensor = output.loss + _square(output.hidden_states[1]) + _square(output.logits)
    return loss


def _twice(output: Any) -> torch.Tensor:
    _square(output.hidden_states[1]).backward(retain_graph=True)
    return _square(output.hidden_states[1])


ALONE: dict[str, Loss] = {
    "one hidden state": lambda o: _square(o.hidden_states[1]),
    "the last": lambda o: _square(o.hidden_states[-1]),
    "detached": lambda o: o.loss * (1 + 0 * o.hidden_states[1].detach().mean()),
    "by place": lambda o: o[0] * 2,
}
TOGETHER: dict[str, Loss] = {
    "distillation": lambda o: o.loss + sum(map(_square, o.hidden_states)),  # type: ignore[arg-type, return-value]
    "by name": lambda o: o["loss"] + _square(o["hidden_states"][1]),
    "by place": lambda o: o[0] + _square(o[-1][1]),
    "as a tuple": lambda o: o.to_tuple()[0] + _square(o.to_tuple()[-1][1]),
    "three": lambda o: o.loss + _square(o.logits) + _square(o.past_key_values.layers[0].keys),
    "logits and a hidden state": lambda o: _square(o.logits) + _square(o.hidden_states[1]),
    "the key/value cache": lambda o: o.loss + _square(o.past_key_values.layers[0].keys),
    "out of the adapters' reach": lambda o: o.loss + _square(o.hidden_states[0]),
    "read without gradient first": _read_without_gradient,
    "backward twice": _twice,
}


def _gradients(model: Any, loss_of: Loss) -> list[torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = loss_of(model(**batch(), output_hidden_states=True))
    loss.backward()
    return [loss.detach(), torch.rand(1), *(p.grad for p in model.parameters() if p.requires_grad)]


def _compare(loss_of: Loss, dropout: float, same: Callable[[torch.Tensor, torch.Tensor], bool], steps: int = 1) -> Any:
    model, eager = (tiny_lora(**SMALL, attention_dropout=dropout) for _ in range(2))
    prepare(model, config())
    for _ in range(steps):
        for got, expected in zip(_gradients(model, loss_of), _gradients(eager, loss_of), strict=True):
            assert (got is None) == (expected is None)
            assert got is None or expected is None or same(got, expected)
    assert stats(model)["steps_eager"] == 0 and stats(model)["without_gradient"] == []
    return model


@pytest.mark.parametrize("loss_of", ALONE.values(), ids=ALONE.keys())
def test_a_gradient_through_one_field_has_eagers_bits(loss_of: Loss) -> None:
    _compare(loss_of, 0.1, torch.equal, steps=2)


@pytest.mark.parametrize("loss_of", TOGETHER.values(), ids=TOGETHER.keys())
def test_gradients_through_several_fields_add_up_to_eagers(loss_of: Loss) -> None:
    """All that one backward goes through takes one run together: gradients meet where eager mode adds them up."""
    _compare(loss_of, 0.1, torch.equal, steps=2)


def test_hidden_states_of_one_output_take_one_run_together() -> None:
    model = _compare(lambda o: sum(map(_square, o.hidden_states[1:])), 0.1, torch.allclose)  # type: ignore[arg-type, return-value]
    assert stats(model)["plans"] == 2


def test_an_output_that_accelerate_made_again_keeps_the_way_back() -> None:
    model, eager = (tiny_lora(**SMALL) for _ in range(2))
    prepare(model, config())
    grads = []
    for one in (model, eager):
        output = convert_outputs_to_fp32(one.forward)(**batch(), output_hidden_states=True)
        _square(output.hidden_states[1]).backward()
        grads.append([p.grad for p in one.parameters() if p.requires_grad])
    for got, expected in zip(*grads, strict=True):
        assert (got is None) == (expected is None) and (got is None or torch.equal(got, expected))


class _Prod(nn.Module):
    """A field that can be read and not be planned: the gradient of its product has another formula under a trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        y = self.linear(x) - labels
        return ModelOutput(loss=_square(y), extras=(y.prod(-1), {"mean": y.mean()}))


def test_a_field_that_no_step_can_differentiate_is_an_error_or_left_to_eager_mode() -> None:
    x = {"x": torch.ones(2, 4), "labels": torch.zeros(2, 4)}
    with pytest.raises(ExecutionError, match=r"extras\.0: a gradient is asked for.*on_unsupported: eager"):
        _square(prepare(_Prod(), config())(**x).extras[0]).backward()
    gradients = []
    for model in (prepare(_Prod(), config(on_unsupported="eager")), _Prod()):
        output = model(**x)
        (output.loss + _square(output.extras[0]) + output.extras[1]["mean"]).backward()
        gradients.append(model.linear.weight.grad)
    torch.testing.assert_close(*gradients)
