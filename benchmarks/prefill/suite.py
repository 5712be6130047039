"""A prompt read under a budget, beside eager in memory and weights streamed one module after the other.

    disco-accel bench prefill [--sequences 1024,4096] [--budgets 0.25,0.5] [--hidden 512 --layers 8 ...] [-o out.json]

Random weights, the host device, a throttled link; the engines of a row take turns, every round starting with another
one. ``planned`` and ``fixed order`` run the same plan; their seconds are those of prefills one after the other, what
brings weights home for the next included, and ``first token`` those until the logits are there. ``streamed`` is eager
with each module's weights copied over the same link before the module runs, as many of them resident as the plan keeps.
Logits, keys and values of these have eager's bits, or the benchmark fails. accelerate's ``cpu_offload`` and
ZeRO-Inference have processes of their own and no link to wait for: docs/prefill.md says what their columns are worth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.compare import same_bits
from benchmarks.common.provenance import provenance
from benchmarks.common.resident_plan import resident_plan
from benchmarks.common.shapes import Shape
from benchmarks.common.subjects import Times
from benchmarks.engine.suite import Differs, any_plan_seconds, cell, in_turn, link_seconds
from benchmarks.gpu.models import batch_for, draw_weights, meta_llama
from benchmarks.prefill.engines import PEERS, TITLES, outputs_of, read_eagerly, weights_over_a_link
from benchmarks.prefill.peers import Peers, peer_cell
from benchmarks.step.engines import Job
from benchmarks.step.options import count, names_of
from benchmarks.step.table import cell_text
from disco_accel import prefill, stats
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import Executor
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.files import write_atomically
from disco_accel.graph.memgraph import MemGraph
from disco_accel.plan.summary import swapped_bytes
from disco_accel.sizes import format_size, parse_size
from disco_accel.step.run.session import current_step

PEERS_SAY = (
    "The peers' weights are in the device's memory already: no link is there to throttle, and theirs costs nothing."
)
"""What their columns mean on the host device."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptShape:
    """A Llama and the prompt that it reads."""

    hidden: int
    layers: int
    tokens: int
    batch: int
    vocabulary: int
    kv_heads: int
    dtype: torch.dtype

    @property
    def sizes(self) -> Shape:
        """As ``meta_llama`` wants them."""
        heads = max(2, self.hidden // 64)
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": min(heads, self.kv_heads),
            "vocab_size": self.vocabulary,
        }

    def model(self) -> Any:
        """Random weights, the same at every call, none of which requires a gradient."""
        model = meta_llama(self.sizes, dtype=self.dtype, attention="sdpa", positions=self.tokens)
        draw_weights(model, torch.device("cpu"), lambda t: t.clone())
        return model.eval()

    def job(self, engine: str, folder: str) -> Job:
        """What a peer's process is told."""
        return Job(
            engine=engine,
            shape=self.sizes,
            batch=self.batch,
            tokens=self.tokens,
            dtype=str(self.dtype).removeprefix("torch."),
            rank=0,
            device="cpu",
            budget=None,
            bandwidth=None,
            planner=DiscoConfig().planner,
            folder=folder,
        )


