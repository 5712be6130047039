"""The benchmark of disturbed steps: the orders that it compares are what it says."""

from __future__ import annotations

import random

import pytest

from benchmarks.common.shapes import PRESETS
from benchmarks.simulated import jitter as simulated_jitter
from benchmarks.simulated.jitter import Subject, in_order, row, subjects
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import Machine, Simulator
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room


def test_a_fixed_order_is_kept_by_every_lane_and_costs_nothing_undisturbed() -> None:
    machine = Machine()
    for seed in range(30):
        rng = random.Random(seed)
        plan = make_plan(with_room(random_taskgraph(rng, Shape(devices=3)), 2.0), machine=machine)
        simulator = Simulator(in_order(plan, machine, ("compute", "h2d", "d2h", "p2p")), machine)
        calm = simulator.run()
        assert calm.makespan == pytest.approx(Simulator(plan, machine).run().makespan)
        shaken = simulator.run(seed=seed, jitter=0.9).starts
        lane = dict(zip(simulator.ids, simulator.lanes, strict=True))
        for name in set(lane.values()):
            mine = sorted((each for each in calm.starts if lane[each] == name), key=lambda each: shaken[each])
            assert [calm.starts[each] for each in mine] == sorted(calm.starts[each] for each in mine)


@pytest.mark.long
def test_a_subject_is_planned_and_disturbed() -> None:
    subject = Subject("prompt, tensor", 2, streamed=True)
    assert subject in list(subjects([2]))
    made = row(subject, 5, 0.5, PRESETS["tiny"], 64)
    assert made.seconds > 0 and made.draws == 5
    assert made.dynamic.low <= made.dynamic.median <= made.dynamic.high
    assert len(simulated_jitter.line(made).split("|")) == 10
