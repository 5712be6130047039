"""Threads beside a program: which run, and what its end waits for."""

from __future__ import annotations

import subprocess
import sys

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