class PromptPair:
    """The same model twice, and the last outputs of each engine. ``step`` is the planned one's plan."""

    def __init__(self, shape: PromptShape, budget: int, bandwidth: float, planner: str) -> None:
        self.eager, self.planned = shape.model(), shape.model()
        self.ids = batch_for(shape.vocabulary, shape.batch, shape.tokens, torch.device("cpu"))["input_ids"]
        self.config = DiscoConfig(
            memory_budget=budget, compute_threads=1, link_bandwidth=bandwidth, planner=planner, plan_cache=None
        )
        self.bandwidth = bandwidth
        self.first_token: dict[str, list[float]] = {}
        self.last: dict[str, Any] = {}
        prefill(self.planned, self.ids, config=self.config)
        step = current_step(self.planned)
        assert step is not None, "the model has read a prompt"
        self.step = step

    def run_eager(self, name: str) -> tuple[float, float]:
        """Sum of the logits, and seconds; whatever hooks the eager model has are part of it."""
        began = time.perf_counter()
        self.last[name] = read_eagerly(self.eager, self.ids)
        return float(self.last[name].logits.sum()), time.perf_counter() - began

    def run_streamed(self) -> tuple[float, float]:
        """``run_eager`` with weights that come over the link, all but as many bytes as the plan keeps."""
        with weights_over_a_link(self.eager, self.step.resident_bytes, self.bandwidth):
            return self.run_eager("streamed")

    def run_on(self, name: str, executor: Executor) -> tuple[float, float]:
        """Sum of the logits, and seconds of a prefill that ``executor`` runs, to its very end."""
        usual = self.step.use(executor)
        try:
            began = time.perf_counter()
            self.last[name] = prefill(self.planned, self.ids)
            self.first_token.setdefault(name, []).append(time.perf_counter() - began)
            self.step.settle()
            return float(self.last[name].logits.sum()), time.perf_counter() - began
        finally:
            self.step.use(usual) if usual is not None else None

    @property
    def logits_sum(self) -> float:
        """Of the last eager run in memory."""
        return float(self.last["in memory"].logits.sum())

    def kernel_seconds(self, executor: Executor) -> float:
        """Time inside the kernels of one prefill."""
        executor.set_tracing(True)
        self.run_on("resident", executor)
        events = executor.events()
        executor.set_tracing(False)
        return sum(e.end - e.start for e in events if e.lane.startswith("compute"))

    def check(self, name: str) -> None:
        """Raise Differs unless the last run of ``name`` has the last eager run's bits."""
        if "in memory" not in self.last:
            self.run_eager("in memory")
        got, expected = (outputs_of(self.last[n]) for n in (name, "in memory"))
        if got.keys() != expected.keys() or not all(same_bits(got[n], expected[n]) for n in got):
            raise Differs(f"{name}: logits, keys or values differ from eager's")

    def resident_plan(self) -> MemGraph:
        """The plan of the same prefill with room for everything."""
        return resident_plan(self.step, self.config)


@contextmanager
def _closing(executors: dict[str, Executor]) -> Any:
    try:
        yield executors
    finally:
        for executor in executors.values():
            executor.close()


