"""Soup's layer streaming for the suite: the job's model as a checkpoint, its layers streamed as ``soup train`` does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.quantised import PLAIN
from benchmarks.gpu.models import draw_adapter, draw_weights, lora_config, meta_llama
from benchmarks.step.engines import Engine, Job
from disco_accel.errors import ConfigError

_DOUBLE_QUANT = {PLAIN: False, "nf4": False, "nf4-nested": True}
"""Forms of the weights that Soup streams, and its ``bnb_4bit_use_double_quant`` for each."""


class SoupStreaming(Engine):
    """``stream_layers`` of ``soup train``, its defaults: weights in host memory, two layers' buffers, recomputation.

    Its checkpoint and then its shards lie in the job's folder until its host memory holds the weights.
    """

    def __init__(self, job: Job) -> None:
        if job.quant not in _DOUBLE_QUANT:
            raise ConfigError(f"Soup streams weights in the forms {', '.join(_DOUBLE_QUANT)}, not {job.quant}")
        # As its command line does before CUDA starts.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        super().__init__(job)

    def build(self) -> Any:
        from soup_cli.utils.layer_shard import shard_checkpoint
        from soup_cli.utils.layer_stream_runtime import (
            build_meta_skeleton,
            build_streamed_model,
            quantised_layer_suffixes,
        )

        job, device = self.job, str(self.where)
        checkpoint, shards = Path(job.folder) / "checkpoint", Path(job.folder) / "shards"
        write_checkpoint(job, checkpoint)
        packed = job.quant != PLAIN
        form = {"quant": "nf4" if packed else "none", "double_quant": _DOUBLE_QUANT[job.quant], "dtype": job.dtype}
        suffixes = quantised_layer_suffixes(build_meta_skeleton(str(checkpoint), **form)) if packed else ()
        index = shard_checkpoint(
            str(checkpoint), str(shards), arch="llama", quant_suffixes=suffixes, quant_device=device, **form
        )
        for file in checkpoint.glob("*.safetensors"):
            file.unlink()
        model, self.runtime = build_streamed_model(
            model_id=str(checkpoint),
            shard_dir=str(shards),
            index=index,
            lora_config=lora_config(job.rank),
            device=device,
            pin=self.where.type == "cuda",
            **form,
        )
        shutil.rmtree(shards)
        draw_adapter(model, job.torch_dtype)
        return model.train()

    def figures(self) -> dict[str, Any]:
        found = self.runtime.stats()
        return {name: found[name] for name in ("store_bytes", "pinned_bytes", "buffer_bytes")}


def write_checkpoint(job: Job, folder: Path) -> None:
    """Write the job's model to ``folder`` as transformers reads it, a file for each weight; one is there at a time."""
    folder.mkdir()
    model = meta_llama(job.shape, dtype=job.torch_dtype, attention="sdpa", positions=max(2048, job.tokens))
    names = [name for name, _ in model.named_parameters()]
    files = {name: f"model-{i:05d}-of-{len(names):05d}.safetensors" for i, name in enumerate(names, 1)}
    left = iter(names)

    def write(weight: torch.Tensor) -> torch.Tensor:
        name = next(left)
        save_file({name: weight.cpu()}, folder / files[name], metadata={"format": "pt"})
        return weight.to("meta")

    draw_weights(model, job.where, write)
    model.config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
