"""An ordinary training loop on the GPU with activations and weights in a store there: the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel.errors import ConfigError, StoreError
from disco_accel.store.client import Store
from tests.emulated.models import CUDA, assert_same, step
from tests.emulated.stores import gpu_store
from tests.store.serving import nothing_left, serving
from tests.support.models import random_batch, tiny_lora

SMALL = 1 << 10
STEPS = 3


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each object takes 2 MiB, so that the device has room for ten."""
    with gpu_store(tmp_path_factory.mktemp("store"), "--host", "512MiB", "--device", "20MiB") as (path, _process):
        yield path


@pytest.fixture
def store(socket: Path) -> Iterator[Store]:
    with Store.connect(socket) as connected:
        yield connected


def train(model: Any, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Loss and gradients of each step; a trained weight changes in between."""
    found = []
    for _ in range(STEPS):
        found.append(step(model, batch))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
    return found


def test_activations_and_weights_in_the_store_have_the_bits_of_plain_pytorch(store: Store) -> None:
    batch = {name: tensor.to(CUDA) for name, tensor in random_batch(seed=3).items()}
    plain = tiny_lora(layers=2).to(CUDA)
    model = copy.deepcopy(plain)
    expected = train(plain, batch)
    before = store.stats()
    with store.offload(model, min_bytes=SMALL) as handle:
        assert len(handle.names) > 5
        assert all(model.get_parameter(name).device == CUDA for name in handle.names)
        with store.saved_activations(min_bytes=SMALL):
            found = train(model, batch)
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted)
    figures = store.stats()
    assert figures["evicted"] > before["evicted"] and figures["fetched"] > before["fetched"]
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))
    nothing_left(store)


def test_a_saved_tensor_that_was_written_to_is_pytorchs_error(store: Store) -> None:
    value = torch.ones(1000, device=CUDA, requires_grad=True)
    with store.saved_activations(min_bytes=SMALL):
        square = value.mul(2).square()
        middle = value.mul(3)
        product = middle * middle
    middle.add_(1)
    square.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    del square, product
    nothing_left(store)


class _Spends(torch.autograd.Function):
    """Its backward writes to what it saved, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value * 3)
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(gradient)


def test_a_backward_may_write_to_what_it_saved(store: Store) -> None:
    """It writes to a copy: what is in the store stays, for a second backward too."""
    value = torch.ones(1000, device=CUDA, requires_grad=True)
    with store.saved_activations(min_bytes=SMALL):
        loss = _Spends.apply(value).sum()
    for times in (1, 2):
        loss.mul(2).backward(retain_graph=True)
        assert value.grad is not None and value.grad.eq(6 * times).all()


def test_a_write_to_an_offloaded_weight_is_refused_with_its_name(store: Store) -> None:
    module = torch.nn.Linear(32, 32, device=CUDA).requires_grad_(False)
    expected = module.weight.clone()
    with store.offload(module, min_bytes=SMALL), pytest.raises(StoreError, match=r"'weight' is offloaded.*add_"):
        module.weight.add_(1)
    assert module.weight.equal(expected) and module.weight.device == CUDA


def test_saved_tensors_of_host_memory_stay(store: Store) -> None:
    value = torch.ones(1000, requires_grad=True)
    with store.saved_activations(min_bytes=SMALL):
        loss = value.mul(2).square().sum()
    assert store.stats()["objects"] == 0
    loss.backward()
    assert value.grad is not None and value.grad.eq(8).all()


def test_a_module_of_another_device_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    module = torch.nn.Linear(32, 32).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'weight' is on cpu, and the store's device is cuda:0"):
        store.offload(module, min_bytes=SMALL)
    with serving(tmp_path), Store.connect(tmp_path / "own" / "store") as other:
        with pytest.raises(ConfigError, match=r"'weight' is on cuda:0, and the store's device is cpu"):
            other.offload(module.to(CUDA), min_bytes=SMALL)
        weight = torch.ones(1000, device=CUDA, requires_grad=True)
        with other.saved_activations(SMALL), pytest.raises(StoreError, match=r"on cuda:0, .* a slice of host memory"):
            weight.mul(2).square()
