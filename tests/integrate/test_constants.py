"""Tensors that a forward reads from plain attributes: eager's values, also after changes in place, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel import prepare, restore, stats
from disco_accel.errors import CaptureError
from tests.integrate.twins import config
from tests.support.models import random_batch

Use = Callable[[Any], torch.Tensor]


class _Reads(nn.Module):
    """``kept`` is a plain attribute that ``use`` reads in the forward."""

    def __init__(self, make: Callable[[Any], Any], use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.randn(3, 16))
        self.kept = make(self)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.frozen(self.first(x)) * self.use(self)) ** 2).mean()


def _steps(model: nn.Module, change: Callable[[Any], object]) -> list[torch.Tensor]:
    """Losses and gradients of two steps before ``change`` and of two after it."""
    values = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for index in range(4):
        if index == 2:
            with torch.no_grad():
                change(model)
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(index)))
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return values


def _add(model: Any) -> None:
    for tensor in model.kept if isinstance(model.kept, list) else [model.kept]:
        tensor += 1


def _turn(model: Any) -> None:
    model.kept.copy_(15 - model.kept)


def _scale_weights(model: Any) -> None:
    model.frozen.weight.mul_(1.25)
    model.table.mul_(1.5)


def _numbers(*shape: int) -> Callable[[Any], Any]:
    return lambda _: np.random.RandomState(0).randn(*shape).astype("float32")


FOLLOWED: dict[str, tuple[Callable[[Any], Any], Use, Callable[[Any], object]]] = {
    "two views": (lambda m: torch.randn(2, 16), lambda m: m.kept[0] + m.kept[1], _add),
    "one view": (lambda m: torch.randn(2, 16), lambda m: m.kept[1], _add),
    "overlapping views": (lambda m: torch.randn(20), lambda m: m.kept[:16] * m.kept[4:], _add),
    "indices": (
        lambda m: torch.randint(0, 16, (2, 16)),
        lambda m: m.frozen.bias[m.kept[0]] * m.frozen.bias[m.kept[1]],
        _turn,
    ),
    "two of one storage": (lambda m: list(torch.randn(5, 16)), lambda m: m.kept[1] + m.kept[4], _add),
    "transposed": (lambda m: torch.randn(16, 4).t(), lambda m: m.kept[0] + m.kept[3], _add),
    "strided with an offset": (lambda m: torch.randn(40)[3:35:2], lambda m: m.kept, _add),
    "split": (lambda m: torch.randn(48), lambda m: sum(m.kept.split(16)), _add),  # type: ignore[arg-type, return-value]
    "view of a frozen weight": (lambda m: m.frozen.weight[1], lambda m: m.kept, _scale_weights),
    "frozen parameter in a list": (lambda m: [m.frozen.weight], lambda m: m.kept[0][0] * m.kept[0][1], _scale_weights),
    "view of a buffer": (lambda m: m.table[0], lambda m: m.kept + m.table[1], _scale_weights),
    "numpy array": (_numbers(2, 16), lambda m: torch.from_numpy(m.kept)[0] + torch.from_numpy(m.kept)[1], _add),
    "copied numpy array": (_numbers(16), lambda m: torch.as_tensor(m.kept), _add),
    "made in the forward": (
        lambda m: None,
        lambda m: torch.arange(16.0) * torch.tensor([1.0, 2.0] * 8),
        lambda m: None,
    ),
}


@pytest.mark.parametrize("case", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_constant_has_eagers_values_before_and_after_a_change_in_place(
    case: tuple[Callable[[Any], Any], Use, Callable[[Any], object]],
) -> None:
    make, use, change = case
    model = prepare(_Reads(make, use), config())
    for got, expected in zip(_steps(model, change), _steps(_Reads(make, use), change), strict=True):
        assert torch.equal(got, expected)
    assert stats(model)["steps_eager"] == 0


def _own_gradient(model: Any) -> torch.Tensor:
    return torch.randn(16, requires_grad=True)


REFUSED: dict[str, tuple[Callable[[Any], Any], Use, str]] = {
    "wants a gradient": (_own_gradient, lambda m: m.kept, r"kept: requires a gradient but is no parameter"),
    "trainable parameter": (lambda m: [m.first.weight], lambda m: m.kept[0][0], r"kept\[0\]: requires a gradient"),
    "view of a trainable one": (lambda m: m.first.weight.detach()[0], lambda m: m.kept, r"kept: .* first\.weight"),
    "written in the forward": (
        lambda m: torch.zeros(2, 16),
        lambda m: m.kept[0].add_(1),
        r"changes an input.*constant",
    ),
    "as_strided": (lambda m: torch.randn(64)[7:], lambda m: m.kept.as_strided((16,), (1,), 3), "as_strided"),
    "conjugated": (lambda m: torch.randn(16, dtype=torch.cfloat).conj(), lambda m: (m.kept * 1j).real, "kept: .*conj"),
    "sparse": (lambda m: torch.eye(16).to_sparse(), lambda m: torch.sparse.sum(m.kept, 0).to_dense(), "kept: .*sparse"),
    "read by tolist": (lambda m: torch.ones(2), lambda m: m.table[0] * m.kept.tolist()[0], r"kept: tolist\(\) reads"),
    "read by numpy": (lambda m: torch.ones(2), lambda m: torch.tensor(m.kept.numpy()[0]), r"kept: numpy\(\) reads"),
    "branched on": (lambda m: torch.tensor(1), lambda m: m.table[int(m.kept)], "depends on the data"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_a_constant_that_no_plan_can_follow_is_refused_by_its_name(
    case: tuple[Callable[[Any], Any], Use, str],
) -> None:
    make, use, said = case
    with pytest.raises(CaptureError, match=said):
        prepare(_Reads(make, use), config())(torch.ones(2, 16))


def test_views_of_frozen_weights_stay_views_of_them() -> None:
    """Through the move into the host arena and back."""
    model: Any = _Reads(lambda m: {"row": [m.frozen.weight[1]]}, lambda m: m.kept["row"][0])
    for move in (lambda: prepare(model, config()), lambda: restore(model)):
        move()
        model.frozen.weight.data.mul_(2)
        assert torch.equal(model.kept["row"][0], model.frozen.weight[1])


def test_a_constant_that_gets_another_shape_in_place_is_followed() -> None:
    results = []
    for planned in (False, True):
        model: Any = _Reads(lambda m: torch.ones(1, 16), lambda m: m.kept)
        if planned:
            prepare(model, config())
        model(torch.ones(2, 16)).backward()
        model.kept.resize_(16).fill_(2)
        model.zero_grad()
        loss = model(torch.ones(2, 16))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results))
    assert stats(model)["plans"] == 2


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's BOFT sets CC and CXX, and where its kernel cannot be built it leaves them so."""
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


