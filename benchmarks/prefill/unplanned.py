"""A forward without a plan, its weights streaming through a ring or each copied when it is read.

    python -m benchmarks.prefill.unplanned [--tokens 256] [--hidden 512 ...] [--share 0.5] [--bandwidth 0.5e9]

Random weights in one host arena, the host device, a throttled link; the engines take turns, each round starting with
another one. Both have ``share`` of the weights' bytes of memory for them: ``ring`` streams through it, ``module by
module`` keeps as many weights there as the ring does. Logits, keys and values have eager's bits, or it fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.compare import same_bits
from benchmarks.common.subjects import Times
from benchmarks.engine.suite import Differs, in_turn
from benchmarks.gpu.models import batch_for
from benchmarks.prefill.engines import outputs_of, read_eagerly, weights_over_a_link
from benchmarks.prefill.suite import PromptShape
from benchmarks.step.options import count
from disco_accel.native.loads import Loading, host_loads
from disco_accel.sizes import format_size
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.streamed_eager import StreamedEager, own_leaves
from disco_accel.step.placement.weight_ring import WeightRing


class Unplanned:
    """One model, and the last outputs of each engine. ``copied``: bytes over the link in the last run of each."""

    def __init__(self, shape: PromptShape, room: int, bandwidth: float) -> None:
        self.eager, self.model = shape.model(), shape.model()
        for one in (self.eager, self.model):
            one.requires_grad_(False)
        self.ids = batch_for(shape.vocabulary, shape.batch, shape.tokens, torch.device("cpu"))["input_ids"]
        self.placement = Placement(self.model, torch.device("cpu"))
        self.placement.gather()
        self.room, self.bandwidth = room, bandwidth
        self._load, self._loaded = host_loads(bandwidth), 0
        self.ring = WeightRing(own_leaves(self.model), self._counted, lambda wanted: room, print)
        self.streamed = StreamedEager(self.model, torch.clone, (), self.ring)
        self.last: dict[str, Any] = {}
        self.copied: dict[str, int] = {}

    def _counted(self, source: torch.Tensor) -> Loading:
        self._loaded += source.nbytes
        return self._load(source)

    def run_eager(self) -> tuple[float, float]:
        """Sum of the logits, and seconds."""
        return self._run("in memory", self.eager)

    def run_ring(self) -> tuple[float, float]:
        """Likewise, through the ring."""
        self._loaded = 0
        with torch.no_grad(), self.streamed.visiting(self.model):
            found = self._run("ring", self.model)
        self.copied["ring"] = self._loaded
        return found

    def run_module_by_module(self) -> tuple[float, float]:
        """Likewise, each weight copied when it is read, all but as many bytes as stay in the ring."""
        with weights_over_a_link(self.eager, self.ring.held, self.bandwidth) as copied:
            found = self._run("module by module", self.eager)
        self.copied["module by module"] = sum(copied)
        return found

    def check(self, name: str) -> None:
        """Raise Differs unless the last run of ``name`` has the last eager run's bits."""
        if "in memory" not in self.last:
            self.run_eager()
        got, expected = (outputs_of(self.last[n]) for n in (name, "in memory"))
        if got.keys() != expected.keys() or not all(same_bits(got[n], expected[n]) for n in got):
            raise Differs(f"{name}: logits, keys or values differ from eager's")

    def _run(self, name: str, model: Any) -> tuple[float, float]:
        began = time.perf_counter()
        self.last[name] = read_eagerly(model, self.ids)
        return float(self.last[name].logits.sum()), time.perf_counter() - began


def measure(shape: PromptShape, share: float, bandwidth: float, rounds: int) -> list[str]:
    """Lines of a table, an engine each."""
    weights = sum(p.nbytes for p in shape.model().parameters())
    pair = Unplanned(shape, int(share * weights), bandwidth)
    for _ in range(2):
        pair.run_ring()
    times: dict[str, Times] = in_turn(
        rounds,
        {"in memory": pair.run_eager, "ring": pair.run_ring, "module by module": pair.run_module_by_module},
        pair.check,
    )
    lines = [
        f"weights {format_size(weights)}, room {format_size(pair.room)}, most held {format_size(pair.ring.most_held)}",
        "| engine | ms | over the link | link alone, ms | max(compute, link), ms | time / that |",
        "|---|---|---|---|---|---|",
    ]
    compute = times["in memory"].median
    for name, found in times.items():
        copied = pair.copied.get(name, 0)
        link = copied / bandwidth
        bound = max(compute, link)
        seconds = ", ".join(f"{s * 1e3:.0f}" for s in sorted(found.seconds))
        lines.append(
            f"| {name} | {found.median * 1e3:.1f} ({seconds}) | {format_size(copied)} | {link * 1e3:.1f} | "
            f"{bound * 1e3:.1f} | {found.median / bound:.2f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if an engine has other bits than eager."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"tokens": 256, "hidden": 512, "layers": 8, "batch": 1, "vocabulary": 4096, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=count, default=value)
    parser.add_argument("--share", type=float, default=0.5, help="of the weights' bytes, for the ring")
    parser.add_argument("--bandwidth", type=float, default=0.5e9, help="of the link, bytes per second")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = PromptShape(args.hidden, args.layers, args.tokens, args.batch, args.vocabulary, 4, torch.float32)
    try:
        print("\n".join(measure(shape, args.share, args.bandwidth, args.rounds)))
    except Differs as error:
        print(f"unplanned: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
