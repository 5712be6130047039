"""Packed weights on the emulated device: training and evaluation as in the libraries' eager mode there, bit for bit.

Without optimum-quanto's float8 and int4, which it packs anew on a GPU, by ``quanto::pack_fp8_marlin`` and
``aten::_convert_weight_to_int4pack``: neither has a kernel for CPUs, which compute here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.capture.parts import frozen_parts, states_replaced
from disco_accel.errors import CaptureError
from tests.emulated.models import CUDA, assert_same, assert_steady, least, step
from tests.support.models import family_lora, random_batch
from tests.support.quantised import FORMS, Quantise, bnb_int8

FAMILY, SIZES = "llama", {"hidden_size": 128, "intermediate_size": 256}
HERE: dict[str, Quantise] = {
    **{name: FORMS[name] for name in FORMS if name not in ("bitsandbytes int8", "quanto float8", "quanto int4")},
    "bitsandbytes int8, no outliers": bnb_int8(threshold=0.0),
}


def batch(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in random_batch(length=20, seed=seed).items()}


def model_of(quantise: Quantise) -> Any:
    return family_lora(FAMILY, dtype=torch.bfloat16, checkpointing=True, lora_dropout=0.1, quantise=quantise, **SIZES)


def logits(model: Any) -> torch.Tensor:
    """Of a batch, in evaluation and without a plan."""
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(**batch(5)).logits
    model.train()
    return found


@pytest.fixture
def moved() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("form", HERE)
def test_packed_weights_train_and_evaluate_as_in_eager_mode(form: str, moved: ExitStack) -> None:
    """Steps under the least budget, dispatched at random, and under one that holds all; evaluation, whose weights visit
    the device module by module, between them. Weights are on the host afterwards, with the bits that they had."""
    try:
        model, eager = model_of(HERE[form]), model_of(HERE[form]).to(CUDA)
    except ImportError as error:
        # An older PEFT imports names that a newer torchao has no more.
        pytest.skip(str(error))
    # ``to`` leaves what hqq and bitsandbytes' 8 bits keep beside their weights where it was.
    for weight in eager.parameters():
        beside = {name: value.to(CUDA) for name, value in vars(weight).items() if isinstance(value, torch.Tensor)}
        vars(weight).update(beside)
    moved.enter_context(states_replaced(eager, lambda leaf: leaf.to(CUDA)))
    packed = {name: part.clone() for name, part in frozen_parts(model).items()}

    def assert_step(seed: int) -> None:
        torch.manual_seed(seed)
        expected = step(eager, batch(seed))
        torch.manual_seed(seed)
        assert_same(step(model, batch(seed)), expected)

    least(model, lambda m: step(m, batch(0)))
    assert_step(1)
    assert torch.equal(logits(model), logits(eager))
    assert_step(2)
    last = batch(3)
    torch.cuda.synchronize()
    assert_steady(lambda: step(model, last))
    found = stats(model)
    assert found["steps_eager"] == 0 and found["engine"]["c10_allocations"] == 0
    assert found["reload_bytes"] > 0
    restore(model)
    assert_same(frozen_parts(model), packed)
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cuda"))
    assert_step(4)
    # The first one has loaded what stays.
    assert_step(5)
    assert stats(model)["reload_bytes"] == 0 and stats(model)["steps_eager"] == 0


def test_outliers_of_8_bit_weights_are_refused_with_the_way_out() -> None:
    model = prepare(model_of(FORMS["bitsandbytes int8"]), DiscoConfig(memory_budget="1GiB", device="cuda"))
    with pytest.raises(CaptureError, match=r"q_proj.*llm_int8_threshold=0\.0"):
        step(model, batch(0))
