"""How a process with prepared models ends: by its script's exit status, without a word from C++, and soon."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disco_accel.native.shared_memory import _Mapping
from disco_accel.step.run.pending import PendingStep
from disco_accel.store.saved_activations import _Stored
from disco_accel.store.stored_object import StoredObject
from tests.support import forkserver

_SCRIPT = """
import os, signal, sys, threading, time
import torch
from disco_accel import set_memory_budget
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.budget import grant_source
from tests.step import moving_budgets
from tests.step.moving_budgets import LARGE, SMALL, answer_here, batch, session_of, twins

torch.set_num_threads(1)
moving_budgets.LAYERS = 2


class Granted:
    '''A grant of which two of our threads tell: each is in an op of PyTorch's while the process ends.'''

    def __init__(self):
        self.nbytes = LARGE
        self.told = {"disco-grant": threading.Event(), "disco-plans": threading.Event()}

    def granted(self):
        return self.nbytes

    def most(self):
        return LARGE

    def hold(self, nbytes):
        self.compute("disco-grant")

    def want(self, minimum, max_useful):
        self.compute("disco-plans")

    def compute(self, name):
        if threading.current_thread().name == name:
            a, last = torch.ones(64, 64), 0.0
            while not last or time.monotonic() < last:
                self.told[name].set()
                a @ a
                if not last and not threading.main_thread().is_alive():
                    last = time.monotonic() + 0.2


way = sys.argv[1]
if way != "hook":
    # How long another process waits for a core is of no interest there.
    PlanningProcess._answer = answer_here
source = Granted()
grant_source.use_grants(lambda: source)
shared, eager = twins("shared")
given, _ = twins(LARGE)
step = lambda model: model(batch(0)).backward()
for model in (shared, given, given):
    step(model)
set_memory_budget(given, SMALL)
step(given)
maker = session_of(shared).budgets.plan_sets.maker


def forked(end):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        end(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert not maker._stopped, "the parent's plans go on"
    step(shared)


def work_in_threads():
    assert source.told["disco-plans"].wait(60)
    source.nbytes = 1
    assert source.told["disco-grant"].wait(60)


def fail():
    raise ValueError("the script's")


def interrupted():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        step(given)


def hook():
    given.layers[1].register_forward_hook(lambda *_: sys.exit(3))
    step(given)


def in_thread():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


if way == "fork":
    forked(sys.exit)
    forked(os._exit)
if way == "hook":
    loss = shared(batch(1))
else:
    work_in_threads()
{"raise": fail, "interrupt": interrupted, "hook": hook, "fork": in_thread}[way]()
"""


@pytest.mark.parametrize(
    ("way", "status", "last"),
    [
        ("raise", 1, "ValueError: the script's"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("fork", 0, "ValueError: the script's"),
        ("hook", 3, ""),
    ],
)
def test_a_process_ends_as_its_script_says(way: str, status: int, last: str, tmp_path: Path) -> None:
    """Threads of ours are in C++ at the end: they are stopped and waited for, or CPython would abort the process."""
    done = subprocess.run(forkserver.program(_SCRIPT, tmp_path, way), capture_output=True, text=True, timeout=600)
    said = done.stderr.splitlines()
    assert done.returncode in (status, 128 - status) if status < 0 else done.returncode == status, done.stderr
    assert said[-1:] == ([last] if last else []), done.stderr


@pytest.mark.parametrize("kind", [PendingStep, StoredObject, _Stored, _Mapping])
def test_what_ctrl_c_left_unmade_is_freed_in_silence(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come before the first line of ``__init__``, and ``__del__`` runs all the same."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    made = kind.from_address(id(kind)) if kind is _Mapping else kind.__new__(kind)
    del made
    assert not said
