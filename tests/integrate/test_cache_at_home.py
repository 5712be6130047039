"""Decoding with keys and values in host memory: bits, bytes over the link, and what a user does between two tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import StaticCache

from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from disco_accel.errors import BudgetTooSmall, VerifyError
from disco_accel.graph.memgraph import Edge
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import is_foreign
from disco_accel.step.run.session import current_step
from disco_accel.verify.static import verify
from tests.integrate.test_decoding import assert_changes_are_ordered, assert_same, generated, prompt
from tests.support.models import family_lora, tiny_lora

ROOMY = DiscoConfig(memory_budget="16MiB", device="cpu", plan_cache=None)
LONG = 2048
"""Tokens of a cache that takes 2 MiB for two rows of the model below."""


@pytest.fixture(autouse=True)
def _quiet_random_order(random_order: None) -> Iterator[None]:
    """Ops are dispatched at random where edges allow it."""
    yield


def at_home(model: Any, **keys: Any) -> Any:
    return generated(model, cache_implementation="offloaded_static", **keys)


def twins(budget: str = "16MiB") -> tuple[Any, Any]:
    """(prepared, eager); each layer has twice as many query heads as heads of keys and values.

    Adapters, which would make the search for a plan twice as long, are merged: the last norm is what could be trained.
    """
    eager: Any = tiny_lora(layers=4, hidden=32, vocabulary=96).merge_and_unload().requires_grad_(False).eval()
    eager.model.norm.requires_grad_(True)
    return prepare(copy.deepcopy(eager), DiscoConfig(memory_budget=budget, device="cpu", plan_cache=None)), eager


def own_cache(model: Any, capacity: int = LONG, **keys: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=capacity, **keys)


def with_cache(model: Any, cache: StaticCache, **keys: Any) -> Any:
    return generated(model, past_key_values=cache, cache_implementation=None, use_cache=True, **keys)


def cache_bytes(made: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in made.past_key_values.layers)


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen3_moe"])
def test_families_decode_with_eagers_bits(family: str) -> None:
    """Windows stay on the device; fused projections; experts."""
    eager = family_lora(family).eval()
    planned = prepare(copy.deepcopy(eager), ROOMY)
    assert_same(at_home(planned), generated(eager))
    assert stats(planned)["forwards_unplanned"] == 0 and stats(planned)["fallbacks"] == []


@pytest.mark.parametrize(
    "keys", [{}, {"do_sample": True, "temperature": 0.7}, {"num_beams": 3}, {"prefill_chunk_size": 5}]
)
def test_sampling_beams_and_chunks_are_eagers(keys: dict[str, Any]) -> None:
    planned, eager = twins()
    for _ in range(2):
        made = at_home(planned, **keys)
        assert_same(made, generated(eager, **keys))
    assert stats(planned)["forwards_unplanned"] == 0 and stats(planned)["cache_at_home_bytes"] == cache_bytes(made)


@pytest.mark.parametrize("early", [False, True], ids=["new", "early"])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_cache_that_does_not_fit_is_loaded_once_a_token(beams: int, early: bool) -> None:
    """Also one whose tensors are there and hold no tokens."""
    keys = {"num_beams": beams} if beams > 1 else {}
    planned, eager = twins(f"{200 + 1830 * beams}KiB")
    caches = own_cache(planned), own_cache(eager)
    if early:
        for cache in caches:
            cache.early_initialization(2 * beams, 2, 8, torch.float32, torch.device("cpu"))
    made = with_cache(planned, caches[0], **keys)
    assert_same(made, with_cache(eager, caches[1], **keys))
    figures = stats(planned)
    assert figures["forwards_unplanned"] == 0 and figures["budget"]["total"] < cache_bytes(made)
    assert figures["cache_at_home_bytes"] == cache_bytes(made)
    assert figures["reload_bytes"] <= 1.1 * cache_bytes(made)
    assert figures["offload_bytes"] < 4096, "new rows alone go back"


def test_layers_that_fit_stay_on_the_device() -> None:
    planned, eager = twins("3300KiB")
    made = with_cache(planned, own_cache(planned))
    assert_same(made, with_cache(eager, own_cache(eager)))
    figures = stats(planned)
    assert figures["forwards_unplanned"] == 0
    assert 0 < figures["cache_at_home_bytes"] < cache_bytes(made) and figures["reload_bytes"] < cache_bytes(made)


def _changes() -> list[Callable[[StaticCache], Any]]:
    def replaced(cache: StaticCache) -> None:
        cache.layers[1].values = cache.layers[1].values.clone()

    def written(cache: StaticCache) -> None:
        with torch.inference_mode():
            cache.layers[0].keys[:, :, 2] += 0.5

    return [written, lambda cache: cache.reorder_cache(torch.tensor([1, 0])), replaced]


def test_between_two_tokens_the_cache_is_the_users() -> None:
    """Who reads, changes, replaces or copies keys and values there finds and gives what eager mode has."""
    planned, eager = twins("1850KiB")
    both: list[list[torch.Tensor]] = []
    for model in (planned, eager):
        cache, seen = with_cache(model, own_cache(model)).past_key_values, []
        for number, change in enumerate(_changes()):
            change(cache)
            cache, held = copy.deepcopy(cache), 17 + number
            mask, places = torch.ones(2, 1, 1, LONG, dtype=torch.bool), torch.full((2, 1), held)
            mask[..., held + 1 :] = False
            ids = prompt()["input_ids"][:, number : number + 1]
            with torch.no_grad():
                made = model(input_ids=ids, past_key_values=cache, position_ids=places, attention_mask=mask)
            seen += [made.logits, *(layer.keys.clone() for layer in cache.layers)]
        with torch.no_grad():
            # Without positions the forward has no plan.
            seen.append(model(input_ids=ids, past_key_values=cache).logits)
        both.append(seen)
    assert all(map(torch.equal, *both))
    assert stats(planned)["forwards_unplanned"] == 1 and "position_ids" in stats(planned)["fallbacks"][0]


def test_a_cache_goes_on_after_reset_another_budget_and_restore() -> None:
    planned, eager = twins("2010KiB")
    caches = own_cache(planned), own_cache(eager)
    for step in (lambda: None, lambda: set_memory_budget(planned, "2040KiB"), lambda: restore(planned)):
        step()
        assert_same(with_cache(planned, caches[0]), with_cache(eager, caches[1]))
        for cache in caches:
            cache.reset()


def test_a_refusal_names_the_budget_for_a_cache_in_host_memory() -> None:
    planned, _ = twins("512KiB")
    with pytest.raises(BudgetTooSmall) as refused:
        with_cache(planned, own_cache(planned))
    assert refused.value.needed < 1850 << 10


def test_a_write_at_home_that_may_come_before_the_load_is_refused() -> None:
    planned, _ = twins()
    at_home(planned)
    step = current_step(planned)
    assert step is not None
    graph, plan = step.graph, step.plan
    homes = {v.id for v in graph.vertices if v.kind is VertexKind.INPUT and is_foreign(v) and v.space}
    assert len(homes) == 8
    assert_changes_are_ordered(graph, homes)
    loads = {v.id for v in graph.vertices if v.kind is VertexKind.COPY and v.inputs[0][0] in homes}
    writes = {v.id for v in graph.vertices if v.op == "aten::index_copy_" and v.space}
    verify(graph, plan)

    def ordered(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
        return tuple((before, then) for before, then in edges if before not in loads or then not in writes)

    loose = replace(plan, data_edges=ordered(plan.data_edges), memory_edges=ordered(plan.memory_edges))
    with pytest.raises(VerifyError, match=r"load.* need not finish before .*index_copy_"):
        verify(graph, loose)
