"""Models on the emulated device under as little memory as they run with, beside the same models in eager mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, restore
from disco_accel.errors import BudgetTooSmall
from disco_accel.native.backend import workspace_bytes
from tests.emulated import device

CUDA = torch.device("cuda", 0)


def least(model: Any, use: Any, where: torch.device = CUDA, **keys: Any) -> Any:
    """The model prepared with the smallest budget that ``use`` (a call with the model) is planned with."""
    too_small = 2 * workspace_bytes(where) + (1 << 16)
    prepare(model, DiscoConfig(memory_budget=too_small, device=where.type, **keys))
    try:
        use(model)
    except BudgetTooSmall as error:
        restore(model)
        prepare(model, DiscoConfig(memory_budget=error.needed, device=where.type, **keys))
        use(model)
    return model


def step(model: Any, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and gradients by name, and where CUDA's generator ends."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, "generator": torch.cuda.get_rng_state(loss.device)}


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same bits by name."""
    assert got.keys() == expected.keys()
    different = {n: (got[n], t) for n, t in expected.items() if got[n].dtype != t.dtype or not torch.equal(got[n], t)}
    assert not different, different


def assert_steady(run: Any, where: torch.device = CUDA) -> None:
    """``run`` takes no memory from the driver or gives any back, and copies from no memory that is not pinned."""
    torch.cuda.synchronize()
    before = device.counts()
    run()
    torch.cuda.synchronize()
    after = device.counts()
    for name in (f"cudaMalloc {where.index}", f"cudaFree {where.index}", "copy h2d pageable", "cudaHostAlloc"):
        assert after.get(name, 0) == before.get(name, 0), name
