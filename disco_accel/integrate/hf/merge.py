"""An adapter merged into its base, shard by shard, within a limit of memory; as PEFT's ``merge_and_unload`` would."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import safetensors
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from disco_accel.errors import ConfigError
from disco_accel.host_limits import host_limits
from disco_accel.integrate.hf.merge_output import _MergeFolder, _ShardWriter, header_of, merge_folder, size_of
from disco_accel.integrate.hf.merge_plan import ADAPTER_CONFIG, ADAPTER_WEIGHTS, _MergedFile, _MergePlan, plan_merge
from disco_accel.integrate.hf.merge_recording import _Ledger, _MergeGroup
from disco_accel.integrate.hf.safetensors_file import StoredTensor, opened, read_into
from disco_accel.observe.log_to_stderr import say
from disco_accel.sizes import format_size, parse_size

_PIECE = 4 << 20
"""Bytes copied at a time where a tensor of the base stays as it is."""
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a repository of the hub: configs, weights, tokenizers."""


@dataclass(frozen=True, slots=True)
class _MergeReport:
    """``folder``: the merged model. ``shards``: its files of weights, ``kept`` of them from an earlier run. Bytes:
    ``nbytes`` of tensors, ``peak`` of them held at most, ``limit`` allowed."""

    folder: str
    shards: int
    kept: int
    nbytes: int
    peak: int
    limit: int


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    *,
    base: str | None = None,
    memory: int | None = None,
    dtype: str = "auto",
    max_shard_size: int | str = "50GB",
) -> _MergeReport:
    """Write the model that PEFT's ``merge_and_unload`` and ``save_pretrained`` would write into the folder ``output``.

    ``adapter``: a folder that PEFT saved. ``base``: a folder or a name on the hub; None: as the adapter says.
    ``memory``: bytes of tensors held at a time; None: what the machine has left. ``dtype``: a torch name, or ``auto``,
    the base's. ``max_shard_size``: of a file, as for ``save_pretrained``.

    The folder appears when it is whole. A run that was killed is taken up by the next one with the same arguments.

    Raises:
        ConfigError: base and adapter do not fit or cannot be read, a weight needs more memory, the folder is taken.
        ExecutionError: the disk is full or fails.
    """
    adapter, target, max_shard_size = Path(adapter), Path(output), parse_size(max_shard_size)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise ConfigError(f"{adapter}: has no {name}; give a folder that PEFT saved")
    origin = _base_directory(adapter, base)
    limit = memory if memory is not None else min(each.left for each in host_limits())
    key = _key(adapter, origin, dtype, max_shard_size)
    with merge_folder(target, key) as folder:
        if folder.is_published:
            folder.remove()
            say(f"merge: {target} was whole already")
            return _report_of(target, limit)
        folder.begin()
        say(f"merge: plans {adapter} on {origin}, within {format_size(limit)}")
        plan = plan_merge(origin, adapter, dtype, max_shard_size, folder.model)
        _require_room(plan, limit)
        ledger = _Ledger(limit)
        kept = _write_all(plan, folder, ledger)
        if _key(adapter, origin, dtype, max_shard_size) != key:
            raise ConfigError(f"{origin} or {adapter} changed while it was merged; run the same command again")
        folder.publish()
        folder.remove()
    nbytes = sum(view.nbytes for file in plan.files for view in file.tensors.values())
    say(f"merge: {target} is whole: {format_size(nbytes)}, {format_size(ledger.peak)} held at most")
    return _MergeReport(str(target), len(plan.files), kept, nbytes, ledger.peak, limit)


def _report_of(target: Path, limit: int) -> _MergeReport:
    files = sorted(target.glob("*.safetensors"))
    return _MergeReport(str(target), len(files), len(files), sum(file.stat().st_size for file in files), 0, limit)


def _base_directory(adapter: Path, base: str | None) -> Path:
    name = base
    if name is None:
        try:
            name = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{adapter / ADAPTER_CONFIG}: cannot be used ({error}); save the adapter again"
            ) from error
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{adapter / ADAPTER_CONFIG}: names no base_model_name_or_path; give it as --base DIR")
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute():
        raise ConfigError(f"base: {name} is no folder here; give the folder of the base as --base DIR")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"base: {name} is no folder here, nor on the hub ({reason}); give --base DIR") from error


