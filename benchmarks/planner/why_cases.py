"""The cases whose distance from the bound is taken apart: ``python -m benchmarks.planner --why``.

Steps of large models are captured from their config over fake tensors, which takes 20 to 60 s each; they are kept in a
folder below ``out``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disco_accel.graph.files import read_taskgraph, write_taskgraph
from disco_accel.graph.taskgraph import TaskGraph

ROOT = Path(__file__).resolve().parents[2]
CAPTURED = ROOT / "out" / "planner-why"
_GRAPHS = ROOT / "tests" / "data" / "graphs"
_COMMON = {"dtype": "bfloat16", "use_cache": False, "tie_word_embeddings": False}

QWEN3_14B: Mapping[str, Any] = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128},
    **{"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 40960},
    **_COMMON,
}
QWEN3_30B_A3B: Mapping[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128},
    **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 40960},
    **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "mlp_only_layers": [],
    **_COMMON,
}
LLAMA_31_8B: Mapping[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    **_COMMON,
}
"""What the published ``config.json`` say that a step depends on."""


@dataclass(frozen=True, slots=True)
class WhyCase:
    """The graph that ``make`` gives, in each of ``memories``."""

    name: str
    make: Callable[[], TaskGraph]
    memories: Sequence[str]

    @property
    def graph(self) -> TaskGraph:
        """The graph, captured once."""
        file = CAPTURED / f"{self.name.replace(' ', '-')}.taskgraph.json"
        if file.exists():
            return replace(read_taskgraph(file), name=self.name)
        graph = replace(self.make(), name=self.name)
        if not (_GRAPHS / f"{self.name}.taskgraph.json").exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_taskgraph(graph, file)
        return graph


def _test_graph(name: str) -> TaskGraph:
    return read_taskgraph(_GRAPHS / f"{name}.taskgraph.json")


def _captured(name: str) -> TaskGraph:
    from benchmarks.planner.captures import PREFILLS, STEPS, lora_step, prefill

    return lora_step(STEPS[name]) if name in STEPS else prefill(PREFILLS[name])


def lora_on_attention(config: Mapping[str, Any], batch: int, tokens: int) -> TaskGraph:
    """Capture a LoRA step of rank 16 on the attention's projections, activations checkpointed."""
    from disco_accel.measure.costs import Estimated
    from disco_accel.recipes.outline import outline
    from disco_accel.recipes.settings import read_any_recipe
    from disco_accel.step.compile.pipeline import with_costs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        keys = {
            **{"model_name_or_path": folder, "dataset": "none.jsonl", "output_dir": "out", "max_steps": 1},
            **{"lora_r": 16, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
            **{"max_length": tokens, "per_device_train_batch_size": batch},
        }
        file = Path(folder) / "recipe.yaml"
        file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in keys.items()))
        captured = outline(read_any_recipe(str(file)), "none").captured
    return with_costs(captured, Estimated("cuda"))[0].graph


CASES: Sequence[WhyCase] = (
    WhyCase("chain8", lambda: _test_graph("chain8"), ("8MiB", "12.8MiB", "19.2MiB", "24MiB")),
    WhyCase(
        "lora_small",
        lambda: _test_graph("lora_small"),
        ("32.24MiB", "51.58MiB", "77.38MiB", "109.6MiB", "128MiB"),
    ),
    WhyCase("lora-7B-1x1024", lambda: _captured("lora-7B-1x1024"), ("2.5GiB", "3GiB", "4GiB", "8GiB", "11GiB")),
    WhyCase("lora-7B-8x1024", lambda: _captured("lora-7B-8x1024"), ("2.5GiB", "3GiB", "4GiB", "8GiB", "11GiB")),
    WhyCase("prefill-7B-8x1024", lambda: _captured("prefill-7B-8x1024"), ("2GiB",)),
    WhyCase("Llama-3.1-8B 1x4096", lambda: lora_on_attention(LLAMA_31_8B, 1, 4096), ("4.2GiB", "8GiB", "12GiB")),
    WhyCase("Qwen3-14B 4x1024", lambda: lora_on_attention(QWEN3_14B, 4, 1024), ("6GiB", "12GiB")),
    WhyCase("Qwen3-30B-A3B 1x4096", lambda: lora_on_attention(QWEN3_30B_A3B, 1, 4096), ("8GiB", "22GiB", "44GiB")),
)
"""Links of 20 GB/s each way, 10 us a copy; kernel times are estimated for an A100."""


def why_cases(only: Sequence[str] = ()) -> Iterator[tuple[TaskGraph, str]]:
    """Yield each graph of CASES, or of those whose names begin with one of ``only``, with each of its memories."""
    for case in CASES:
        if not only or case.name.startswith(tuple(only)):
            graph = case.graph
            for memory in case.memories:
                yield graph, memory
