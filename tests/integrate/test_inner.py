"""A module inside a prepared model that is called itself runs without a plan: counted, and told once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from disco_accel import prepare, restore, stats
from tests.integrate.twins import SMALL, assert_same_step, batch, config
from tests.support.models import tiny_lora

INNER = {
    "base_model": lambda m: m.base_model(**batch()).loss,
    "base_model.model": lambda m: m.get_base_model()(**batch()).loss,
    "base_model.model.model": lambda m: m.get_base_model().model(batch()["input_ids"]).last_hidden_state.mean(),
}


@pytest.mark.parametrize("name", INNER)
def test_a_call_of_an_inner_model_is_counted_and_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, eager = prepare(tiny_lora(**SMALL), config()), tiny_lora(**SMALL)
    for _ in range(2):
        for each in (model, eager):
            each.zero_grad()
            INNER[name](each).backward()
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(model.parameters(), eager.parameters(), strict=True)
        if b.grad is not None
    )
    assert stats(model)["inner_forwards"] == 2 and stats(model)["steps_compiled"] == 0
    told = [m for m in caplog.messages if m.startswith(f"{name}: called itself, past the model that is prepared")]
    assert len(told) == 1


def test_the_model_s_own_forwards_count_as_none() -> None:
    """Planned, fallen back, without gradients, generating, of a copy."""
    model: Any = prepare(tiny_lora(**SMALL, checkpointing=True), config(on_unsupported="eager"))
    model(**batch()).loss.backward()
    model(**batch(), return_dict=False)[0].backward()
    with torch.no_grad():
        model(**batch())
        model.base_model(**batch())
    model.eval().generate(input_ids=batch()["input_ids"], max_new_tokens=3, pad_token_id=0)
    copy.deepcopy(model).train().base_model(**batch()).loss.backward()
    counts = stats(model)
    assert counts["inner_forwards"] == 0 and counts["steps_eager"] == 1 and counts["prefills"] == 1


def test_restore_leaves_no_trace() -> None:
    model, eager = prepare(tiny_lora(**SMALL), config()), tiny_lora(**SMALL)
    assert_same_step(model, eager)
    restore(model)
    assert all(vars(m).get("_compiled_call_impl") is None for m in model.modules())
    assert_same_step(copy.deepcopy(model), copy.deepcopy(eager))
    assert_same_step(model, eager)
