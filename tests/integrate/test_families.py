"""The ten model families through capture, plan and engine: losses, gradients and generator as in eager mode, bit for
bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.execute.executor import Executor
from disco_accel.step.run.session import current_step
from tests.integrate.generators import assert_same_step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch

BF16, FP32 = torch.bfloat16, torch.float32
MIXTURES = ("mixtral", "qwen3_moe")
pytestmark = pytest.mark.usefixtures("random_order")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, (BF16, FP32)[number % 2]) for number, family in enumerate(TEN_FAMILIES)),
        *((family, (FP32, BF16)[number % 2]) for number, family in enumerate(TEN_FAMILIES) if family in MIXTURES),
    ],
)
def test_lora_steps_of_every_family_are_bitwise_eager(family: str, dtype: torch.dtype) -> None:
    """With checkpointing and dropout, ops dispatched at random, on batches that differ: experts get other tokens.

    The same steps with the other dtype of each family run on several devices, in test_several_devices.py.
    """
    eager = family_lora(family, dtype=dtype, checkpointing=True, lora_dropout=0.1)
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="4MiB"))
    for seed in range(3):
        assert_same_step(eager, planned, random_batch(length=20, seed=seed))
    assert stats(planned)["steps_compiled"] == 3 and stats(planned)["steps_eager"] == 0
    assert stats(planned)["engine"]["c10_allocations"] == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_the_cache_that_eager_fills_without_checkpointing_is_captured(family: str, attention: str) -> None:
    """Concatenated keys and values have other strides, and with them other bits."""
    eager = family_lora(family, dropout=0.1, attention=attention, use_cache=True)
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="6MiB"))
    for seed in range(2):
        assert_same_step(eager, planned, random_batch(length=20, seed=seed))
    assert stats(planned)["steps_compiled"] == 2


@pytest.mark.parametrize("family", MIXTURES)
def test_every_routing_fits_the_planned_scratch(family: str) -> None:
    """Grouped products allocate by group size: one expert may get nearly all tokens or none."""
    eager = family_lora(family, dtype=BF16)
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="6MiB"))
    for seed in range(6):
        batch = random_batch(length=37, seed=seed)
        # The same token throughout goes to the same experts throughout.
        batch["input_ids"][:, seed * 6 :] = seed
        assert_same_step(eager, planned, batch)
    assert stats(planned)["plans"] == 1


def test_scratch_that_is_too_small_names_the_op() -> None:
    planned = prepare(family_lora("mixtral", dtype=BF16), DiscoConfig(memory_budget="6MiB"))
    planned(**random_batch()).loss.backward()
    compiled = current_step(planned)
    assert compiled is not None
    if not any(record.loose_bytes for record in compiled.records.values()):
        pytest.skip("products of groups take no memory that depends on values on this processor")
    records = {v: replace(r, loose_bytes=min(64, r.loose_bytes)) for v, r in compiled.records.items()}
    batch, named = random_batch(), dict(planned.named_parameters())
    given = {b.vertex: (batch if b.source == "batch" else named)[b.name].detach() for b in compiled.externals}
    with Executor(compiled.plan, compiled.graph.ops, records, clean=compiled.clean) as executor:
        executor.begin(given)
        with pytest.raises(ExecutionError, match=r"_grouped_mm in .*experts.*recorded allocations"):
            executor.wait_out()


def test_experts_chosen_by_a_loop_are_refused_with_the_setting() -> None:
    eager = family_lora("mixtral", experts_implementation="eager")
    planned = prepare(eager, DiscoConfig(memory_budget="6MiB"))
    with pytest.raises(CaptureError, match=r"experts_implementation: grouped_mm"):
        planned(**random_batch())
    planned.get_base_model().set_experts_implementation("grouped_mm")
    planned(**random_batch()).loss.backward()
    assert stats(planned)["steps_compiled"] == 1
