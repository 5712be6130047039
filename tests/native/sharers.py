"""Processes that share small weights, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from disco_accel.native.host_memory import HostMemory
from disco_accel.native.shared_copies import key_of, shared_copy


def weights(seed: int = 0) -> list[torch.Tensor]:
    """Small ones, one across pages, one transposed, one with holes, one empty."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(40, 30, generator=generator)
    return [
        whole,
        torch.randn(5000, generator=generator),
        whole.t(),
        whole[:, 3:9],
        torch.zeros(0),
        whole[0].bfloat16(),
    ]


class Shared:
    """What became of the weights of one process."""

    def __init__(self, folder: Path, tensors: list[torch.Tensor] | None = None) -> None:
        self.said: list[str] = []
        tensors = weights() if tensors is None else tensors
        key = key_of(tensors)
        right = lambda placed: key_of(placed) == key  # noqa: E731
        with shared_copy(folder, key, HostMemory.room_for(tensors), right, self.said.append, self.said.append) as copy:
            self.tensors = [copy.put(tensor) for tensor in tensors]
        self.arena, self.is_new = copy.arena, copy.is_new
        assert all(map(torch.equal, self.tensors, tensors))
        assert [t.stride() for t in self.tensors] == [t.stride() for t in tensors]


@contextlib.contextmanager
def child(work: Callable[[], object]) -> Iterator[Callable[[], int]]:
    """A process that does ``work`` and waits until it is killed; what is given waits until it has, or its end: the
    status of that."""
    done, ended = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(done)
            kept = work()
            os.write(ended, b"1")
            if kept is not None:
                time.sleep(600)
            status = 0
        finally:
            os._exit(status)
    os.close(ended)
    status = -1

    def wait() -> int:
        nonlocal status
        if not os.read(done, 1) and status == -1:
            status = os.waitpid(process, 0)[1]
        return status

    try:
        yield wait
    finally:
        os.close(done)
        if status == -1:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
