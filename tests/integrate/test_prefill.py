"""Prefill from a plan: keys, values, logits and tokens as ``generate`` has them without us, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from disco_accel import DiscoConfig, prefill, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError, ExecutionError
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.integrate.hf.kv_cache import fill
from disco_accel.plan.summary import resident_bytes, swapped_bytes
from disco_accel.step.run.session import current_step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch, tiny_lora

SMALL = {"layers": 2, "hidden": 32, "vocabulary": 96}
ROOMY = DiscoConfig(memory_budget="16MiB", device="cpu", planner="build")


def prompt(rows: int = 2, tokens: int = 20, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and mask; all rows but the last have padding on the left."""
    ids = random_batch(batch=rows, length=tokens, seed=seed)["input_ids"]
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 5 + row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, torch.Tensor], tokens: int = 1, **keys: Any) -> Any:
    return model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=95,
        pad_token_id=0,
        **keys,
    )


def assert_same_cache(got: Any, expected: Any) -> None:
    assert len(got.layers) == len(expected.layers) > 0
    for ours, eagers in zip(got.layers, expected.layers, strict=True):
        assert type(ours) is type(eagers)
        assert torch.equal(ours.keys, eagers.keys) and torch.equal(ours.values, eagers.values)
        assert ours.get_seq_length() == eagers.get_seq_length()


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_every_family_has_eagers_cache_logits_and_tokens(family: str) -> None:
    """Left padding, grouped heads, sliding windows, tied embeddings and experts; ops dispatched at random."""
    eager = family_lora(family).eval()
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="8MiB", planner="build"))
    first, inputs = generated(eager, prompt()), prompt()
    got = prefill(planned, **inputs)
    assert_same_cache(got.past_key_values, first.past_key_values)
    assert torch.equal(got.logits[:, -1], first.logits[0])
    ours, theirs = generated(planned, inputs, 6), generated(eager, inputs, 6)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    assert stats(planned)["plans"] == 2, "prefill() and generate share that of the prompt"
    assert stats(planned)["prefills"] == 2 and stats(planned)["fallbacks"] == []


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_chunks_are_eagers_chunks_and_the_whole_prompt_to_rounding(family: str) -> None:
    """The last chunk is shorter; windows of 8 tokens move on inside and between chunks of 7."""
    eager = family_lora(family).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    inputs = prompt()
    chunked, whole = generated(eager, inputs, prefill_chunk_size=7), generated(eager, inputs)
    for _ in range(2):
        got = prefill(planned, **inputs, chunk=7)
        assert_same_cache(got.past_key_values, chunked.past_key_values)
        assert torch.equal(got.logits[:, -1], chunked.logits[0])
        torch.testing.assert_close(got.logits[:, -1], whole.logits[0])
    assert stats(planned)["plans"] == 3 and stats(planned)["plan_hits"] == 3
    assert torch.equal(
        generated(planned, inputs, 4, prefill_chunk_size=7).sequences, generated(eager, inputs, 4).sequences
    )
    assert stats(planned)["plans"] == 4 and stats(planned)["fallbacks"] == []


def test_a_cache_can_be_continued_by_prefill_and_by_generate() -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    ids = prompt(1, 20)["input_ids"]
    begun = prefill(planned, ids[:, :12])
    cache = prefill(planned, ids[:, 12:], past_key_values=begun.past_key_values).past_key_values
    assert cache is begun.past_key_values and cache.get_seq_length() == 20
    expected = DynamicCache(config=eager.config)
    with torch.no_grad():
        eager(ids[:, :12], past_key_values=expected, use_cache=True)
        eager(ids[:, 12:], past_key_values=expected, use_cache=True)
    assert_same_cache(cache, expected)
    more = torch.cat([ids, ids[:, :3]], dim=1)
    inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    ours = generated(planned, inputs, 4, past_key_values=cache)
    assert torch.equal(ours.sequences, generated(eager, inputs, 4, past_key_values=expected).sequences)
    assert stats(planned)["fallbacks"] == [] and stats(planned)["prefills"] == 3


def test_a_pending_training_step_survives(caplog: pytest.LogCaptureFixture) -> None:
    """A prefill between a step's forward and its backward changes neither; with dropout, so that draws count too."""
    eager = tiny_lora(**SMALL, attention_dropout=0.2)
    planned = prepare(copy.deepcopy(eager), ROOMY)
    batch, inputs = random_batch(length=12), prompt()
    for model in (eager, planned):
        torch.manual_seed(3)
        loss = model(**batch).loss
        state = torch.get_rng_state()
        model.eval()
        generated(model, inputs) if model is eager else prefill(model, **inputs)
        model.train()
        torch.set_rng_state(state)
        loss.backward()
    for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    assert stats(planned)["steps_compiled"] == 1 and stats(planned)["prefills"] == 1
    assert not [r for r in caplog.records if r.levelname == "WARNING"], "a prefill is no step that lacks gradients"


