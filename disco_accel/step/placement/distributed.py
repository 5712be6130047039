"""Several processes: engines around planned steps, and frozen weights, which are shared or the same in all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disco_accel.capture.parts import named_parts
from disco_accel.config.deepspeed_keys import REPLACED
from disco_accel.config.settings import DiscoConfig, local_processes
from disco_accel.errors import ConfigError
from disco_accel.native.file_arena import FileArena
from disco_accel.native.host_memory import HostMemory, bytes_of
from disco_accel.native.rendezvous import NotSharedError
from disco_accel.native.shared_copies import key_of, shared_copy
from disco_accel.observe.log_to_stderr import say, say_everywhere
from disco_accel.sizes import format_size
from disco_accel.step.optimizer_home import asks_for_host

_DDP = "_ddp_params_and_buffers_to_ignore"
_DEEPSPEED = "ds_optim_param"
"""DeepSpeed 0.19 broadcasts no parameter that has this attribute."""

_PLAIN_ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED")
_WAYS_OUT = (
    "use ZeRO stage 0, 1 or 2, or start the script with `disco-accel launch --ds_config`, which plans what stage 3 does"
)


def check_engine(state: Any) -> None:
    """Refuse engines that shard the weights of plans. ``state``: accelerate's, of the run.

    Raises:
        ConfigError: ZeRO stage 3, its parameter offload, FSDP, Megatron-LM or a device that is no CPU or CUDA device.
    """
    kind = _kind_of(state)
    if kind not in _PLAIN_ENGINES:
        raise ConfigError(
            f"distributed_type: {kind} does not work under plans; use MULTI_GPU, or DEEPSPEED stage 0 to 2"
        )
    if kind != "DEEPSPEED":
        return
    plugin = state.deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if zero.get("stage") == 3:
        raise ConfigError(f"zero_optimization.stage: 3 shards the frozen weights; {REPLACED}; {_WAYS_OUT}")
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        raise ConfigError(f"zero_optimization.offload_param: leave it out; {REPLACED}")


def config_under(config: DiscoConfig, state: Any) -> DiscoConfig:
    """``config`` as it holds in a run of accelerate's ``state``: engines such as DeepSpeed's update on the device.

    Raises:
        ConfigError: ``optimizer: host`` or ``planned`` in such a run.
    """
    kind = _kind_of(state)
    if kind in _PLAIN_ENGINES and kind != "DEEPSPEED":
        return config
    if asks_for_host(config):
        raise ConfigError(
            f"optimizer: {config.optimizer} does not work with distributed_type: {kind}, whose engine copies and "
            "updates the trained weights itself; use optimizer: device, or distributed_type: 'NO' or MULTI_CPU"
        )
    return dataclasses.replace(config, optimizer="device")


def _kind_of(state: Any) -> str:
    return str(getattr(state.distributed_type, "value", state.distributed_type))


def check_not_sharded(name: str, parameter: torch.nn.Parameter) -> None:
    """Raises ConfigError when ZeRO stage 3 has taken this weight apart."""
    if hasattr(parameter, "ds_id"):
        raise ConfigError(f"{name}: ZeRO stage 3 has sharded this weight; {REPLACED}; {_WAYS_OUT}")


def exclude_from_collectives(model: torch.nn.Module) -> None:
    """Mark frozen weights and buffers so that neither DDP nor DeepSpeed broadcasts or reduces them.

    For weights on the host beside adapters on a device, which no collective takes together. Each process has read the
    same weights itself; ``check_same`` makes sure of it.
    """
    model.__dict__[_DDP] = [*getattr(model, _DDP, ()), *_frozen_names(model)]
    for parameter in model.parameters():
        if not parameter.requires_grad:
            setattr(parameter, _DEEPSPEED, True)


def include_again(model: torch.nn.Module) -> None:
    """Undo ``exclude_from_collectives``."""
    ours = set(_frozen_names(model))
    others = [name for name in model.__dict__.pop(_DDP, ()) if name not in ours]
    if others:
        model.__dict__[_DDP] = others
    for parameter in model.parameters():
        parameter.__dict__.pop(_DEEPSPEED, None)


def _frozen_names(model: torch.nn.Module) -> Iterator[str]:
    yield from (n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad)
    yield from (n for n, _ in model.named_buffers(remove_duplicate=False))


def frozen_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parts of frozen weights and buffers of ``model`` by every name they have."""
    yield from ((p.name, p.tensor) for p in named_parts(model, remove_duplicate=False) if not p.requires_grad)


