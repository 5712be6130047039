"""The cases on which each setting of the timed planner is judged: captured steps and prompts, and random graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.sizes import parse_size
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets


@dataclass(frozen=True, slots=True)
class Case:
    """The graph that ``make`` gives, in each of ``memories`` (None: its own) with links of each of ``bandwidths`` in
    bytes/s."""

    name: str
    make: Callable[[], TaskGraph]
    memories: Sequence[str | None]
    bandwidths: Sequence[float] = (2e10,)


def cases() -> Iterator[tuple[TaskGraph, int, float]]:
    """Yield each graph of CASES with each of its memories in bytes and of its bandwidths."""
    for case in CASES:
        graph = replace(case.make(), name=case.name)
        for memory in case.memories:
            for bandwidth in case.bandwidths:
                yield graph, parse_size(memory) if memory else graph.devices[0].memory, bandwidth


def _llama(layers: int, hidden: int, ffn: int, batch: int, tokens: int) -> TaskGraph:
    """A LoRA step of all projections of a Llama with heads of 128 and a vocabulary of 32,000."""
    from benchmarks.common.shapes import llama
    from benchmarks.planner.captures import Workload, lora_step

    return lora_step(Workload(llama(hidden, ffn, layers, hidden // 128, hidden // 128, 32000), batch, tokens))


def _prefill() -> TaskGraph:
    """A prompt of the shape of Llama 3.2 3B with a vocabulary of 32,000."""
    from benchmarks.common.shapes import llama
    from benchmarks.planner.captures import Workload, prefill

    return prefill(Workload(llama(3072, 8192, 28, 24, 8, 32000), 1, 512))


def _qwen3() -> TaskGraph:
    from benchmarks.planner.why_cases import QWEN3_14B, lora_on_attention

    small = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    return lora_on_attention({**QWEN3_14B, **small, "num_attention_heads": 16}, 2, 512)


def _experts() -> TaskGraph:
    from benchmarks.planner.why_cases import QWEN3_30B_A3B, lora_on_attention

    small = {
        "vocab_size": 32000,
        "head_dim": 64,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
    }
    fewer = {"num_attention_heads": 16, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4}
    return lora_on_attention({**QWEN3_30B_A3B, **small, **fewer}, 2, 512)


def _random(seed: int) -> TaskGraph:
    """A random graph of up to 120 vertices in 1.1 to 3 times its working set, some with values that change."""
    rng = random.Random(seed)
    shape = Shape(vertices=rng.choice((24, 60, 120)), states=rng.choice((0.0, 0.3)))
    graph = with_working_sets(random_taskgraph(rng, shape), rng.choice((1.1, 1.3, 1.6, 2.0, 3.0)))
    timed = (replace(v, duration=rng.random() * 1e-4) if v.duration else v for v in graph.vertices)
    return replace(graph, vertices=tuple(timed))


CASES: Sequence[Case] = (
    *(Case(f"random {seed}", partial(_random, seed), (None,), ((1e7, 1e8, 1e9)[seed % 3],)) for seed in range(100)),
    Case("LoRA 2 layers 4x512", partial(_llama, 2, 2048, 5632, 4, 512), ("560MiB", "700MiB")),
    Case("LoRA 6 layers 1x1024", partial(_llama, 6, 4096, 11008, 1, 1024), ("1.45GiB",)),
    Case("Qwen3 6 layers 2x512", _qwen3, ("285MiB", "340MiB")),
    Case("experts 6 layers 2x512", _experts, ("450MiB",)),
    Case("prefill 3B 1x512", _prefill, ("2GiB",)),
)
"""No setting was tuned on any of them. All but the random graphs are traced anew, over fake tensors."""
