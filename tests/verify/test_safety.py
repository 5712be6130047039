"""A sample of ``make safety``: no random plan is wrong, and no planted fault goes unnoticed."""

from __future__ import annotations

import os

import pytest

from tests.support.faults.faults import FAULTS, RUN_FAULTS
from tests.support.faults.state_faults import STATE_FAULTS, STATE_RUN_FAULTS
from tests.support.plans.host_updated_plans import HOST_UPDATED_FAULTS
from tests.verify.safety import KINDS, Result, hunt, plant

GRAPHS = int(os.environ.get("DISCO_SAFETY_GRAPHS", "1200"))
PLANTED = 8
"""How often each fault is planted."""


@pytest.mark.parametrize("part", range(4))
def test_no_random_plan_is_wrong_in_any_order(part: int) -> None:
    """Races, wrong values, deadlocks, refusals where there is room: none."""
    result = Result()
    for seed in range(part * 1_000_000, part * 1_000_000 + GRAPHS // 4):
        hunt(seed, 4, result)
    assert not result.wrong, "\n".join(result.wrong[:20])
    assert result.counts["plans"] > 0.7 * result.counts["graphs"], "nearly every graph was refused"


def test_no_planted_fault_goes_unnoticed() -> None:
    """Those of ranges have tests of their own."""
    result = Result()
    plant(PLANTED, result, first_seed=5, kinds=KINDS[:3])
    assert result.planted == dict.fromkeys({**FAULTS, **STATE_FAULTS, **HOST_UPDATED_FAULTS}, PLANTED)
    assert result.either == result.planted
    assert result.static == result.planted
    for faults in (RUN_FAULTS, STATE_RUN_FAULTS, HOST_UPDATED_FAULTS):
        assert sum(result.dynamic[name] for name in faults) > 0.5 * PLANTED * len(faults)