def test_dropout_in_training_mode_draws_as_eager_draws() -> None:
    eager = tiny_lora(**SMALL, attention_dropout=0.3)
    planned = prepare(copy.deepcopy(eager), ROOMY)
    found = []
    for model in (eager, planned):
        torch.manual_seed(5)
        found.append((generated(model, prompt()).logits[0], torch.get_rng_state()))
    assert stats(planned)["prefills"] == 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_unprepared_model_is_frozen_until_it_is_restored() -> None:
    """Without an adapter every weight requires a gradient before; training afterwards starts with prepare()."""
    eager = tiny_lora(**SMALL).merge_and_unload().requires_grad_(True).eval()
    model = copy.deepcopy(eager)
    got = prefill(model, **prompt(), config=ROOMY)
    expected = generated(eager, prompt())
    assert_same_cache(got.past_key_values, expected.past_key_values)
    # By requires_grad PyTorch chooses between products.
    torch.testing.assert_close(got.logits[:, -1], expected.logits[0])
    frozen = generated(copy.deepcopy(eager).requires_grad_(False), prompt())
    assert torch.equal(got.logits[:, -1], frozen.logits[0])
    assert not any(p.requires_grad for p in model.parameters())
    batch = random_batch(length=12)
    assert torch.equal(model(**batch).loss, eager(**batch).loss), "outside prefill the model is its own"
    assert torch.equal(prefill(model, **prompt()).logits, got.logits), "prepared now, so that no config is needed"
    assert restore(model) is model and stats(model) == {}
    assert all(p.requires_grad for p in model.parameters())
    assert "_prefill" not in model.__dict__ and "forward" not in model.__dict__
    assert torch.equal(generated(model, prompt()).logits[0], expected.logits[0])


def test_prepare_makes_a_frozen_model_trainable_again() -> None:
    model, eager = tiny_lora(**SMALL), tiny_lora(**SMALL)
    prefill(model, **prompt(), config=ROOMY)
    prepare(model, ROOMY)
    batch = random_batch(length=12)
    model(**batch).loss.backward()
    eager(**batch).loss.backward()
    assert stats(model)["steps_compiled"] == 1
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_weights_larger_than_the_budget_are_streamed_within_it() -> None:
    """Run after run from one plan; the least budget that the error names works, one byte less does not."""
    eager = tiny_lora(layers=2, hidden=64).merge_and_unload().eval()
    model, inputs = copy.deepcopy(eager), prompt()
    with pytest.raises(BudgetTooSmall) as refusal:
        prefill(model, **inputs, config=DiscoConfig(memory_budget=10_000, device="cpu", plan_cache=None))
    needed = refusal.value.needed
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert needed < weights
    with pytest.raises(BudgetTooSmall):
        prefill(model, **inputs, config=DiscoConfig(memory_budget=needed - 1, device="cpu", plan_cache=None))
    expected = generated(eager, inputs)
    for _ in range(3):
        got = prefill(model, **inputs, config=DiscoConfig(memory_budget=needed, device="cpu", plan_cache=None))
        assert torch.equal(got.logits[:, -1], expected.logits[0])
        assert_same_cache(got.past_key_values, expected.past_key_values)
    step, figures = current_step(model), stats(model)
    assert step is not None and swapped_bytes(step.plan, swaps_in) > 0
    assert figures["plans"] == 1 and figures["peak_bytes"] <= needed
    cache = sum(t.nbytes for layer in got.past_key_values.layers for t in (layer.keys, layer.values))
    assert figures["budget"]["outputs"] >= cache + got.logits.nbytes, "what leaves the arena is paid for"


