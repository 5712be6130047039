"""The user's default random generator around a step: put back when it fails, replayed when it is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disco_accel.native.backend import backend_of
from disco_accel.step.compile.compiled_step import CompiledStep


def generator_state(step: CompiledStep) -> torch.Tensor | None:
    """Where the generator that ``step`` draws from is now; None for a step that draws nothing."""
    if not step.draws:
        return None
    return backend_of(torch.device(step.engine.device)).rng_state()


def set_generator(step: CompiledStep, state: torch.Tensor | None) -> None:
    """Set the generator of ``step`` to what ``generator_state`` returned."""
    if state is not None:
        backend_of(torch.device(step.engine.device)).set_rng_state(state)


@contextmanager
def generator_from(step: CompiledStep, state: torch.Tensor | None) -> Iterator[None]:
    """Draw again from ``state`` on; afterwards the generator is where it was."""
    live = generator_state(step)
    set_generator(step, state)
    try:
        yield
    finally:
        set_generator(step, live)


@contextmanager
def kept_on_failure(step: CompiledStep) -> Iterator[None]:
    """What fails inside has drawn nothing, as far as the user's generator goes."""
    before = generator_state(step)
    try:
        yield
    except BaseException:
        set_generator(step, before)
        raise
