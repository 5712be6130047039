"""Decoding from plans with a cache that grows, the default of ``generate``: the bits of eager mode at each length."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.integrate.hf import growing_cache
from disco_accel.step.run.session import current_step
from tests.integrate.generators import assert_same_step
from tests.integrate.test_decoding import ROOMY, SMALL, assert_same, twins
from tests.support.models import TEN_FAMILIES, family_lora, random_batch, tiny_lora


@pytest.fixture(autouse=True)
def _few_lengths_share_a_plan(random_order: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Up to 16, so that a short generation runs from several plans; ops are dispatched at random."""
    monkeypatch.setattr(growing_cache, "_FEWEST", 16)
    yield


def generated(model: Any, tokens: int = 8, length: int = 12, padding: int = 4, **keys: Any) -> Any:
    torch.manual_seed(0)
    ids = random_batch(batch=2, length=length)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    given = {"do_sample": False, "eos_token_id": 95, "pad_token_id": 0} | keys
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **given,
    )


def assert_all_planned(model: Any) -> None:
    found = stats(model)
    assert found["fallbacks"] == [] and found["forwards_unplanned"] == 0 and found["engine"]["c10_allocations"] == 0


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_every_family_decodes_with_eagers_bits(family: str) -> None:
    """Grouped heads, experts, tied embeddings; windows are full when the prompt is read."""
    eager = family_lora(family).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    assert_same(generated(planned), generated(eager))
    assert_all_planned(planned)
    assert stats(planned)["plans"] <= 3, "one for the prompt, one for lengths up to 16, one for those up to 32"


@pytest.mark.parametrize("length", [1, 5])
def test_windows_that_fill_up_on_the_way_have_plans_of_their_own(length: int) -> None:
    """Of 8 tokens. A prompt of one token makes tensors with one token, whose layout knows less."""
    eager = family_lora("mistral").eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    assert_same(generated(planned, 9, length, 0), generated(eager, 9, length, 0))
    assert_all_planned(planned)


@pytest.mark.parametrize(
    "keys", [{"do_sample": True, "temperature": 0.7}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"padding": 0}]
)
def test_samples_beams_and_chunks_are_eagers(keys: dict[str, Any]) -> None:
    planned, eager = twins()
    for _ in range(2):
        assert_same(generated(planned, **keys), generated(eager, **keys))
    assert_all_planned(planned)


def tokens_alone(model: Any, *, change: Callable[[int, Any], None] = lambda *_: None, **keys: Any) -> list[Any]:
    """Logits and cache of a loop of the user's own. ``change``: told of each token and the cache before it."""
    cache, found = DynamicCache(config=model.get_base_model().config), []
    ids = random_batch(batch=3, length=7)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache).logits[:, -1:]
        for token in range(6):
            change(token, cache)
            ids = logits.argmax(-1)[: cache.layers[0].keys.shape[0]]
            length = cache.get_seq_length() + 1
            given = {name: make(ids, length) for name, make in keys.items()}
            logits = model(input_ids=ids, past_key_values=cache, **given).logits
            found.append(logits)
    return [*found, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]


def padded(ids: torch.Tensor, length: int) -> torch.Tensor:
    return (torch.arange(length) >= torch.arange(len(ids))[:, None]).long()


_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"attention_mask": lambda ids, n: torch.ones(len(ids), n, dtype=torch.int64)},
    "padding": {"attention_mask": padded, "position_ids": lambda ids, n: padded(ids, n).sum(-1, keepdim=True) - 1},
    "a part of a larger one": {"attention_mask": lambda ids, n: padded(ids, 40)[:, 40 - n :]},
    "of each head": {"attention_mask": lambda ids, n: torch.zeros(len(ids), 1, 1, n)},
}


@pytest.mark.parametrize("mask", _MASKS)
def test_masks_and_positions_are_as_the_user_gives_them(mask: str) -> None:
    planned, eager = twins()
    assert all(map(torch.equal, tokens_alone(planned, **_MASKS[mask]), tokens_alone(eager, **_MASKS[mask])))
    assert_all_planned(planned)


def _scale(cache: Any) -> None:
    cache.layers[0].keys.mul_(0.5)


def _replace(cache: Any) -> None:
    cache.layers[1].values = cache.layers[1].values.flip(1)


def _scatter(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys.transpose(1, 2).contiguous().transpose(1, 2)


_CHANGES: dict[str, Callable[[Any], None]] = {
    "values": _scale,
    "a tensor": _replace,
    "strides": _scatter,
    "order of rows": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])),
    "fewer rows": lambda cache: cache.batch_select_indices(torch.tensor([0, 2])),
    "fewer tokens": lambda cache: cache.crop(-3),
}


@pytest.mark.parametrize("changed", _CHANGES)
def test_changes_of_the_cache_between_two_tokens_are_followed(changed: str) -> None:
    planned, eager = twins()
    keys = {"change": lambda token, cache: _CHANGES[changed](cache) if token == 3 else None}
    assert all(map(torch.equal, tokens_alone(planned, **keys), tokens_alone(eager, **keys)))
    assert_all_planned(planned)


def test_a_layer_with_other_tokens_than_the_cache_counts_is_named() -> None:
    planned, eager = twins()
    keys = {"change": lambda token, cache: cache.layers[1].crop(-2) if token == 3 else None}
    keys |= {"attention_mask": lambda ids, n: torch.ones(len(ids), 1, 1, 1)}
    assert all(map(torch.equal, tokens_alone(planned, **keys), tokens_alone(eager, **keys)))
    assert [reason for reason in stats(planned)["fallbacks"] if "layer 1 holds" in reason]


