"""One engine of ``engines.py`` in a process of its own: takes a training step whenever it is told to."""

from __future__ import annotations

from benchmarks.full.engines import ENGINES, Whole
from benchmarks.step.worker import Session, main

COMMAND = ("-m", "benchmarks.full.worker")


class WholeSession(Session):
    """One engine that trains all weights, and what was measured of it."""

    def make_engine(self) -> Whole:
        return ENGINES[self.job.engine](self.job)


if __name__ == "__main__":
    main(WholeSession)
