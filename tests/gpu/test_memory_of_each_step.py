"""Transfers into host memory that each step is given anew, page-locked or not: its bits there, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from disco_accel.execute.executor import EngineOptions
from tests.execute.given_memory import Given, Made, program, run

STEPS = 4


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_each_step_writes_to_the_memory_that_it_was_given(device: torch.device, pinned: bool) -> None:
    """In the least memory and with room for all; every other step is one dropped at its gate, or behind it."""
    for memory, options in (
        ("least", EngineOptions(device=str(device))),
        ("all", EngineOptions(device=str(device), dispatch="random", seed=2, lookahead=3)),
    ):
        with Made.of(memory, device).executor(options) as executor:
            before: list[tuple[Given, dict[str, torch.Tensor]]] = []
            for seed in range(STEPS):
                dropped, given = (Given(program(each, device), pinned=pinned) for each in (seed + 10, seed))
                executor.run_out(dropped.begin())
                if seed % 2:
                    executor.deliver(dropped.late())
                executor.abandon()
                if not seed % 2:
                    dropped.assert_untouched(*(name for name in dropped.around if name != "early"))
                before.append((dropped, {name: around.clone() for name, around in dropped.around.items()}))
                given.assert_untouched()
                run(executor, given, in_two=seed % 2 == 0)
                before.append((given, {name: around.clone() for name, around in given.around.items()}))
                for others, was in before:
                    assert all(torch.equal(around, was[name]) for name, around in others.around.items())