class _Python(torch.nn.Module):
    """Does something else from 14 tokens on, as ``kind`` says."""

    def __init__(self, inner: torch.nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, hidden: torch.Tensor, **keys: Any) -> Any:
        length = keys["past_key_values"].get_seq_length() + hidden.shape[1] if keys["past_key_values"] else 1
        if self.kind == "a branch" and length >= 14:
            hidden = hidden * 1.25
        if self.kind == "a root":
            hidden = hidden * math.sqrt(length)
        if self.kind == "a remainder":
            hidden = hidden * (length % 3)
        return self.inner(hidden, **keys)


@pytest.mark.parametrize("kind", ["a branch", "a root", "a remainder"])
def test_python_that_knows_the_length_is_refused_and_told_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    eager = tiny_lora(**SMALL).eval()
    layers = eager.get_base_model().model.layers
    layers[1] = _Python(layers[1], kind)
    planned = prepare(copy.deepcopy(eager), ROOMY)
    assert_same(generated(planned), generated(eager))
    (reason,) = stats(planned)["fallbacks"]
    assert "does not depend on the cache's length by sizes alone" in reason and "static" in reason
    assert [m for m in caplog.messages if "without a plan" in m] == [
        f"generate's decoding runs without a plan: {reason}"
    ]


@pytest.mark.parametrize("where", ["of adapters", "of attention"])
def test_dropout_in_training_mode_draws_as_eager_does(where: str) -> None:
    """That of attention draws a number for each token of the cache: the generator behind it knows the length."""
    eager = tiny_lora(**SMALL, attention_dropout=0.3 if where == "of attention" else 0.0)
    for module in eager.modules():
        if where == "of adapters" and hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.3)
    planned = prepare(copy.deepcopy(eager), ROOMY)
    assert_same(generated(planned), generated(eager))
    reasons = stats(planned)["fallbacks"]
    if where == "of adapters":
        assert not reasons
    else:
        assert len(reasons) == 1 and "call model.eval(), or pass cache_implementation" in reasons[0]


def test_attentions_of_all_tokens_run_as_they_are() -> None:
    eager = tiny_lora(**SMALL).eval()
    eager.set_attn_implementation("eager")
    planned = prepare(copy.deepcopy(eager), ROOMY)
    keys = {"output_attentions": True}
    ours, eagers = generated(planned, 4, **keys), generated(eager, 4, **keys)
    assert_same(ours, eagers)
    assert any("attentions.0: its size depends on the length" in reason for reason in stats(planned)["fallbacks"])


class _Budgets(BaseStreamer):
    """Moves the budget of a model behind some tokens."""

    def __init__(self, model: Any, budgets: dict[int, str]) -> None:
        self.model, self.budgets, self.tokens = model, budgets, 0

    def put(self, value: Any) -> None:
        self.tokens += 1
        if self.tokens in self.budgets:
            set_memory_budget(self.model, self.budgets[self.tokens])

    def end(self) -> None:
        pass


def test_the_budget_moves_between_two_tokens() -> None:
    eager = tiny_lora(layers=4, hidden=64, vocabulary=96).eval()
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="1MiB", device="cpu"))

    def alone(model: Any, **keys: Any) -> Any:
        ids = random_batch(batch=1, length=5)["input_ids"]
        more = {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": 95, "pad_token_id": 0}
        return model.generate(input_ids=ids, max_new_tokens=14, do_sample=False, **more, **keys)

    budgets = {4: "500KiB", 9: "2MiB"}
    assert_same(alone(planned, streamer=_Budgets(planned, budgets)), alone(eager))
    assert_all_planned(planned)


def test_a_plan_for_fewer_lengths_is_made_where_one_for_all_does_not_fit() -> None:
    """A cache for 128 tokens takes 256 KiB, one for 72 tokens 144."""
    eager = tiny_lora(layers=4, hidden=64, vocabulary=96).eval()
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="600KiB", device="cpu"))
    keys = {"prefill_chunk_size": 16}
    assert_same(generated(planned, 3, 66, 0, **keys), generated(eager, 3, 66, 0, **keys))
    assert_all_planned(planned)
    lengths = current_step(planned).captured.lengths
    assert lengths is not None and lengths.between.longest < 128
    assert current_step(planned).budget.total <= 600 << 10
    assert current_step(planned).settings.fusing is None, "a fused kernel is compiled for one length"


def test_two_threads_decode_at_lengths_of_their_own() -> None:
    planned, eager = twins()
    wanted = {length: generated(eager, 6, length, 0) for length in (3, 8)}
    found: dict[int, Any] = {}
    # Sampling is off: the generator is shared.
    threads = [threading.Thread(target=lambda n=n: found.update({n: generated(planned, 6, n, 0)})) for n in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, result in wanted.items():
        assert_same(found[length], result)
    assert_all_planned(planned)


def test_steps_and_rollouts_take_turns() -> None:
    """As in reinforcement learning: adapters change between two generations."""
    planned, eager = twins()
    batch = random_batch(batch=2, length=12)
    for _ in range(2):
        for model in (planned, eager):
            model.train()
        assert_same_step(eager, planned, batch)
        for model in (planned, eager):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.add_(0.1)
            model.eval()
        assert_same(generated(planned), generated(eager))
    assert_all_planned(planned)
