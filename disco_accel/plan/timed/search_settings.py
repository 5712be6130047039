"""The moves of the timed planner's search: each is a field that can be switched off.

``python -m benchmarks.planner --ablate`` measures the worth of each, in simulated step time and in CPU seconds of
planning, on graphs that none was tuned on (docs/planner.md). One that is worth less than half a percent is not here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedSettings:
    """Plans are a function of graph, machine and these."""

    min_gap_ratios: tuple[float | None, ...] = (None, 10.0, 5.0, 2.0)
    """An activation is offloaded only if its idle gap is at least this many times its two copies; None: never. Each is
    drafted. Without offloads a large batch has no plan in little memory."""

    resident_shares: tuple[float, ...] = (0.0, 0.5, 0.9, 0.95, 0.3, 0.7)
    """Shares of the memory, beside pinned bytes at their peak, for weights that never leave; the first is drafted for
    every gap ratio, the others for the best. Where a step waits for the link, permanent weights save evictions that
    the nearest next use alone would choose badly."""

    outliers_permanent: bool = True
    """Draft with unusually large weights (embeddings, the head) permanent before others: bytes that have to be kept
    free for swaps depend on the largest buffer that swaps."""

    low_peak_order: bool = True
    """Draft in a serial order with a lower live peak. It counts where the given order is a bad one."""

    program_gaps_from: float = 1000
    """From so many vertices on, a graph of one device is drafted, too, with the gaps of the step program
    (``kept_gaps.py``); infinity: never."""

    redrafts: int = 8
    """How often a draft without offsets is drafted again with less memory where its packing was above it; 0: never."""

    range_shares: tuple[float, ...] = (0.1, 0.05, 0.02)
    """Ranges of about these shares of the memory in which weights are swapped; empty: they are swapped as a whole."""

    large_range_share: float = 0.005
    """As ``range_shares``, of a graph that is larger than ``descend_in_ranges_up_to``; 1: none."""

    descend_in_ranges_up_to: int = 2000
    """Up to so many vertices, all options are tried again with weights in ranges. Of a larger graph the best so far
    alone is, since each option takes a second or more."""

    repacking_rounds: int = 60
    """Rounds in which buffers that lie above the memory are packed first; 0: none."""