def check_same(named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Make sure that tensors which nobody broadcasts are the same in all processes: one pass over their bytes.

    ``device``: where collectives of this run take their tensors from.

    Raises:
        ConfigError: a tensor differs, named; or this is one of several processes without a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        if local_processes() > 1:
            raise ConfigError(
                "prepare: this is one of several processes, but they have no process group yet; "
                "create the Accelerator, or call torch.distributed.init_process_group, before prepare"
            )
        return
    if dist.get_world_size() == 1:
        return
    names, sums = [], []
    for name, tensor in named:
        names.append(name)
        sums.append(_checksum(tensor))
    if not _equal_everywhere(torch.tensor([len(sums)], device=device)).all():
        raise ConfigError("prepare: the processes' models differ in their number of tensors; load the same in all")
    equal = _equal_everywhere(torch.tensor(sums, dtype=torch.int64, device=device))
    if not equal.all():
        first = names[int(equal.logical_not().nonzero()[0])]
        raise ConfigError(
            f"{first}: this frozen tensor differs between processes, and frozen weights are not broadcast; "
            "load the same checkpoint in all, or seed all before the model is made"
        )


def _checksum(tensor: torch.Tensor) -> int:
    data = bytes_of(tensor.detach().cpu())
    words = data[: data.numel() // 8 * 8]
    # A storage may begin at any byte.
    words = words if words.data_ptr() % 8 == 0 else words.clone()
    return int(words.view(torch.int64).sum()) ^ int(data[words.numel() :].sum(dtype=torch.int64))


def _equal_everywhere(values: torch.Tensor) -> torch.Tensor:
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (low == high).cpu()


class FrozenSharing:
    """``share_weights``: puts frozen weights into memory that all processes of the user map, and tells of it once."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """``folder``: where processes find each other; ``warn`` shows a line once."""
        self._folder, self._warn = folder, warn

    def gather(
        self, tensors: Sequence[torch.Tensor], move: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> FileArena | None:
        """Move all of ``tensors`` into one shared copy, one at a time: each old one is given up at once. None, and
        nothing moved, where they cannot be shared. ``move`` gives a weight other memory with the same bytes.

        Raises:
            ConfigError: the folder is another user's, a link, or open to others.
        """
        try:
            key, room = key_of(tensors), HostMemory.room_for(tensors)
            if room == 0:
                return None

            def unchanged(placed: list[torch.Tensor]) -> bool:
                return key_of(placed) == key

            with shared_copy(self._folder, key, room, unchanged, say_everywhere, self._warn) as copy:
                for tensor in tensors:
                    move(tensor, copy.put(tensor.data))
        except NotSharedError as error:
            self._warn(f"share_weights: this process keeps frozen weights of its own: {error}")
            return None
        say(f"share_weights: {format_size(room)} of frozen weights, shared: {copy.origin}")
        return copy.arena

    def tell_written(self, arena: FileArena, names: Sequence[str]) -> None:
        """Say once that this process has written to weights of these ``names`` in ``arena``."""
        if not names or arena.told_written:
            return
        arena.told_written = True
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self._warn(
            f"share_weights: this process has written to {names[0]}{others}, which it shares: from now on it has pages "
            "of its own there, and no other process sees what it wrote"
        )