def test_the_next_prefill_starts_with_what_the_last_one_brought_home() -> None:
    model = tiny_lora(**{**SMALL, "hidden": 128}).eval().requires_grad_(False)
    weights = sum(p.nbytes for p in model.parameters())
    prefill(model, ids(1, 8), config=DiscoConfig(memory_budget=weights // 2, link_bandwidth=1e7))
    step = current_step(model)
    assert step is not None and resident_bytes(step.plan) > 0 and swapped_bytes(step.plan, swaps_in) > 0
    step.executor.set_tracing(True)
    # The link is so slow that the run has not ended when its logits are there.
    prefill(model, ids(1, 8))
    step.settle()
    inputs = {vertex.id for vertex in step.plan.vertices if vertex.kind is VertexKind.INPUT}
    copied = [event.vertex for event in step.executor.events() if event.lane == "h2d"]
    assert copied and inputs.isdisjoint(copied)


def test_a_cache_is_paid_for_once() -> None:
    """Each layer more costs its keys and values one time; the last layer's are joined with what is there."""
    needed, keys = [], {"device": "cpu", "plan_cache": None, "planner": "build"}
    for layers in (3, 6):
        model = tiny_lora(layers=layers, hidden=32, vocabulary=32).merge_and_unload().eval()
        with pytest.raises(BudgetTooSmall) as refusal:
            prefill(model, ids(1, 256), config=DiscoConfig(memory_budget=10_000, **keys))
        needed.append(refusal.value.needed)
        got = prefill(model, ids(1, 256), config=DiscoConfig(memory_budget=needed[-1], **keys))
        cache = sum(t.nbytes for layer in got.past_key_values.layers for t in (layer.keys, layer.values))
    assert needed[1] - needed[0] <= 1.05 * cache / 2


def test_what_has_joined_the_cache_is_freed_although_the_run_may_hold_it() -> None:
    cache = DynamicCache()
    found = {f"{i}.{name}": torch.randn(1, 2, 3, 4) for i in range(2) for name in ("keys", "values")}
    expected = {name: tensor.clone() for name, tensor in found.items()}
    fill(cache, found, 3)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in found.values())
    assert torch.equal(cache.layers[1].keys, expected["1.keys"])


def test_a_changed_weight_is_seen_by_the_next_prefill() -> None:
    """Also while the last run still brings weights home."""
    model = tiny_lora(**SMALL).merge_and_unload().eval()
    config = DiscoConfig(memory_budget="16MiB", device="cpu")
    before = prefill(model, **prompt(), config=config).logits
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    after = prefill(model, **prompt()).logits
    assert not torch.equal(before, after)
    assert torch.equal(after[:, -1], generated(copy.deepcopy(model), prompt()).logits[0])


def test_each_adapter_state_has_its_plan() -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    with_adapter = prefill(planned, **prompt()).logits
    with planned.disable_adapter(), eager.disable_adapter():
        without = prefill(planned, **prompt()).logits
        assert torch.equal(without[:, -1], generated(eager, prompt()).logits[0])
    assert not torch.equal(with_adapter, without)
    assert torch.equal(prefill(planned, **prompt()).logits, with_adapter)
    assert stats(planned)["plans"] == 2


class _OtherCache(DynamicCache):
    """Of a class that no plan knows."""


def test_generate_says_once_what_it_cannot_plan(caplog: pytest.LogCaptureFixture) -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    for _ in range(2):
        ours, eagers = (generated(m, prompt(), 3, past_key_values=_OtherCache()) for m in (planned, eager))
        assert torch.equal(ours.sequences, eagers.sequences)
    assert stats(planned)["prefills"] == 0 and len(stats(planned)["fallbacks"]) == 1
    assert len([m for m in caplog.messages if "without a plan" in m]) == 1
    assert len([m for m in caplog.messages if "without a plan" in m and "_OtherCache" in m]) == 1
    generated(planned, prompt(), 2, use_cache=False)
    assert any("use_cache" in reason for reason in stats(planned)["fallbacks"])


@pytest.mark.parametrize("way", ["prompt_lookup_num_tokens", "assistant_model"])
def test_decoding_that_guesses_tokens_says_once_that_it_has_no_plan(way: str, caplog: pytest.LogCaptureFixture) -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    inputs, forwards = prompt(1), list[int]()
    planned.get_base_model().lm_head.register_forward_hook(lambda *_: forwards.append(1))
    guesses = {way: 2 if way == "prompt_lookup_num_tokens" else tiny_lora(**SMALL, seed=1).get_base_model().eval()}
    for _ in range(2):
        ours, eagers = (generated(model, inputs, 6, **guesses) for model in (planned, eager))
        assert torch.equal(ours.sequences, eagers.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, eagers.logits, strict=True))
    assert len([m for m in caplog.messages if "prompt_lookup_num_tokens" in m]) == 1
    assert stats(planned)["prefills"] == 0 and len(stats(planned)["fallbacks"]) == 1
    assert stats(planned)["forwards_unplanned"] == len(forwards) > 2
    restore(planned)
    assert "_get_candidate_generator" not in planned.get_base_model().__dict__


