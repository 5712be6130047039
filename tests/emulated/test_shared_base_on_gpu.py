"""``share_weights`` on the emulated device: two models over one copy in host memory, which both only read."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.native.backend import workspace_bytes
from disco_accel.step.run.session import find_state
from tests.emulated.models import CUDA, assert_same, step
from tests.emulated.test_host_optimizer import beside_graphs
from tests.support.models import random_batch, tiny_lora


def test_two_models_read_one_copy_and_a_write_is_the_writers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have eager's bits, before and after one of them writes to a weight that both have."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "disco_accel").mkdir(mode=0o700)
    batch = {name: tensor.to(CUDA) for name, tensor in random_batch(seed=3).items()}
    plain = tiny_lora(layers=2)
    budget = beside_graphs(2 * workspace_bytes(CUDA) + (1 << 19))
    config = DiscoConfig(memory_budget=budget, device="cuda", share_weights=True)
    models = [prepare(copy.deepcopy(plain), config) for _ in range(2)]
    eager = copy.deepcopy(plain).to(CUDA)
    for model in models:
        assert_same(step(model, batch), step(eager, batch))
        eager.zero_grad()
        assert stats(model)["steps_eager"] == 0
    arenas = [find_state(model).placement.shared_arenas() for model in models]  # type: ignore[union-attr]
    assert all(len(found) == 1 for found in arenas)
    assert len({Path(f"/proc/self/fd/{found[0].file}").stat().st_ino for found in arenas}) == 1
    name = next(name for name, p in models[0].named_parameters() if not p.requires_grad and p.dim() == 2)
    written = copy.deepcopy(plain)
    for model in (models[0], written):
        with torch.no_grad():
            model.get_parameter(name).data[0] += 1
    written.to(CUDA)
    assert_same(step(models[0], batch), step(written, batch))
    eager.zero_grad()
    assert_same(step(models[1], batch), step(eager, batch))
