"""Random sequences of what users do to a model and with it: every output is eager's, no plan is ever stale.

DISCO_SEQUENCES sets how many (10 in CI; a thousand take a quarter of an hour or more). A failure names its seed and
what was done.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import CaptureError
from disco_accel.step.run.session import STATE
from tests.integrate.generators import gradients
from tests.integrate.test_buckets import padded
from tests.support.models import random_batch, tiny_lora

SEQUENCES = int(os.environ.get("DISCO_SEQUENCES", "10"))
SEQUENCES_PER_MODEL = 50
ACTIONS = 4
SHAPES = ((2, 8), (2, 13))
BUCKETS = (8, 16)
Batch = dict[str, torch.Tensor]
Results = dict[str, torch.Tensor | None]


class Pair:
    """A prepared model and its eager twin, to which the same is done."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log: list[str] = []
        shape: Any = {"layers": 1, "hidden": 32, "vocabulary": 32, "attention_dropout": 0.1}
        self.models: list[Any] = [tiny_lora(**shape), tiny_lora(**shape)]
        config = DiscoConfig(
            memory_budget=rng.choice([400_000, 1 << 30]),
            device="cpu",
            planner=rng.choice(["build", "timed"]),
            buckets=BUCKETS,
            plan_cache=None,
        )
        prepare(self.models[0], config)
        self.models[0].__dict__[STATE].engine = {"dispatch": rng.choice(["priority", "random"])}
        self.optimizers = [torch.optim.AdamW(_trainable(m), lr=1e-2) for m in self.models]
        self.autocast = False
        self.compared = 0

    def batch(self) -> Batch:
        """Of one of few shapes, so that plans are met again; sometimes with padding of its own."""
        rows, length = self.rng.choice(SHAPES)
        batch = random_batch(32, batch=rows, length=length, seed=self.rng.randrange(1 << 30))
        if self.rng.random() < 0.15:
            batch["attention_mask"][0, -3:], batch["labels"][0, -3:] = 0, -100
        return batch

    def padded(self, batch: Batch) -> Batch:
        """``batch`` as the prepared model pads it."""
        return padded(batch, min(n for n in BUCKETS if n >= batch["input_ids"].shape[1]))

    def step(self, model: Any, batch: Batch) -> Any:
        """The output of a step; the eager model gets what the prepared one makes of the batch."""
        if model is self.models[1]:
            batch = self.padded(batch)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            return model(**batch)

    def same(self, run: Callable[[Any], Results]) -> None:
        """``run(model)`` gives equal bits on both, and leaves the generator in equal states."""
        seed = self.rng.randrange(1 << 30)
        found = []
        for model in self.models:
            torch.manual_seed(seed)
            found.append(run(model) | {"generator": torch.get_rng_state()})
        got, expected = found
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            other = got[name]
            assert (value is None) == (other is None), name
            assert value is None or (other is not None and torch.equal(other, value)), name
        self.compared += 1


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def training_step(pair: Pair) -> None:
    """Two micro-batches half of the time; then the optimizer, most of the time."""
    batches = [pair.batch() for _ in range(pair.rng.choice([1, 2]))]

    def run(model: Any) -> Results:
        losses = {}
        for i, batch in enumerate(batches):
            loss = pair.step(model, batch).loss
            (loss / len(batches)).backward()
            losses[f"loss{i}"] = loss.detach()
        return losses | gradients(model)

    pair.same(run)
    if pair.rng.random() < 0.8:
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two_forwards(pair: Pair) -> None:
    """Before their backwards, which come in either order."""
    batches, order = [pair.batch(), pair.batch()], pair.rng.choice([(0, 1), (1, 0)])

    def run(model: Any) -> Results:
        model.zero_grad(set_to_none=True)
        losses = [pair.step(model, b).loss for b in batches]
        states = torch.get_rng_state()
        for i in order:
            losses[i].backward()
        return {"loss0": losses[0].detach(), "loss1": losses[1].detach(), "then": states, **gradients(model)}

    pair.same(run)


def dropped_forward(pair: Pair) -> None:
    batch = pair.batch()
    pair.same(lambda model: {"loss": pair.step(model, batch).loss.detach()})


def loss_outside(pair: Pair) -> None:
    """Computed from logits, which come back without padding."""
    batch = pair.batch()
    length = batch["input_ids"].shape[1]
    labels = batch.pop("labels").clamp(min=0)

    def run(model: Any) -> Results:
        model.zero_grad(set_to_none=True)
        logits = pair.step(model, batch).logits[:, :length].contiguous()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
        return {"logits": logits.detach(), **gradients(model)}

    pair.same(run)


