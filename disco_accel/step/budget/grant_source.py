"""Where a budget comes from that moves while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from disco_accel.store.shared_budgets import StoreGrants


class GrantSource(Protocol):
    """Says how many bytes of the device, or of each of its devices, one job may hold. Called from several threads."""

    def granted(self) -> int:
        """Bytes that the job may hold now. Asked at the beginning of each step and between them: costs no message."""
        ...

    def most(self) -> int | None:
        """The most that there is for all jobs together; None: not known, or without a limit. May take a message."""
        ...

    def want(self, minimum: int, max_useful: int) -> None:
        """Tell that the job needs ``minimum`` bytes from now on, and is no faster with more than ``max_useful``."""
        ...

    def hold(self, nbytes: int) -> None:
        """The job has shrunk to ``nbytes``, or is about to take so many. Returns when they are counted: ``granted``
        tells from then on the bytes of a job that holds them."""
        ...


class GrantChanged(Exception):
    """A grant changed between the choice of a plan and the allocation of its memory, or may rise soon: choose again,
    after ``seconds`` at most, by which the step is shorter with ``total`` bytes."""

    def __init__(self, seconds: float = 0.0, total: int = 0) -> None:
        super().__init__(seconds, total)
        self.seconds, self.total = seconds, total


_source: Callable[[], GrantSource] | None = None


def use_grants(source: Callable[[], GrantSource] | None) -> None:
    """Models with ``memory_budget: shared`` ask ``source()`` from now on, one each; None: the store."""
    global _source
    _source = source


def shared_grants(devices: Collection[int], run: int) -> GrantSource:
    """For one model with ``memory_budget: shared``, whose steps run on ``devices``, by their numbers on the machine, in
    one of the processes of ``run``, as in ``Store.wanted``. Raises StoreGone where no store listens."""
    return StoreGrants(devices, run) if _source is None else _source()
