"""TRL's head where TRL has Triton, told of a device that has it: a plan's shapes must not depend on the labels.

TRL itself runs in ``make outside``; the modules here ask the same question in the same places.
"""

from __future__ import annotations

import copy
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn

from disco_accel import DiscoConfig, prepare, pure, stats

_PLACES = ("trl.trainer.utils", "trl.kernels.chunked_logprob")
_HIDDEN = 8


class _Head(nn.Module):
    """The loss of the positions with a label: of these alone, or of all, where the others count nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen = nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN).requires_grad_(False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.frozen(self.first(hidden)), labels != -100
        answers = [sys.modules[name]._use_triton(hidden.device) for name in _PLACES]  # type: ignore[attr-defined]
        assert answers[0] == answers[1]
        _meanwhile()
        if answers[0]:
            return (hidden[mask] ** 2).sum()
        return (hidden**2).sum(-1).masked_fill(~mask, 0).sum()


_elsewhere: list[bool] = []


@pure
def _meanwhile() -> None:
    """Asks in another thread."""
    ask: Any = sys.modules[_PLACES[0]]
    thread = threading.Thread(target=lambda: _elsewhere.append(ask._use_triton(torch.device("cpu"))))
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _PLACES:
        module = types.ModuleType(name)
        module.__dict__["_use_triton"] = lambda device: True
        monkeypatch.setitem(sys.modules, name, module)


def test_a_planned_step_scores_all_positions_and_other_threads_keep_their_answer() -> None:
    eager = _Head()
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="8MiB", device="cpu"))
    hidden = torch.randn(2, 6, _HIDDEN)
    for labelled in (3, 5, 0):
        labels = torch.full((2, 6), -100)
        labels[:, :labelled] = 1
        losses = [model(hidden=hidden, labels=labels) for model in (planned, eager)]
        for loss in losses:
            loss.backward()
        # Rows of a product are rounded by the number of its rows.
        torch.testing.assert_close(*losses)
    for ours, eagers in zip(planned.parameters(), eager.parameters(), strict=True):
        if eagers.grad is not None:
            torch.testing.assert_close(ours.grad, eagers.grad)
    assert stats(planned)["steps_compiled"] == 3 and stats(planned)["plans"] == 1
    assert all(_elsewhere) and len(_elsewhere) == 4, "once in the capture, three times in eager mode"
    assert all(sys.modules[name]._use_triton(None) for name in _PLACES)  # type: ignore[attr-defined]
