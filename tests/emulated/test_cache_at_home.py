"""Keys and values in host memory beside an emulated GPU: bits, and forwards without a plan on the same cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from tests.emulated.models import CUDA, least
from tests.support.models import random_batch, tiny_lora


def generated(model: Any, kind: str, **keys: Any) -> Any:
    """With room for some tokens more."""
    ids = random_batch(length=12)["input_ids"].to(CUDA)
    model.get_base_model()._previous_max_cache_length = 24
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "cache_implementation": kind}
    given |= {"do_sample": False, "eos_token_id": 95, "pad_token_id": 0, "disable_compile": True}
    return model.generate(**given, max_new_tokens=5, return_dict_in_generate=True, output_logits=True, **keys)


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("keys", [{}, {"num_beams": 3}])
def test_a_cache_in_host_memory_gives_eagers_tokens(keys: dict[str, Any]) -> None:
    """Under the smallest budgets; a forward without a plan takes keys and values to the GPU and back."""
    model = tiny_lora(layers=3, hidden=32).eval()
    eager = copy.deepcopy(model).to(CUDA)
    planned = least(model, lambda m: generated(m, "offloaded_static", **keys))
    got, want = generated(planned, "offloaded_static", **keys), generated(eager, "static", **keys)
    assert torch.equal(got.sequences, want.sequences) and all(map(torch.equal, got.logits, want.logits))
    found = stats(planned)
    assert found["forwards_unplanned"] == 0 and found["engine"]["c10_allocations"] == 0
    held = [(layer.keys, layer.values) for layer in got.past_key_values.layers]
    assert all(tensor.is_cpu for pair in held for tensor in pair)
    assert found["cache_at_home_bytes"] == sum(tensor.nbytes for pair in held for tensor in pair)
    more = torch.full((held[0][0].shape[0], 1), 7, device=CUDA)
    with torch.no_grad():
        ours, eagers = (
            m(input_ids=more, past_key_values=made.past_key_values).logits
            for m, made in ((planned, got), (eager, want))
        )
    assert torch.equal(ours, eagers) and stats(planned)["forwards_unplanned"] == 1
    for ours, eagers in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert ours.keys.is_pinned() and torch.equal(ours.keys, eagers.keys.cpu())


@pytest.mark.usefixtures("random_order")
def test_prompts_in_chunks_extend_what_is_in_host_memory() -> None:
    """With the bits of plans for a cache on the GPU; ``generate`` makes either beside the weights, on the host."""
    model = tiny_lora(layers=3, hidden=32).eval()
    wanted = generated(copy.deepcopy(model).to(CUDA), "static").sequences
    planned = prepare(model, DiscoConfig(memory_budget="96MiB", device=CUDA.type))
    home, near = (generated(planned, kind, prefill_chunk_size=5) for kind in ("offloaded_static", "static"))
    assert torch.equal(home.sequences, wanted) and all(map(torch.equal, home.logits, near.logits))
    for there, here in zip(home.past_key_values.layers, near.past_key_values.layers, strict=True):
        assert there.keys.is_pinned() and here.keys.is_cuda and torch.equal(there.keys, here.keys.cpu())
    assert stats(planned)["forwards_unplanned"] == 0 and stats(planned)["fallbacks"] == []
