"""A process that shares weights is killed before any of its lines: nobody gets half a copy, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from disco_accel.native import rendezvous, shared_copies
from disco_accel.native.rendezvous import Rendezvous
from tests.native.sharers import Shared, child, weights
from tests.support import turns


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights"


Line = tuple[str, int]


def _before_line(meet: Callable[[Line], None]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that calls ``meet`` before each line of our two modules."""
    ours = {shared_copies.__file__, rendezvous.__file__}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            meet((frame.f_code.co_filename, frame.f_lineno))
        return trace

    return trace


def _lines_of(folder: Path) -> list[Line]:
    """The lines that are run when weights are shared in ``folder``, each once."""
    lines: list[Line] = []
    sys.settrace(_before_line(lines.append))
    try:
        Shared(folder)
    finally:
        sys.settrace(None)
    gc.collect()
    return list(dict.fromkeys(lines))


def _killed_before(line: Line, folder: Path) -> int:
    """How a process ended that was killed when it first came to ``line``."""

    def meet(met: Line) -> None:
        if met == line:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        sys.settrace(_before_line(meet))
        Shared(folder)

    with child(work) as wait:
        wait()
        return wait()


def test_a_maker_killed_between_its_lines_leaves_nothing_half(folder: Path) -> None:
    """Whoever comes next makes the copy, and waits for no lock."""
    lines = _lines_of(folder)
    assert len(lines) > 80
    for line in turns.one_in(12, lines):
        assert _killed_before(line, folder) == signal.SIGKILL, line
        after = Shared(folder)
        assert after.is_new and not after.said, line
        del after
        gc.collect()
    Rendezvous(folder).sweep()
    assert not list(folder.iterdir()), "what the dead have left is cleared away"


def test_a_reader_killed_between_any_two_lines_harms_nobody(folder: Path) -> None:
    holder = Shared(folder)
    for line in turns.one_in(16, _lines_of(folder)):
        assert _killed_before(line, folder) == signal.SIGKILL, line
        again = Shared(folder)
        assert not again.is_new and not again.said, line
        del again
    assert torch.equal(holder.tensors[1], weights()[1])
