"""Offsets for a drafted step: one whose bytes do not suffice is drafted again with less memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from disco_accel.plan.timed.live_ranges import LiveRanges
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.plan.timed.step_buffers import Profile
from disco_accel.simulate.machine import Machine
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.oracles.adversary import run_reference


def test_a_step_that_does_not_fit_as_drafted_fits_when_drafted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes above the memory are named by position, and the draft that keeps them free passes both judges."""
    shape = LoraShape(layers=3, hidden=1024, ffn=2816, vocabulary=4096, tokens=8192, flops=2e13)
    memory, above = 220 << 20, list[int]()
    assign_offsets = LiveRanges.assign_offsets

    def watched(self: LiveRanges, capacity: Mapping[int, int], *, lowest: bool, rounds: int) -> dict[int, Profile]:
        over = assign_offsets(self, capacity, lowest=lowest, rounds=rounds)
        highest = max(live.offset + live.block for live in self.all)
        assert max((int(profile.max()) for profile in over.values()), default=0) == max(0, highest - memory)
        above.append(highest - memory)
        return over

    monkeypatch.setattr(LiveRanges, "assign_offsets", watched)
    graph = lora_graph(shape, memory)
    settings = TimedSettings(min_gap_ratios=(None, 2.0), resident_shares=(0.0,))
    plan = build_timed(graph, Machine(), cyclic=True, settings=settings)
    assert above[0] > 0, "the case has become too easy: find one whose draft does not fit"
    assert min(above) <= 0
    verify(graph, plan)
    for seed in range(3):
        run_reference(graph, plan, seed=seed)