def _key(adapter: Path, base: Path, dtype: str, max_shard_size: int) -> str:
    """A text that changes with each input and option that the merged bytes depend on."""
    rows: list[list[Any]] = []
    for file in sorted((*adapter.iterdir(), *base.iterdir())):
        if not file.is_file():
            continue
        status = file.stat()
        # The time of the last change of an inode, too: unlike that of a write, no program can set it.
        rows.append([str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    libraries = [each.__version__ for each in (torch, transformers, peft, safetensors)]
    options = [dtype, max_shard_size, torch.get_num_threads()]
    return hashlib.blake2b(json.dumps([rows, options, libraries]).encode(), digest_size=16).hexdigest()


def _require_room(plan: _MergePlan, limit: int) -> None:
    largest = max((group for group in plan.groups if group.calls), key=lambda group: group.peak, default=None)
    if largest is not None and largest.peak > limit:
        raise ConfigError(
            f"--memory: to merge {next(iter(largest.results))} takes {format_size(largest.peak)} of tensors at a time, "
            f"{format_size(limit)} are given; give --memory {-(-largest.peak // (1 << 20))}MiB"
        )


def _write_all(plan: _MergePlan, folder: _MergeFolder, ledger: _Ledger) -> int:
    """Write the shards that are not there; return how many were."""
    total = sum(view.nbytes for file in plan.files for view in file.tensors.values())
    progress, kept = _Progress(total), 0
    headers = {file.name: header_of(file) for file in plan.files}
    folder.require_space({file.name: size_of(file, headers[file.name]) for file in plan.files})
    for number, file in enumerate(plan.files, 1):
        header = headers[file.name]
        found = folder.is_whole(file, header)
        what = f"{file.name}, {number} of {len(plan.files)}"
        if found:
            kept += 1
            progress.add(sum(view.nbytes for view in file.tensors.values()), f"kept {what}")
            continue
        if found is False:
            say(f"merge: {file.name} is not as it was written; it is written again")
        writer = _ShardWriter(folder.model / file.name, file, header)
        whole = False
        try:
            for group in plan.groups:
                if not file.tensors.keys().isdisjoint(group.results):
                    _write_group(plan, file, group, writer, ledger)
                    made = file.tensors.keys() & group.results.keys()
                    progress.add(sum(file.tensors[name].nbytes for name in made), what)
            whole = True
        finally:
            writer.close(whole=whole)
        folder.keep(file, writer.written)
    return kept


def _write_group(
    plan: _MergePlan, file: _MergedFile, group: _MergeGroup, writer: _ShardWriter, ledger: _Ledger
) -> None:
    if not group.calls:
        (name, view), (storage,) = next(iter(group.results.items())), group.inputs
        source = plan.recording.inputs[storage]
        if type(source) is StoredTensor:
            begin = source.offset + view.offset * view.dtype.itemsize
            writer.put_pieces(name, _pieces(source, begin, view.nbytes, ledger))
            return

    def done(name: str, tensor: torch.Tensor) -> None:
        if name in file.tensors:
            writer.put(name, tensor)

    plan.recording.run(group, ledger, done)


def _pieces(source: StoredTensor, begin: int, nbytes: int, ledger: _Ledger) -> Iterator[torch.Tensor]:
    """So many bytes of the file of ``source``, a piece at a time; the next one takes the place of the last."""
    room = max(1, min(_PIECE, nbytes, ledger.limit))
    ledger.take(room)
    buffer = torch.empty(room, dtype=torch.uint8)
    try:
        with opened(source.file) as descriptor:
            for offset in range(0, nbytes, room):
                size = min(room, nbytes - offset)
                part = StoredTensor(source.file, source.name, torch.uint8, (size,), begin + offset, size)
                read_into(descriptor, part, buffer[:size], buffer)
                yield buffer[:size]
    finally:
        ledger.give(room)


class _Progress:
    """Says each second how far the merge is."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._done = 0
        self._clock = clock
        self._told = -1.0

    def add(self, nbytes: int, what: str) -> None:
        """So many bytes more of ``what`` are written."""
        self._done += nbytes
        if self._clock() >= self._told + 1 or self._done == self._total:
            self._told = self._clock()
            say(f"merge: {format_size(self._done)} of {format_size(self._total)}: {what}")
