"""Loops of preferences and rollouts: a reference beside the policy, generations between steps; eager's bits."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTuner
from transformers.generation.streamers import BaseStreamer

from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from disco_accel.integrate.hf import merge_watch
from tests.support.models import random_batch, tiny_lora

ROOMY = DiscoConfig(memory_budget="16MiB", device="cpu", planner="build")
SMALL = {"layers": 1, "hidden": 32, "vocabulary": 96}
PROMPT = 6


def twins(**keys: Any) -> tuple[Any, Any]:
    """(prepared, eager)."""
    eager = tiny_lora(**SMALL | keys).train()
    return prepare(copy.deepcopy(eager), ROOMY), eager


def prompts() -> dict[str, torch.Tensor]:
    """Two answers for each of two prompts, of which the second has padding on the left."""
    ids = random_batch(length=PROMPT)["input_ids"].repeat_interleave(2, dim=0)
    mask = torch.ones_like(ids)
    mask[2:, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def rollout(model: Any, seed: int, **keys: Any) -> torch.Tensor:
    """Sampled; a fifth of the vocabulary ends an answer, so that some rows end early."""
    torch.manual_seed(seed)
    given = {"max_new_tokens": 5, "do_sample": True, "eos_token_id": [*range(76, 96)], "pad_token_id": 0}
    tokens: torch.Tensor = model.generate(**prompts(), cache_implementation="static", **given | keys)
    return tokens


@contextmanager
def checkpointing_off(model: Any) -> Iterator[None]:
    """As TRL has it around rollouts: with checkpointing, models in training mode do without their cache."""
    was_on = model.is_activation_checkpointing
    if was_on:
        model.activation_checkpointing_disable()
    yield
    if was_on:
        model.activation_checkpointing_enable()


def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.cat([prompts()["attention_mask"], torch.ones_like(tokens[:, PROMPT:])], dim=1)
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, PROMPT - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None]).squeeze(2)
    return found


def reference(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), model.disable_adapter():
        return log_probabilities(model, tokens)


def policy_loss(policy: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    rewards = tokens[:, PROMPT:].float().std(1)
    advantages = (rewards.view(2, 2) - rewards.view(2, 2).mean(1, keepdim=True)).flatten()
    away = base - policy
    return (0.04 * (away.exp() - away - 1) - (policy - policy.detach()).exp() * advantages[:, None]).mean()


def assert_same_weights(planned: Any, eager: Any) -> None:
    for (name, ours), theirs in zip(planned.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def assert_all_planned(model: Any) -> None:
    shown = stats(model)
    assert shown["fallbacks"] == [] and shown["forwards_unplanned"] == shown["steps_eager"] == 0


@pytest.mark.parametrize(("policy_first", "checkpointing"), [(False, False), (True, True)])
def test_rollouts_references_and_updates_have_eagers_bits(policy_first: bool, checkpointing: bool) -> None:
    """The reference may come between the policy's forward and its backward. Memory is lent between rollout and step."""
    planned, eager = twins(checkpointing=checkpointing)
    seen: dict[Any, list[Any]] = {planned: [], eager: []}
    for model in seen:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for number in range(3):
            with checkpointing_off(model):
                tokens = rollout(model, number)
            if model is planned:
                set_memory_budget(model, "256KiB")
                assert stats(model)["held_bytes"] <= 256 << 10
                set_memory_budget(model, "16MiB")
            if policy_first:
                policy = log_probabilities(model, tokens)
                base = reference(model, tokens)
            else:
                base = reference(model, tokens)
                policy = log_probabilities(model, tokens)
            loss = policy_loss(policy, base, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[model] += [tokens.tolist(), base.tolist(), loss.item()]
    assert seen[planned] == seen[eager]
    ended = [(torch.tensor(tokens)[:, PROMPT:] >= 76).any(1) for tokens in seen[eager][::3]]
    assert any(rows.any() and not rows.all() for rows in ended), "some answers end early, others do not"
    assert_same_weights(planned, eager)
    assert_all_planned(planned)


def test_a_field_that_is_read_behind_a_reference_is_that_of_its_own_forward() -> None:
    """PEFT freezes the adapter for the reference's time, and its plan may be made just then."""
    planned, eager = twins()
    ids = random_batch()["input_ids"]
    found = []
    for model in (planned, eager):
        for _ in range(2):
            output = model(input_ids=ids, labels=ids)
            places = [p.data_ptr() for p in model.parameters() if p.requires_grad]
            with torch.no_grad(), model.disable_adapter():
                base = model(input_ids=ids).logits
            assert places == [p.data_ptr() for p in model.parameters() if p.requires_grad]
            (output.loss + (output.logits - base).pow(2).mean()).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert_all_planned(planned)


def test_a_generation_between_the_micro_batches_of_a_step() -> None:
    planned, eager = twins()
    grads = []
    for model in (planned, eager):
        for number in range(3):
            tokens = rollout(model, number)
            log_probabilities(model, tokens).mean().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))
    assert_all_planned(planned)


