"""``chunks``: steps and prompts that do not fit whole, beside plain PyTorch."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel import DiscoConfig, prefill, prepare, stats
from disco_accel.config.keys import MOST_CHUNKS
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.step.compile import planned_step
from disco_accel.step.run.session import current_step
from tests.integrate.generators import run
from tests.integrate.test_prefill import assert_same_cache, generated, prompt
from tests.integrate.test_shared_weights import apart
from tests.support.models import family_lora

pytestmark = pytest.mark.usefixtures("random_order")


@pytest.fixture(autouse=True)
def few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` tries up to an eighth of the chunks that users get: those of most take longest to write out."""
    monkeypatch.setattr(planned_step, "MOST_CHUNKS", MOST_CHUNKS // 8)


def config(budget: int | str, chunks: int | str, **keys: Any) -> DiscoConfig:
    ours = {"memory_budget": budget, "chunks": chunks, "device": "cpu", "plan_cache": None}
    return DiscoConfig(**(ours | {"planner": "build"} | keys))


def small(vocabulary: int = 384) -> torch.nn.Module:
    """Logits of a batch take several times its weights; norms are trained."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary, use_cache=False)).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def batch(rows: int = 4, length: int = 32, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 384, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@functools.cache
def needed(chunks: int | str) -> int:
    """The smallest budget that a refusal names."""
    with pytest.raises(BudgetTooSmall) as caught:
        run(prepare(small(), config(1000, chunks)), batch())
    return caught.value.needed


def chunk_count(model: torch.nn.Module) -> int:
    """How many kernels of the step make a part of the loss, of a part of the batch or not."""
    step = current_step(model)
    assert step is not None
    names = [call.name for call in step.graph.ops.values()]
    return max(names.count("aten::nll_loss_forward"), names.count("aten::log"))


def test_a_step_that_does_not_fit_whole_runs_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """In half of what it needs whole, with weights that change and another batch; told once, with its sums."""
    caplog.set_level(logging.INFO, "disco_accel")
    whole, least = needed(1), needed("auto")
    assert least < whole / 2
    eager, planned = small(), prepare(small(), config(whole // 2, "auto", verify_steps=2, planner="timed"))
    for seed in range(3):
        expected, got = run(eager, batch(seed=seed)), run(planned, batch(seed=seed))
        assert apart(got, expected) <= 2e-6
        with torch.no_grad():
            for name, parameter in eager.named_parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.01)
                    dict(planned.named_parameters())[name].mul_(1.01)
    assert chunk_count(planned) > 1 and stats(planned)["fallbacks"] == []
    assert "of them add up sums in chunks, which rounds otherwise" in caplog.text
    assert "verify_steps: the first planned 2 steps and the same without a plan agree" in caplog.text


def test_a_step_that_fits_whole_stays_whole() -> None:
    planned = prepare(small(), config("8MiB", "auto"))
    expected, got = run(small(), batch()), run(planned, batch())
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert chunk_count(planned) == 1


def test_a_refusal_names_a_budget_that_works() -> None:
    planned = prepare(small(), config(needed("auto"), "auto"))
    assert apart(run(planned, batch()), run(small(), batch())) <= 2e-6


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_prompts_in_chunks_have_eagers_bits(family: str) -> None:
    """Keys and values, which leave chunk by chunk, and the last logits, which read one chunk alone."""
    eager = family_lora(family).eval()
    inputs = prompt(2, 32)
    first = generated(eager, inputs)
    planned = prepare(copy.deepcopy(eager), config("156KiB", 4))
    got = prefill(planned, **inputs)
    assert_same_cache(got.past_key_values, first.past_key_values)
    assert torch.equal(got.logits[:, -1], first.logits[0])
    assert stats(planned)["fallbacks"] == []
    step = next(iter(planned.__dict__["_disco_state"].memory.plans.values()))
    assert step.chunked_kernels >= 10


@pytest.mark.parametrize("keys", [{"parallel": "layers"}, {"parallel": "batch"}, {"parallel": "tensor"}], ids=str)
def test_devices_share_a_step_in_chunks(keys: dict[str, Any]) -> None:
    eager, planned = small(), prepare(small(), config("192KiB", 4, devices=2, **keys))
    assert apart(run(planned, batch()), run(eager, batch())) <= 3e-6
    assert chunk_count(planned) > 2


def test_weights_that_change_between_steps_are_followed_in_chunks() -> None:
    eager, planned = small(), prepare(small(), config("256KiB", 4))
    for _ in range(2):
        assert apart(run(planned, batch()), run(eager, batch())) <= 2e-6
        for model in (eager, planned):
            with torch.no_grad():
                model.lm_head.weight[5:9] *= 1.5
                model.model.layers[0].mlp.gate_proj.weight[0, 0] += 1.0
    assert chunk_count(planned) > 2


@pytest.mark.parametrize("value", [0, 65, -1, "many", 2.0, True, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"chunks.*use auto, or a number from 1, which is whole, to 64"):
        DiscoConfig(chunks=value)
