"""``update: auto``: deferred where a known Trainer drives the run and no code of others runs between, else ``step``.

Every run has the bits of eager mode, and so has what callbacks see of the parameters themselves.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, DiscoConfig, prepare, stats
from disco_accel.errors import ConfigError
from disco_accel.step.run.session import find_state
from tests.support.models import family_full, random_batch

STEPS = 5


class Own(Trainer):
    """A user's."""


class Norms(TrainerCallback):
    """Reads parameters themselves at each event of a step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, torch.Tensor]] = []

    def _see(self, event: str, model: torch.nn.Module) -> None:
        self.seen.append((event, torch.stack([p.detach().norm().cpu() for p in model.parameters()])))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._see("begin", kwargs["model"])

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._see("optimizer", kwargs["model"])

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._see("end", kwargs["model"])


class Arriving:
    """A collator that adds a callback when it makes its fifth batch, one before that is wanted."""

    def __init__(self) -> None:
        self.batches, self.norms = 0, Norms()
        self.trainer: Trainer | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self.batches += 1
        if self.batches == 5 and self.trainer is not None:
            self.trainer.add_callback(self.norms)
        batch: dict[str, Any] = default_data_collator(rows)
        return batch


def config(**keys: Any) -> DiscoConfig:
    return DiscoConfig(**({"memory_budget": 1 << 30, "device": "cpu", "optimizer": "host", "plan_cache": None} | keys))


def trainer_of(
    folder: Path, model: Any, callbacks: list[Any], cls: type[Trainer] = Trainer, collator: Any = None, **keys: Any
) -> Trainer:
    ids = torch.randint(0, 96, (24, 12), generator=torch.Generator().manual_seed(1)).tolist()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        optim="adamw_torch_fused",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **keys,
    )
    rows = [{"input_ids": row, "attention_mask": [1] * 12, "labels": row} for row in ids]
    collator = collator or default_data_collator
    return cls(model=model, args=arguments, train_dataset=rows, callbacks=callbacks, data_collator=collator)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """Weights of plain training, and what a callback sees on the way."""
    norms, model = Norms(), family_full("llama")
    trainer_of(tmp_path_factory.mktemp("eager"), model, [norms]).train()
    return [p.detach() for p in model.parameters()], norms.seen


def assert_weights(model: torch.nn.Module, expected: list[torch.Tensor]) -> None:
    """As the parameters themselves are."""
    assert all(map(torch.equal, model.parameters(), expected))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "update: auto" in record.getMessage()]


@pytest.mark.parametrize("by_callback", [True, False])
def test_a_trainer_of_the_library_defers(
    tmp_path: Path, eager: Any, caplog: pytest.LogCaptureFixture, by_callback: bool
) -> None:
    """With ``DiscoCallback`` and with ``prepare``; when ``train()`` has ended the parameters are the last ones."""
    model = family_full("llama")
    if not by_callback:
        prepare(model, config())
    trainer_of(tmp_path, model, [DiscoCallback(config())] if by_callback else []).train()
    assert_weights(model, eager[0])
    figures = stats(model)
    # The first update makes the moments, the last has no step behind it.
    assert (figures["update"], figures["updates_planned"], figures["updates_settled"]) == ("deferred", STEPS - 2, 1)
    assert not lines(caplog)


def test_a_callback_of_somebody_else_sees_true_weights(
    tmp_path: Path, eager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, norms = family_full("llama"), Norms()
    trainer_of(tmp_path, model, [DiscoCallback(config()), norms]).train()
    assert_weights(model, eager[0])
    for (event, found), (expected_event, expected) in zip(norms.seen, eager[1], strict=True):
        assert event == expected_event and torch.equal(found, expected), event
    assert stats(model)["update"] == "step" and "updates_planned" not in stats(model)
    (line,) = lines(caplog)
    assert "callback Norms" in line and "update: deferred" in line


def test_a_callback_that_is_added_in_the_middle_sees_true_weights(
    tmp_path: Path, eager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What is pending is done before its first event; until then updates are put off."""
    found = []
    for planned in (True, False):
        model, arriving = family_full("llama"), Arriving()
        callbacks = [DiscoCallback(config())] if planned else []
        arriving.trainer = trainer_of(tmp_path, model, callbacks, collator=arriving)
        arriving.trainer.train()
        found.append(arriving.norms.seen)
        assert_weights(model, eager[0])
        if planned:
            figures = stats(model)
            assert (figures["update"], figures["updates_settled"]) == ("step", 1)
            assert 0 < figures["updates_planned"] < STEPS - 2
    assert len(found[0]) == len(found[1]) > 0
    assert all(ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]) for ours, theirs in zip(*found, strict=True))
    assert len(lines(caplog)) == 1


