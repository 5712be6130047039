"""Processes that compile: which one gets a request, when one ends, and what it knows of the processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disco_accel.errors import ExtensionError
from disco_accel.fuse import compiler_process
from disco_accel.fuse.compiler_process import _CompilerProcess, _IdleProcess
from tests.store.serving import in_child, until

PROGRAM = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    knows = os.environ.get("TORCHINDUCTOR_VEC_ISA_OK")
    answer = {"error": f"{knows}"} if knows in asked["fails"] else {"path": f"{os.getpid()} {knows}"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers with its number and what it was told, or fails as it is asked to."""
    monkeypatch.setattr(compiler_process, "_PROGRAM", PROGRAM)
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)


def answer(process: _CompilerProcess, *fails: str | None) -> list[str]:
    """The process's number, and what it was told of vector instructions."""
    return str(process.compile({"fails": fails})).split()


def test_the_next_call_gets_the_process_of_the_last(tmp_path: Path) -> None:
    """One; a second that is kept takes its place."""
    idle = _IdleProcess()
    first, second = idle.take(tmp_path, None), idle.take(tmp_path, None)
    numbers = [answer(process)[0] for process in (first, second)]
    assert numbers[0] != numbers[1]
    idle.keep(first)
    idle.keep(second)
    assert first._child is None
    assert answer(idle.take(tmp_path, None))[0] == numbers[1]
    assert answer(idle.take(tmp_path, None))[0] not in numbers
    second.stop()


def test_a_process_serves_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder, GPU or environment; one that has ended; and a forked process."""
    idle, kept = _IdleProcess(), list[_CompilerProcess]()

    def number(folder: Path = tmp_path, gpu: dict[str, str] | None = None) -> str:
        kept.append(idle.take(folder, gpu))
        found = answer(kept[-1])[0]
        idle.keep(kept[-1])
        return found

    numbers = [number(), number(tmp_path / "other"), number(gpu={"kind": "cuda"}), number()]
    monkeypatch.setenv("CXX", "another")
    numbers.append(number())
    assert kept[-1]._child is not None
    kept[-1]._child.kill()
    kept[-1]._child.wait()
    numbers.append(number())
    assert len(set(numbers)) == len(numbers)
    assert all(process._child is None for process in kept[:-1])
    assert number() == numbers[-1]

    def forked() -> None:
        idle.forget()
        assert number() != numbers[-1]

    assert in_child(forked) == 0
    assert number() == numbers[-1]
    kept[-1].stop()


def test_a_process_without_work_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that got work meanwhile."""
    idle = _IdleProcess()
    process = idle.take(tmp_path, None)
    answer(process)
    child = process._child
    assert child is not None
    idle.keep(process)
    assert idle.take(tmp_path, None) is process
    idle._stop(process)
    assert child.poll() is None
    monkeypatch.setattr(compiler_process, "_IDLE_SECONDS", 0.01)
    idle.keep(process)
    until(lambda: child.poll() is not None)


def test_a_compiler_that_is_older_than_the_processor_is_asked_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has said it; and what fails then, too, is an error."""
    process = _CompilerProcess(tmp_path, None)
    assert answer(process)[1] == "1"
    assert answer(process, "1")[1] == "None"
    assert answer(process)[1] == "None"
    with pytest.raises(ExtensionError, match="cannot be compiled: None"):
        process.compile({"fails": ["1", None]})
    process.stop()
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_VEC_ISA_OK", "0")
    process = _CompilerProcess(tmp_path, None)
    assert answer(process)[1] == "0"
    with pytest.raises(ExtensionError, match="cannot be compiled: 0"):
        answer(process, "0")
    process.stop()
