"""Views are found again from layouts: the steps give the tensor that the layout names."""

from __future__ import annotations

import random

import pytest
import torch

from disco_accel.fuse.value_views import view_of
from disco_accel.graph.taskgraph import TensorSpec


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec("float32", tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def random_base(rng: random.Random) -> torch.Tensor:
    shape = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4))]
    dense = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return dense.permute(rng.sample(range(len(shape)), len(shape)))


def random_view(base: torch.Tensor, rng: random.Random) -> torch.Tensor:
    view = base
    for _ in range(rng.randint(0, 4)):
        what = rng.randrange(5)
        dim = rng.randrange(view.dim()) if view.dim() else 0
        if what == 0 and view.dim() > 1:
            view = view.transpose(dim, rng.randrange(view.dim()))
        elif what == 1 and view.dim() and view.shape[dim] > 1:
            begin = rng.randrange(view.shape[dim])
            view = view.narrow(dim, begin, rng.randint(1, view.shape[dim] - begin))
        elif what == 2:
            view = view.unsqueeze(dim)
        elif what == 3 and view.dim() and view.shape[dim] == 1:
            view = view.expand([3 if d == dim else n for d, n in enumerate(view.shape)])
        elif what == 4 and view.is_contiguous():
            view = view.reshape(-1, 2) if view.numel() % 2 == 0 else view.reshape(-1)
    return view


def test_a_view_that_is_found_has_the_elements_of_its_layout() -> None:
    """Of 2000 random views of random tensors; nearly all are found."""
    found = 0
    for seed in range(2000):
        rng = random.Random(seed)
        base = random_base(rng)
        view = random_view(base, rng)
        steps = view_of(spec_of(base), spec_of(view))
        if steps is not None:
            found += 1
            assert torch.equal(steps.of(base), view), (seed, steps)
    assert found > 1800


@pytest.mark.parametrize(
    "target",
    [
        TensorSpec("int32", (2, 3), (3, 1)),
        TensorSpec("float32", (2, 2), (1, 1)),
        TensorSpec("float32", (3, 3), (3, 1)),
        TensorSpec("float32", (2, 3), (3, 1), 4),
    ],
    ids=["another dtype", "overlapping", "too long", "behind the end"],
)
def test_what_is_no_such_view_is_not_found(target: TensorSpec) -> None:
    """A layout that the steps cannot make."""
    assert view_of(TensorSpec("float32", (2, 3), (3, 1)), target) is None


def test_a_tensor_with_gaps_has_no_views() -> None:
    """Its elements are not those of the memory that a layout counts."""
    assert view_of(TensorSpec("float32", (2, 3), (4, 1)), TensorSpec("float32", (3,), (1,))) is None
