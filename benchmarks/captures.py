"""Captured steps of Llama shapes, traced over fake tensors: no weights, durations estimated for a GPU.

python -m benchmarks.captures FOLDER    writes each as FOLDER/NAME.taskgraph.json, for ``--graph`` of other benchmarks
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel.capture.step import capture_forward
from disco_accel.graphfile import write_taskgraph
from disco_accel.integrate.hf import hf_contexts
from disco_accel.plan.roofline import SPEEDS, with_estimates
from disco_accel.taskgraph import TaskGraph
from recipes.outline import outline
from recipes.settings import read_recipe


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama in bf16 and its batch: bytes and FLOPs are those of the real model, the weights do not exist."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    batch: int
    tokens: int

    @property
    def config(self) -> dict[str, Any]:
        """What the model's ``config.json`` says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "use_cache": False,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": max(2048, self.tokens),
            "vocab_size": 32000,
        }


STEPS: Mapping[str, LlamaShape] = {
    "lora-8layers": LlamaShape(1024, 2816, 8, 16, 1, 512),
    "lora-1B-1x512": LlamaShape(2048, 5632, 22, 32, 1, 512),
    "lora-7B-1x1024": LlamaShape(4096, 11008, 32, 32, 1, 1024),
    "lora-7B-8x1024": LlamaShape(4096, 11008, 32, 32, 8, 1024),
}
"""LoRA steps of rank 16 on all projections, with activation checkpointing."""

PREFILLS: Mapping[str, LlamaShape] = {
    "prefill-7B-1x1024": LlamaShape(4096, 11008, 32, 32, 1, 1024),
    "prefill-7B-8x1024": LlamaShape(4096, 11008, 32, 32, 8, 1024),
}
"""Forward passes that return the logits of the last token."""


def captures() -> Iterator[TaskGraph]:
    """Yield STEPS, then PREFILLS."""
    for name, shape in STEPS.items():
        yield replace(lora_step(shape), name=name)
    for name, shape in PREFILLS.items():
        yield replace(prefill(shape), name=name)


def lora_step(shape: LlamaShape) -> TaskGraph:
    """Capture forward and backward as a recipe trains them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        recipe: dict[str, Any] = {"model_name_or_path": folder, "dataset": "none.jsonl", "output_dir": "out"}
        recipe |= {"max_steps": 1, "lora_r": 16}
        recipe |= {"max_length": shape.tokens, "per_device_train_batch_size": shape.batch}
        file = Path(folder) / "recipe.yaml"
        file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in recipe.items()))
        return with_estimates(outline(read_recipe(str(file))).captured.graph, SPEEDS["cuda"])


def prefill(shape: LlamaShape) -> TaskGraph:
    """Capture a forward pass without gradients."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**shape.config), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    batch = {"input_ids": torch.zeros((shape.batch, shape.tokens), dtype=torch.int64)}

    def last_logits(**kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": model(**kwargs, use_cache=False, logits_to_keep=1).logits}

    captured = capture_forward(model, batch, forward=last_logits, contexts=hf_contexts(model, batch))
    return with_estimates(captured.graph, SPEEDS["cuda"])


def main(argv: Sequence[str] | None = None) -> int:
    """Write every capture; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for graph in captures():
        write_taskgraph(graph, folder / f"{graph.name}.taskgraph.json")
        print(f"{graph.name}: {len(graph.vertices)} vertices", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
