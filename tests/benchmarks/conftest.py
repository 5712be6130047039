"""The processes that a benchmark starts import PyTorch and transformers once, all of them together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import forkserver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sys.executable`` forks a server of this process; what has other libraries on its path starts anew."""
    monkeypatch.setattr(sys, "executable", str(forkserver.start() / "python"))
