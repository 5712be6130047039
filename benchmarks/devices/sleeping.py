"""A kernel that sleeps for its time, so that two cores show steps on four devices."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch

_SET_TIMER_SLACK = 29
"""prctl's PR_SET_TIMERSLACK: how late a timer of the calling thread may go off, in nanoseconds; 50 us by default."""
_SLACK_NS = 1000
_EARLY = 60e-6
"""Seconds that the long sleep ends before its time: about what a thread needs to be awake again."""
_NAP = 2e-6

_thread = threading.local()


def sleep_until(due: float) -> None:
    """Returns within some microseconds after ``time.monotonic()`` is ``due``, on a machine with a core to spare.

    Naps at the end, instead of one sleep that wakes too late or a spin that takes a core and the interpreter's lock.
    """
    if not getattr(_thread, "exact", False):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
        _thread.exact = True
    long = due - _EARLY - time.monotonic()
    if long > 0:
        time.sleep(long)
    while time.monotonic() < due:
        time.sleep(_NAP)


@torch.library.custom_op("disco_bench::work", mutates_args=())
def work(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
    """Half of ``x``, ``seconds`` for each of its rows after it began; it reads one element of ``weight``."""
    due = time.monotonic() + x.shape[0] * seconds
    half = x * 0.5 + weight[0]
    sleep_until(due)
    return half


@work.register_fake
def _shape(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.weight, ctx.seconds = inputs[1], inputs[2]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.disco_bench.work(gradient, ctx.weight, ctx.seconds), None, None


work.register_autograd(_backward, setup_context=_keep)


class Sleeping(torch.nn.Module):
    """The feed-forward part of a layer, ``nbytes`` of frozen weight."""

    def __init__(self, nbytes: int, seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(nbytes // 4), requires_grad=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.disco_bench.work(x, self.weight, self.seconds)
        return made