class _Stop(BaseStreamer):
    """Ends a generation in its midst."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.tokens = error, 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == 3:
            raise self.error("in mid-rollout")

    def end(self) -> None:
        pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["decoding", "accumulation"])
def test_a_rollout_that_ends_by_an_exception_leaves_no_trace(error: type[BaseException], where: str) -> None:
    planned, eager = twins()
    results = []
    for model in (planned, eager):
        ids = random_batch(batch=1, length=PROMPT)["input_ids"]
        if where == "accumulation":
            model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(error, match="mid-rollout"):
            model.generate(
                ids,
                cache_implementation="static",
                max_new_tokens=5,
                streamer=_Stop(error),
                pad_token_id=0,
                do_sample=False,
            )
        tokens = rollout(model, 1)
        log_probabilities(model, tokens).mean().backward()
        results.append((tokens, [p.grad for p in model.parameters() if p.requires_grad]))
    (ours, our_grads), (theirs, their_grads) = results
    assert torch.equal(ours, theirs)
    assert all(torch.equal(a, b) for a, b in zip(our_grads, their_grads, strict=True))
    assert_all_planned(planned)


def base_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the weights that the adapter is merged into."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".base_layer." in name}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "other bits than before merge_adapter()" in r.getMessage()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_merged_for_rollouts_is_followed_and_unmerged(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """The base that is left is what PEFT leaves in eager mode; that it is another one is told once."""
    planned, eager = twins(dtype=dtype)
    seen: dict[Any, list[Any]] = {planned: [], eager: []}
    for model in seen:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for number in range(2):
            before = base_of(model)
            model.merge_adapter()
            seen[model].append(rollout(model, number).tolist())
            tokens = torch.tensor(seen[model][-1])
            model.unmerge_adapter()
            if number == 0:
                changed = [name for name, weight in base_of(model).items() if not torch.equal(weight, before[name])]
                assert len(lines_of(caplog)) == 1
            log_probabilities(model, tokens).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen[planned] == seen[eager]
    assert_same_weights(planned, eager)
    assert_all_planned(planned)
    (line,) = lines_of(caplog)
    assert f"{len(changed)} of {len(before)} base tensors" in line and f"the first is {changed[0]}:" in line


def test_a_changed_base_is_told_whoever_is_prepared_and_an_unchanged_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the wrapper of a prepared base, and without a step between; not where the adapter adds nothing, nor of a
    copy or a restored model. PEFT's methods are its own again at the end."""
    for name, (original, _) in merge_watch._patches.items():
        monkeypatch.setattr(BaseTuner, name, original)
    # Models of other tests may still be there.
    monkeypatch.setattr(merge_watch, "_patches", {})
    monkeypatch.setattr(merge_watch, "_watched", weakref.WeakKeyDictionary())
    methods = BaseTuner.merge_adapter, BaseTuner.unmerge_adapter
    model: Any = tiny_lora(**SMALL)
    prepare(model.get_base_model(), ROOMY)
    with torch.no_grad():
        adapters = {name: p for name, p in model.named_parameters() if "lora_B" in name}
        trained = {name: p.clone() for name, p in adapters.items()}
        for p in adapters.values():
            p.zero_()
        model.merge_adapter()
        model.unmerge_adapter()
        for name, p in adapters.items():
            p.copy_(trained[name])
    twin = copy.deepcopy(model)
    twin.merge_adapter()
    twin.unmerge_adapter()
    assert lines_of(caplog) == []
    other = prepare(tiny_lora(**SMALL), ROOMY)
    model.merge_adapter()
    model.unmerge_adapter()
    assert len(lines_of(caplog)) == 1
    restore(other)
    assert BaseTuner.merge_adapter is not methods[0]
    restore(model.get_base_model())
    assert methods == (BaseTuner.merge_adapter, BaseTuner.unmerge_adapter)
    model.merge_adapter()
    model.unmerge_adapter()
    assert len(lines_of(caplog)) == 1
