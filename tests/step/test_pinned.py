"""Buffers and plain tensors that move into one piece of host memory keep values, sharing and layouts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from disco_accel.native.host_memory import WatchedTensors
from disco_accel.step.placement.pinned_tensors import PinnedTensors
from tests.support.unwatched import without_watching_writes

CPU = torch.device("cpu")


def test_tensors_that_share_bytes_go_on_sharing_them() -> None:
    """The same storage, other offsets, strides and dtypes, and what views were taken from."""
    whole = torch.arange(64, dtype=torch.float32)
    matrix, words, tail = whole[16:48].view(4, 8).t(), whole[20:24].view(torch.int32), whole[40:48]
    del whole
    alone = torch.arange(5)
    before = [t.clone() for t in (matrix, words, tail, alone)]
    strides = matrix.stride()
    pinned = PinnedTensors(CPU)
    pinned.gather([matrix, alone], [words, tail])
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip((matrix, words, tail, alone), before, strict=True))
        assert matrix.stride() == strides and matrix.data_ptr() % 64 == 0
        assert words.data_ptr() - matrix.data_ptr() == 16 and tail.data_ptr() - matrix.data_ptr() == 96
        assert len({t.untyped_storage().data_ptr() for t in (matrix, words, tail)}) == 1
        tail[0] += 1
        assert matrix[0, 3] == tail[0]
        tail[0] -= 1
        pinned.undo()


def test_they_lie_side_by_side_in_memory_that_is_read_for_writes() -> None:
    """Small tensors take no page each, and every bit that anybody writes is found, as before."""
    tensors = [torch.full((3,), float(i)) for i in range(8)]
    pinned = PinnedTensors(CPU)
    pinned.gather(tensors[:4], tensors[4:])
    places = sorted(t.data_ptr() for t in tensors)
    assert [b - a for a, b in itertools.pairwise(places)] == [64] * 7
    watched = WatchedTensors(tensors)
    assert watched.hashed_bytes == 8 * 12 and not watched.changed()
    tensors[5].numpy()[1] = 7
    assert watched.changed()
    here = tensors[0].data_ptr()
    pinned.gather(tensors[:4], tensors[4:])
    assert tensors[0].data_ptr() == here, "what is there stays there"
    with without_watching_writes():
        assert WatchedTensors(tensors).hashed_bytes == 8 * 12


@pytest.mark.parametrize("alias", ["tensor", "numpy", "from numpy"])
def test_what_others_may_write_to_stays_where_it_is(alias: str) -> None:
    """A tensor that nobody here knows, or a numpy array, would go on showing the old place."""
    array = np.zeros(4, dtype=np.float32)
    buffer = torch.from_numpy(array) if alias == "from numpy" else torch.zeros(4)
    other = buffer.detach()[1:] if alias == "tensor" else buffer.numpy()[1:] if alias == "numpy" else array[1:]
    here = buffer.data_ptr()
    pinned = PinnedTensors(CPU)
    pinned.gather([buffer], [])
    assert buffer.data_ptr() == here
    other[:] = 3
    assert float(buffer[2]) == 3
    if alias == "tensor":
        pinned.gather([buffer], [other])
        assert buffer.data_ptr() != here and other.data_ptr() == buffer.data_ptr() + 4


def test_a_tensor_that_was_put_elsewhere_stays_there() -> None:
    """As after ``.data =``: neither an undo nor a second gathering of others touches it; a new gathering moves it."""
    first, second = torch.ones(2), torch.ones(2)
    pinned = PinnedTensors(CPU)
    pinned.gather([first, second], [])
    mine = torch.full((2,), 5.0)
    first.data = mine
    here = first.data_ptr()
    pinned.undo()
    assert first.data_ptr() == here and torch.equal(second, torch.ones(2))
    del mine
    pinned.gather([first], [])
    assert first.data_ptr() != here and first.tolist() == [5.0, 5.0]


def test_kinds_that_cannot_move_are_left_alone() -> None:
    sparse = torch.eye(3).to_sparse()
    with torch.inference_mode():
        inference = torch.ones(2)
    tensors = [sparse, inference, torch.empty(0), torch.ones(2, device="meta"), torch.ones(2, requires_grad=True)]
    PinnedTensors(CPU).gather(tensors, [])
    assert not any(t.layout is torch.strided and t.device.type == "cpu" and t.data_ptr() == 0 for t in tensors[4:])
    assert torch.equal(inference, torch.ones(2)) and tensors[3].device.type == "meta"
