"""Calls of an op table at several lengths: the bits of PyTorch's at each, in the memory of the longest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disco_accel.execute.varying_kernels import _EncodedCall
from disco_accel.native.engine_class import op_table

LONGEST, SHORTEST, ROWS = 9, 2, 3


def tensor(storage: int, *shape: int) -> tuple[Any, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return ("tensor", storage, "float32", shape, tuple(stride), 0)


def joined(length: int, storages: list[int]) -> _EncodedCall:
    """The columns up to ``length`` and one more."""
    parts = tensor(storages[0], ROWS, length), tensor(storages[2], ROWS, 1)
    return _EncodedCall("aten::cat", "out", (("list", *parts), 1, tensor(storages[1], ROWS, length + 1)), (), ())


@pytest.fixture
def values() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS * LONGEST), torch.zeros(ROWS * (LONGEST + 1)), torch.randn(ROWS)]


def columns(values: list[torch.Tensor], length: int) -> torch.Tensor:
    return values[0][: ROWS * length].view(ROWS, length)


def test_each_length_has_its_bits_and_no_more_memory(values: list[torch.Tensor]) -> None:
    ops = op_table(torch.device("cpu"))
    storages = [ops.add_fixed(each.data_ptr(), each.nbytes) for each in values]
    longest, shortest = (joined(n, storages) for n in (LONGEST, SHORTEST))
    op = longest.add(ops, "joined", [], (0, 0))
    longest.set_varying(ops, op, shortest)
    for length in (5, LONGEST, SHORTEST, 8, 8, 3):
        ops.set_length(LONGEST - length, LONGEST - SHORTEST)
        values[1].fill_(-1)
        ops.run(op)
        wanted = torch.cat((columns(values, length), values[2].view(ROWS, 1)), 1).flatten()
        assert torch.equal(values[1][: wanted.numel()], wanted)
        assert bool((values[1][wanted.numel() :] == -1).all())


def test_lengths_and_sizes_that_do_not_fit_are_refused(values: list[torch.Tensor]) -> None:
    ops = op_table(torch.device("cpu"))
    storages = [ops.add_fixed(each.data_ptr(), each.nbytes) for each in values]
    longest, shortest = (joined(n, storages) for n in (LONGEST, SHORTEST))
    op = longest.add(ops, "joined", [], (0, 0))
    with pytest.raises(RuntimeError, match="joined: no encoded call"):
        ops.set_varying(op, (longest.args,), (shortest.args,))
    with pytest.raises(RuntimeError, match="joined: allocates more at a smaller length"):
        ops.set_varying(op, (longest.args, (), (4,)), (shortest.args, (), (8,)))
    longest.set_varying(ops, op, shortest)
    for below, span in ((-1, 7), (8, 7), (0, 0)):
        with pytest.raises(RuntimeError, match="a length that the plan is not for"):
            ops.set_length(below, span)
    larger = joined(LONGEST + 1, storages)
    with pytest.raises(RuntimeError, match="reaches past the"):
        larger.add(ops, "joined", [], (0, 0))
    other = op_table(torch.device("cpu"))
    storages = [other.add_fixed(each.data_ptr(), each.nbytes) for each in values]
    op = joined(4, storages).add(other, "joined", [], (0, 0))
    joined(4, storages).set_varying(other, op, joined(LONGEST + 5, storages))
    before = columns(values, 4)
    with pytest.raises(RuntimeError, match="reaches past the"):
        other.set_length(5, 5)
    other.run(op)
    assert torch.equal(values[1][: 5 * ROWS], torch.cat((before, values[2].view(ROWS, 1)), 1).flatten())
