"""Steps and evaluations without a plan, whose weights stream through a part of the budget, beside eager mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, batch_for
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import ConfigError
from disco_accel.step.run.session import find_state
from tests.gpu.test_steps import expect, lora, roomy


def ring_of(model: Any) -> Any:
    state = find_state(model)
    assert state is not None and state.placement._streamed is not None
    return state.placement._streamed.visits.ring


def step(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch, return_dict=False)[0]
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_unplanned_steps_and_evaluations_stream_within_their_room(cuda: torch.device, checkpointing: bool) -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, cuda)
    eager = lora(cuda, torch.float32, "sdpa", checkpointing).to(cuda)
    model = lora(cuda, torch.float32, "sdpa", checkpointing)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    config = DiscoConfig(memory_budget=frozen + 4 * trained, device="cuda", plan_cache=None, on_unsupported="eager")
    prepare(model, config)
    ring = ring_of(model)
    load, loaded = ring._load, list[int]()
    ring._load = lambda source: (loaded.append(source.nbytes), load(source))[1]
    for number in range(3):
        wanted, got = step(eager, batch), step(model, batch)
        assert wanted.keys() == got.keys()
        for name in wanted:
            expect(wanted[name], got[name], f"{name} of step {number}")
        with torch.no_grad():
            loaded.clear()
            expect(eager(**batch).logits, model(**batch).logits, f"logits {number}")
    assert ring.most_held <= max(ring._window, frozen // 2)
    assert 0 < sum(loaded) < frozen, "some weights have stayed"
    found = stats(model)
    assert found["steps_eager"] == 3 and found["unplanned_peak_bytes"] > ring.most_held


def test_generations_without_a_plan_stream_within_the_budget(cuda: torch.device) -> None:
    """Decoding that guesses tokens."""
    ids = batch_for(SMALL["vocab_size"], 1, 16, cuda)["input_ids"]
    eager = lora(cuda, torch.float32, "sdpa", False).to(cuda).eval()
    model: Any = lora(cuda, torch.float32, "sdpa", False).eval()
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    budget = frozen // 2 + 4 * trained
    prepare(model, DiscoConfig(memory_budget=budget, device="cuda", plan_cache=None))
    keys = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    keys |= {"prompt_lookup_num_tokens": 2}
    wanted = eager.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)
    with pytest.raises(ConfigError, match=r"input_ids: on cuda.* pass input_ids\.to"):
        model.generate(input_ids=ids, **keys)
    ids = ids.cpu()
    got = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)
    assert torch.equal(wanted.cpu(), got.cpu())
    found = stats(model)
    assert len(found["fallbacks"]) == 1 and found["forwards_unplanned"] >= 2
    assert 0 < ring_of(model).most_held <= max(ring_of(model)._window, (budget - 4 * trained) // 2)
    assert ring_of(model).most_held < found["unplanned_peak_bytes"]


def test_a_plan_takes_the_memory_back(cuda: torch.device) -> None:
    """After a call past the model, whose weights went through the ring. Later the ring has room beside the arena."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, cuda)
    eager, model = lora(cuda, torch.float32, "sdpa", False).to(cuda), lora(cuda, torch.float32, "sdpa", False)
    config = replace(roomy(cuda), plan_cache=None)
    prepare(model, config)
    state = find_state(model)
    assert state is not None
    for number in range(2):
        with torch.no_grad():
            expect(*(each.base_model.model(**batch).logits for each in (eager, model)), "logits")
        assert ring_of(model).held > 0
        for one in (eager, model):
            one.zero_grad()
            one(**batch).loss.backward()
        arena = sum(memory.numel() for memory in state.memory.arenas.values())
        assert number or ring_of(model).held == 0
        assert arena > 0 and arena + ring_of(model).held <= state.budgets.grant.total
        for (name, wanted), got in zip(eager.named_parameters(), model.parameters(), strict=True):
            if wanted.grad is not None:
                expect(wanted.grad, got.grad, name)
