"""Values that live over steps and change: bits after every step, with homes in pinned and in other host memory."""

from __future__ import annotations

import pytest
import torch

from disco_accel.execute.executor import EngineOptions
from disco_accel.native.host_memory import HostMemory
from tests.execute.programs import step, step_in_two
from tests.execute.state_plans import PLANS, Trained, training, weights_of


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("name", PLANS)
def test_states_have_eagers_bits_after_every_step(device: torch.device, name: str, pinned: bool) -> None:
    """Loaded, changed and written home, or resident; dropped at the gate and stored in between."""
    homes = weights_of()
    memory = HostMemory(HostMemory.room_for(homes))
    if pinned:
        homes = [memory.adopt(home) for home in homes]
        if device.type == "cuda":
            memory.pin(device)
    trained = Trained(training, homes, PLANS[name], EngineOptions(device=str(device)))
    with trained.executor as executor:
        for seed in range(5):
            trained.step(seed, step if seed % 2 else step_in_two)
            if seed == 2:
                executor.store_states()
                trained.assert_homes()
                executor.invalidate()
            if seed == 3:
                executor.begin(trained.inputs(seed).external)
                executor.wait_out()
                executor.abandon()
    trained.assert_homes()