def without_gradients(pair: Pair, forward: Callable[[Any, Batch], Any]) -> None:
    """``forward``, padded like a step, unless it runs without a plan."""
    own = pair.batch()
    length, before = own["input_ids"].shape[1], stats(pair.models[0])["forwards_unplanned"]

    def run(model: Any) -> Results:
        planned = stats(pair.models[0])["forwards_unplanned"] == before
        batch = pair.padded(own) if model is pair.models[1] and planned else own
        with torch.no_grad():
            output = forward(model, batch)
        return {"loss": output.loss, "logits": output.logits[:, :length]}

    pair.same(run)


def evaluation(pair: Pair) -> None:
    adapter = pair.rng.random() < 0.7

    def forward(model: Any, batch: Batch) -> Any:
        training = model.training
        model.eval()
        with nullcontext() if adapter else model.disable_adapter():
            output = model(**batch)
        model.train(training)
        return output

    without_gradients(pair, forward)


def step_without_adapter(pair: Pair) -> None:
    """Refused, unless something else can be trained."""
    batch = pair.batch()
    others = any("lora" not in n for n, p in pair.models[0].named_parameters() if p.requires_grad)
    if others:
        return
    with pair.models[0].disable_adapter(), pytest.raises(CaptureError):
        pair.step(pair.models[0], batch)


def toggle_mode(pair: Pair) -> None:
    for model in pair.models:
        model.train(not model.training)


def toggle_checkpointing(pair: Pair) -> None:
    for model in pair.models:
        if model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def toggle_dropout(pair: Pair) -> None:
    p = pair.rng.choice([0.0, 0.25])
    for model in pair.models:
        for layer in model.base_model.model.model.layers:
            layer.self_attn.attention_dropout = p


def toggle_autocast(pair: Pair) -> None:
    pair.autocast = not pair.autocast


def toggle_base_weight(pair: Pair) -> None:
    for model in pair.models:
        weight = model.get_parameter("base_model.model.model.norm.weight")
        weight.requires_grad_(not weight.requires_grad)
        weight.grad = None


def reload_weights(pair: Pair) -> None:
    factor, assign = 1 + pair.rng.randrange(1, 5) / 64, pair.rng.random() < 0.3
    adapters_alone = pair.rng.random() < 0.5
    for model in pair.models:
        chosen = {n: t * factor for n, t in model.state_dict().items() if "lora_" in n or not adapters_alone}
        model.load_state_dict(chosen, strict=False, assign=assign)
    if assign:
        pair.optimizers = [torch.optim.AdamW(_trainable(m), lr=1e-2) for m in pair.models]


def write_base(pair: Pair) -> None:
    through_data = pair.rng.random() < 0.5
    for model in pair.models:
        weight = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        with torch.no_grad():
            (weight.data if through_data else weight).mul_(0.96875)


def merge_and_unmerge(pair: Pair) -> None:
    for model in pair.models:
        model.merge_adapter()
    without_gradients(pair, lambda model, batch: model(**batch))
    for model in pair.models:
        model.unmerge_adapter()


RUNS = [training_step, training_step, training_step, two_forwards, dropped_forward, loss_outside, evaluation]
CHANGES = [
    step_without_adapter,
    toggle_mode,
    toggle_checkpointing,
    toggle_dropout,
    toggle_autocast,
    toggle_base_weight,
    reload_weights,
    write_base,
    merge_and_unmerge,
]


def test_every_output_of_a_random_sequence_is_eagers() -> None:
    """Runs and changes in random order on models that live on: plans are met again under other circumstances."""
    compared = planned = hits = 0
    for first in range(0, SEQUENCES, SEQUENCES_PER_MODEL):
        pair = Pair(random.Random(first))
        for seed in range(first, min(first + SEQUENCES_PER_MODEL, SEQUENCES)):
            pair.rng.seed(seed)
            for _ in range(ACTIONS):
                action = pair.rng.choice(RUNS if pair.rng.random() < 0.75 else CHANGES)
                pair.log.append(f"{seed}: {action.__name__}")
                try:
                    action(pair)
                except Exception as error:
                    error.add_note(" ".join(pair.log))
                    raise
        seen = stats(pair.models[0])
        assert seen["steps_eager"] == 0 and seen["fallbacks"] == []
        compared, planned, hits = compared + pair.compared, planned + seen["steps_compiled"], hits + seen["plan_hits"]
        print(f"{seed + 1} sequences: {compared} comparisons, {planned} planned steps, {hits} plans met again")
    assert compared > 2 * SEQUENCES and hits > SEQUENCES
