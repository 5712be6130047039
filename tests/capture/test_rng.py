"""Random ops in the captured graph: the chain of live draws, the replays, and what cannot be replayed says so."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.capture.checkpointing import checkpointed
from disco_accel.capture.step import capture_step
from disco_accel.errors import CaptureError
from tests.capture.steps import assert_same_bits, assert_well_formed, capture, run_captured, run_eager
from tests.support.models import family_lora, random_batch


def ancestors(step: CapturedStep, vertex: int) -> set[int]:
    found: set[int] = set()
    todo = [vertex]
    while todo:
        current = step.graph.vertices[todo.pop()]
        for before in (*(producer for producer, _ in current.inputs), *current.after):
            if before not in found:
                found.add(before)
                todo.append(before)
    return found


def test_edges_fix_the_order_of_draws() -> None:
    """Live draws are a chain before the loss, each replay follows the draw of its slot; slots are used once."""
    step = capture(family_lora("llama", checkpointing=True, lora_dropout=0.1, dropout=0.1), random_batch())
    assert_well_formed(step.graph)
    sites = {v: call.rng for v, call in step.graph.ops.items() if call.rng is not None}
    live = [v for v, site in sites.items() if not site.replay]
    owner = {sites[v].slot: v for v in live}
    assert len(live) == 2 * 8 == len(owner)
    assert all(first in step.graph.vertices[then].after for first, then in itertools.pairwise(live))
    assert set(live) <= ancestors(step, step.outputs[0].ref[0])
    replays = [v for v, site in sites.items() if site.replay]
    assert len(replays) == len(live)
    assert all(owner[sites[v].slot] in ancestors(step, v) for v in replays)


def test_capture_leaves_the_generator_alone_and_the_graph_draws_as_eager() -> None:
    model = family_lora("gpt2", checkpointing=True, lora_dropout=0.1, dropout=0.1)
    batch = random_batch()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    step = capture(model, batch)
    assert torch.equal(torch.get_rng_state(), before)
    expected = run_eager(model, batch, nullcontext())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert_same_bits(run_captured(step, model, batch), expected)
    assert torch.equal(torch.get_rng_state(), after)


class Toy(nn.Module):
    """``rule`` on the output of a linear layer; the sum is the loss unless ``rule`` gives one."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rule = rule

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.rule(self.first(x))
        return {"loss": found if found.dim() == 0 else found.sum()}


def unread(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    torch.empty(5).normal_()
    return x * torch.rand_like(x)


@pytest.mark.parametrize(
    "rule",
    [
        lambda x: functional.dropout(x, 0.5, True),
        lambda x: x + torch.randn_like(x),
        unread,
        lambda x: x * x.detach().clone().uniform_(0.9, 1.1),
        lambda x: x[:, torch.randperm(4)] * torch.randint(0, 9, (2, 4)),
        lambda x: functional.alpha_dropout(x, 0.3, True),
    ],
    ids=["dropout", "randn_like", "unread", "uniform", "randperm", "alpha_dropout"],
)
def test_each_way_of_drawing_is_eagers(rule: Any) -> None:
    """Also numbers that nobody reads, and a second half of a pair of normals that the generator keeps."""
    model, batch = Toy(rule), {"x": torch.randn(2, 4)}
    step = capture_step(model, batch)
    torch.manual_seed(1)
    loss = model(**batch)["loss"]
    loss.backward()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    got = run_captured(step, model, batch)
    assert_same_bits(got, (loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert torch.equal(torch.get_rng_state(), after)


def seeding(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x * torch.rand_like(x)


def unlike(x: torch.Tensor) -> torch.Tensor:
    """Draws from another distribution when it is recomputed."""
    unlike.calls += 1  # type: ignore[attr-defined]
    drawn = torch.rand(2, 4) if unlike.calls % 2 else torch.randn(2, 4)  # type: ignore[attr-defined]
    return (x * drawn).exp() * x


unlike.calls = 0  # type: ignore[attr-defined]


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return functional.dropout(y.exp(), 0.5, True).sin()

    return checkpointed(lambda y: checkpointed(inner, y, use_reentrant=False).exp(), x, use_reentrant=False)


def late(x: torch.Tensor) -> torch.Tensor:
    loss = x.sum()
    torch.rand(3)
    return loss


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (seeding, r"manual_seed.*outside of the forward"),
        (late, r"rand.*compute the loss last"),
        (lambda x: checkpointed(unlike, x, use_reentrant=False), r"rand.*recomputation.*same both times"),
        (nested, r"bernoulli_.*inside another one"),
        (
            lambda x: checkpoint(
                lambda y: functional.dropout(y.exp(), 0.5, True).sin(), x, use_reentrant=False, preserve_rng_state=False
            ),
            r"bernoulli_.*gradient_checkpointing_enable",
        ),
        (lambda x: x * torch.rand(2, 4, generator=torch.Generator()), r"leave out generator="),
    ],
    ids=["seeds itself", "after the loss", "another recomputation", "nested", "unknown checkpoint", "own generator"],
)
def test_what_cannot_be_replayed_is_refused(rule: Any, message: str) -> None:
    torch.manual_seed(2)
    model = Toy(rule)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=message):
        capture_step(model, {"x": torch.ones(2, 4)})
    assert torch.equal(torch.get_rng_state(), before)
