"""Plans with an optimizer on a device in host memory: weights and moments change at their homes, bit for bit."""

from __future__ import annotations

import pytest
import torch

from disco_accel.execute.executor import EngineOptions
from tests.execute.host_programs import FORMS, HostRun

SCHEDULES = {
    "priority": EngineOptions(),
    "random": EngineOptions(dispatch="random", seed=1, lookahead=4, compute_streams=2),
    "fixed": EngineOptions(dispatch="fixed"),
    "synchronous": EngineOptions(dispatch="synchronous"),
    "throttled": EngineOptions(link_bandwidth=20e6, link_latency=1e-5, host_threads=2),
}
STEPS = 4


@pytest.mark.parametrize("memory", ["least", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_have_the_bits_of_eager_training(form: str, memory: str) -> None:
    """Results, weights, moments and counts after each step, under each schedule."""
    for options in SCHEDULES.values():
        with HostRun(FORMS[form], memory, options) as run:
            for seed in range(STEPS):
                run.step(seed)
                run.assert_homes()
