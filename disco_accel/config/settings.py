"""DiscoConfig: all that a user can set, from files, the environment, or code.

The only reader of the environment variables that config comes from; ``tests/test_imports.py`` names other readers of
variables. No torch is imported until ``DiscoConfig.resolve`` looks at the machine, and no YAML parser until a file is
read, because this module is loaded whenever torch is (see ``integrate/launch/import_hook.py``).
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from disco_accel.config.device_choice import count_of, gpus_of, resolve_device, smallest_gpu_bytes
from disco_accel.config.keys import FORMER_KEYS, PARSERS, contradiction, unused_policy
from disco_accel.config.strict_yaml import parse_yaml, read_yaml
from disco_accel.errors import ConfigError
from disco_accel.host_limits import host_limits, own_bytes
from disco_accel.native.device_types import DEVICE_TYPES

logger = logging.getLogger("disco_accel")

SECTION = "disco_config"
CONFIG_FILE_VARIABLE = "DISCO_CONFIG_FILE"
DS_CONFIG_VARIABLE = "DISCO_DS_CONFIG"
LAUNCHER_VARIABLE = "DISCO_LAUNCHER"
AUTOLOAD_VARIABLE = "DISCO_AUTOLOAD"

_OTHER_VARIABLES = (CONFIG_FILE_VARIABLE, DS_CONFIG_VARIABLE, LAUNCHER_VARIABLE, AUTOLOAD_VARIABLE, "DISCO_BUILD_EXT")
_PREFIX = "DISCO_"
_GENERATIONS = 4
_LOCAL_PROCESSES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""As torchrun, DeepSpeed's launcher and two MPIs call the number of processes on this machine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A config on this machine: ``device`` is cpu or cuda, sizes in bytes, bandwidth in bytes/s. ``devices``: how many
    share a step, each with ``memory_budget``. ``gpus``: their indices on cuda, first that of the script's tensors; none
    for the current one alone."""

    device: str
    devices: int
    gpus: tuple[int, ...]
    memory_budget: int
    host_memory: int
    link_bandwidth: float | None


