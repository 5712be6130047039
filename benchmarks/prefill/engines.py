"""Ways to read one and the same prompt, for the suite and ``peers.py``, on any device.

A ``Job`` of rank 0 says which. Every engine has the same random weights, none of which requires a gradient, and returns
the logits of the last token and the cache. Peers are set up as their documentation says; what they cannot do shows as
their own error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common.any_plan import any_plan_of, kernel_seconds
from benchmarks.gpu.models import arena_llama, batch_for, draw_weights, meta_llama
from benchmarks.step.engines import Job, link_rates
from benchmarks.step.peers import one_process
from disco_accel import prefill, stats
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.step.placement.streamed_eager import StreamedEager
from disco_accel.step.run.session import current_step


def outputs_of(output: Any) -> dict[str, torch.Tensor]:
    """What a prompt leaves: ``logits``, and ``keys`` and ``values`` of each layer."""
    found = {"logits": output.logits}
    for number, layer in enumerate(output.past_key_values.layers):
        found |= {f"keys.{number}": layer.keys, f"values.{number}": layer.values}
    return found


def read_eagerly(model: Any, ids: torch.Tensor) -> Any:
    """``model``'s own forward as the first step of ``generate`` calls it, with a new cache."""
    cache, mask = DynamicCache(config=model.config), torch.ones_like(ids)
    with torch.no_grad():
        positions = mask.cumsum(-1) - 1
        return model(ids, mask, positions, past_key_values=cache, use_cache=True, logits_to_keep=1)


@contextmanager
def weights_over_a_link(model: Any, resident: int, bandwidth: float) -> Iterator[list[int]]:
    """Inside, each weight of ``model`` is copied over a link of so many bytes a second when it is read, all but
    ``resident`` bytes of them. The list gets the bytes of each copy."""
    room, stay, copied = resident, set[int](), list[int]()
    for parameter in model.parameters():
        if parameter.nbytes <= room:
            room -= parameter.nbytes
            stay.add(id(parameter))

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in stay or not isinstance(tensor, torch.nn.Parameter):
            return tensor
        copied.append(tensor.nbytes)
        arrives = time.perf_counter() + tensor.nbytes / bandwidth
        copy = tensor.detach().clone()
        time.sleep(max(0.0, arrives - time.perf_counter()))
        return copy

    hooks = StreamedEager(model, visit)
    try:
        yield copied
    finally:
        hooks.remove(model)


class Reader:
    """Eager PyTorch; as it stands, with everything on the device."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.where = job.where
        self.ids = batch_for(job.shape["vocab_size"], job.batch, job.tokens, self.where)["input_ids"]
        self.model = self.build()

    def build(self) -> Any:
        """The model as it reads."""
        return self.random_model(self.where).to(self.where)

    def random_model(self, home: torch.device) -> Any:
        """The job's model, its weights on ``home``."""
        job = self.job
        model = meta_llama(job.shape, dtype=job.torch_dtype, attention="sdpa", positions=job.tokens)
        draw_weights(model, self.where, lambda t: t.to(home, copy=True))
        return model.eval()

    def read(self) -> Any:
        """Read the prompt; the output has ``logits`` and ``past_key_values``."""
        return read_eagerly(self.model, self.ids)

    def settle(self) -> None:
        """Wait for what goes on after the output is there."""

    def figures(self) -> dict[str, Any]:
        """As of ``step/engines.py``, ``Engine``."""
        return {"h2d": 0, "d2h": 0}


class Planned(Reader):
    """A plan within the job's budget."""

    def build(self) -> Any:
        job = self.job
        kind = {"dtype": job.torch_dtype, "attention": "sdpa", "positions": job.tokens}
        model, _ = arena_llama(job.shape, source=self.where, **kind)
        model = model.requires_grad_(False).eval()
        prefill(model, self.ids, config=job.config)
        step = current_step(model)
        assert step is not None, "the model has read a prompt"
        self.step = step
        return model

    def read(self) -> Any:
        return prefill(self.model, self.ids)

    def settle(self) -> None:
        self.step.settle()

    def figures(self) -> dict[str, Any]:
        found, step = stats(self.model), self.step
        given = dict.fromkeys(("h2d", "d2h"), self.job.bandwidth)
        rates = link_rates() if self.where.type == "cuda" else given
        seconds = kernel_seconds(step, lambda: (self.read(), self.settle()))
        h2d, d2h = (Link(rates[way] or float("inf"), 0.0) for way in ("h2d", "d2h"))
        return {
            "used": found["peak_bytes"],
            "reserved": step.budget.total - step.budget.arena + found["arena_bytes"],
            "h2d": found["reload_bytes"],
            "d2h": found["offload_bytes"],
            "any_plan": any_plan_of(step, seconds, Machine(links={TO_DEVICE: h2d, TO_HOST: d2h})),
        }


class AccelerateHooks(Reader):
    """accelerate's ``cpu_offload``: hooks bring each module's weights to the device and take them away again."""

    def build(self) -> Any:
        from accelerate import cpu_offload

        return cpu_offload(self.random_model(torch.device("cpu")), execution_device=self.where)

    def figures(self) -> dict[str, Any]:
        return {}


class ZeroInference(Reader):
    """DeepSpeed's ZeRO-Inference: stage 3 and ``offload_param`` without an optimizer, set as in its own example."""

    def build(self) -> Any:
        one_process()
        import deepspeed

        job, hidden = self.job, self.job.shape["hidden_size"]
        config = {
            "train_micro_batch_size_per_gpu": job.batch,
            "bf16": {"enabled": job.dtype == "bfloat16"},
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 2 * hidden * hidden,
                "stage3_param_persistence_threshold": hidden,
                "stage3_max_live_parameters": 2 * hidden * hidden,
                "offload_param": {"device": "cpu", "pin_memory": self.where.type == "cuda"},
            },
        }
        engine = deepspeed.initialize(model=self.random_model(torch.device("cpu")), config=config)[0]
        return engine.module.eval()

    def figures(self) -> dict[str, Any]:
        return {}


PEERS: Mapping[str, type[Reader]] = {"accelerate": AccelerateHooks, "zero-inference": ZeroInference}
READERS: Mapping[str, type[Reader]] = {"in-memory": Reader, "disco": Planned, **PEERS}
TITLES = {
    "in-memory": "eager in memory",
    "disco": "disco",
    "accelerate": "accelerate cpu_offload",
    "zero-inference": "ZeRO-Inference",
}