@pytest.mark.parametrize("token", [96, -1])
def test_a_token_outside_the_vocabulary_is_named_before_anything_runs(token: int) -> None:
    """By prefill, generate and a training step; the next one is right."""
    planned, eager = prepare(tiny_lora(**SMALL), ROOMY), tiny_lora(**SMALL)
    wrong = prompt(1)["input_ids"].index_fill(1, torch.tensor(3), token)
    for run in (
        lambda: prefill(planned.eval(), wrong),
        lambda: generated(planned, {"input_ids": wrong}),
        lambda: planned.train()(input_ids=wrong, labels=wrong.clamp(0, 95)),
    ):
        with pytest.raises(ExecutionError, match=rf"input_ids: holds {token}, .* table of 96 rows, 0 to 95"):
            run()
    right = prompt(1)["input_ids"]
    losses = [m(input_ids=right, labels=right).loss for m in (planned, eager)]
    assert torch.equal(*losses)


def test_beams_and_sampling_start_from_a_plan() -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    for keys in ({"num_beams": 3}, {"do_sample": True, "top_k": 20}):
        found = []
        for model in (eager, planned):
            torch.manual_seed(1)
            found.append(model.generate(**prompt(), max_new_tokens=5, pad_token_id=0, **keys))
        assert torch.equal(*found)
    assert stats(planned)["prefills"] == 2 and stats(planned)["fallbacks"] == []


def test_a_prompt_that_does_not_fit_is_refused_by_generate_too() -> None:
    planned = prepare(tiny_lora(**SMALL).eval(), DiscoConfig(memory_budget=300_000, device="cpu", planner="build"))
    generated(planned, prompt(1, 4))
    with pytest.raises(BudgetTooSmall, match="memory_budget") as refusal:
        generated(planned, prompt(2, 100))
    assert refusal.value.given == 300_000 < refusal.value.needed
    assert "forward" not in planned.get_base_model().__dict__
    generated(planned, prompt(1, 4))


def test_a_copy_of_a_prepared_model_generates_by_itself() -> None:
    planned = prepare(tiny_lora(**SMALL).eval(), ROOMY)
    expected = prefill(planned, **prompt()).logits[:, -1]
    other = copy.deepcopy(planned)
    assert stats(other) == {}
    assert torch.equal(generated(other, prompt()).logits[0], expected)
    assert stats(planned)["prefills"] == 1


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [1, 2]}, "input_ids: is a list"),
        ({"input_ids": ids(2, 0)}, r"input_ids: .*no token"),
        ({"input_ids": ids(0, 2)}, r"input_ids: .*no token"),
        ({"input_ids": ids(4)}, r"input_ids: has shape \(4,\)"),
        ({"input_ids": torch.ones(1, 4)}, r"input_ids: is of torch.float32"),
        ({"input_ids": ids(1, 4), "attention_mask": ids(1, 3)}, r"attention_mask: has shape \(1, 3\)"),
        ({"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 4)}, "attention_mask: must be"),
        ({"input_ids": ids(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])}, "row 0 ends with padding"),
        ({"input_ids": ids(1, 4), "chunk": 0}, "chunk: 0"),
        ({"input_ids": ids(1, 4), "chunk": True}, "chunk: True"),
        ({"input_ids": ids(1, 4)}, "config: the model is not prepared"),
        ({"input_ids": ids(1, 4), "config": DiscoConfig(enabled=False)}, "enabled"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prefill(tiny_lora(**SMALL), **arguments)


def test_caches_and_models_that_cannot_be_planned_are_named() -> None:
    planned = prepare(tiny_lora(**SMALL, checkpointing=True), ROOMY)
    with pytest.raises(CaptureError, match="past_key_values: a StaticCache"):
        prefill(planned, ids(1, 4), past_key_values=StaticCache(config=planned.config, max_cache_len=16))
    offloading = DynamicCache(config=planned.config)
    # Said to the constructor, it makes a stream, which a PyTorch built for CUDA may refuse where there is no GPU.
    offloading.offloading = True
    with pytest.raises(CaptureError, match=r"offloading=False"):
        prefill(planned, ids(1, 4), past_key_values=offloading)
    with pytest.raises(CaptureError, match=r"model.eval\(\)"):
        prefill(planned, ids(1, 4))
    with pytest.raises(ConfigError, match="not a causal language model"):
        prefill(torch.nn.Linear(2, 2), ids(1, 4), config=ROOMY)
    with pytest.raises(ConfigError, match="prepared for training with another one"):
        prefill(planned, ids(1, 4), config=DiscoConfig(memory_budget="17MiB"))
    planned.eval()
    assert prefill(planned, ids(1, 4)).logits.shape == (1, 1, 96)