@dataclass(frozen=True)
class DiscoConfig:
    """The keys of the ``disco_config`` section. Values are checked and normalised when an instance is made.

    Sizes are bytes (int) once parsed; ``memory_budget`` and ``host_memory`` may stay ``"auto"`` or ``"80%"`` until
    ``resolve``; one that is ``"shared"`` is a store's, at most as large as ``auto``. ``plan_seconds``: the time that a
    search for a plan may take; ``auto``: an amount of work that depends on the graph alone. ``link_bandwidth``
    (bytes/s) applies to the host device only.

    Raises:
        ConfigError: a value has the wrong type or is out of range; the message names the key and one that works.
    """

    memory_budget: int | str = "auto"
    host_memory: int | str = "auto"
    planner: str = "timed"
    policy: str = "auto"
    plan_seconds: float | str = "auto"
    lookahead: int = 2
    launch_graphs: str = "auto"
    buckets: str | tuple[int, ...] = "auto"
    plan_cache: str | None = "~/.cache/disco_accel"
    on_unsupported: str = "error"
    optimizer: str = "auto"
    update: str = "auto"
    update_on: str = "host"
    master_weights: str = "auto"
    share_weights: bool = False
    device: str = "auto"
    devices: int | str | tuple[int, ...] = 1
    parallel: str = "auto"
    micro_batches: int = 1
    chunks: int | Literal["auto"] = 1
    recompute: str = "auto"
    fuse: str = "auto"
    link_bandwidth: float | str | None = None
    compute_threads: int | None = None
    self_check: str = "auto"
    verify_steps: int = 0
    report_dir: str | None = None
    quiet: bool = False
    enabled: bool = True

    def __post_init__(self) -> None:
        for key, parse in PARSERS.items():
            given = getattr(self, key)
            try:
                object.__setattr__(self, key, parse(given))
            except ValueError as error:
                raise ConfigError(f"{key}: {given!r} does not work; {error}") from error
        if wrong := contradiction(self.optimizer, self.update):
            raise ConfigError(wrong)

    @classmethod
    def from_dict(cls, section: Mapping[str, Any], where: str = SECTION) -> DiscoConfig:
        """A config from the keys of a ``disco_config`` section.

        Raises:
            ConfigError: an unknown key (with the nearest known one) or a wrong value; ``where`` leads the message.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(f"{where}: expected keys and values, got {section!r}")
        for key in section:
            if key not in PARSERS:
                raise ConfigError(f"{where}: unknown key {str(key)!r}{_hint(str(key))}")
        try:
            return cls(**section)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> DiscoConfig:
        """The ``disco_config`` section of an accelerate or recipe YAML; the file may also be that section alone.

        Raises:
            ConfigError: the file is missing or malformed, has no such section, or a key of it is wrong.
        """
        _, config = split_yaml(path)
        if config is None:
            raise ConfigError(f"{path}: no {SECTION} section; add one with at least memory_budget")
        return config

    @classmethod
    def from_deepspeed(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> DiscoConfig:
        """The config that replaces the offloading of a DeepSpeed config (path of its JSON file, or its content).

        A ``disco_config`` object in it is ours and may set any key. Each key of DeepSpeed's that plans replace is
        logged in a line.

        Raises:
            ConfigError: the file is malformed, or a key of it asks for a thing that cannot be planned (ZenFlow,
                SuperOffload, DeepCompile, weights on NVMe, ...).
        """
        from disco_accel.config.deepspeed_keys import migrate, read_ds_config

        where = "DeepSpeed config" if isinstance(source, Mapping) else str(source)
        _, planned, section = migrate(source if isinstance(source, Mapping) else read_ds_config(source), where)
        for line in planned:
            logger.warning("%s", line)
        return cls.from_dict(section, f"{where}: {SECTION}")

    @classmethod
    def from_env(cls, base: DiscoConfig | None = None, environ: Mapping[str, str] | None = None) -> DiscoConfig:
        """``base`` (default: all defaults) with each ``DISCO_<KEY>`` variable put over it.

        Values are written as in YAML: ``DISCO_MEMORY_BUDGET=12GiB``, ``DISCO_BUCKETS='[256, 512]'``. Variables that
        are far from any known name are not ours and are ignored.

        Raises:
            ConfigError: a variable is misspelt or its value is wrong.
        """
        environ = os.environ if environ is None else environ
        known = {_PREFIX + key.upper(): key for key in PARSERS}
        changes: dict[str, Any] = {}
        for name in sorted(environ):
            if name in known:
                try:
                    value = parse_yaml(environ[name], name)
                    changes[known[name]] = value
                    cls(**{known[name]: value})
                except ConfigError as error:
                    raise ConfigError(f"environment variable {name}: {error}") from error
            elif name.startswith(_PREFIX) and name not in _OTHER_VARIABLES:
                key = name.removeprefix(_PREFIX).lower()
                hint = _hint(key) if key in FORMER_KEYS else _nearest(name, [*known, *_OTHER_VARIABLES], cutoff=0.85)
                if hint:
                    raise ConfigError(f"environment variable {name} is unknown{hint}")
        return dataclasses.replace(base or cls(), **changes)

    def as_dict(self) -> dict[str, Any]:
        """All keys with their normalised values, ready for JSON."""
        return {
            field.name: list(value) if isinstance(value := getattr(self, field.name), tuple) else value
            for field in dataclasses.fields(self)
        }

    @property
    def deadline(self) -> float | None:
        """``plan_seconds`` as a number; None for ``auto``."""
        return None if isinstance(self.plan_seconds, str) else self.plan_seconds

    @property
    def without_effect(self) -> str:
        """One line for the user if a key is set that the planner does not look at, else ""."""
        return unused_policy(self.planner, self.policy)

    def resolve(self) -> Settings:
        """The values that depend on the machine.

        ``memory_budget: auto`` is half of the RAM on the host device (the weights share it) and nine tenths of a CUDA
        device; ``host_memory: auto`` is the RAM that others leave. Each process has a budget of its own: ``auto`` and
        shares of the RAM are divided by the processes on this machine.

        Raises:
            ConfigError: a device is not there, or a size is larger than the machine, its other processes counted.
        """
        # accelerate's launcher tells its children in this way that the user asked for the CPU.
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        device = resolve_device(self.device, on_cpu)
        bandwidth = self.link_bandwidth
        assert not isinstance(bandwidth, str)
        kind = DEVICE_TYPES[device]
        if kind.separate_memory and bandwidth is not None:
            raise ConfigError(f"link_bandwidth throttles the host device only; leave it out on {device}")
        gpus = gpus_of(device, self.devices, local_processes()) if kind.separate_memory else ()
        devices = len(gpus) or count_of(self.devices)
        budget = smallest_gpu_bytes(device, gpus) if kind.separate_memory else host_memory_bytes() // devices
        return Settings(
            device=device,
            devices=devices,
            gpus=gpus,
            memory_budget=_resolve_size("memory_budget", self.memory_budget, budget, device, kind.auto_share),
            host_memory=self._host_bytes(),
            link_bandwidth=bandwidth,
        )

    def _host_bytes(self) -> int:
        if self.host_memory in ("auto", "shared"):
            return spare_host_memory(local_processes())
        return _resolve_size("host_memory", self.host_memory, host_memory_bytes(), "cpu", 1.0)


def split_yaml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], DiscoConfig | None]:
    """The keys of a YAML file that are not ours, and our section of it (None if it has none).

    A file without a ``disco_config`` key whose keys are ours is taken as the section itself.

    Raises:
        ConfigError: as ``read_yaml`` and ``DiscoConfig.from_dict``; a section name that is nearly ours; keys of ours
            outside the section.
    """
    content = read_yaml(path)
    ours = [key for key in content if key in PARSERS]
    if SECTION in content:
        rest = {key: value for key, value in content.items() if key != SECTION}
        # Recipes have keys of their own, of which none is ours.
        if ours:
            raise ConfigError(f"{path}: {ours[0]!r} belongs under {SECTION}")
        return rest, DiscoConfig.from_dict(content[SECTION], f"{path}: {SECTION}")
    if ours and "distributed_type" not in content:
        return {}, DiscoConfig.from_dict(content, str(path))
    for key in content:
        if key.startswith("disco") or _nearest(key, [SECTION], cutoff=0.8):
            raise ConfigError(f"{path}: unknown key {key!r}; did you mean {SECTION!r}?")
    if ours:
        raise ConfigError(f"{path}: {ours[0]!r} belongs under {SECTION}")
    return content, None


def host_memory_bytes() -> int:
    """RAM that this process may use: the machine's, or less where a limit of its own or of a control group is lower."""
    return min(limit.total for limit in host_limits())


