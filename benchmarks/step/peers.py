"""What others offer for a LoRA step larger than the device, for the suite.

Each is set up as its documentation says; what it cannot do shows as its own error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from benchmarks.step.engines import Engine
from benchmarks.step.soup import SoupStreaming


class AccelerateHooks(Engine):
    """accelerate's ``cpu_offload``: hooks bring each module's weights to the device and take them away again."""

    def build(self) -> Any:
        from accelerate import cpu_offload

        model = self.random_model(lambda t: t.to("cpu", copy=True))
        return cpu_offload(model, execution_device=self.where)


class LayerOffload(Engine):
    """axolotl's offloading of frozen layers, by the manager that its trainer mixin uses."""

    def build(self) -> Any:
        from axolotl.core.trainers.mixins.layer_offloading import LayerOffloadManager

        model = super().build()
        self.manager = LayerOffloadManager(model, num_prefetch=1)
        if not self.manager.enabled:
            raise RuntimeError("axolotl's LayerOffloadManager found no layers on a CUDA device and is off")
        self.manager.setup_hooks()
        return model

    def backward(self) -> float:
        self.manager.pre_step()
        return super().backward()

    def update(self) -> None:
        self.manager.post_step()
        super().update()


class ZeroThree(Engine):
    """DeepSpeed ZeRO stage 3 with ``offload_param`` on the host, its defaults otherwise; one process."""

    settings: ClassVar[Mapping[str, Any]] = {}
    more: ClassVar[Mapping[str, Any]] = {}

    def zero(self, pinned: bool) -> dict[str, Any]:
        """What the key ``zero_optimization`` holds beside ``settings``."""
        return {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": pinned}}

    def build(self) -> Any:
        one_process()
        import deepspeed

        model = self.random_model(lambda t: t.to("cpu", copy=True))
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        pinned = self.where.type == "cuda"
        kind = self.job.dtype
        config = {
            "train_micro_batch_size_per_gpu": self.job.batch,
            "bf16": {"enabled": kind == "bfloat16"},
            "fp16": {"enabled": kind == "float16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # DeepSpeed clips at 1.0 unless told otherwise; nobody else here clips.
            "gradient_clipping": 0.0,
            "zero_optimization": {**self.zero(pinned), **self.settings},
            **self.more,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=self.adamw(), config=config)
        return self.engine

    def make_optimizer(self) -> Any:
        return self.optimizer

    def backward(self) -> float:
        loss = self.engine(**self.batch).loss
        self.engine.backward(loss)
        return float(loss.detach())

    def gradients(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        named = {n.removeprefix("module."): p for n, p in self.engine.named_parameters() if p.requires_grad}
        found = {n: safe_get_full_grad(p) for n, p in named.items()}
        return {n: g.to("cpu", copy=True) for n, g in found.items() if g is not None}

    def update(self) -> None:
        self.engine.step()


class ZeroThreeTuned(ZeroThree):
    """The same with more prefetched and more kept: what suits a layer of a 7B model."""

    settings: ClassVar[Mapping[str, Any]] = {
        "stage3_prefetch_bucket_size": int(4e8),
        "stage3_max_live_parameters": int(2e9),
    }


class DeepCompile(ZeroThreeTuned):
    """DeepSpeed's compiler passes over ZeRO stage 3."""

    more: ClassVar[Mapping[str, Any]] = {"compile": {"deepcompile": True, "offload_parameters": True}}

    def build(self) -> Any:
        engine = super().build()
        engine.compile()
        return engine


def one_process() -> None:
    """What torch.distributed reads where no launcher has set it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


PEERS: Mapping[str, type[Engine]] = {
    "accelerate": AccelerateHooks,
    "zero3": ZeroThree,
    "zero3-tuned": ZeroThreeTuned,
    "deepcompile": DeepCompile,
    "axolotl": LayerOffload,
    "soup": SoupStreaming,
}
