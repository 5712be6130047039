"""What is told of one prepared model: messages, counts, the report of its first steady step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from disco_accel.observe.report import write_report
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.frontend import Frontend
from disco_accel.step.run.observer import Observers
from disco_accel.step.run.progress_messages import ProgressMessages
from disco_accel.step.run.step_stats import RunCounts

logger = logging.getLogger("disco_accel")

_WARM_STEPS = 2


class Reports:
    """``observers`` hear of all that happens; ``messages`` and ``counts`` are two of them."""

    def __init__(
        self, model: torch.nn.Module, frontend: Frontend, report_dir: str | None, link_bandwidth: float | None
    ) -> None:
        """``link_bandwidth``: of a throttled link, in bytes/s."""
        self.messages, self.counts = ProgressMessages(model, link_bandwidth), RunCounts()
        self.observers = Observers(self.counts, self.messages, frontend.observer(self.counts))
        self._folder, self._left = report_dir, 1 if report_dir is not None else 0
        self._said: set[str] = set()

    def say_once(self, warning: str) -> None:
        """Log ``warning`` the first time."""
        if warning not in self._said:
            self._said.add(warning)
            logger.warning("%s", warning)

    def trace_wanted(self) -> bool:
        """Whether the step about to start is the one that ``report_dir`` shows: the first in steady state."""
        return self._left > 0 and self.counts.steps_compiled >= _WARM_STEPS

    def write(self, step: CompiledStep, stats: Mapping[str, Any]) -> None:
        """Write plan, trace, numbers and picture of the step that just ran into ``report_dir``."""
        self._left -= 1
        assert self._folder is not None
        write_report(self._folder, step.plan, step.executor.events(), stats)
