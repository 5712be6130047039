"""One model that engines train one after the other in one process, each from the same adapter and on the same batch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.quantised import PLAIN, quantise_of
from benchmarks.common.shapes import PRESETS
from benchmarks.gpu.models import batch_for, draw_weights, meta_llama, with_adapter
from benchmarks.gpu.stage import Run
from benchmarks.step.engines import LEARNING_RATE
from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.selfcheck.agreement import RUNS, Agreement, Tensors, agreement

ROUNDS = 5
"""Timed steps of each engine, after those that warm up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A shape, the batch's rows and tokens, the form of the frozen weights. Its stages' names begin with ``name``."""

    name: str
    shape: str
    batch: int
    tokens: int
    quant: str = PLAIN


CASES: Mapping[str, Case] = {
    "1b": Case("1b", "1b", 4, 1024),
    "8b": Case("8b", "8b", 4, 1024),
    "70b": Case("70b", "70b", 1, 2048, "nf4"),
}
_SMALL: Mapping[str, Case] = {
    "1b": Case("1b", "tiny", 2, 16),
    "8b": Case("8b", "tiny", 2, 16),
    "70b": Case("70b", "tiny", 1, 16, "nf4"),
}


def case_of(run: Run) -> Case:
    """The case that the stage's name begins with."""
    return (_SMALL if run.small else CASES)[run.stage.partition("_")[0]]


class Subject:
    """A Llama in bf16 with an adapter of rank 16, all on the device at first; weights never leave the GPU to be drawn
    or packed. ``references``: gradients of eager's first step, of three runs where bits differ."""

    def __init__(self, case: Case, where: torch.device) -> None:
        self.case, self.where = case, where
        self.seconds: dict[str, float] = {}
        shape = PRESETS[case.shape]
        base = self._timed("outline", lambda: meta_llama(shape, dtype=torch.bfloat16, attention="sdpa"))
        self._timed("weights", lambda: draw_weights(base, where, lambda t: t, quantise=quantise_of(case.quant)))
        self.base = base.to(where)
        rank = 16 if shape["hidden_size"] > 1024 else 4
        self.model = self._timed("adapter", lambda: with_adapter(self.base, rank=rank, checkpointing=True).to(where))
        self.batch = batch_for(shape["vocab_size"], case.batch, case.tokens, where)
        self.trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._initial = {n: p.detach().clone() for n, p in self.trainable.items()}
        self.references: list[Tensors] = []

    def _timed(self, what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = call()
        synchronize(self.where)
        self.seconds[what] = time.perf_counter() - began
        return found

    def reset(self) -> None:
        """The adapter as it was drawn, without gradients."""
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(self._initial[name])
                parameter.grad = None

    def backward(self) -> float:
        """Forward and backward; returns the loss."""
        loss = self.model(**self.batch).loss
        loss.backward()
        return float(loss.detach())

    def first_step(self) -> dict[str, torch.Tensor]:
        """``loss`` and gradients, on the host, of a step from the adapter as it was drawn."""
        self.reset()
        loss = torch.tensor(self.backward(), dtype=torch.float64)
        gradients = {n: p.grad.to("cpu", copy=True) for n, p in self.trainable.items() if p.grad is not None}
        return {"loss": loss, **gradients}

    def refer(self, folder: Path) -> None:
        """Others are compared with eager's first steps from now on, also by other processes: with as many of them as
        the comparison asks for."""
        # As in plans: cuDNN's attention rounds otherwise.
        with cudnn_attention_off(self.where):
            self.references = [self.first_step() for _ in range(RUNS)]
        for number, reference in enumerate(self.references):
            save_file(dict(reference), folder / f"{self.case.name}-{number}.safetensors")

    def agreement(self, outcome: Tensors) -> Agreement:
        """What ``first_step`` returned beside eager's; everything agrees where eager did not run."""
        return agreement(outcome, self.references or [outcome], outputs=("loss",))

    def train(self, rounds: int = ROUNDS) -> dict[str, Any]:
        """``seconds`` of each timed step of a training from the adapter as it was drawn, and the ``losses`` of all."""
        self.reset()
        optimizer = torch.optim.AdamW(self.trainable.values(), lr=LEARNING_RATE)
        losses, seconds = [], []
        for number in range(2 + rounds):
            synchronize(self.where)
            if number == 1 and self.where.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            losses.append(self.backward())
            optimizer.step()
            optimizer.zero_grad()
            synchronize(self.where)
            seconds.append(time.perf_counter() - began)
        del seconds[:2]
        tokens = self.case.batch * self.case.tokens
        row: dict[str, Any] = {
            "seconds": median(seconds),
            "spread": max(seconds) - min(seconds),
            "tokens_per_second": tokens / median(seconds),
            "losses": losses,
        }
        if self.where.type == "cuda":
            used = {"used": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            row |= used
        return row

    def release(self) -> None:
        """Memory that the last engine has left behind goes back to the device."""
        self.reset()
        if self.where.type == "cuda":
            torch.cuda.empty_cache()


@functools.cache
def subject_of(case: Case, where: torch.device, folder: Path) -> Subject:
    """The one of this process; its references are those that another process has left in ``folder``."""
    subject = Subject(case, where)
    subject.references = references_in(folder, case)
    return subject


def references_in(folder: Path, case: Case) -> list[dict[str, torch.Tensor]]:
    """What ``refer`` has kept in ``folder``, in the order of the runs; empty where eager did not run."""
    return [load_file(path) for path in sorted(folder.glob(f"{case.name}-?.safetensors"))]


def synchronize(where: torch.device) -> None:
    """Wait for the device."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
