"""An ordinary LoRA training loop whose activations, or frozen weights, are in a store: ``python -m
benchmarks.store.offload [--rounds 7] [--link 500MB/s] [-o out/store-offload.json]``.

Plain PyTorch beside stores of several device sizes, in turn, each in a process of its own; losses and gradients are
compared bit for bit. A row without announcements tells the store nothing of the next uses and asks nothing back ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.compare import same_bits
from benchmarks.common.provenance import provenance
from benchmarks.store.suite import serve
from disco_accel.graph.files import write_atomically
from disco_accel.sizes import format_size
from disco_accel.store.client import Store
from disco_accel.store.offload import offload
from disco_accel.store.saved_activations import saved_activations
from disco_accel.store.store_command import parse_rate
from tests.support.models import tiny_lora

SHAPE = {"layers": 6, "hidden": 256, "vocabulary": 512, "max_position_embeddings": 512}
BATCH, LENGTH = 2, 256
MIN_BYTES = 1 << 16


class Silent:
    """A store that nobody tells when a tensor is used next."""

    def __init__(self, store: Store) -> None:
        self.create, self.get, self.free, self.stats = store.create, store.get, store.free, store.stats
        self._put = store.put

    def put(self, id: int, next_use: float | None = None) -> None:
        """Without the announcement."""
        del next_use
        self._put(id)

    def prefetch(self, id: int) -> None:
        """Not asked back."""


class Counted(Silent):
    """One that counts its objects and their bytes."""

    nbytes = count = 0

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._create = store.create
        self.create = self._counted  # type: ignore[method-assign,assignment]

    def _counted(self, shape: Any, dtype: torch.dtype, device: str = "host") -> int:
        self.nbytes += shape[0]
        self.count += 1
        return self._create(shape, dtype, device)


@dataclass
class Loop:
    """A model, and a store of ``device`` bytes for its ``moved`` (activations, weights, or nothing)."""

    name: str
    moved: str
    device: int = 0
    store: Any = None
    connection: Store | None = None
    model: torch.nn.Module = field(default_factory=lambda: tiny_lora(**SHAPE))  # type: ignore[arg-type]
    seconds: list[float] = field(default_factory=list)
    figures: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.moved == "weights":
            offload(self.store, self.model, min_bytes=MIN_BYTES)

    def step(self, number: int) -> list[torch.Tensor]:
        """Loss and gradients of one step, on the same numbers in each loop."""
        ids = torch.randint(512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
        self.model.zero_grad()
        before = self._stats()
        begun = time.perf_counter()
        moves = self.moved == "activations"
        with saved_activations(self.store, MIN_BYTES) if moves else contextlib.nullcontext():
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.seconds.append(time.perf_counter() - begun)
        after = self._stats()
        self.figures.append({key: after[key] - before[key] for key in before})
        return [loss.detach()[None], *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def _stats(self) -> dict[str, int]:
        if self.connection is None:
            return {}
        found = self.connection.stats()
        keys = ("gets", "hits", "prefetched", "evicted", "saved_bytes", "loaded_bytes", "stalled_microseconds")
        return {key: found[key] for key in keys}

    def row(self, rate: float, skip: int, objects: int) -> dict[str, Any]:
        """Medians over the steps from ``skip`` on. Of activations, each of the ``objects`` of a step is got once to be
        written, which is no hit."""
        seconds = self.seconds[skip:]
        quarters = statistics.quantiles(seconds, n=4)
        figures = {k: statistics.median(f[k] for f in self.figures[skip:]) for k in self.figures[0]}
        row: dict[str, Any] = {"name": self.name, "device": self.device, "seconds": statistics.median(seconds)}
        row |= {"quarters": [quarters[0], quarters[2]], "least": min(seconds)} | figures
        if figures:
            made = objects if self.moved == "activations" else 0
            row["hit_rate"] = (figures["hits"] - made) / (figures["gets"] - made)
            row["link_seconds"] = max(figures["saved_bytes"], figures["loaded_bytes"]) / rate
        return row


def totals(folder: Path) -> tuple[int, int, int]:
    """Bytes that one step saves as objects, how many these are, and bytes of the frozen weights that are moved."""
    process, connection = serve(folder, "--host", "4GiB", "--device", "4GiB")
    try:
        store = Counted(connection)
        loop = Loop("all", "activations", 0, store)
        loop.step(0)
        weights = sum(p.nbytes for p in loop.model.parameters() if not p.requires_grad and p.nbytes >= MIN_BYTES)
        return store.nbytes, store.count, weights
    finally:
        process.kill()
        process.wait()


def measure(rounds: int, link: str) -> dict[str, Any]:
    """Rows of all loops."""
    torch.set_num_threads(1)
    rate = parse_rate(link)
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        activations, objects, weights = totals(folder / "totals")
        shares: list[tuple[str, str, float, bool]] = [
            ("activations, all on the device", "activations", 1.3, True),
            ("activations, half on the device", "activations", 0.5, True),
            ("activations, half, not announced", "activations", 0.5, False),
            ("activations, a quarter", "activations", 0.25, True),
            ("activations, a quarter, not announced", "activations", 0.25, False),
            ("weights, half on the device", "weights", 0.5, True),
            ("weights, half, not announced", "weights", 0.5, False),
        ]
        loops = [Loop("plain PyTorch", "nothing")]
        for place, (name, moved, share, announced) in enumerate(shares):
            device = int(share * (activations if moved == "activations" else weights))
            options = ("--host", "4GiB", "--device", str(device), "--link-bandwidth", link)
            process, connection = serve(folder / str(place), *options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            store = connection if announced else Silent(connection)
            loops.append(Loop(name, moved, device, store, connection))
        for number in range(rounds + 2):
            print(f"round {number + 1} of {rounds + 2}", file=sys.stderr)
            turn = number % len(loops)
            found = {loop.name: loop.step(number) for loop in loops[turn:] + loops[:turn]}
            plain = found["plain PyTorch"]
            for name, tensors in found.items():
                same = len(plain) == len(tensors) and all(map(same_bits, plain, tensors))
                if not same:
                    raise SystemExit(f"{name}: step {number} has other bits than plain PyTorch")
        rows = [loop.row(rate, 2, objects) for loop in loops]
    return {
        "activations": activations,
        "objects": objects,
        "weights": weights,
        "link": rate,
        "rounds": rounds,
        "rows": rows,
    }


def title(found: Mapping[str, Any]) -> str:
    """What was measured."""
    activations, weights = format_size(found["activations"]), format_size(found["weights"])
    return (
        f"LoRA step, {BATCH} x {LENGTH} tokens, {SHAPE['layers']} layers of {SHAPE['hidden']}, through a tensor store; "
        f"{activations} of activations ({found['objects']} objects), {weights} of weights, link "
        f"{found['link'] / 1e6:g} MB/s each way; {found['rounds']} rounds, all with the bits of plain PyTorch"
    )


def table(found: Mapping[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| loop | device | step, s | middle half | over plain, s | bytes / link, s | hits | waited, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = found["rows"][0]["seconds"]
    for row in found["rows"]:
        device = format_size(row["device"]) if row["device"] else ""
        low, high = row["quarters"]
        line = f"| {row['name']} | {device} | {row['seconds']:.3f} | {low:.3f} - {high:.3f} |"
        if "hit_rate" in row:
            line += f" {row['seconds'] - plain:.3f} | {row['link_seconds']:.3f} | {row['hit_rate']:.0%} |"
            line += f" {row['stalled_microseconds'] / 1e6:.3f} |"
        else:
            line += " | | | |"
        lines.append(line)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line; the table on stdout."""
    parser = argparse.ArgumentParser(description="a training loop with activations or weights in a store")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--link", default="500MB/s", help="the device's link, each way")
    parser.add_argument("-o", "--output", type=Path, help="also write the figures, as JSON")
    args = parser.parse_args(argv)
    found = measure(args.rounds, args.link)
    print(title(found), table(found), sep="\n\n")
    if args.output is not None:
        said = sys.argv[1:] if argv is None else argv
        head = {"benchmark": "store-offload"} | provenance("python -m benchmarks.store.offload", said, "cpu")
        write_atomically(args.output, (json.dumps(head | found, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
