"""Faults in a prepared model's training: ops that throw, Ctrl-C, forks, several models and several threads."""

from __future__ import annotations

import copy
import gc
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from disco_accel import prepare, restore
from disco_accel.errors import DiscoError, ExecutionError
from disco_accel.native.op_encoding import label
from disco_accel.step.run.session import current_step
from tests.integrate.twins import SMALL, Grads, assert_same, assert_same_step, batch, config, pair, step
from tests.support import forkserver
from tests.support.engine_faults import failing, kernels
from tests.support.models import tiny_lora


def test_an_op_that_throws_at_every_vertex() -> None:
    """Each kernel of a checkpointed LoRA step in turn: a typed error that names it, nothing of the user's changed.

    Parameters, gradients and optimizer state stay as they were, and the next step has eager's bits.
    """
    model, eager = pair(checkpointing=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(**batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    eager.load_state_dict(model.state_dict())
    expected = step(eager, 1)
    planned = current_step(model)
    assert planned is not None
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict())
    for op, vertex in enumerate(kernels(planned.plan)):
        name = re.escape(label(planned.graph.ops[vertex]))
        with pytest.raises(ExecutionError, match=f"vertex {vertex} failed: {name}"), failing(planned.executor, op):
            model(**batch(1)).loss.backward()
        assert all(p.grad is None for p in model.parameters())
        assert_same(step(model, 1), expected)
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters())
    assert _same_state(optimizer.state_dict(), state)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_state(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same_state, one, other))
    return bool(one == other)


def test_a_hundred_forwards_without_backward() -> None:
    """Losses that are dropped, one after the other, leave no trace in the step that follows."""
    model, eager = pair()
    for i in range(100):
        model(**batch(i % 4))
    gc.collect()
    assert_same_step(model, eager, 5)


def test_a_tangent_that_is_late_by_100_ms() -> None:
    """The user may take time between forward and backward."""
    model, eager = pair()
    for seed in range(2):
        loss = model(**batch(seed)).loss
        time.sleep(0.1)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        assert_same((loss.detach(), grads), step(eager, seed))


_CTRL_C = """
import torch
from disco_accel import prepare
from disco_accel.errors import BudgetTooSmall
from disco_accel.step.run.session import Session
from tests.support.interrupts import interrupt_when_waiting, interrupted
from tests.support.models import tiny_lora
from tests.integrate.twins import SMALL, assert_same_step, batch, config

shape = SMALL
torch.set_num_threads(1)
try:
    prepare(tiny_lora(**shape), config(memory_budget="4096"))(**batch())
except BudgetTooSmall as error:
    least = str(error.needed)
model = prepare(tiny_lora(**shape), config(memory_budget=least))
Session.engine = {"link_latency": 0.005}
eager = tiny_lora(**shape)

def backward():
    model.zero_grad()
    global loss
    loss = model(**batch(2)).loss
    return loss.backward

model(**batch()).loss.backward()
model.zero_grad()
interrupted(lambda: lambda: model(**batch()))
assert_same_step(model, eager, 1)
interrupted(backward)
assert all(p.grad is None for p in model.parameters())
loss.backward()
model.zero_grad()
assert_same_step(model, eager, 3)
print("trains on", flush=True)
with interrupt_when_waiting():
    while True:
        model(**batch())
"""


