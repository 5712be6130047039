"""Steps on several host devices beside the ideal: ``disco-accel bench devices [-o FILE]``.

Two cores cannot compute on four devices at once, so in the first two tables the work of a layer is a kernel that sleeps
for its time. The third has real kernels, one thread for each device. All variants of a table take turns in one process.
Each first gives the loss and the gradients of eager mode, bit for bit: of accumulation over its parts, if it has some.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.provenance import provenance
from benchmarks.devices.sleeping import Sleeping
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import ConfigError
from disco_accel.graph.files import write_atomically

ROWS, LENGTH, LAYERS = 8, 8, 8
SECONDS_A_ROW = 0.008
"""Of each layer, forward and backward alike. So long that the ops which do not sleep, and of which two cores run two at
a time whatever the number of devices, are one or two in a hundred of a step."""
LINK = 1e9
STREAMED = 16 << 20
"""Bytes of a layer's weight where the link is the limit: 17 ms on it, for 2 ms of kernels."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all variants of a table train. ``nbytes`` of each layer's sleeping kernel and its ``seconds`` a row; real
    kernels where there are none. ``budget`` in bytes of each device, ``link`` in bytes/s."""

    title: str
    nbytes: int
    seconds: float
    budget: int
    link: float | None = None
    hidden: int = 32
    length: int = LENGTH

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": self.hidden, "intermediate_size": 4 * self.hidden, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=self.length))
        if self.nbytes:
            for layer in model.model.layers:
                layer.mlp = Sleeping(self.nbytes, self.seconds)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        trained: torch.nn.Module = model.train()
        return trained

    def batch(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (ROWS, self.length), generator=torch.Generator().manual_seed(0))
        labels = ids.clone()
        labels[0, : self.length // 2] = -100
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True, slots=True)
class Variant:
    devices: int
    parallel: str = "layers"
    micro_batches: int = 1

    @property
    def parts(self) -> int:
        return self.devices if self.parallel == "batch" else self.micro_batches


@dataclass(frozen=True, slots=True)
class Row:
    """``seconds``: of a step, median, and half of the distance between the quartiles. ``ideal``: made of the step of
    one device with as many micro-batches, in the same run. ``reload``: bytes a step."""

    table: str
    devices: int
    parallel: str
    micro_batches: int
    seconds: float
    spread: float
    ideal: float
    reload: int


SLEEPING = Job("kernels that sleep, memory for everything", 1 << 12, SECONDS_A_ROW, 64 << 20)
BOUND = Job(
    "kernels that sleep, a quarter of the weights on each device", STREAMED, 0.00025, LAYERS * STREAMED * 21 // 80, LINK
)
REAL = Job("real kernels, a thread for each device", 0, 0.0, 1 << 30, hidden=256, length=64)
ONE = Variant(1)
TABLES: dict[Job, tuple[Variant, ...]] = {
    SLEEPING: (
        *(ONE, Variant(1, micro_batches=4), Variant(1, micro_batches=8)),
        *(Variant(2, micro_batches=4), Variant(4, micro_batches=4), Variant(4, micro_batches=8)),
        *(Variant(2, "batch"), Variant(4, "batch")),
    ),
    BOUND: (ONE, Variant(2), Variant(4)),
    REAL: (ONE, Variant(1, micro_batches=4), Variant(2, "batch"), Variant(2, micro_batches=4)),
}


def ideal(variant: Variant, one: float) -> float:
    """Of the step of one device with as many micro-batches, ``one`` second long: parts go through the devices in a row,
    or each device has one.

    Where the link is the limit and there is one part, each device streams its share of the weights."""
    count, parts = variant.devices, variant.micro_batches
    return one / count if variant.parallel == "batch" or parts == 1 else one / count * (parts + count - 1) / parts


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _require_bits(job: Job, planned: torch.nn.Module, variant: Variant) -> None:
    """Raises ConfigError unless a step of ``planned`` has the loss and the gradients of eager mode."""
    batch, eager = job.batch(), job.model()
    loss = planned(**batch).loss
    loss.backward()
    items, total = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].ne(-100).sum(), None
    for part in range(variant.parts):
        rows = {name: value.chunk(variant.parts)[part] for name, value in batch.items()}
        found = eager(**rows, **({"num_items_in_batch": items} if variant.parts > 1 else {})).loss
        found.backward()
        total = found.detach() if total is None else total + found.detach()
    assert total is not None
    expected, got = _gradients(eager), _gradients(planned)
    if not torch.equal(loss, total) or any(not torch.equal(got[name], value) for name, value in expected.items()):
        raise ConfigError(f"bench devices: {job.title}, {variant}: other bits than eager mode's")
    planned.zero_grad()


def measure(job: Job, variants: Sequence[Variant], rounds: int) -> list[Row]:
    """Train with every variant in turn, ``rounds`` times."""
    models = []
    for variant in variants:
        config = DiscoConfig(
            memory_budget=job.budget,
            device="cpu",
            devices=variant.devices,
            parallel=variant.parallel,
            micro_batches=variant.micro_batches,
            link_bandwidth=job.link,
            compute_threads=1,
            plan_cache=None,
            quiet=True,
        )
        models.append(prepare(job.model(), config))
        _require_bits(job, models[-1], variant)
    batch = job.batch()
    seconds: list[list[float]] = [[] for _ in variants]
    for number in range(rounds + 1):
        for position, model in enumerate(models):
            began = time.perf_counter()
            model(**batch).loss.backward()
            model.zero_grad()
            if number:
                seconds[position].append(time.perf_counter() - began)
    medians = [statistics.median(times) for times in seconds]
    # Small ops take as long on a part of the batch as on all of it, so a step in parts is longer on one device, too.
    alone = {v.micro_batches: median for v, median in zip(variants, medians, strict=True) if v.devices == 1}
    rows = []
    for variant, model, times, median in zip(variants, models, seconds, medians, strict=True):
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        rows.append(
            Row(
                job.title,
                variant.devices,
                variant.parallel,
                variant.micro_batches,
                median,
                (high - low) / 2,
                ideal(variant, alone[variant.micro_batches]),
                stats(model)["reload_bytes"],
            )
        )
    return rows


HEADER = """| | devices | parallel | micro-batches | s per step | ideal, s | step / ideal | as fast as one device |
|---|---|---|---|---|---|---|---|"""


def table(result: dict[str, Any]) -> str:
    """One line for each variant."""
    lines, one = [HEADER], 0.0
    for row in result["rows"]:
        one = row["seconds"] if (row["devices"], row["micro_batches"]) == (1, 1) else one
        cells = [row["table"], row["devices"], row["parallel"], row["micro_batches"]]
        cells += [f"{row['seconds']:.3g} ±{row['spread']:.1g}", f"{row['ideal']:.3g}"]
        cells += [f"{row['seconds'] / row['ideal']:.2f}", f"{one / row['seconds']:.2f} x"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="disco-accel bench devices", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", metavar="FILE")
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error("--rounds: give 1 or more")
    torch.set_num_threads(1)
    head = provenance("disco-accel bench devices", words, "cpu")
    rows = [asdict(row) for job, variants in TABLES.items() for row in measure(job, variants, args.rounds)]
    result = {"benchmark": "devices", **head, "rows": rows}
    print(f"{result['machine']}; torch {torch.__version__}; load {result['load']}\n\n{table(result)}")
    if args.output is not None:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(args.output), json.dumps(result, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
