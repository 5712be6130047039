"""Offsets for a drafted step: reloads give way, by no more than they have to, where bytes do not suffice."""

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


def test_a_step_that_does_not_fit_as_drafted_fits_with_delayed_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload that is delayed keeps the draft's order of kernels, its own readers and the race-freedom of the plan."""
    shape = LoraShape(layers=3, hidden=1024, ffn=2816, vocabulary=4096, tokens=8192, flops=2e13)
    fitted: list[LiveRanges] = []
    delay_prefetches = LiveRanges.delay_prefetches

    def watched(self: LiveRanges, capacity: Mapping[int, int]) -> dict[int, Profile]:
        before = {id(live): live.begin for live in self.all}
        over = delay_prefetches(self, capacity)
        if not over:
            fitted.append(self)
            for live in self.all:
                if live.begin != before[id(live)]:
                    assert live.scheduled < live.begin <= live.first_read, (
                        "only reloads move, and not behind their readers"
                    )
            assert any(live.begin != before[id(live)] for live in self.all)
        return over

    monkeypatch.setattr(LiveRanges, "delay_prefetches", watched)
    graph = lora_graph(shape, 220 << 20)
    plan = build_timed(graph, Machine(), cyclic=True, settings=TimedSettings(resident_shares=(0.0,)))
    assert fitted, "the case has become too easy: find one whose draft does not fit"
    for ranges in fitted:
        verify(graph, ranges.plan(cyclic=True))
    for seed in range(3):
        run_reference(graph, plan, seed=seed)
