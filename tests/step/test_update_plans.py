"""Plans with updates: what is measured for them, and what a step behind a step does."""

from __future__ import annotations

import pytest
import torch

from disco_accel import stats
from disco_accel.step.update import update_pass
from disco_accel.step.update.update_pass import samples
from tests.integrate.deferred_updates import adamw, assert_same, one_layer, prepared, train, with_update


def test_a_step_behind_a_step_settles_the_first() -> None:
    """With new gradients, and with none."""
    model, eager = one_layer(), one_layer()
    prepared(model)
    ours, theirs = adamw(model), adamw(eager)
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=2)
        optimizer.step()
        train(each, optimizer, steps=1)
        for p in each.parameters():
            p.grad = torch.full_like(p, 1e-3)
        optimizer.step()
    assert stats(model)["updates_settled"] == 2
    assert_same(model, ours, eager, theirs)


def test_updates_are_measured_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all of a size, on memory of that size: a table of embeddings has hundreds of them."""
    monkeypatch.setattr(update_pass, "PIECE", 1 << 8)
    model = prepared(one_layer())
    train(model, adamw(model), steps=3)
    updated = with_update(model).updated
    graph, stands_for = samples(updated)
    assert stands_for.keys() == {kernel.id for kernel in updated.kernels}
    kernels_measured = set(stands_for.values())
    assert len(kernels_measured) < len(updated.kernels) // 10
    assert max(size for vertex in graph.vertices for size in vertex.sizes) <= 4 << 8
    elements = {kernel.id: kernel.end - kernel.begin for kernel in updated.kernels}
    bytes_of_sample = {vertex.id: vertex.sizes[0] for vertex in graph.vertices}
    assert all(bytes_of_sample[stands_for[kernel]] == 4 * count for kernel, count in elements.items())