def spare_host_memory(processes: int = 1) -> int:
    """The part of one of so many ``processes`` in the bytes of ``host_memory_bytes`` that nobody else uses now."""
    held = own_bytes()
    return min(limit.share(processes, held) for limit in host_limits())


def launch_config_file() -> str | None:
    """The YAML file that a launcher left for this process, or None."""
    return os.environ.get(CONFIG_FILE_VARIABLE) or None


def set_launch_config_file(path: str | os.PathLike[str]) -> None:
    """Make this process and its children train under the ``disco_config`` of ``path``."""
    os.environ[CONFIG_FILE_VARIABLE] = str(Path(path).resolve())
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())


def ds_config_file() -> str | None:
    """The DeepSpeed config that a launcher was given, whose offloading this process's plans replace; or None."""
    return os.environ.get(DS_CONFIG_VARIABLE) or None


def set_ds_config_file(path: str | os.PathLike[str]) -> None:
    """Make this process and its children plan the tensors that the DeepSpeed config in ``path`` would offload."""
    os.environ[DS_CONFIG_VARIABLE] = str(Path(path).resolve())
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())


def launched() -> bool:
    """Whether one of our launchers started this process."""
    return launch_config_file() is not None or ds_config_file() is not None


def inherited_file_gone() -> str | None:
    """The launcher's file where it is gone and this process is not of that launch, but inherited its environment."""
    path = launch_config_file() or ds_config_file()
    if path is None or os.path.exists(path) or os.environ.get(LAUNCHER_VARIABLE) in _ancestors():
        return None
    return path


