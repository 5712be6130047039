"""Other programs in the process, and what they count, are no state of a model: no step is refused or planned anew."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tqdm import tqdm

from disco_accel import DiscoConfig, prepare, stats
from tests.support.models import family_full, random_batch

logger = logging.getLogger("tests.outside")


class ImportHook:
    """As trackers and test runners install: it looks at the other hooks, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        self.seen.append(f"{name} beside {len([f for f in sys.meta_path if f is not self])}")


class Counting(logging.Handler):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Talking(torch.nn.Module):
    """Asks for an optional library, logs, warns and looks at the environment in each forward."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> torch.Tensor:
        try:
            import an_optional_library_that_is_not_there  # noqa: F401
        except ImportError:
            logger.info("without it")
        if os.environ.get("TESTS_OUTSIDE_WARN") is not None:
            warnings.warn("a forward", stacklevel=1)
        return self.inner(**batch).loss * 1.5


@contextmanager
def _import_hook(model: torch.nn.Module) -> Iterator[Callable[[], object]]:
    hook = ImportHook()
    sys.meta_path.insert(0, hook)  # type: ignore[arg-type]
    yield lambda: hook.seen.append("by itself")
    sys.meta_path.remove(hook)  # type: ignore[arg-type]
    assert hook.seen


@contextmanager
def _handler(model: torch.nn.Module) -> Iterator[Callable[[], object]]:
    handler = Counting()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: logger.info("between forward and backward")
    logger.removeHandler(handler)
    assert handler.records


@contextmanager
def _trace(model: torch.nn.Module) -> Iterator[Callable[[], object]]:
    calls: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        calls.append(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(trace)
    yield int
    sys.settrace(before)
    assert calls


@contextmanager
def _progress(model: torch.nn.Module) -> Iterator[Callable[[], object]]:
    bar = tqdm(total=100, file=open(os.devnull, "w"), mininterval=0)  # noqa: SIM115
    handle = model.register_forward_hook(lambda *_: bar.update(1) and None)
    yield lambda: bar.update(1)
    handle.remove()
    bar.close()
    assert bar.n >= 4


@pytest.mark.parametrize("program", [_import_hook, _handler, _trace, _progress])
def test_what_other_programs_keep_is_no_state_of_the_model(program: Any) -> None:
    """With checkpointing, so that Python code runs in the backward too."""
    eager = Talking(family_full("llama", num_hidden_layers=1))
    model = Talking(family_full("llama", num_hidden_layers=1))
    model.load_state_dict(eager.state_dict())
    for each in (eager, model):
        each.inner.gradient_checkpointing_enable({"use_reentrant": False})
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cpu", plan_cache=None))
    with program(model) as between:
        for step in range(5):
            losses = [each(**random_batch(seed=step)) for each in (eager, model)]
            between()
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert stats(model)["steps_eager"] == 0 and stats(model)["steps_compiled"] == 5
    assert stats(model)["plans"] <= 3, "one plan, one that adds to gradients, and what its first steps teach"


def test_state_may_change_before_a_backward_that_runs_no_python() -> None:
    """A look at the validation loss between forward and backward: ``model.eval()``, a forward without gradients."""
    eager = family_full("llama", num_hidden_layers=1)
    model = family_full("llama", num_hidden_layers=1)
    model.load_state_dict(eager.state_dict())
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cpu", plan_cache=None))
    seen = []
    for each in (eager, model):
        loss = each(**random_batch()).loss
        each.eval()
        with torch.no_grad():
            seen.append(each(**random_batch(seed=1)).loss)
        loss.backward()
        each.train()
    assert torch.equal(*seen)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
