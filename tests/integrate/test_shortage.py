"""A shortage of memory is of the moment: told as it comes, never remembered as something about the model."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture import step as capture
from disco_accel.errors import CaptureError, DiscoError
from disco_accel.execute import executor
from disco_accel.measure import record
from disco_accel.native import host_memory
from disco_accel.shortage import met_shortage
from disco_accel.step.budget import plan_loader
from disco_accel.step.compile import compiled_step, pipeline
from disco_accel.step.placement import model_placement as placement
from tests.support import forkserver
from tests.support.models import random_batch, tiny_lora

CPU = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
SHORTAGES: dict[str, BaseException] = {
    "Python": MemoryError(),
    "PyTorch on the host": RuntimeError(CPU),
    "PyTorch on a device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "the system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "C++": RuntimeError("std::bad_alloc"),
    "native code that says nothing": SystemError("error return without exception set"),
}


def config(on_unsupported: str = "error") -> DiscoConfig:
    return DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None, on_unsupported=on_unsupported)


def gradients(model: Any, key: str = "labels") -> dict[str, torch.Tensor]:
    """Of one step; ``{}`` where the model has none."""
    model.zero_grad()
    output = model(**random_batch())
    output.loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None} | {"loss": output.loss}


def assert_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: BaseException) -> Iterator[list[str]]:
    """Inside, ``where.name`` raises ``error`` once; the list says that it did."""
    raised: list[str] = []
    original = getattr(where, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if raised:
            return original(*args, **kwargs)
        raised.append(name)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(where, name, fails)
        yield raised


STAGES: dict[str, tuple[object, str]] = {
    "tracing": (capture, "record_ops"),
    "lowering": (capture, "used_inputs"),
    "measuring": (record, "_measure"),
    "planning": (pipeline, "decide"),
    "verifying": (pipeline, "verify"),
    "host copies": (compiled_step, "bytes_of"),
    "the arena": (plan_loader, "device_arena"),
    "the host's arena": (executor, "host_arena"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_step_after_a_shortage_is_planned(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever memory ran out: a typed error that says so, and the next step runs planned with eager's bits."""
    expected = gradients(tiny_lora(layers=1, hidden=32))
    model: Any = prepare(tiny_lora(layers=1, hidden=32), config())
    with (
        failing(monkeypatch, *STAGES[stage], MemoryError()) as raised,
        pytest.raises(DiscoError, match="tries again") as told,
    ):
        model(**random_batch())
    assert raised and met_shortage(told.value)
    assert_bits(gradients(model), expected)
    assert stats(model)["steps_compiled"] == 1


@pytest.mark.parametrize("kind", SHORTAGES)
def test_every_kind_of_shortage_is_known(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its class, its number or its words, in a forward that is being traced as around it."""
    model: Any = prepare(tiny_lora(layers=1, hidden=32), config())
    inner = model.get_submodule("base_model.model.model.norm")
    with failing(monkeypatch, inner, "forward", SHORTAGES[kind]), pytest.raises(DiscoError, match="tries again"):
        model(**random_batch())
    model(**random_batch()).loss.backward()
    assert stats(model)["steps_compiled"] == 1


def test_with_fallbacks_the_step_runs_eagerly_and_the_next_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortage is told once, and no later step is held up by it."""
    expected = gradients(tiny_lora(layers=1, hidden=32))
    model: Any = prepare(tiny_lora(layers=1, hidden=32), config("eager"))
    with failing(monkeypatch, capture, "record_ops", MemoryError()):
        assert_bits(gradients(model), expected)
    assert_bits(gradients(model), expected)
    seen = stats(model)
    assert (seen["steps_eager"], seen["steps_compiled"]) == (1, 1)
    assert len(seen["fallbacks"]) == 1 and "tries again" in seen["fallbacks"][0]


def test_what_is_about_the_model_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the trace that is no shortage is met once; the second step does not trace again."""
    model: Any = prepare(tiny_lora(layers=1, hidden=32), config())
    traced: list[int] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        traced.append(1)
        raise ValueError("no such thing")

    monkeypatch.setattr(capture, "record_ops", fails)
    for _ in range(2):
        with pytest.raises(CaptureError, match="no such thing"):
            model(**random_batch())
    assert traced == [1]


def test_an_interrupted_capture_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a step is traced."""
    model: Any = prepare(tiny_lora(layers=1, hidden=32), config("eager"))
    with (
        failing(monkeypatch, capture, "record_ops", KeyboardInterrupt()),
        pytest.raises(KeyboardInterrupt),
    ):
        model(**random_batch())
    model(**random_batch()).loss.backward()
    assert stats(model)["steps_compiled"] == 1


def test_a_model_whose_weights_do_not_fit_is_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """``prepare`` raises a typed error, the model still runs, and preparing it later works."""
    expected = gradients(tiny_lora(layers=1, hidden=32))
    model: Any = tiny_lora(layers=1, hidden=32)
    for where, name in ((placement.HostMemory, "place_for"), (host_memory, "host_arena")):
        with failing(monkeypatch, where, name, RuntimeError(CPU)), pytest.raises(DiscoError, match="frozen weights"):
            prepare(model, config())
        assert stats(model) == {}
        assert_bits(gradients(model), expected)
    assert_bits(gradients(prepare(model, config())), expected)


def test_causes_are_looked_at_and_rings_of_them_end() -> None:
    """An error that was raised because of a shortage counts as one; one that says nothing of it does not."""
    outer = ValueError("made of")
    outer.__cause__ = MemoryError()
    assert met_shortage(outer) and not met_shortage(ValueError("made of"))
    a, b = ValueError("a"), ValueError("b")
    a.__context__, b.__context__ = b, a
    assert not met_shortage(a)


LIMITED = """
import os, resource, torch
from disco_accel import DiscoConfig, prepare
from disco_accel.errors import DiscoError
from disco_accel.native.extension import load_extension
from tests.support.models import random_batch, tiny_lora

torch.set_num_threads(1)
load_extension()
model, batch = tiny_lora(layers=1, hidden=32), random_batch()
config = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None)
forever = (resource.RLIM_INFINITY,) * 2

def attempt():
    prepare(model, config)(**batch).loss.backward()

for mib in (0, 20, 28, 1024):
    if (child := os.fork()) == 0:
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (mib << 20), resource.RLIM_INFINITY))
        said = "works"
        try:
            attempt()
        except DiscoError as error:
            said = repr(str(error))
        resource.setrlimit(resource.RLIMIT_AS, forever)
        attempt()
        print(mib, said, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, mib
"""


def test_under_a_limit_of_the_address_space_every_failure_is_typed_and_passes(tmp_path: Path) -> None:
    """Where weights move, where the engine starts its threads: a typed error that says to try again, and then it works.

    Between the two the trace meets the limit, where the interpreter itself may crash.
    """
    done = subprocess.run(forkserver.program(LIMITED, tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.pop("1024") == "works"
    assert all(line == "works" or "tries again" in line for line in said.values()), said
