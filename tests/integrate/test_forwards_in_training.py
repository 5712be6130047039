"""Forwards without gradients between the steps of a training, and inside them: neither changes the other."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, DiscoConfig, prefill, restore, set_memory_budget, stats
from disco_accel.execute.executor import arena_bytes
from disco_accel.step.run.session import find_state
from tests.integrate.forward_pairs import Plain, assert_equal, compare, counts, prepared, rows
from tests.support.interrupts import interrupted
from tests.support.models import random_batch, tiny_lora

SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "vocabulary": 32}


def scaled(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss, which forwards without gradients return too."""
    return (y * module.table + module.plain).square().mean()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    loss = model(rows(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def pair(**keys: Any) -> tuple[Any, Any]:
    """(prepared, eager)"""
    eager = Plain(scaled)
    return prepared(eager, **keys), eager


@pytest.mark.parametrize("keys", [{}, {"optimizer": "host", "update": "deferred"}, {"optimizer": "host"}])
def test_evaluations_anywhere_in_a_step(keys: dict[str, Any]) -> None:
    """Between forward and backward, between two micro-batches, and behind an update that may be pending."""
    found = []
    planned, eager = pair(planner="timed", **keys)
    for model in (planned, eager):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)
        values = []

        def look(model: Any = model, values: list[torch.Tensor] = values) -> None:
            with torch.no_grad():
                values.append(model(rows(9)))

        for seed in range(3):
            look()
            for part in range(2):
                loss = model(rows(2 * seed + part))
                look()
                loss.backward()
                values += [loss.detach(), model.scale.grad.clone()]
                look()
            optimizer.step()
            look()
            optimizer.zero_grad()
        look()
        found.append([*values, model.scale.detach().clone()])
    assert_equal(found[0], [type(w)(w) if isinstance(w, torch.nn.Parameter) else w for w in found[1]])
    assert counts(planned)[1] == 0 and counts(planned)[0] == 19
    assert stats(planned)["steps_eager"] == 0


def _write_part(model: Any) -> None:
    model.linear.weight.data[3, 2] = 5.0


def _write_buffer(model: Any) -> None:
    model.table.mul_(2)


def _replace(model: Any) -> None:
    model.linear.weight = torch.nn.Parameter(torch.full((8, 8), 0.25), requires_grad=False)


def _assign(model: Any) -> None:
    model.linear.weight.data = torch.full((8, 8), 0.5)


def _write_plain(model: Any) -> None:
    model.plain += 1


def _write_trained(model: Any) -> None:
    model.scale.data.fill_(0.5)


def _unfreeze(model: Any) -> None:
    model.linear.bias.requires_grad_(True)


def _hook(model: Any) -> None:
    model.linear.register_forward_hook(lambda module, args, output: output + 1)


def _method(model: Any) -> None:
    model.result = lambda module, x, y: y.square().sum()


def test_changes_between_two_forwards_are_followed() -> None:
    """Weights written and replaced, hooks and code put in between: each forward sees what is there."""
    planned, eager = pair()
    changes = [_write_part, _write_buffer, _write_plain, _write_trained, _replace, _assign, _unfreeze, _hook, _method]
    for number, change in enumerate(changes):
        compare(planned, eager, rows(number))
        with torch.no_grad():
            change(planned), change(eager)
    compare(planned, eager, rows(99))
    compare(planned, eager, rows(99, count=7))
    assert counts(planned) == (len(changes) + 2, 0)


def test_adapters_on_off_and_merged() -> None:
    eager = tiny_lora(**SMALL).eval()
    planned = prepared(eager)
    batch = random_batch(32, length=6)
    on = compare(planned, eager, **batch)
    with planned.disable_adapter(), eager.disable_adapter():
        off = compare(planned, eager, **batch)
    assert not torch.equal(on.logits, off.logits)
    assert_equal(compare(planned, eager, **batch).logits, on.logits)
    planned.merge_adapter(), eager.merge_adapter()
    merged = compare(planned, eager, **batch)
    torch.testing.assert_close(merged.logits, on.logits)
    planned.unmerge_adapter(), eager.unmerge_adapter()
    compare(planned, eager, **batch)
    assert counts(planned) == (5, 0)


def test_dropout_in_training_mode_draws_eagers_numbers() -> None:
    def dropped(module: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        first = torch.nn.functional.dropout(y, 0.5, module.training)
        return first, torch.rand(3), torch.nn.functional.dropout(first, 0.5, module.training)

    eager = Plain(dropped).train()
    planned = prepared(eager)
    found = []
    for model in (planned, eager):
        torch.manual_seed(3)
        with torch.no_grad():
            results = [model(rows(seed)) for seed in range(3)]
        found.append((results, torch.get_rng_state()))
    assert_equal(*found)
    assert counts(planned) == (3, 0)


def test_ctrl_c_in_a_forward_leaves_all_as_it_was() -> None:
    def slow(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        square = y @ y.t()
        for _ in range(20):
            square = torch.nn.functional.dropout((square @ square).tanh(), 0.5)
        return square

    eager = Plain(slow)
    planned = prepared(eager)
    x = rows(0, count=400)
    compare_from(3, planned, eager, x)
    torch.manual_seed(4)
    before = torch.get_rng_state()

    def attempt() -> Callable[[], object]:
        torch.set_rng_state(before)

        def run() -> None:
            with torch.no_grad():
                planned(x)

        return run

    interrupted(attempt)
    assert torch.equal(torch.get_rng_state(), before)
    compare_from(5, planned, eager, x)
    planned(rows(1)).sum().backward()


def compare_from(seed: int, planned: Any, eager: Any, x: torch.Tensor) -> None:
    """Both forwards, each from the same state of the generator."""
    with torch.no_grad():
        torch.manual_seed(seed)
        got = planned(x)
        torch.manual_seed(seed)
        assert_equal(got, eager(x))


def test_two_threads_evaluate_while_the_main_thread_trains() -> None:
    planned, eager = pair()
    wanted = [eager(rows(seed)).detach() for seed in range(4)]
    optimizer = torch.optim.SGD([planned.scale], lr=0.0)
    failures: list[object] = []

    def evaluate() -> None:
        try:
            with torch.no_grad():
                for turn in range(20):
                    assert torch.equal(planned(rows(turn % 4)), wanted[turn % 4])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(20):
        assert torch.equal(step(planned, optimizer, seed % 4), wanted[seed % 4])
    for thread in threads:
        thread.join()
    assert not failures
    assert counts(planned) == (40, 0) and stats(planned)["steps_compiled"] == 20


def test_a_budget_that_moves_between_two_forwards() -> None:
    """Less than a forward needs: it runs as it is, told once for each budget and never planned for it again."""
    planned, eager = pair(buckets="off")
    compare(planned, eager, rows(0))
    for budget, planned_then in ((1 << 20, True), (300, False), (1 << 22, True)):
        set_memory_budget(planned, budget)
        was = counts(planned)
        for seed in range(3):
            compare(planned, eager, rows(seed))
        now = counts(planned)
        assert (now[0] - was[0], now[1] - was[1]) == ((3, 0) if planned_then else (0, 3))
        if planned_then:
            assert stats(planned)["peak_bytes"] <= budget
    (told,) = stats(planned)["fallbacks"]
    assert "needs at least" in told


def test_a_forked_child_runs_the_models_own_forward() -> None:
    planned, eager = pair()
    compare(planned, eager, rows(0))
    if (child := os.fork()) == 0:
        ended = 1
        try:
            compare(planned, eager, rows(1))
            state = find_state(planned)
            assert state is not None
            ended = 0 if state.reports.counts.forwards_unplanned == 1 else 2
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    compare(planned, eager, rows(2))


def test_restore_afterwards_leaves_the_plain_model() -> None:
    planned, eager = pair()
    got = compare(planned, eager, rows(0))
    restore(planned)
    gc.collect()
    with torch.no_grad():
        assert torch.equal(planned(rows(0)), got)
    assert stats(planned) == {}


def test_a_model_frozen_for_prompts_and_then_unfrozen_has_gradients() -> None:
    """Its forwards run from plans with gradients enabled, too, until something requires one."""
    eager = tiny_lora(**SMALL).eval().requires_grad_(False)
    model = tiny_lora(**SMALL).eval()
    ids = random_batch(32, length=6)["input_ids"]
    prefill(model, ids, config=DiscoConfig(memory_budget="32MiB", device="cpu", planner="build", plan_cache=None))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    assert_equal(model(**batch), eager(**batch))
    assert counts(model) == (2, 0)
    for each in (model, eager):
        each.get_parameter("base_model.model.lm_head.weight").requires_grad_(True)
        each(**batch).loss.backward()
    weight = "base_model.model.lm_head.weight"
    assert_equal(model.get_parameter(weight).grad, eager.get_parameter(weight).grad)
    assert counts(model) == (2, 1)


class _Generates(TrainerCallback):
    """After each evaluation 16 tokens."""

    def __init__(self, prompt: torch.Tensor) -> None:
        self.prompt, self.tokens = prompt, list[torch.Tensor]()

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        asked: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}
        self.tokens.append(given["model"].generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **asked))


def test_a_trainer_evaluates_generates_and_predicts_from_plans(tmp_path: Path) -> None:
    """Three times eight steps, an evaluation of four batches and 16 tokens, in 120 KiB: losses, tokens and predictions
    are plain training's."""
    lives = []
    rows = random_batch(32, batch=16, length=8)["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in rows.tolist()]
    for planned in (False, True):
        model, generates = tiny_lora(**SMALL, attention_dropout=0.1), _Generates(rows[:2])
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            max_steps=24,
            eval_strategy="steps",
            eval_steps=8,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        config = DiscoConfig(memory_budget="120KiB", device="cpu", planner="build", plan_cache=None)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=data,
            eval_dataset=data,
            data_collator=default_data_collator,
            callbacks=[generates, *([DiscoCallback(config)] if planned else [])],
        )
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        predicted = trainer.predict(data[:8])
        lives.append(
            [losses, trainer.evaluate()["eval_loss"], *generates.tokens, torch.from_numpy(predicted.predictions)]
        )
    assert_equal(lives[1], lives[0])
    assert len(losses) == 3 and stats(model)["forwards_unplanned"] == 0
    assert counts(model)[0] == 3 * 4 + 2 + 4 + 4 * 16
    state = find_state(model)
    assert state is not None
    plans = [step.plan for step in state.memory.plans.values()]
    assert (
        len(plans) > 3
        and max(arena_bytes(plan, d.id) for plan in plans for d in plan.devices if not d.is_host_device) <= 120 << 10
    )


def test_a_reference_in_each_step_leaves_training_its_engine() -> None:
    """A forward in turn with training takes memory beside the arena: from the second time on both fit in together."""

    def loss_or_rows(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() if module.training else y.relu()

    eager = Plain(loss_or_rows)
    planned = prepared(eager, 1 << 16)
    state = find_state(planned)
    assert state is not None
    unloads = []
    unload = state.memory.unload
    state.memory.unload = lambda: unloads.append(len(seen)) or unload()  # type: ignore[method-assign, func-returns-value]
    seen: list[int] = []
    optimizer = torch.optim.SGD([planned.scale], lr=0.1)
    optimizers = {planned: optimizer, eager: torch.optim.SGD([eager.scale], lr=0.1)}
    for seed in range(6):
        values = []
        for model, optimizer in optimizers.items():
            with torch.no_grad():
                reference = model.eval()(rows(seed, 256))
            loss = model.train()(rows(seed, 256))
            (loss * reference.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        assert torch.equal(*values)
        seen.append(seed)
    assert counts(planned) == (6, 0) and stats(planned)["peak_bytes"] <= 1 << 16
    assert unloads and max(unloads) < 4, "it goes on without making anything anew"
