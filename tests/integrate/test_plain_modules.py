"""Models of no library: modules that return a tensor, wrap one another, or take their parameters apart as they run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import CaptureError, ConfigError

CONFIG = DiscoConfig(memory_budget="16MiB", device="cpu", plan_cache=None)
EAGER = DiscoConfig(memory_budget="16MiB", device="cpu", plan_cache=None, on_unsupported="eager")


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def half_frozen() -> nn.Module:
    model = two_layers()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x, x, x)[0]


def adapted_attention() -> nn.Module:
    return get_peft_model(Attention(), LoraConfig(target_modules=["attend"], r=2, init_lora_weights=False))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def adapted_parameter() -> nn.Module:
    model = nn.Sequential(Product(), nn.Linear(8, 4))
    return get_peft_model(model, LoraConfig(target_parameters=["0.weight"], r=2, init_lora_weights=False))


def train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    outputs = []
    for step in range(steps):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        y = model(x)
        y.square().mean().backward()
        outputs.append(y.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def assert_same(ours: list[torch.Tensor], eager: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("build", [two_layers, half_frozen, adapted_parameter])
def test_a_model_that_returns_a_tensor_trains_from_a_plan_to_the_same_bits(build: Callable[[], nn.Module]) -> None:
    model, eager = build(), build()
    prepare(model, CONFIG)
    assert_same(train(model), train(eager))
    assert stats(model)["steps_compiled"] == 3
    assert_same(list(model.state_dict().values()), list(eager.state_dict().values()))


def test_a_capture_leaves_the_model_as_it_was_whose_forward_takes_parameters_apart() -> None:
    model = adapted_parameter()
    names = [list(map(list, (m._parameters, m._buffers, m._modules))) for m in model.modules()]
    kept = dict(model.named_parameters())
    train(prepare(model, CONFIG), 1)
    assert [list(map(list, (m._parameters, m._buffers, m._modules))) for m in model.modules()] == names
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())


def test_an_adapter_that_changes_the_bits_of_its_base_is_refused_by_its_name_and_eager_mode_has_its_way() -> None:
    with pytest.raises(CaptureError, match=r"attend: PEFT adds this adapter.*target_modules"):
        train(prepare(adapted_attention(), CONFIG))
    model, eager = adapted_attention(), adapted_attention()
    prepare(model, EAGER)
    assert_same(train(model), train(eager))
    assert_same(list(model.state_dict().values()), list(eager.state_dict().values()))


def test_a_model_that_accelerate_offloads_is_refused_by_its_name() -> None:
    model = half_frozen()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises((CaptureError, ConfigError), match=r"0: Accelerate's offloading.*remove_hook_from_submodules"):
        train(prepare(model, CONFIG))


def test_an_input_that_wants_a_gradient_is_refused_by_its_name() -> None:
    model = prepare(half_frozen(), CONFIG)
    with pytest.raises(CaptureError, match=r"^input: requires a gradient.*detach"):
        model(torch.randn(5, 8, requires_grad=True))


def test_an_input_that_wants_a_gradient_gets_it_in_eager_mode() -> None:
    model = prepare(half_frozen(), EAGER)
    x = torch.randn(5, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and stats(model)["steps_eager"] == 1


def test_a_prepared_model_inside_a_prepared_model_is_part_of_its_plan() -> None:
    inner = prepare(half_frozen(), CONFIG)
    outer, eager = nn.Sequential(inner, nn.Tanh()), nn.Sequential(half_frozen(), nn.Tanh())
    prepare(outer, CONFIG)
    assert_same(train(outer), train(eager))
    assert stats(outer)["steps_compiled"] == 3 and stats(inner)["steps_compiled"] == 0
    restore(outer)
    restore(inner)
    assert_same(train(outer), train(eager))


def test_a_copy_of_such_a_model_is_unprepared() -> None:
    model = prepare(half_frozen(), CONFIG)
    train(model, 1)
    copied = copy.deepcopy(model)
    assert_same(train(copied), train(copy.deepcopy(restore(model))))
    assert stats(copied) == {}
