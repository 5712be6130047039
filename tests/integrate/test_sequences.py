"""Random sequences of what users do to a model and with it: every output is eager's, no plan is ever stale.

DISCO_SEQUENCES sets how many of each kind (10 in CI; a thousand take a quarter of an hour or more, with generations an
hour). A failure names its seed and what was done.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.errors import CaptureError
from disco_accel.integrate.hf import growing_cache
from disco_accel.step.run.session import STATE
from tests.integrate.generators import gradients
from tests.integrate.test_buckets import padded
from tests.support.models import random_batch, tiny_lora

SEQUENCES = int(os.environ.get("DISCO_SEQUENCES", "10"))
SEQUENCES_PER_MODEL = 50
ACTIONS = 4
SHAPES = ((2, 8), (2, 13))
BUCKETS = (8, 16)
BUDGETS = (300_000, 400_000, 600_000, 1 << 30)
CAPACITY = 24
Batch = dict[str, torch.Tensor]
Results = dict[str, torch.Tensor | None]


class Pair:
    """A prepared model and its eager twin, to which the same is done."""

    def __init__(self, rng: random.Random, generates: bool) -> None:
        """``generates``: without buckets, which would pad prompts."""
        self.rng = rng
        self.log: list[str] = []
        shape: Any = {"layers": 1, "hidden": 32, "vocabulary": 32, "attention_dropout": 0.1}
        self.models: list[Any] = [tiny_lora(**shape), tiny_lora(**shape)]
        self.buckets = () if generates else BUCKETS
        own: dict[str, Any] = {"planner": rng.choice(["build", "timed"]), "buckets": BUCKETS}
        if generates:
            own = rng.choice([{}, {"optimizer": "host"}, {"optimizer": "host", "update": "deferred"}])
            own = {"plan_seconds": 0.05, **own}
        budget = rng.choice([400_000, 1 << 30])
        prepare(self.models[0], DiscoConfig(memory_budget=budget, device="cpu", plan_cache=None, quiet=True, **own))
        self.models[0].__dict__[STATE].engine = {"dispatch": rng.choice(["priority", "random"])}
        self.optimizers = [torch.optim.AdamW(_trainable(m), lr=1e-2) for m in self.models]
        self.autocast = False
        self.compared = 0
        self.caches: list[Any] = []
        """Of each model: the tokens of a loop of the user's own, which goes on between other things."""
        self.next = torch.empty(0)

    def batch(self) -> Batch:
        """Of one of few shapes, so that plans are met again; sometimes with padding of its own."""
        rows, length = self.rng.choice(SHAPES)
        batch = random_batch(32, batch=rows, length=length, seed=self.rng.randrange(1 << 30))
        if self.rng.random() < 0.15:
            batch["attention_mask"][0, -3:], batch["labels"][0, -3:] = 0, -100
        return batch

    def padded(self, batch: Batch) -> Batch:
        """``batch`` as the prepared model pads it."""
        length = batch["input_ids"].shape[1]
        return padded(batch, min((n for n in self.buckets if n >= length), default=length))

    def step(self, model: Any, batch: Batch) -> Any:
        """The output of a step; the eager model gets what the prepared one makes of the batch."""
        if model is self.models[1]:
            batch = self.padded(batch)
        with self.casts():
            return model(**batch)

    def casts(self) -> Any:
        """The autocast region that the user is in."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

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


class _Interrupts(BaseStreamer):
    """Ends a generation behind some tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def put(self, value: Any) -> None:
        self.tokens -= 1
        if self.tokens < 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def generation(pair: Pair) -> None:
    """Greedy, sampled or with beams, in training mode too, interrupted sometimes; with each kind of cache."""
    rng = pair.rng
    ids = pair.batch()["input_ids"][: rng.choice([1, 2]), : rng.choice([3, 6])]
    mask = torch.ones_like(ids)
    mask[0, : rng.choice([0, 0, 2])] = 0
    # A static cache has the model's data type, not that of an autocast region, and is not filled in training mode.
    kind = None if pair.autocast or pair.models[0].training else rng.choice([None, "static", "offloaded_static"])
    keys: dict[str, Any] = rng.choice([{"do_sample": False}, {"do_sample": True}, {"num_beams": 2, "do_sample": False}])
    tokens, stop = rng.choice([2, 4, 14]), rng.choice([None, None, 2]) if "num_beams" not in keys else None
    more = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    more |= {"return_dict_in_generate": True, "output_logits": True}

    def run(model: Any) -> Results:
        # On a CPU a cache in host memory is eager's static one.
        own = "static" if kind is not None and model is pair.models[1] else kind
        streamer = None if stop is None else _Interrupts(stop)
        try:
            with pair.casts():
                given = {**keys, **more, "streamer": streamer, "cache_implementation": own}
                found = model.generate(input_ids=ids, attention_mask=mask, **given)
        except KeyboardInterrupt:
            return {}
        return {"tokens": found.sequences, **{f"logits{i}": logits for i, logits in enumerate(found.logits)}}

    pair.same(run)


