"""Threads beside a program: which run, and what its end waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from disco_accel import prepare, stats
from disco_accel.execute import program
from disco_accel.threads import interrupts_wait
from tests.integrate.generators import assert_same_step
from tests.integrate.twins import SMALL, batch, config
from tests.support.models import tiny_lora

_SCRIPT = """
import atexit, os, threading


@atexit.register
def last():
    print("at exit", start_thread(work, "late", name="late", stop=go.set))


from disco_accel import threads
from disco_accel.threads import start_thread

threads.END_SECONDS = 0.2
go, never = threading.Event(), threading.Event()


def work(word):
    go.wait()
    print("worked", word, flush=True)


def other():
    threading.main_thread().join()
    start_thread(work, "after the script", name="after", stop=go.set)


start_thread(never.wait, name="stuck", stop=go.set)
start_thread(go.wait, name="parent's", stop=go.set)
child = os.fork()
if child == 0:
    start_thread(work, "in a child", name="child", stop=go.set)
else:
    os.waitpid(child, 0)
    threading.Thread(target=other).start()
"""


def test_the_end_of_a_process_stops_its_own_threads() -> None:
    """Those of a program whose main thread has ended are started too, one that hangs keeps the process for a time, and
    a child of a fork waits for its own alone."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=600)
    lines = ["worked in a child", "at exit None", "worked after the script", "at exit None"]
    assert done.returncode == 0 and done.stdout.splitlines() == lines, (done.stdout, done.stderr)
    told = "this process ends while its threads still work after 0 s: stuck"
    assert done.stderr.splitlines() == [told]


def test_ctrl_c_comes_behind_the_work_that_it_would_have_cut() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    before = signal.signal(signal.SIGINT, lambda number, _frame: done.append(number))
    try:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            assert done == [1]
        assert done == [1, signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_ctrl_c_to_the_main_one() -> None:
    seen: list[Any] = []

    def work() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_ctrl_c_while_a_plan_is_lowered_is_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind it has eager's bits."""
    lowered = program._Lowering.run

    def interrupted(self: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        made.append(lowered(self))
        return made[-1]

    model, made = prepare(tiny_lora(**SMALL), config()), list[Any]()
    monkeypatch.setattr(program._Lowering, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(**batch(0))
    assert made
    monkeypatch.undo()
    assert_same_step(model, tiny_lora(**SMALL), batch(0))
    assert stats(model)["fallbacks"] == []