def measure(shape: PromptShape, budget: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: all engines on one prompt under one budget."""
    pair = PromptPair(shape, budget, args.bandwidth, args.planner)
    step = pair.step
    fixed = dataclasses.replace(step.engine, dispatch="fixed")
    free = dataclasses.replace(step.engine, link_bandwidth=None)
    compute: list[float] = []
    with (
        Peers(args.peers, shape.job, args.limit) as peers,
        _closing(
            {
                "planned": step.make_executor(step.engine),
                "fixed order": step.make_executor(fixed),
                "resident": step.make_executor(free, plan=pair.resident_plan()),
            }
        ) as executors,
    ):

        def resident() -> tuple[float, float]:
            compute.append(pair.kernel_seconds(executors["resident"]))
            return pair.run_on("resident", executors["resident"])

        subjects: dict[str, Callable[[], tuple[float, float]]] = {
            "in memory": lambda: pair.run_eager("in memory"),
            "streamed": pair.run_streamed,
            "resident": resident,
        }
        for name in ("planned", "fixed order"):
            subjects[name] = lambda name=name: pair.run_on(name, executors[name])  # type: ignore[misc]
        for name in peers.names:
            # What they leave is compared at the end, to a tolerance.
            subjects[name] = lambda name=name: (pair.logits_sum, peers.turn(name))  # type: ignore[misc]
        times = in_turn(args.rounds, subjects, lambda name: None if name in peers.names else pair.check(name))
        beside = peers.rows(outputs_of(pair.last["in memory"]), args.rounds)
    alone, link = Times(tuple(compute[1:])), link_seconds(pair, args.bandwidth)
    peak = stats(pair.planned)["peak_bytes"]
    return {
        "tokens": shape.tokens,
        "budget": budget,
        "peak": peak,
        "weights": sum(p.nbytes for p in pair.eager.parameters()),
        "reload_bytes": swapped_bytes(step.plan, swaps_in),
        "plan_seconds": sum(step.seconds.values()),
        "compute_alone": alone,
        "link": link,
        "bound": max(alone.median, link),
        "any_plan": any_plan_seconds(pair, args.bandwidth, alone.median),
        "first_token": Times(tuple(pair.first_token["planned"][1:])),
        "times": {name: found for name, found in times.items() if name not in peers.names},
        "peers": beside,
    }


def show(row: dict[str, Any]) -> str:
    """One line of the table; a prompt that does not fit has its error in the last cell."""
    prompt = [f"{row['tokens']}", f"{format_size(row['budget'])} ({row['budget'] / row['weights']:.0%})"]
    if row.get("error") is not None:
        return "| " + " | ".join([*prompt, *["—"] * (_COLUMNS - 3), cell_text(row["error"])]) + " |"
    times, bound = row["times"], row["bound"]
    planned = times["planned"].median
    cells = [
        *prompt,
        format_size(row["peak"]),
        cell(times["planned"]),
        f"{row['first_token'].median * 1e3:.1f}",
        f"{bound / planned:.1%}",
        f"{row['any_plan'] / planned:.1%}",
        f"{row['reload_bytes'] / planned / 1e9:.3f}",
        *(f"{times[name].median / planned:.2f}" for name in ("fixed order", "streamed", "in memory")),
        # Results of before they were measured have none.
        *(peer_cell(row.get("peers", {}).get(name), planned) for name in PEERS),
    ]
    return "| " + " | ".join(cells) + " |"


def from_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as ``measure`` made it, from the file that ``-o`` wrote."""
    if row.get("error") is not None:
        return dict(row)
    times = {name: Times(tuple(found["seconds"])) for name, found in row["times"].items()}
    return {**row, "times": times, "first_token": Times(tuple(row["first_token"]["seconds"]))}


_COLUMNS = 11 + len(PEERS)
HEADER = (
    "| tokens | budget (of the weights) | peak | planned, ms | first token | max(compute, link) / planned | "
    "lower bound / planned | link, GB/s | fixed order / planned | streamed / planned | in memory / planned | "
    + " | ".join(f"{TITLES[name]} / planned" for name in PEERS)
    + " |\n|"
    + "---|" * _COLUMNS
)


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 1024,4096") from error
    if any(number <= 0 for number in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers above 0")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="disco-accel bench prefill", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sequences", type=lambda t: _numbers(t, int), default=[256, 1024], help="tokens of the prompt"
    )
    parser.add_argument(
        "--budgets", type=lambda t: _numbers(t, float), default=[0.5, 0.8], help="of the weights' bytes"
    )
    parser.add_argument("--memory", help="one budget as a size, in place of --budgets")
    for name, value in {"hidden": 512, "layers": 8, "batch": 1, "vocabulary": 4096, "kv-heads": 4, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=count, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bandwidth", type=float, default=0.5e9, help="of the link, bytes per second each way")
    parser.add_argument(
        "--peers",
        type=lambda t: names_of(tuple(PEERS), t, none=True),
        default=list(PEERS),
        help=f"{', '.join(PEERS)}, or none",
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the building of a peer, or its prompt")
    parser.add_argument("--planner", default=DiscoConfig().planner)
    parser.add_argument("-o", "--output", type=Path, help="all seconds as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if an engine has other bits than eager."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    head = provenance("disco-accel bench prefill", words, "cpu")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"torch {torch.__version__}, one compute thread, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    print(
        f"hidden {args.hidden}, {args.layers} layers, batch {args.batch}, {args.dtype}, {args.bandwidth / 1e9:g} GB/s\n"
    )
    print(HEADER)
    rows = []
    try:
        for tokens in args.sequences:
            kind = getattr(torch, args.dtype)
            shape = PromptShape(args.hidden, args.layers, tokens, args.batch, args.vocabulary, args.kv_heads, kind)
            weights = sum(p.nbytes for p in shape.model().parameters())
            budgets = [parse_size(args.memory)] if args.memory else [int(share * weights) for share in args.budgets]
            for budget in budgets:
                try:
                    rows.append(measure(shape, budget, args))
                except BudgetTooSmall as error:
                    rows.append({"tokens": tokens, "budget": budget, "weights": weights, "error": str(error)})
                print(show(rows[-1]), flush=True)
    except Differs as error:
        print(f"bench prefill: {error}", file=sys.stderr)
        return 1
    print(f"\nLogits, keys and values of all engines but the peers have the same bits. {PEERS_SAY}")
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        told = ("hidden", "layers", "batch", "dtype", "bandwidth")
        result = {"benchmark": "prefill", **head, **{name: getattr(args, name) for name in told}, "rows": rows}
        write_atomically(args.output, json.dumps(result, default=dataclasses.asdict).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