_TARGETS = ["q_proj", "v_proj"]
ADAPTERS: dict[str, Callable[[], Any]] = {
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=_TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=_TARGETS),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=_TARGETS, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=_TARGETS, init_weights=False),
    "IA3": lambda: peft.IA3Config(target_modules=[*_TARGETS, "down_proj"], feedforward_modules=["down_proj"]),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, target_modules=_TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, target_modules=_TARGETS),
    "AdaLoRA": lambda: peft.AdaLoraConfig(total_step=9, tinit=1, tfinal=1, init_r=4, target_modules=_TARGETS),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=_TARGETS),
    "RandLora": lambda: peft.RandLoraConfig(r=4, target_modules=_TARGETS),
    "VB-LoRA": lambda: peft.VBLoRAConfig(num_vectors=8, vector_length=16, target_modules=_TARGETS),
    "SHiRA": lambda: peft.ShiraConfig(r=4, target_modules=_TARGETS),
    "C3A": lambda: peft.C3AConfig(block_size=8, target_modules=_TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=_TARGETS),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def _adapted(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))
    model = peft.get_peft_model(base, make())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_pefts_adapters_are_bitwise_eager_or_refused_by_name(adapter: Callable[[], Any]) -> None:
    batch, results = random_batch(32, length=8), []
    try:
        for model in (prepare(_adapted(adapter), config()), _adapted(adapter)):
            loss = model(**batch).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
    except CaptureError as error:
        assert "base_model" in str(error) or "resolve_conj" in str(error) or "Sparse" in str(error), error
        return
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None) and (got is None or torch.equal(got, expected))
