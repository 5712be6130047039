"""Where an optimizer updates the trained weights: on the device, or in host memory.

On the host, weights, gradients and the optimizer's state take nothing of the device's budget: a step loads each weight
as it loads frozen ones, and hands its gradients out as tensors on the CPU.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist

from disco_accel.capture.parts import named_parts
from disco_accel.config.settings import DiscoConfig, Settings, local_processes
from disco_accel.errors import ConfigError
from disco_accel.native.backend import backend_of
from disco_accel.sizes import format_size

_MOMENTS = 2
"""Tensors as large as a weight, or as its master, that AdamW keeps for each."""

ROUNDED = (torch.bfloat16, torch.float16)
"""Dtypes of weights that ``master_weights: fp32`` keeps masters of, of twice their bytes."""


class OptimizerHome(enum.StrEnum):
    """Where trained weights, their gradients and the optimizer's state live between steps."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class TrainedBytes:
    """Bytes of ``weights`` that are trained and of ``frozen`` ones. ``rounded``: of those with fp32 masters."""

    weights: int
    frozen: int
    rounded: int = 0

    @classmethod
    def of(cls, model: torch.nn.Module, masters: bool = False) -> TrainedBytes:
        """Of ``model``, also of one on ``meta``. ``masters``: with ``master_weights: fp32``."""
        sizes, rounded = [0, 0], 0
        for part in named_parts(model):
            if not part.is_buffer:
                sizes[part.requires_grad] += part.tensor.nbytes
                if masters and part.requires_grad and part.tensor.dtype in ROUNDED:
                    rounded += part.tensor.nbytes
        return cls(sizes[1], sizes[0], rounded)

    @property
    def gradients(self) -> int:
        """One of each trained weight's size. Where they accumulate, a second set is there until it has been added."""
        return self.weights

    @property
    def moments(self) -> int:
        """Of the optimizer's state, if it is AdamW's, without masters: as large as weights, or as their masters."""
        return _MOMENTS * (self.weights + self.rounded)

    @property
    def masters(self) -> int:
        """Of the fp32 masters."""
        return 2 * self.rounded

    @property
    def beside(self) -> int:
        """The additions of ``master_weights: fp32``: masters, and moments of their size."""
        return self.masters + _MOMENTS * self.rounded

    @property
    def training(self) -> int:
        """All that training adds to a model: gradients, moments, masters, and the trained weights themselves."""
        return self.weights + self.gradients + self.moments + self.masters


def optimizer_home(
    model: torch.nn.Module, config: DiscoConfig, settings: Settings, device: torch.device
) -> OptimizerHome:
    """The meaning of ``optimizer`` in ``config`` for ``model``, whose steps run on ``device``.

    ``auto`` is the host where most of the weights are trained, and where these, gradients and two moments take more
    than half of the budget: not for an adapter. It is the device where the host cannot do it.

    Raises:
        ConfigError: the host has too little memory, several processes on GPUs ask for it, or another planner.
    """
    sizes = TrainedBytes.of(model)
    if home_by_size(config, sizes, settings.memory_budget) is OptimizerHome.DEVICE:
        return OptimizerHome.DEVICE
    if backend_of(device).separate_memory and _processes() > 1:
        if config.optimizer == "auto":
            return OptimizerHome.DEVICE
        raise ConfigError(
            f"optimizer: {config.optimizer} works for one process on {device.type}, this run has {_processes()}; "
            "use one process, optimizer: device, or device: cpu, whose processes reduce gradients in host memory"
        )
    sizes = TrainedBytes.of(model, keeps_masters(config))
    needed = sizes.frozen + sizes.training
    if needed > settings.host_memory:
        if config.optimizer == "auto":
            return OptimizerHome.DEVICE
        masters = f"{format_size(sizes.masters)} of their fp32 masters, " if sizes.masters else ""
        raise ConfigError(
            f"host_memory: {format_size(settings.host_memory)} is too small for optimizer: {config.optimizer}, which "
            f"needs {format_size(needed)}: {format_size(sizes.frozen)} of frozen weights, {format_size(sizes.weights)} "
            f"of trained ones, {masters}{format_size(sizes.weights)} of gradients, {format_size(sizes.moments)} of two "
            "moments; raise it, train fewer weights, or use optimizer: device"
        )
    return OptimizerHome.HOST


def home_by_size(config: DiscoConfig, sizes: TrainedBytes, budget: int) -> OptimizerHome:
    """The meaning of ``optimizer`` in ``config`` for a model of these ``sizes`` under ``budget`` bytes.

    Raises:
        ConfigError: the host, with the planner that has no rule for weights that change between steps.
    """
    if config.optimizer == "device" or not sizes.weights:
        return OptimizerHome.DEVICE
    if config.planner == "build":
        if asks_for_host(config):
            raise ConfigError(
                f"optimizer: {config.optimizer} needs planner: timed; planner: build has no rule for weights that "
                "change"
            )
        return OptimizerHome.DEVICE
    too_large = sizes.weights > sizes.frozen and 2 * sizes.training > budget
    return OptimizerHome.HOST if too_large or asks_for_host(config) else OptimizerHome.DEVICE


def asks_for_host(config: DiscoConfig) -> bool:
    """Whether ``config`` wants trained weights of any size in host memory."""
    return config.optimizer in ("host", "planned")


def update_asked(config: DiscoConfig) -> str:
    """``step``, ``deferred``, or ``auto``: when ``config`` wants weights in host memory updated."""
    return "deferred" if config.optimizer == "planned" else config.update


def check_update(config: DiscoConfig, home: OptimizerHome, devices: int) -> None:
    """Refuse when and where ``config`` wants weights updated if that cannot be with an optimizer at ``home``, in a
    step on so many ``devices``. Raises ConfigError."""
    update = update_asked(config)
    if update == "deferred" and home is OptimizerHome.DEVICE:
        raise ConfigError(
            "update: deferred delays updates in host memory, and this run's optimizer is on the device: set "
            "optimizer: host, or leave update out"
        )
    if config.update_on != "host" and update != "deferred":
        raise ConfigError(
            f"update_on: {config.update_on} is for updates in the plan of a step: set update: deferred, or "
            "update_on: host"
        )
    if config.update_on != "host" and devices > 1:
        raise ConfigError(f"update_on: {config.update_on} is for a step on one device: leave it out, or set devices: 1")
    if keeps_masters(config) and home is OptimizerHome.DEVICE:
        raise ConfigError(
            "master_weights: fp32 keeps masters in host memory, and this run's optimizer is on the device: set "
            "optimizer: host, or master_weights: script"
        )


def keeps_masters(config: DiscoConfig) -> bool:
    """Whether ``config`` wants fp32 masters of bf16 and fp16 weights; it does not run with those on the device."""
    return config.master_weights == "fp32"


def _processes() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return local_processes()
