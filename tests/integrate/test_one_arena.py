"""Steps that take turns share one arena, and each of them stays within the budget with what it has outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall
from disco_accel.step.run.session import find_state
from tests.support.models import family_lora, random_batch

Steps = Callable[[torch.nn.Module], Iterator[None]]


def _t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0, pad_token_id=0
    )
    base = T5ForConditionalGeneration(config)
    base.config.use_cache = False
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q", "v"])).train()


def _with_and_without_encoder(model: Any) -> Iterator[None]:
    ids, labels = torch.randint(1, 64, (2, 24)), torch.randint(1, 64, (2, 12))
    with torch.no_grad():
        outputs = (model.base_model.model.get_encoder()(ids).last_hidden_state,)
    while True:
        for given in ({"input_ids": ids}, {"encoder_outputs": outputs}):
            model(**given, labels=labels).loss.backward()
            yield


def _of_two_lengths(model: Any) -> Iterator[None]:
    while True:
        for tokens in (16, 24):
            model(**random_batch(length=tokens)).loss.backward()
            yield


def _logits_in_turn(model: Any) -> Iterator[None]:
    while True:
        for tokens in (16, 24):
            output = model(**random_batch(length=tokens))
            if tokens == 16:
                _ = output.logits
            output.loss.backward()
            yield


CASES: dict[str, tuple[Callable[[], Any], Steps]] = {
    "encoder": (_t5, _with_and_without_encoder),
    "lengths": (lambda: family_lora("llama"), _of_two_lengths),
    "logits": (lambda: family_lora("llama"), _logits_in_turn),
}


def _prepared(make: Callable[[], Any], steps: Steps, more: float) -> Any:
    """A model with ``more`` times the budget that its first step needs."""
    with pytest.raises(BudgetTooSmall) as refused:
        next(steps(prepare(make(), _config(1 << 14))))
    return prepare(make(), _config(int(refused.value.needed * more)))


def _config(budget: int) -> DiscoConfig:
    # A search of seconds is not what is tested.
    return DiscoConfig(
        memory_budget=budget, device="cpu", plan_cache=None, buckets="off", optimizer="device", plan_seconds=0.1
    )


@pytest.mark.parametrize(("case", "more"), [("encoder", 1.1), ("lengths", 1.3), ("logits", 1.6)])
def test_no_step_takes_more_than_the_budget(case: str, more: float) -> None:
    """The arena of one step and all that another has outside of its own may be more than the budget together; with some
    room their plans are made for one arena, which stays where it is."""
    make, steps = CASES[case]
    model = _prepared(make, steps, more)
    turns, state = steps(model), find_state(model)
    assert state is not None
    arenas = []
    for _ in range(12):
        next(turns)
        figures = stats(model)
        assert figures["peak_bytes"] <= figures["budget_bytes"]
        arenas.append(id(state.memory.arenas[0]))
    assert figures["steps_compiled"] == 12
    if more > 1:
        assert len(set(arenas[-4:])) == 1


def test_a_step_with_less_outside_is_planned_once() -> None:
    """Its first plan already leaves what the steps before it have outside of the arena that they share."""
    model = prepare(family_lora("llama"), _config(16 << 20))
    for tokens in (24, 16, 12, 24, 16, 12):
        model(**random_batch(length=tokens)).loss.backward()
    state = find_state(model)
    assert state is not None
    assert [len(family.totals()) for family in state.budgets.plan_sets.all()] == [1, 1, 1]