def _ancestors() -> list[str]:
    """This process, its parent, and so on: DeepSpeed's launcher puts two between accelerate's and a script."""
    line = [str(os.getpid()), str(os.getppid())]
    while len(line) < _GENERATIONS:
        try:
            # The name, in parentheses, may hold anything; state and parent follow it.
            line.append(Path(f"/proc/{line[-1]}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            break
    return line


def launch_config() -> DiscoConfig:
    """The config of the launcher's file, else of its DeepSpeed config, with environment overrides.

    Raises:
        ConfigError: as ``from_yaml``, ``from_deepspeed`` and ``from_env``; or no launcher set a file.
    """
    path, ds_path = launch_config_file(), ds_config_file()
    if path is not None:
        return DiscoConfig.from_env(DiscoConfig.from_yaml(path))
    if ds_path is not None:
        from disco_accel.config.deepspeed_keys import migrate, read_ds_config

        # The launcher has said what is planned instead.
        _, _, section = migrate(read_ds_config(ds_path), ds_path)
        return DiscoConfig.from_env(DiscoConfig.from_dict(section, f"{ds_path}: {SECTION}"))
    raise ConfigError(f"environment variable {CONFIG_FILE_VARIABLE} names no config file")


def local_processes() -> int:
    """Processes of this run on this machine, as its launcher says; 1 without a launcher."""
    for name in _LOCAL_PROCESSES:
        given = os.environ.get(name, "")
        if given.isdigit() and int(given) > 0:
            return int(given)
    return 1


def shared_weights_folder() -> Path:
    """Where processes of this user find the frozen weights that they share; not made yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) / "disco_accel" if os.path.isabs(runtime) else Path(f"/tmp/disco_accel-{os.geteuid()}")
    return base / "weights"


def process_rank() -> int:
    """This process's number in its run, as its launcher says; 0 without a launcher."""
    given = os.environ.get("RANK", "")
    return int(given) if given.isdigit() else 0


def autoload_wanted() -> bool:
    """Whether importing torch may install our import hook."""
    return os.environ.get(AUTOLOAD_VARIABLE, "1") != "0"


def _hint(key: str) -> str:
    """A hint about an unknown ``key``, if there is one."""
    return f"; {FORMER_KEYS[key]}" if key in FORMER_KEYS else _nearest(key, PARSERS)


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def _resolve_size(key: str, value: int | str, total: int, device: str, auto_share: float) -> int:
    from disco_accel.sizes import format_size

    processes = 1 if DEVICE_TYPES[device].separate_memory else local_processes()
    if value in ("auto", "shared"):
        return int(total * auto_share) // processes
    if isinstance(value, str):
        return int(total * float(value.removesuffix("%")) / 100) // processes
    if value * processes > total:
        each = f" for each of {processes} processes" if processes > 1 else ""
        raise ConfigError(
            f"{key}: {format_size(value)}{each} is larger than the machine: {device} has {format_size(total)}; "
            f"use at most {format_size(total // processes) if processes > 1 else 'that'}, a share such as 80%, or auto"
        )
    return value