def next_token(pair: Pair) -> None:
    """Of the user's own loop, which begins with a prompt; growing caches are changed sometimes."""
    rng = pair.rng
    full = bool(pair.caches) and pair.caches[1].get_seq_length() >= CAPACITY - 1
    if not pair.caches or full or rng.random() < 0.1:
        config, pair.next = pair.models[1].get_base_model().config, pair.batch()["input_ids"][:, :5]
        grows = pair.autocast or rng.random() < 0.5
        pair.caches = [
            DynamicCache(config=config) if grows else StaticCache(config=config, max_cache_len=CAPACITY) for _ in "01"
        ]
    elif isinstance(pair.caches[0], DynamicCache) and rng.random() < 0.3:
        change = rng.choice(
            [
                lambda cache: cache.crop(-2),
                lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
                lambda cache: cache.layers[0].keys.mul_(0.5),
            ]
        )
        for cache in pair.caches:
            change(cache)
    ids, filled = pair.next, int(pair.caches[1].get_seq_length())
    places = torch.arange(filled, filled + ids.shape[1])[None].expand(len(ids), -1)
    region = nullcontext() if isinstance(pair.caches[0], StaticCache) else pair.casts()

    def run(model: Any) -> Results:
        cache = pair.caches[pair.models.index(model)]
        training = model.training
        model.eval()
        with torch.no_grad(), region:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=places).logits
        model.train(training)
        pair.next = logits[:, -1:].argmax(-1)
        filled = {
            f"{name}{i}": getattr(x, name).clone() for i, x in enumerate(cache.layers) for name in ("keys", "values")
        }
        return {"logits": logits, **filled}

    pair.same(run)


def move_budget(pair: Pair) -> None:
    set_memory_budget(pair.models[0], pair.rng.choice(BUDGETS))


def write_adapter(pair: Pair) -> None:
    name, through_data = pair.rng.choice(["q_proj", "down_proj"]), pair.rng.random() < 0.5
    for model in pair.models:
        weights = (p for n, p in model.named_parameters() if name in n and "lora_A" in n)
        with torch.no_grad():
            for weight in weights:
                (weight.data if through_data else weight).mul_(0.96875)


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
ROLLOUTS = [generation, generation, next_token, next_token, next_token, next_token]
MOVES = [move_budget, move_budget, write_adapter]


@pytest.mark.parametrize("generates", [False, True])
def test_every_output_of_a_random_sequence_is_eagers(generates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and changes in random order on models that live on: plans are met again under other circumstances."""
    # A generation runs from several plans.
    monkeypatch.setattr(growing_cache, "_FEWEST", 16)
    runs = RUNS + (generates * ROLLOUTS)
    changes = CHANGES + (generates * MOVES)
    compared = planned = hits = 0
    for first in range(0, SEQUENCES, SEQUENCES_PER_MODEL):
        pair = Pair(random.Random(first), generates)
        for seed in range(first, min(first + SEQUENCES_PER_MODEL, SEQUENCES)):
            pair.rng.seed(seed)
            for _ in range(ACTIONS):
                action = pair.rng.choice(runs if pair.rng.random() < 0.75 else changes)
                pair.log.append(f"{seed}: {action.__name__}")
                try:
                    action(pair)
                except Exception as error:
                    error.add_note(" ".join(pair.log))
                    raise
        seen = stats(pair.models[0])
        assert seen["steps_eager"] == 0 and (generates or seen["fallbacks"] == [])
        compared, planned, hits = compared + pair.compared, planned + seen["steps_compiled"], hits + seen["plan_hits"]
        print(f"{seed + 1} sequences: {compared} comparisons, {planned} planned steps, {hits} plans met again")
    assert compared > 2 * SEQUENCES and hits > SEQUENCES
