"""Every test run starts the same: no plans of earlier runs, and Ctrl-C as in a terminal, also in what it starts."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import deepspeed_op, turns
from tests.support.brief_search import brief_search

__all__ = ["brief_search"]

ROOT = Path(__file__).resolve().parents[1]
LONG = (
    "runtime_ext/test_core.py",
    "pages/test_pages.py",
    "pages/test_examples.py",
    "integrate/test_distributed.py",
    "quantised/test_bits.py",
    "quantised/test_life.py",
    "quantised/test_load_packed.py",
    "quantised/test_changes.py",
    "benchmarks/test_gpu.py",
    "benchmarks/test_step_bench.py",
    "benchmarks/test_prefill_bench.py",
    "execute/test_soak.py",
    "recipes/test_killed.py",
    "verify/test_safety.py",
    "verify/test_verify_oracle.py",
)
"""Below tests/: files whose few tests take much longer than those of others."""
_home = ""


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist inherit the environment that their controller sets here."""
    global _home
    if threading.current_thread() is threading.main_thread():
        # Shells start background jobs with the signal ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        deepspeed_op.use_cache()
        turns.begin()
        _home = os.environ["HOME"] = tempfile.mkdtemp(prefix="disco-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home folder again."""
    if _home:
        shutil.rmtree(_home, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what these tests leave to another command."""
    terminalreporter.write_line(f"cases of tests/sampled.txt: those of {turns.NAME}={turns.number()}")
    if os.environ.get("EMULATED_CUDA") != "1":
        terminalreporter.write_line("not run here: the CUDA path on an emulated GPU (make emulated)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No search for garbage goes through modules and collected tests, which stay until the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
    from disco_accel.measure import fused_kernels

    # On a busy machine the kernels of small steps take long enough to be worth half a minute of a compiler.
    fused_kernels.WORTH_SECONDS = math.inf


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, or at the end one of two processes would wait for the other's."""
    missing = [name for name in LONG if not (ROOT / "tests" / name).is_file()]
    assert not missing, f"LONG in tests/conftest.py names {missing}"
    order = {ROOT / "tests" / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    sample(items, whole=not config.option.file_or_dir)


def sample(items: list[pytest.Item], *, whole: bool) -> None:
    """Mark two thirds of the cases of each test in sampled.txt as long, or all but one in as many as its line says.

    The turn says which ones stay: neighbours in an order that hangs by the cases' names, so that one more case moves
    few others. A test without cases stays in as many turns as one of its cases would. If the items are the ``whole``
    suite's, each of these tests must be there."""
    lines = (ROOT / "tests" / "sampled.txt").read_text().splitlines()
    shares = {name: int(share or 3) for name, _, share in (line.partition(" ") for line in lines)}
    cases: dict[str, list[pytest.Item]] = {name: [] for name in shares}
    alone = set()
    for item in items:
        name, parameters, _ = item.nodeid.removeprefix("tests/").partition("[")
        if name not in cases:
            continue
        if parameters:
            cases[name].append(item)
        else:
            alone.add(name)
            if (turns.number() + zlib.crc32(name.encode())) % shares[name]:
                item.add_marker(pytest.mark.long)
    for name, found in cases.items():
        assert found or name in alone or not whole, f"tests/sampled.txt names {name}, which is no test"
        found.sort(key=lambda item: zlib.crc32(item.name.encode()))
        kept = max(1, round(len(found) / shares[name]))
        first = turns.number() % max(1, len(found))
        for item in (found[first:] + found[:first])[kept:]:
            item.add_marker(pytest.mark.long)


@pytest.fixture
def random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ready vertices of a prepared model's steps, the engine starts any."""
    from disco_accel.step.run.session import Session

    monkeypatch.setattr(Session, "engine", {"dispatch": "random"})


@pytest.fixture(scope="module")
def compiler_of_our_priority() -> Iterator[None]:
    """Fused kernels are compiled as fast as tests run: beside two other test processes a lower priority gets little."""
    from disco_accel.fuse import compiler_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler_process, "_PROGRAM", f"import os; os.nice = lambda _: 0; {compiler_process._PROGRAM}")
        yield


@pytest.fixture(autouse=True)
def messages_as_before() -> Iterator[None]:
    """What one test has shown to its user (a recipe shows messages, an entry point does) no other test prints."""
    ours = logging.getLogger("disco_accel")
    level = ours.level
    # Fixtures of whole files may have left some.
    ours.handlers.clear()
    yield
    ours.setLevel(level)
    ours.handlers.clear()


@pytest.fixture(autouse=True)
def accelerate_as_before() -> Iterator[None]:
    """The precision and the processes that one test's Accelerator has settled on no other test's has to take."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