def _run_script(source: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``source`` in a process of its own; hanging is a failure."""
    command = forkserver.program(source, folder, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=1500)


def test_ctrl_c_in_forward_and_backward(tmp_path: Path) -> None:
    """KeyboardInterrupt in the middle of a step; training goes on when it is caught; uncaught, the process ends."""
    done = _run_script(_CTRL_C, tmp_path)
    assert "trains on" in done.stdout, done.stderr[-2000:]
    assert done.returncode in (-signal.SIGINT, 130), done.stderr[-2000:]
    assert "KeyboardInterrupt" in done.stderr


_FORK = """
import os, signal, sys, time
import torch
from disco_accel import prepare, restore
from disco_accel.errors import ExecutionError
from tests.integrate.twins import assert_same_step, batch, config, pair, step

torch.set_num_threads(1)
model, eager = pair()
loss = model(**batch()).loss
for way in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        if way == "exit":
            sys.exit(7)
        for use in (lambda: model(**batch()), loss.backward):
            try:
                use()
            except ExecutionError as error:
                assert "forked" in str(error), error
            else:
                sys.exit("not refused")
        with torch.no_grad():
            assert torch.equal(model(**batch()).logits, eager(**batch()).logits)
        del loss
        prepare(restore(model), config())
        assert_same_step(model, eager, 1)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, way
loss.backward()
model.zero_grad()
assert_same_step(model, eager, 2)
print("parent went on")
"""


def test_ctrl_c_in_the_making_of_a_step_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of it is freed without an ignored exception, and the next step is right."""
    model, eager = pair()
    unraisable: list[Any] = []

    def interrupted(step: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("disco_accel.step.run.pending.generator_state", interrupted)
        during.setattr(sys, "unraisablehook", unraisable.append)
        with pytest.raises(KeyboardInterrupt):
            model(**batch())
        gc.collect()
    assert not unraisable
    assert_same_step(model, eager)


def test_fork_after_the_engine_started(tmp_path: Path) -> None:
    """In the child, planned steps are refused, evaluation works, restore + prepare make it trainable; no exit hangs."""
    done = _run_script(_FORK, tmp_path, "exit", "use")
    assert done.returncode == 0 and "parent went on" in done.stdout, done.stderr[-2000:]


def test_forked_data_loader_workers() -> None:
    """Worker processes that fork from a training process load batches and end; every step has eager's bits."""
    model, eager = pair()
    assert_same_step(model, eager)
    rows = [{k: v[0] for k, v in batch(seed).items()} for seed in range(6)]
    for loaded in DataLoader(rows, batch_size=2, num_workers=2, multiprocessing_context="fork"):
        for m in (model, eager):
            m.zero_grad()
            m(**loaded).loss.backward()
        grads = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, eager)]
        assert grads[0].keys() == grads[1].keys()
        assert all(torch.equal(grads[0][n], g) for n, g in grads[1].items())


@pytest.mark.parametrize("nested", [True, False])
def test_two_prepared_models_interleave(nested: bool) -> None:
    """Forward A, forward B, backward B, backward A (or A first): each gets eager's gradients."""
    models = [prepare(tiny_lora(**SMALL, seed=s), config()) for s in (1, 2)]
    eager = [tiny_lora(**SMALL, seed=s) for s in (1, 2)]
    for round_ in range(3):
        losses = [m(**batch(10 * round_ + i)).loss for i, m in enumerate(models)]
        for loss in reversed(losses) if nested else losses:
            loss.backward()
        for i, (m, e) in enumerate(zip(models, eager, strict=True)):
            got = (losses[i].detach(), {n: p.grad for n, p in m.named_parameters() if p.grad is not None})
            assert_same(got, step(e, 10 * round_ + i))
            m.zero_grad()


def _gradients(model: torch.nn.Module, seed: int) -> tuple[torch.Tensor, Grads]:
    """As ``step``, but nothing is accumulated into the parameters, which threads share."""
    loss = model(**batch(seed)).loss
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return loss.detach(), {n: g for (n, _), g in zip(named, found, strict=True) if g is not None}


def _in_threads(work: Callable[[int], None]) -> list[BaseException]:
    """Runs ``work(0)`` and ``work(1)`` at the same time; what they raised."""
    raised: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "two threads hang"
    return raised


@pytest.mark.parametrize("shared", [True, False])
def test_two_threads(shared: bool) -> None:
    """Two threads with one prepared model, or one each, from the first capture on: right bits or a typed error."""
    expected = {seed: _gradients(tiny_lora(**SMALL), seed) for seed in range(6)}
    first = prepare(tiny_lora(**SMALL), config())
    models = [first, first if shared else prepare(tiny_lora(**SMALL), config())]
    checked = [0, 0]

    def work(i: int) -> None:
        torch.set_num_threads(1)
        for round_ in range(25):
            seed = (3 * i + round_) % 6
            assert_same(_gradients(models[i], seed), expected[seed])
            if round_ % 5 == i:
                models[i](**batch(seed))  # dropped: freed while the other thread may be in a step
            checked[i] += 1

    raised = _in_threads(work)
    assert all(isinstance(error, DiscoError) for error in raised), raised
    if not shared:
        assert not raised and checked == [25, 25]
    assert_same(_gradients(models[0], 0), expected[0])
    for model in models:
        restore(model)
