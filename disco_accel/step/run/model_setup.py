"""What is settled when a model is prepared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from disco_accel.config.settings import DiscoConfig, Settings
from disco_accel.native.backend import run_device
from disco_accel.step.optimizer_home import OptimizerHome, TrainedBytes, check_update, keeps_masters, optimizer_home
from disco_accel.step.run.frontend import Frontend
from disco_accel.store.shared_budgets import HostClaims


@dataclass(frozen=True)
class ModelSetup:
    """The config of a model, what it means on this machine, and where the trained weights, of ``sizes``, are updated.
    ``host_claims`` tells a store what is held on the host, if one is to know."""

    config: DiscoConfig
    settings: Settings
    frontend: Frontend
    device: torch.device
    optimizer: OptimizerHome
    sizes: TrainedBytes
    host_claims: HostClaims | None

    @classmethod
    def of(cls, model: torch.nn.Module, config: DiscoConfig, frontend: Frontend, *, trains: bool) -> ModelSetup:
        """Of ``model``. Raises ConfigError where a key does not fit the machine."""
        settings = config.resolve()
        first = "".join(f":{index}" for index in settings.gpus[:1])
        device = run_device(settings.device + first)
        claims = HostClaims() if config.host_memory == "shared" else None
        if claims is not None:
            settings = replace(settings, host_memory=min(settings.host_memory, claims.most))
        optimizer = optimizer_home(model, config, settings, device) if trains else OptimizerHome.DEVICE
        if trains:
            check_update(config, optimizer, settings.devices)
        sizes = TrainedBytes.of(model, keeps_masters(config) and trains)
        return cls(config, settings, frontend, device, optimizer, sizes, claims)

    @property
    def host_memory(self) -> int:
        """Bytes that training may take on the host beside fp32 masters and what these need."""
        return self.settings.host_memory - self.sizes.beside

    @property
    def trained_on_host(self) -> bool:
        """Whether the optimizer updates the weights there."""
        return self.optimizer is OptimizerHome.HOST
