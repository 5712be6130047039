"""Decoding from plans with a static cache: tokens, logits and caches of ``generate`` without us, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StaticCache
from transformers.generation.streamers import BaseStreamer

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import ExecutionError
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.step.run.session import current_step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch, tiny_lora

SMALL = {"layers": 2, "hidden": 32, "vocabulary": 96}
ROOMY = DiscoConfig(memory_budget="16MiB", device="cpu", planner="build")


def prompt(rows: int = 2, tokens: int = 12) -> dict[str, torch.Tensor]:
    """Token ids and mask; the first row has padding on the left."""
    ids = random_batch(batch=rows, length=tokens)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, tokens: int = 6, **keys: Any) -> Any:
    torch.manual_seed(0)
    given = {"cache_implementation": "static", "do_sample": False, "eos_token_id": 95, "pad_token_id": 0}
    return model.generate(
        **prompt(), max_new_tokens=tokens, return_dict_in_generate=True, output_logits=True, **given | keys
    )


def assert_same(ours: Any, eagers: Any) -> None:
    assert torch.equal(ours.sequences, eagers.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, eagers.logits, strict=True))
    assert type(ours.past_key_values) is type(eagers.past_key_values)
    for a, b in zip(ours.past_key_values.layers, eagers.past_key_values.layers, strict=True):
        assert vars(a).keys() == vars(b).keys()
        for name, value in vars(b).items():
            assert torch.equal(getattr(a, name), value) if torch.is_tensor(value) else getattr(a, name) == value, name


def twins(**keys: Any) -> tuple[Any, Any]:
    """(prepared, eager)."""
    eager = tiny_lora(**SMALL, **keys).eval()
    return prepare(copy.deepcopy(eager), ROOMY), eager


@pytest.fixture(autouse=True)
def _quiet_random_order(random_order: None) -> Iterator[None]:
    """Ops are dispatched at random where edges allow it."""
    yield


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_every_family_decodes_with_eagers_bits(family: str) -> None:
    """Windows of 8 tokens fill up on the way; grouped heads, experts, tied embeddings."""
    eager = family_lora(family).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    assert_same(generated(planned), generated(eager))
    figures = stats(planned)
    assert figures["forwards_planned"] == 6 and figures["forwards_unplanned"] == 0 and figures["fallbacks"] == []
    assert figures["plans"] <= 3, "one for the prompt, one for all tokens, one more for windows that are full"


@pytest.mark.parametrize("keys", [{"do_sample": True, "temperature": 0.7}, {"num_beams": 3}, {"prefill_chunk_size": 5}])
def test_sampling_beams_and_chunks_are_eagers(keys: dict[str, Any]) -> None:
    planned, eager = twins()
    for _ in range(2):
        assert_same(generated(planned, **keys), generated(eager, **keys))
    assert stats(planned)["forwards_unplanned"] == 0 and stats(planned)["plan_hits"] > 6


def test_the_cache_goes_on_from_one_call_to_the_next() -> None:
    planned, eager = twins()
    both = []
    for model in (planned, eager):
        cache = StaticCache(config=model.config, max_cache_len=24)
        first = generated(model, past_key_values=cache, cache_implementation=None)
        more = torch.cat([first.sequences, torch.full((2, 2), 7)], dim=1)
        mask = torch.cat([prompt()["attention_mask"], torch.ones(2, 8, dtype=torch.int64)], dim=1)
        both.append(
            model.generate(
                input_ids=more,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=3,
                do_sample=False,
                eos_token_id=95,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert_same(*both)


def assert_changes_are_ordered(graph: TaskGraph, changed: set[int]) -> None:
    """Of two kernels that touch an input which one of them changes, one waits for the other."""
    before: dict[int, set[int]] = {}
    for vertex in graph.vertices:
        direct = {producer for producer, _ in vertex.inputs} | set(vertex.after)
        before[vertex.id] = direct.union(*(before[other] for other in direct))
    writes = ("aten::index_copy_", "aten::add_", "aten::copy_", "aten::index_put_")
    for input_ in changed:
        users = [v for v in graph.vertices if any(producer == input_ for producer, _ in v.inputs)]
        writers = [v for v in users if v.op in writes and v.inputs[0][0] == input_]
        assert writers
        for writer in writers:
            for user in users:
                ordered = user.id in before[writer.id] or writer.id in before[user.id]
                assert user is writer or ordered, (writer.op, user.op)


def test_kernels_that_touch_the_cache_keep_eagers_order() -> None:
    planned, _ = twins()
    generated(planned, 3)
    step = current_step(planned)
    assert step is not None
    graph = step.captured.graph
    changed = {b.vertex for b in step.captured.bindings if b.name.startswith("static_cache")}
    assert len(changed) == 3 * SMALL["layers"]
    assert_changes_are_ordered(graph, changed)


def test_training_and_decoding_take_turns() -> None:
    planned, eager = twins()
    batch = random_batch(length=10)
    for _ in range(2):
        for model in (planned, eager):
            model.train()
            loss = model(**batch).loss
            model.eval()
            model.made = generated(model, 3)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        assert_same(planned.__dict__.pop("made"), eager.__dict__.pop("made"))
    assert stats(planned)["forwards_unplanned"] == 0


class _Interrupt(BaseStreamer):
    """Ends a generation after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def put(self, value: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_an_interrupted_generation_leaves_all_as_it_was() -> None:
    planned, eager = twins()
    with pytest.raises(KeyboardInterrupt):
        planned.generate(**prompt(1), max_new_tokens=6, cache_implementation="static", streamer=_Interrupt(3))
    assert_same(generated(planned), generated(eager))
    assert_same(generated(restore(planned)), generated(eager))


def test_a_cache_that_is_full_is_eagers_error_and_no_harm() -> None:
    planned, eager = twins()
    for model in (planned, eager):
        cache = StaticCache(config=model.config, max_cache_len=13)
        with pytest.raises(ExecutionError if model is planned else IndexError, match="13"):
            generated(model, 6, past_key_values=cache, cache_implementation=None)
    assert_same(generated(planned), generated(eager))


def test_a_static_cache_without_positions_runs_as_it_is() -> None:
    planned, eager = twins()
    results = []
    for model in (planned, eager):
        cache = StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            ids = prompt()["input_ids"]
            model(input_ids=ids, past_key_values=cache)
            results.append(model(input_ids=ids[:, :1], past_key_values=cache).logits)
    assert torch.equal(*results)
    assert stats(planned)["forwards_planned"] == 1 and "position_ids" in stats(planned)["fallbacks"][0]


def test_the_forward_s_patch_is_gone_after_generate() -> None:
    planned, _ = twins()
    inner = planned.get_base_model()
    before = {name: vars(inner).get(name) for name in ("forward", "generate", "_prefill")}
    generated(planned, 2)
    assert {name: vars(inner).get(name) for name in before} == before
    restore(planned)
    assert "generate" not in vars(inner)
