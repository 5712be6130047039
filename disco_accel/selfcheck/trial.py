"""Planned steps of the self-check's subject, with every moment of a step within the caller's reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from disco_accel.capture.captured_step import InputSource
from disco_accel.execute.executor import EngineOptions
from disco_accel.native.backend import backend_of
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.selfcheck.agreement import RUNS
from disco_accel.selfcheck.subject import Subject, by_name, eager_step, seed_generator, trained_of


class Trial:
    """An executor of ``subject`` between ``__enter__`` and ``__exit__``. A step is ``begin``, ``loss``, ``end`` and
    ``gradients``, as in a training: the second and the last copy values out of the arena."""

    def __init__(self, subject: Subject, options: EngineOptions) -> None:
        self.subject = subject
        self.executor = subject.executor(options)
        captured = subject.captured
        self._loss, self._gradients = (
            self.executor.add_leaving([(value.ref, value.spec) for value in values])
            for values in (captured.outputs, captured.gradients)
        )
        self._batch, self._trained = subject.vertices(InputSource.BATCH), subject.vertices(InputSource.TRAINABLE)
        self._tangent = subject.vertices(InputSource.TANGENT)["loss"]

    def begin(self, batch: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], seed: int) -> None:
        """Start a step from the generator's state after ``seed``; returns when its loss has been launched."""
        seed_generator(self.subject.device, seed)
        inputs = {self._batch[name]: tensor for name, tensor in batch.items()}
        self.executor.run_out(inputs | {self._trained[name]: tensor for name, tensor in trained.items()})

    def loss(self) -> torch.Tensor:
        """A copy of the loss."""
        return self.executor.leave(self._loss)[0]

    def end(self, tangent: torch.Tensor) -> None:
        """Hand in the gradient of the loss and run the rest."""
        self.executor.run_end({self._tangent: tangent})

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients, by the parameters' names."""
        copies = self.executor.leave(self._gradients)
        return {g.name: copy for g, copy in zip(self.subject.captured.gradients, copies, strict=True)}

    def step(
        self, batch: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], seed: int
    ) -> dict[str, torch.Tensor]:
        """Run a whole step; returns its results by name."""
        self.begin(batch, trained, seed)
        loss = self.loss()
        self.end(one(self.subject.device))
        return by_name(loss, self.gradients())

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.executor.close()


def one(device: torch.device) -> torch.Tensor:
    """The gradient of a loss that is differentiated as it is."""
    return torch.ones((), dtype=torch.float32, device=device)


def values_of(subject: Subject) -> dict[str, torch.Tensor]:
    """The trainable parameters' values, by name."""
    return {name: parameter.detach() for name, parameter in trained_of(subject.model).items()}


def eager_runs(subject: Subject, batch: Mapping[str, torch.Tensor], seed: int) -> list[dict[str, torch.Tensor]]:
    """Runs of plain PyTorch on the same device, each from the generator's state after ``seed``."""
    return [eager_step(subject.eager, batch, subject.device, seed) for _ in range(RUNS)]


@contextmanager
def circumstances(device: torch.device) -> Iterator[None]:
    """The settings of a usual training step in place of the caller's, whose generators stay where they are."""
    backend = backend_of(device)
    host, drawn = torch.get_rng_state(), backend.rng_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in DEVICE_TYPES:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_rng_state(host)
        backend.set_rng_state(drawn)
