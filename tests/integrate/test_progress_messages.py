"""What a user hears while plans are made, from which entry point, and where it is written."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from transformers import Trainer, TrainingArguments

from disco_accel import DiscoCallback, prefill, prepare, stats
from disco_accel.errors import CaptureError
from disco_accel.integrate.accelerate.trainer_runs import KEY
from disco_accel.observe.log_to_stderr import show_messages
from disco_accel.step.run import progress_messages, step_plans
from disco_accel.step.run.session import find_state
from tests.integrate.twins import SMALL, batch, config
from tests.support.models import tiny_lora


@contextmanager
def script_without_logging() -> Iterator[io.StringIO]:
    """Its stderr. pytest's own handlers are away meanwhile."""
    root, ours, stderr = logging.getLogger(), logging.getLogger("disco_accel"), io.StringIO()
    handlers, root.handlers = root.handlers, []
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)
    with redirect_stderr(stderr):
        try:
            yield stderr
        finally:
            root.handlers = handlers


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "disco_accel"]


def test_an_own_loop_hears_each_stage_and_one_line_of_result(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, without any logging set up; stdout is the script's."""
    with script_without_logging() as stderr:
        model = prepare(tiny_lora(**SMALL), config(plan_cache=None))
        for seed in range(4):
            model(**batch(seed)).loss.backward()
    lines = stderr.getvalue().splitlines()
    words = ("frozen weights go to the host", "capturing a training step on 2 x 8 tokens", "measuring ", "planning ")
    result = ("planned in", "a planned step takes")
    assert len(lines) == 6 and all(line.startswith("disco: ") for line in lines)
    assert all(word in line for word, line in zip((*words, *result), lines, strict=True))
    assert all(w in lines[4] for w in ("budget 1GiB", "stay resident", "reloaded", "offloaded"))
    assert "times its bound" in lines[5] and capsys.readouterr().out == ""


def test_a_stage_is_told_before_it_begins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def stuck(*_: Any, **__: Any) -> Any:
        told.extend(said(caplog))
        raise CaptureError("stop here")

    monkeypatch.setattr(step_plans, "compile_step", stuck)
    model = prepare(tiny_lora(**SMALL), config())
    with pytest.raises(CaptureError):
        model(**batch())
    assert any("capturing a training step" in line for line in told)


def test_a_long_stage_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The stage ends once that was heard, and nothing is said after its end."""
    heard = threading.Event()
    monkeypatch.setattr(progress_messages, "FIRST_BEAT", 0.01)

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "still measuring" in record.getMessage():
                heard.set()

    ear = Ear()
    logging.getLogger("disco_accel").setLevel(logging.INFO)
    logging.getLogger("disco_accel").addHandler(ear)
    threads = threading.active_count()
    speaker = progress_messages.ProgressMessages(tiny_lora(**SMALL))
    with speaker.making("a step") as stage:
        stage("measuring 3 kernels")
        assert heard.wait(60)
    assert threading.active_count() == threads


def test_new_lengths_and_plans_of_the_cache_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        model = prepare(tiny_lora(**SMALL), config(plan_cache=str(tmp_path), buckets=[16]))
        model(**batch(0, 8)).loss.backward()
        model(**batch(0, 12)).loss.backward()
    lines = said(caplog)
    assert sum("capturing a training step on 2 x 16 tokens (padded from 8)" in line for line in lines) == 2
    assert sum("padded from 12" in line for line in lines) == 0, "the same plan"
    assert sum("LlamaForCausalLM: planned in" in line for line in lines) == 1
    assert sum("plan read from the cache" in line for line in lines) == 1


def test_prefill_speaks_too(caplog: pytest.LogCaptureFixture) -> None:
    prefill(tiny_lora(**SMALL).eval(), batch()["input_ids"], config=config())
    lines = said(caplog)
    assert any("frozen weights go to the host" in line for line in lines)
    assert any("capturing the reading of 2 x 8 tokens" in line for line in lines)


def test_quiet_leaves_warnings() -> None:
    with script_without_logging() as stderr:
        model = prepare(tiny_lora(**SMALL), config(quiet=True, on_unsupported="eager"))
        model(**batch()).loss.backward()
        assert stderr.getvalue() == ""
        model(**batch(), return_dict=False)
    assert stderr.getvalue().count("disco: this step runs in eager mode") == 1


def test_what_the_user_set_up_stays() -> None:
    """A level of their own, or a handler, and nothing is added."""
    ours, own = logging.getLogger("disco_accel"), io.StringIO()
    with script_without_logging() as stderr:
        ours.setLevel(logging.WARNING)
        show_messages()
        assert ours.level == logging.WARNING
        ours.handlers[:] = [logging.StreamHandler(own)]
        show_messages()
        ours.warning("once")
    assert own.getvalue() == "once\n" and stderr.getvalue() == "" and len(ours.handlers) == 1


def test_a_bar_on_the_screen_is_not_torn() -> None:
    """The bar is taken away, the line written, the bar drawn again below."""
    with script_without_logging() as stderr, tqdm.tqdm(total=8, file=stderr, ncols=40, mininterval=0) as bar:
        show_messages()
        logging.getLogger("disco_accel").info("hello")
        text = stderr.getvalue()
        bar.update(1)
    before, after = text.split("disco: hello\n")
    assert before.endswith("\r") and "0/8" in after


def test_other_processes_of_a_run_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with script_without_logging() as stderr:
        model = prepare(tiny_lora(**SMALL), config())
        model(**batch()).loss.backward()
    assert stderr.getvalue() == ""


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[0] for name, column in batch(row).items()}


def test_trainers_speed_leaves_planning_out_and_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``train_runtime`` and planning together are the time on the clock; the speeds are those of ``train_runtime``; a
    second training, which plans nothing, is not corrected."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        include_num_input_tokens_seen=True,
    )
    model = tiny_lora(**SMALL)
    trainer = Trainer(model=model, args=arguments, train_dataset=_Rows(), callbacks=[DiscoCallback(config())])
    began = progress_messages.time.time()
    metrics = trainer.train().metrics
    clock = progress_messages.time.time() - began
    state = find_state(model)
    assert state is not None
    planning = sum(ended - begun for begun, ended in state.reports.messages.made)
    assert metrics[KEY] == pytest.approx(planning, abs=1e-3) and planning > 0
    assert metrics["train_runtime"] + metrics[KEY] <= clock
    assert metrics["train_samples_per_second"] == pytest.approx(6 / metrics["train_runtime"], rel=0.02)
    assert metrics["train_steps_per_second"] == pytest.approx(3 / metrics["train_runtime"], rel=0.02)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [KEY in entry for entry in steps] == [True, False, False], "where it was spent"
    assert all(entry["train_runtime"] <= clock - planning + 1e-3 for entry in steps)
    assert trainer.state.log_history[-1][KEY] == metrics[KEY]
    assert any("capturing a training step" in line for line in said(caplog))
    assert KEY not in trainer.train().metrics and stats(model)["steps_compiled"] == 6


def test_a_trainer_without_us_logs_what_it_always_logged(tmp_path: Path) -> None:
    """After a prepared model's Trainer has been corrected in the same process."""
    prepared = prepare(tiny_lora(**SMALL), config())
    prepared(**batch()).loss.backward()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model=tiny_lora(**SMALL), args=arguments, train_dataset=_Rows())
    metrics = trainer.train().metrics
    assert metrics["train_runtime"] > 0 and KEY not in metrics