def test_classes_methods_and_hooks_of_somebody_else_are_named(
    tmp_path: Path, eager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def hooked(model: torch.nn.Module) -> Trainer:
        model.register_forward_pre_hook(lambda *_: None)
        return trainer_of(tmp_path, model, [])

    def replaced(model: torch.nn.Module) -> Trainer:
        trainer = trainer_of(tmp_path, model, [])
        own = trainer.log
        trainer.log = lambda *args, **kwargs: own(*args, **kwargs)  # type: ignore[method-assign]
        return trainer

    cases = {
        "trainer Own": lambda model: trainer_of(tmp_path, model, [], Own),
        "Trainer.log, which was replaced,": replaced,
        "a forward pre-hook of LlamaForCausalLM": hooked,
    }
    for name, make in cases.items():
        model = family_full("llama")
        prepare(model, config())
        caplog.clear()
        make(model).train()
        assert_weights(model, eager[0])
        assert stats(model)["update"] == "step"
        (line,) = lines(caplog)
        assert name in line


def test_a_user_may_choose_otherwise(tmp_path: Path, eager: Any) -> None:
    """``planned`` with a class of the user's, ``step`` with the library's."""
    for cls, keys, when in ((Own, {"optimizer": "planned"}, "deferred"), (Trainer, {"update": "step"}, "step")):
        model = family_full("llama")
        trainer_of(tmp_path, model, [DiscoCallback(config(**keys))], cls).train()
        assert_weights(model, eager[0])
        assert (stats(model)["optimizer"], stats(model)["update"]) == ("host", when)


def test_a_failed_training_leaves_the_weights_it_had(tmp_path: Path) -> None:
    """Whatever ends ``train()``, the parameters themselves are those of eager mode then, and a bare loop goes on."""

    class Failing(Arriving):
        def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
            self.batches += 1
            if self.batches == 6:
                raise OSError("no more data")
            batch: dict[str, Any] = default_data_collator(rows)
            return batch

    found = []
    for planned in (True, False):
        model = family_full("llama")
        if planned:
            prepare(model, config())
        trainer = trainer_of(tmp_path, model, [], collator=Failing())
        with pytest.raises(OSError, match="no more data"):
            trainer.train()
        weights = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for seed in range(3):
            model(**random_batch(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            weights += [p.detach().clone() for p in model.parameters()]
        found.append(weights)
        if planned:
            assert stats(model)["updates_planned"] > 0 and stats(model)["update"] == "step"
    assert all(map(torch.equal, *found))


def test_planned_is_host_with_updates_in_the_plan() -> None:
    """Beside ``update: step`` it is refused, wherever the two come from."""
    with pytest.raises(ConfigError, match=r"optimizer: planned does not go with update: step.*optimizer: host"):
        DiscoConfig(optimizer="planned", update="step")
    with pytest.raises(ConfigError, match="optimizer: planned does not go with update: step"):
        DiscoConfig.from_env(DiscoConfig(optimizer="planned"), {"DISCO_UPDATE": "step"})
    for keys in ({"update": "deferred"}, {"update_on": "device"}, {"master_weights": "fp32"}):
        state = find_state(prepare(family_full("llama"), config(optimizer="planned", **keys)))
        assert state is not None and state.updates.deferral is not None
    with pytest.raises(ConfigError, match="optimizer: planned needs planner: timed"):
        prepare(family_full("llama"), config(optimizer="planned", planner="build"))


def test_the_default_is_the_host_for_a_model_too_large_to_train_on_the_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Told in one line; a bare loop updates in ``step()``. With too little host memory it is the device."""
    caplog.set_level(logging.INFO, "disco_accel")
    weights = sum(p.nbytes for p in family_full("llama").parameters())
    homes = []
    for keys in ({"memory_budget": 5 * weights}, {"memory_budget": 9 * weights}, {"host_memory": 3 * weights}):
        model = prepare(family_full("llama"), DiscoConfig(**({"device": "cpu", "memory_budget": 5 * weights} | keys)))
        state = find_state(model)
        assert state is not None and state.updates.deferral is None
        homes.append(state.setup.optimizer.value)
    assert homes == ["host", "device", "device"]
    assert sum("optimizer: auto is host here" in record.getMessage() for record in caplog.records) == 1
