"""Stores on the emulated device, and other processes that use them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from disco_accel.store.client import Store
from tests.store.serving import command

READER = Path(__file__).parent / "scripts" / "store_reader.py"
MIB = 1 << 20


@contextlib.contextmanager
def gpu_store(folder: Path, *options: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The command that users start, with its device on the GPU: its socket and its process. It complains of nothing."""
    process = command(folder, "--device-kind", "cuda", *options)
    try:
        yield folder / "own" / "store", process
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        report = Path(os.environ["EMULATED_REPORTS"], f"{process.pid}.txt")
        complaints = report.read_text() if report.exists() else ""
        report.unlink(missing_ok=True)
        assert not complaints, complaints


class Reader:
    """A client in a process of its own."""

    def __init__(self, socket: Path) -> None:
        words = [sys.executable, str(READER), str(socket)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, word: str, id: int) -> str:
        """Its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(word, id, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def digest(content: torch.Tensor) -> str:
    """What a reader answers for an object on the GPU with this content."""
    return f"cuda {hashlib.sha256(bytes(content.cpu().contiguous().view(torch.uint8).numpy())).hexdigest()}"


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes on the GPU, no two objects' alike."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).cuda()


def put_pattern(store: Store, nbytes: int, seed: int) -> int:
    """An object with that content, final."""
    made = store.create((nbytes,), torch.uint8, "device")
    store.get(made).copy_(pattern(nbytes, seed))
    store.put(made)
    return made


def leases(store: Store, pid: int) -> int:
    """How many the store counts for that process."""
    found: int = next((one["leases"] for one in store.stats()["clients"] if one["pid"] == pid), 0)
    return found
