"""Weights that change under a plan: each way is noticed, and the next step has eager's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disco_accel import stats
from disco_accel.errors import CaptureError
from tests.integrate.twins import assert_same, assert_same_step, batch, pair, step

BASE = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
ADAPTER = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
Change = Callable[[torch.nn.Module], object]


def _base(model: torch.nn.Module) -> torch.nn.Parameter:
    return model.get_parameter(BASE)


def _adapter(model: torch.nn.Module) -> torch.nn.Parameter:
    return model.get_parameter(ADAPTER)


def _loaded(model: torch.nn.Module, assign: bool) -> None:
    other = {n: t * 1.25 for n, t in model.state_dict().items()}
    model.load_state_dict(other, assign=assign)


def _merged(model: torch.nn.Module) -> None:
    """Merging and unmerging leaves rounding errors in the base weights, in eager too."""
    model.merge_adapter()
    model.unmerge_adapter()


def _in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        _base(model).add_(0.125)


def _through_data(model: torch.nn.Module) -> None:
    _base(model).data.mul_(1.5)


def _adapter_through_data(model: torch.nn.Module) -> None:
    _adapter(model).data.mul_(1.5)


def _adapter_replaced(model: torch.nn.Module) -> None:
    _adapter(model).data = _adapter(model).data.flip(0).contiguous()


def _base_trained(model: torch.nn.Module) -> None:
    """An optimizer that holds a base weight, updated while it takes no gradient of its own."""
    weight = _base(model)
    weight.grad = torch.full_like(weight, 0.5)
    torch.optim.SGD([weight], lr=0.25).step()
    weight.grad = None


def _buffer(model: torch.nn.Module) -> None:
    """Rotary frequencies: a buffer, and one that no state_dict holds."""
    buffer = next(b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n)
    buffer.mul_(0.5)


def _new_adapter_values(model: torch.nn.Module) -> None:
    adapters = {n: t + 0.01 for n, t in model.state_dict().items() if "lora_" in n}
    model.load_state_dict(adapters, strict=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: _loaded(m, assign=False),
        lambda m: _loaded(m, assign=True),
        _new_adapter_values,
        _merged,
        _in_place,
        _through_data,
        _adapter_through_data,
        _adapter_replaced,
        _base_trained,
        _buffer,
    ],
    ids=[
        "load_state_dict",
        "load_state_dict-assign",
        "load_adapter",
        "merge-unmerge",
        "in-place",
        "data",
        "adapter-data",
        "adapter-replaced",
        "optimizer-on-base",
        "buffer",
    ],
)
def test_a_change_reaches_the_next_step(change: Change) -> None:
    """The step after the change differs from the one before it, and equals eager's."""
    model, eager = pair(dtype=torch.bfloat16)
    before = step(model)
    assert_same(before, step(eager))
    for m in (model, eager):
        change(m)
    after = step(model)
    assert_same(after, step(eager))
    if change is not _merged:
        assert not all(torch.equal(g, before[1][n]) for n, g in after[1].items())
    assert_same_step(model, eager, 2)


def test_requires_grad_toggled() -> None:
    """A base weight that becomes trainable gets its gradient, can be trained, and is frozen again at its new value."""
    model, eager = pair()
    assert_same_step(model, eager)
    for m in (model, eager):
        _base(m).requires_grad_(True)
    assert_same_step(model, eager, 1)
    for m in (model, eager):
        m(**batch(2)).loss.backward()
        torch.optim.SGD([_base(m)], lr=0.1).step()
        _base(m).requires_grad_(False)
        _adapter(m).requires_grad_(False)
    assert torch.equal(_base(model), _base(eager))
    assert_same_step(model, eager, 3)
    assert ADAPTER not in step(model)[1]
    for m in (model, eager):
        _adapter(m).requires_grad_(True)
    assert_same_step(model, eager, 4)


def test_adapter_disabled_and_enabled() -> None:
    """While it is disabled evaluation is the base model's and a training step is refused; then all is as before."""
    model, eager = pair()
    assert_same_step(model, eager)
    with model.disable_adapter(), eager.disable_adapter():
        with torch.no_grad():
            assert torch.equal(model(**batch()).logits, eager(**batch()).logits)
        with pytest.raises(CaptureError, match="no trainable parameter reaches the loss"):
            model(**batch())
    assert_same_step(model, eager, 1)


def test_adapter_merged_for_evaluation() -> None:
    """Merged weights are used while they are merged, and training goes on from the unmerged ones."""
    model, eager = pair()
    assert_same_step(model, eager)
    for m in (model, eager):
        m.merge_adapter()
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, eager(**batch()).logits)
    with pytest.raises(CaptureError, match="no trainable parameter reaches the loss"):
        model(**batch())
    for m in (model, eager):
        m.unmerge_adapter()
    assert_same_step(model, eager, 1)


def test_a_second_adapter_takes_over() -> None:
    """Adding and switching adapters is a new step; switching back finds the first plan again."""
    from peft import LoraConfig

    model, eager = pair()
    assert_same_step(model, eager)
    for m in (model, eager):
        torch.manual_seed(3)
        m.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        m.set_adapter("other")
    assert_same_step(model, eager, 1)
    for m in (model, eager):
        m.set_adapter("default")
    assert_same_step(model, eager, 2)
    assert stats(model)["steps_eager"] == 0


def test_every_plan_follows_a_base_weight_that_was_moved_elsewhere() -> None:
    """Of the plan that runs, of one that ran before, and of one that is made afterwards."""
    model, eager = pair()
    for length in (8, 16):
        assert_same_step(model, eager, length=length)
    for of in (model, eager):
        _base(of).data = _base(of).data * 1.5
    for length in (8, 16, 32, 8):
        assert_same_step(model, eager, length=length)
    for of in (model, eager):
        _base(of).data = _base(of).data.clone()
    assert_same_step(model, eager, length=8)
    assert stats(model)["steps_eager"] == 0 and stats(model)["plans"] == 3


def test_a_base_that_becomes_half_and_full_again_has_plans_for_both() -> None:
    model, eager = pair()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for of in (model, eager):
            of.to(dtype)
        assert_same_step(model, eager)
    assert stats(model)["steps_eager"] == 0
