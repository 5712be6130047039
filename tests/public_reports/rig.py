"""One script, plain and prepared: what a user sees of it must be the same bits.

A case is a script, a function of a ``Run``. It builds a model, gives it to ``run.prepare``, trains, and tells the run
what it sees. ``case`` makes a test of it that runs the script plain and then prepared: at 1.1 times the least budget
and with plenty, with the optimizer on the device and on the host. ``make test`` has one of these four; the others are
long.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall

SETTINGS = [(budget, optimizer) for budget in ("least", "plenty") for optimizer in ("device", "host")]
PLENTY = 1 << 30
Script = Callable[["Run"], None]


@dataclass
class Run:
    """One run of a script: ``keys`` are those of ``DiscoConfig``, or None for plain PyTorch."""

    keys: dict[str, Any] | None
    seen: list[tuple[str, Any]] = field(default_factory=list)
    prepared: list[Any] = field(default_factory=list)

    def prepare(self, model: Any) -> Any:
        """The model, to train as this run does."""
        if self.keys is None:
            return model
        settings = {"device": "cpu", "plan_cache": None, "quiet": True, "buckets": "off", "plan_seconds": 0.05}
        model = prepare(model, DiscoConfig(**(settings | self.keys)))
        self.prepared.append(model)
        return model

    def see(self, name: str, value: Any) -> None:
        """Note what is compared with the plain run: a tensor is copied."""
        if isinstance(value, dict):
            for key, part in value.items():
                self.see(f"{name}.{key}", part)
        elif isinstance(value, list | tuple):
            for place, part in enumerate(value):
                self.see(f"{name}.{place}", part)
        else:
            self.seen.append((name, value.detach().clone() if isinstance(value, torch.Tensor) else value))

    def backward(self, model: nn.Module, loss: torch.Tensor, **keys: Any) -> None:
        """``loss.backward()``; sees the loss and every gradient, also that it is None."""
        loss.backward(**keys)
        self.see("loss", loss)
        self.see("grad", {name: parameter.grad for name, parameter in model.named_parameters()})

    def step(self, model: nn.Module, optimizer: Any, **batch: Any) -> None:
        """A forward, its backward, an update."""
        self.backward(model, model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    def end(self, model: nn.Module, *optimizers: Any) -> None:
        """See all weights, optimizer states and the random state."""
        self.see("weights", dict(model.named_parameters()))
        self.see("buffers", dict(model.named_buffers()))
        for optimizer in optimizers:
            self.see("state", optimizer.state_dict()["state"])
        self.see("rng", torch.get_rng_state())


def run(script: Script, **keys: Any) -> Run:
    """The script, prepared with these keys; plain if there are none."""
    torch.manual_seed(5)
    made = Run(keys or None)
    script(made)
    return made


def least_budget(script: Script, **keys: Any) -> int:
    """The smallest budget that the script runs with: each of its steps may need more than those before."""
    budget = 4096
    while True:
        try:
            run(script, memory_budget=budget, **keys)
        except BudgetTooSmall as short:
            assert short.needed > budget
            budget = short.needed
        else:
            return budget


def assert_same(got: Run, plain: Run) -> None:
    """Everything that was seen is the same, to the bit."""
    assert [name for name, _ in got.seen] == [name for name, _ in plain.seen]
    for (name, value), (_, expected) in zip(got.seen, plain.seen, strict=True):
        if isinstance(expected, torch.Tensor):
            assert isinstance(value, torch.Tensor), f"{name} is {value}"
            assert torch.equal(value, expected) or (
                value.isnan().equal(expected.isnan()) and torch.equal(value.nan_to_num(), expected.nan_to_num())
            ), f"{name} differs by {(value.double() - expected.double()).abs().max().item():.3g}"
        else:
            assert value == expected, name


def compare(script: Script, budget: str, optimizer: str, *, planned: int = 1, **keys: Any) -> Run:
    """Run the script plain and with these settings, of which at least ``planned`` steps ran from a plan."""
    keys = {"optimizer": optimizer, **keys}
    size = PLENTY if budget == "plenty" else least_budget(script, **keys) * 11 // 10
    plain, got = run(script), run(script, memory_budget=size, **keys)
    assert_same(got, plain)
    numbers = [stats(model) for model in got.prepared]
    assert sum(each["steps_compiled"] for each in numbers) >= planned
    assert all(each["peak_bytes"] <= each["budget_bytes"] for each in numbers)
    return got


def case(planned: int = 1, *, tight: bool = False, long: bool = False, **keys: Any) -> Callable[[Script], Any]:
    """Make a test of a script. ``make test`` has one setting: the least budget if ``tight``, which takes three times
    as long; the script's name chooses where the optimizer is. It has none if ``long``."""

    def decorated(script: Script) -> Any:
        chosen = ("least" if tight else "plenty", ("device", "host")[zlib.crc32(script.__name__.encode()) % 2])
        settings = [
            pytest.param(*setting, marks=() if setting == chosen and not long else pytest.mark.long)
            for setting in SETTINGS
        ]

        @pytest.mark.parametrize(("budget", "optimizer"), settings)
        def test(budget: str, optimizer: str) -> None:
            compare(script, budget, optimizer, planned=planned, **keys)

        test.__doc__ = script.__doc__
        return test

    return decorated


def llama(**config: Any) -> LlamaForCausalLM:
    """A random model of one layer, or ``num_hidden_layers``; hidden size 64, 128 tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | config))).train()


def lora(model: nn.Module, **keys: Any) -> Any:
    """Adapters on attention; B is no longer zero where PEFT made it so."""
    adapted = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    made = get_peft_model(model, LoraConfig(**(adapted | keys)))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name and not parameter.any():
                parameter.normal_(std=0.02)
    return made.train()


def batch(seed: int = 0, rows: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """Token ids and labels that depend on the seed alone."""
    ids = torch.randint(4, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that want gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW of whatever the model trains now."""
    return torch.optim.AdamW(trained(model), lr=lr)
