"""Captured steps of Llama shapes, traced over fake tensors: no weights, durations estimated for a GPU.

    python -m benchmarks.planner.captures FOLDER

writes each as FOLDER/NAME.taskgraph.json, for ``--graph`` of other benchmarks.
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

from benchmarks.common.shapes import PRESETS, Shape, llama
from disco_accel.capture.step import capture_forward, capture_step
from disco_accel.graph.files import write_taskgraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.traits import HOST_UPDATED
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.measure.costs import Estimated
from disco_accel.recipes.loading import checkpoint_activations
from disco_accel.recipes.outline import Outline, outline
from disco_accel.recipes.settings import read_any_recipe
from disco_accel.step.compile.pipeline import with_costs
from disco_accel.step.optimizer_home import OptimizerHome


@dataclass(frozen=True, slots=True)
class Workload:
    """A Llama and its batch: bytes and FLOPs are those of the real model, the weights do not exist. ``dtype`` of the
    weights; adapters are float32."""

    shape: Shape
    batch: int
    tokens: int
    dtype: str = "bfloat16"

    @property
    def config(self) -> dict[str, Any]:
        """What the model's ``config.json`` says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": self.dtype,
            "use_cache": False,
            "max_position_embeddings": max(2048, self.tokens),
            "tie_word_embeddings": False,
            **self.shape,
        }


STEPS: Mapping[str, Workload] = {
    "lora-8layers": Workload(llama(1024, 2816, 8, 16, 16, 32000), 1, 512),
    "lora-1B-1x512": Workload(llama(2048, 5632, 22, 32, 32, 32000), 1, 512),
    "lora-7B-1x1024": Workload(PRESETS["7b"], 1, 1024),
    "lora-7B-8x1024": Workload(PRESETS["7b"], 8, 1024),
}
"""LoRA steps of rank 16 on all projections, with activation checkpointing."""

PREFILLS: Mapping[str, Workload] = {
    "prefill-7B-1x1024": Workload(PRESETS["7b"], 1, 1024),
    "prefill-7B-8x1024": Workload(PRESETS["7b"], 8, 1024),
}
"""Forward passes that return the logits of the last token."""


def captures() -> Iterator[TaskGraph]:
    """Yield STEPS, then PREFILLS."""
    for name, work in STEPS.items():
        yield replace(lora_step(work), name=name)
    for name, work in PREFILLS.items():
        yield replace(prefill(work), name=name)


def lora_step(work: Workload) -> TaskGraph:
    """Capture forward and backward as a recipe trains them."""
    return with_costs(lora_outline(work).captured, Estimated("cuda"))[0].graph


def lora_outline(
    work: Workload, quant: str = "none", parts: int = 1, ranks: int = 1, *, checkpointed: bool = True
) -> Outline:
    """The same before anybody has said how fast a device is, and what of a budget lies outside the arena. ``quant``:
    form of the frozen weights, as of ``disco-accel plan``. ``parts`` of the batch and ``ranks``: as of ``outline``.
    ``checkpointed``: by the script."""
    recipe: dict[str, Any] = {"dataset": "none.jsonl", "output_dir": "out", "max_steps": 1, "lora_r": 16}
    recipe |= {"max_length": work.tokens, "per_device_train_batch_size": work.batch}
    recipe |= {"gradient_checkpointing": checkpointed}
    return _outlined(work, recipe, quant, parts, ranks)


def prompt_outline(work: Workload, ranks: int = 1) -> Outline:
    """A whole prompt of one row, which leaves the last logits and the key/value cache, as ``lora_outline``."""
    assert work.batch == 1, "a prompt is one row"
    return _outlined(work, {"prompts": "none.txt", "max_length": work.tokens}, ranks=ranks)


def _outlined(
    work: Workload, recipe: Mapping[str, Any], quant: str = "none", parts: int = 1, ranks: int = 1
) -> Outline:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(work.config))
        keys = {"model_name_or_path": folder, **recipe}
        file = Path(folder) / "recipe.yaml"
        file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in keys.items()))
        return outline(read_any_recipe(str(file)), quant, parts=parts, ranks=ranks)


def full_outline(work: Workload) -> Outline:
    """As ``lora_outline``, with all weights trained and their optimizer in host memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**work.config), dtype=torch.bfloat16)
    model.train()
    checkpoint_activations(model)
    ids = torch.zeros((work.batch, work.tokens), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids.clone(), "num_items_in_batch": torch.tensor(1)}
    captured = capture_step(model, batch, contexts=hf_contexts(model, batch), name="full", trained=HOST_UPDATED)
    return Outline(captured, model, batch, optimizer=OptimizerHome.HOST)


def prefill(work: Workload) -> TaskGraph:
    """Capture a forward pass without gradients."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**work.config), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    batch = {"input_ids": torch.zeros((work.batch, work.tokens), dtype=torch.int64)}

    def last_logits(**kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": model(**kwargs, use_cache=False, logits_to_keep=1).logits}

    captured = capture_forward(model, batch, forward=last_logits, contexts=hf_contexts(model, batch))
    return with_costs(captured, Estimated("cuda"))[0].graph


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
