"""Frozen tensors made under ``torch.inference_mode``, as hqq's layers pack theirs, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import ConfigError

WIDTH = 32


class Packed(nn.Module):
    """A weight of bytes and scales, held as ``kind`` says; ``meta`` has a view of the scales."""

    def __init__(self, layer: nn.Linear, kind: str, inference: bool) -> None:
        super().__init__()
        with torch.inference_mode(inference), torch.no_grad():
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            packed = (layer.weight / scale).round().to(torch.int8)
            bias = layer.bias.clone()
            if kind == "plain":
                self.packed, self.scale, self.bias = packed, scale, bias
            for name, tensor in (("packed", packed), ("scale", scale), ("bias", bias)):
                if kind == "buffer":
                    self.register_buffer(name, tensor)
                elif kind != "plain":
                    self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        if kind == "moved":
            # As Module.to does: ordinary data in an object that still counts no versions.
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()
        with torch.inference_mode(inference):
            self.meta = {"scale": self.scale.data[:, 0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.packed.to(x.dtype) * self.meta["scale"][:, None]
        return nn.functional.linear(x, weight) + self.bias


def network(kind: str, inference: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    packed = Packed(layers[1], kind, inference)
    # The same layer twice: tied weights.
    return nn.Sequential(layers[0], packed, nn.GELU(), packed, layers[2])


def steps(model: nn.Module) -> list[torch.Tensor]:
    seen = []
    for seed in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


def prepared(model: nn.Module, **keys: Any) -> nn.Module:
    return prepare(model, DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None, quiet=True, **keys))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "plain", "moved"])
def test_steps_have_the_bits_of_ordinary_tensors(kind: str) -> None:
    expected = steps(network(kind, inference=False))
    model = prepared(network(kind, inference=True))
    parts = [model[1].packed, model[1].scale, model[1].bias, model[1].meta["scale"]]
    got = steps(model)
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
    assert stats(model)["steps_compiled"] == 3
    # The same objects as before, over memory that they share as before.
    assert parts[1].data_ptr() == parts[3].data_ptr() and model[1].packed is parts[0]
    restore(model)
    assert all(map(torch.equal, steps(model), expected))


@pytest.mark.parametrize("keys", [{"share_weights": True}, {"verify_steps": 1}], ids=str)
def test_other_settings_take_them_too(keys: dict[str, Any]) -> None:
    expected = steps(network("parameter", inference=False))
    assert all(map(torch.equal, steps(prepared(network("parameter", inference=True), **keys)), expected))


def test_a_weight_that_becomes_one_between_steps() -> None:
    """A merge inside of ``torch.inference_mode`` puts other tensors in the place of weights."""
    runs = []
    for inference in (False, True):
        model = network("parameter", inference=False)
        model = prepared(model) if inference else model
        first = steps(model)
        with torch.inference_mode(inference), torch.no_grad():
            model[1].bias = nn.Parameter(model[1].bias + 1, requires_grad=False)
            model[1].scale.data = model[1].scale * 2
            model[1].meta["scale"] = model[1].scale[:, 0]
        runs.append([*first, *steps(model)])
    assert all(map(torch.equal, *runs))


def test_a_model_prepared_inside_of_inference_mode() -> None:
    expected = steps(network("parameter", inference=False))
    model = network("parameter", inference=True)
    with torch.inference_mode():
        model = prepared(model)
    assert all(map(torch.equal, steps(model), expected))


def test_a_trained_one_is_refused_by_name() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigError, match=r"0\.weight was made under torch\.inference_mode, so that .* freeze it"):
        prepared(model)


def test_inputs_made_under_inference_mode() -> None:
    runs = []
    for ours in (False, True):
        model = network("parameter", inference=False)
        model = prepared(model) if ours else model
        model[0].requires_grad_(False)
        with torch.inference_mode():
            x = torch.ones(4, WIDTH)
        loss = model(x).square().mean()
        loss.backward()
        runs.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *runs))
