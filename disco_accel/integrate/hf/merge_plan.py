"""The plan of a merge: transformers and PEFT load, merge and save over fake tensors, and a recording keeps their calls.

Files of JSON, such as the config, are written by ``save_pretrained`` itself on the way; its shards are described.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.serialization._torch as hub_shards
import peft.peft_model
import peft.utils.save_and_load as peft_files
import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_utils
from transformers.utils import logging as transformers_logging

from disco_accel.capture.fake_mode import fake_mode
from disco_accel.capture.thread_patches import patched
from disco_accel.config.hf_environment import transformers_reads_in_turn
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.checkpoint_files import checkpoint_tensors, dtype_of
from disco_accel.integrate.hf.merge_recording import INSTEAD, _MergeGroup, _MergeInput, _MergeRecording, _TensorView
from disco_accel.integrate.hf.packed_checkpoint import has_loader
from disco_accel.integrate.hf.safetensors_file import StoredTensor, files_read_unmapped, stored_tensors
from disco_accel.quantised.libraries import library_of_config, value_of

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TASKS = (None, "CAUSAL_LM")
_NUMBERS = ("lora_alpha", "r", "alpha_pattern", "rank_pattern")
_REFUSED = (AttributeError, KeyError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)
"""What transformers and PEFT raise for files that do not fit each other, and torch over fake tensors."""


@dataclass(frozen=True, slots=True)
class _MergedFile:
    """A shard to write: its name, the metadata of its header, and the data type and shape of each tensor."""

    name: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, _TensorView]


@dataclass(frozen=True, slots=True)
class _MergePlan:
    """The shards of a merged model, and the groups in which their tensors are made."""

    files: list[_MergedFile]
    recording: _MergeRecording
    groups: list[_MergeGroup]


@dataclass(frozen=True, slots=True)
class _StandIn(StoredTensor):
    """A tensor of a file that is recorded, not read, where transformers reads it."""

    recording: _MergeRecording
    source: _MergeInput

    def read(self) -> torch.Tensor:
        return self.recording.stand_in(self.source)


@dataclass(frozen=True, slots=True)
class _AdapterTensor(StoredTensor):
    def read(self) -> torch.Tensor:
        values = StoredTensor.read(self)
        if values.is_floating_point() and not bool(torch.isfinite(values.float()).all()):
            raise ConfigError(
                f"{self.file}: tensor {self.name} has values that are infinite or no numbers; its training went wrong, "
                "take an earlier checkpoint of the adapter"
            )
        return values


def plan_merge(base: Path, adapter: Path, dtype: str, max_shard_size: int, folder: Path) -> _MergePlan:
    """Plan the merge of ``adapter`` into ``base``, two local directories, and write the small files into ``folder``.

    ``dtype``: a torch name, or ``auto``, the checkpoint's. ``max_shard_size``: bytes of a file at most.

    Raises:
        ConfigError: a file is missing or broken, base and adapter do not fit, or the merge cannot be recorded.
    """
    stored = checkpoint_tensors(base)
    adapter_tensors = [_as(_AdapterTensor, tensor) for tensor in stored_tensors(adapter / ADAPTER_WEIGHTS)]
    adapter_config = _adapter_config(adapter)
    config = _config(base)
    inputs, config = _plain(base, config, stored)
    recording = _MergeRecording()
    fakes = [_stand_in(tensor, source, recording) for tensor, source in inputs]
    adapters = {t.name: _stand_in(t, t, recording) for t in adapter_tensors}
    wanted = dtype_of(dtype, config, {tensor.name: tensor for tensor, _ in inputs})
    files: list[_MergedFile] = []
    with _faked(recording):
        with files_read_unmapped(fakes), _as_config_error(f"{base}: cannot be loaded"):
            model = _base_model(base, config, wanted)
        with _as_config_error(f"{adapter}: does not fit {base}"):
            tuned = _tuned(model, adapter, adapter_config, adapters)
        with _as_config_error(f"{adapter}: {INSTEAD}; this merge cannot be recorded"):
            merged = _merged(tuned)
            with _shards_noted(files, recording):
                merged.save_pretrained(folder, max_shard_size=max_shard_size)
    _save_tokenizer(adapter, base, folder)
    return _MergePlan(files, recording, recording.groups({n: v for file in files for n, v in file.tensors.items()}))


def _as(kind: Callable[..., StoredTensor], tensor: StoredTensor, *more: Any) -> Any:
    return kind(tensor.file, tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes, *more)


def _stand_in(tensor: StoredTensor, source: _MergeInput, recording: _MergeRecording) -> _StandIn:
    made: _StandIn = _as(_StandIn, tensor, recording, source)
    return made


def _adapter_config(adapter: Path) -> Any:
    path = adapter / ADAPTER_CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        config = PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be used ({_first(error)}); give a folder that PEFT saved") from error
    for key in _NUMBERS:
        given = raw.get(key)
        for value in given.values() if isinstance(given, dict) else [given]:
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{path}: {key} is {value!r}, which scales no weight; correct it")
    task = getattr(config.task_type, "value", config.task_type)
    if task not in _TASKS:
        raise ConfigError(f"{path}: task_type is {task}; causal language models are merged here: for others, {INSTEAD}")
    return config


def _config(base: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(base)
    except _REFUSED as error:
        raise ConfigError(f"{base}/config.json: cannot be used ({_first(error)}); download it again") from error


def _plain(
    base: Path, config: Any, stored: Mapping[str, StoredTensor]
) -> tuple[list[tuple[StoredTensor, _MergeInput]], Any]:
    """The tensors of the base, and its config, without packed weights: those are dequantised when they are read."""
    packing = getattr(config, "quantization_config", None)
    if packing is None:
        return [(tensor, tensor) for tensor in stored.values()], config
    library = library_of_config(packing)
    plain = library.dequantised(stored) if library is not None and has_loader(config) else None
    if plain is None:
        name = library.name if library else value_of(packing, "quant_method")
        raise ConfigError(
            f"{base}: weights packed by {name} are not dequantised here; dequantise the base, or {INSTEAD}"
        )
    del config.quantization_config
    made: list[tuple[StoredTensor, _MergeInput]] = [
        (StoredTensor(tensor.file, tensor.name, tensor.dtype, tensor.shape, 0, tensor.nbytes), tensor)
        if not isinstance(tensor, StoredTensor)
        else (tensor, tensor)
        for tensor in plain.values()
    ]
    return made, config


@contextmanager
def _as_config_error(what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (*_REFUSED, SafetensorError) as error:
        raise ConfigError(f"{what} ({_first(error)})") from error


@contextmanager
def _faked(recording: _MergeRecording) -> Iterator[None]:
    bars = transformers_logging.is_progress_bar_enabled()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(patched(torch.nn.Module, "_apply", _applied_to_data))
        stack.enter_context(transformers_reads_in_turn())
        stack.enter_context(fake_mode())
        stack.enter_context(recording)
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if bars:
                transformers_logging.enable_progress_bar()


def _applied_to_data(_: Callable[..., Any]) -> Callable[..., Any]:
    """``Module._apply`` as it is for real parameters, whose data it sets; it would swap fake ones, which fails."""

    def applied(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if recurse:
            for child in module.children():
                applied(child, function)
        for parameter in module._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    changed = function(parameter)
                if changed is not parameter:
                    parameter.data = changed
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return applied


def _base_model(base: Path, config: Any, dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype, output_loading_info=True)
    model, info = loaded
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ConfigError(f"{base}: tensor {name} has shape {list(found)}, config.json makes it {list(wanted)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"{base}: lacks {len(missing)} tensors, the first is {missing[0]}; download it again")
    return model


def _tuned(model: Any, adapter: Path, config: Any, tensors: Mapping[str, _StandIn]) -> Any:
    unexpected: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            unexpected.extend(result.unexpected_keys)
            return result

        return load

    def standing_in(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: {name: tensor.read() for name, tensor in tensors.items()}

    with (
        patched(peft_files, "safe_load_file", standing_in),
        patched(peft.peft_model, "set_peft_model_state_dict", noting),
    ):
        tuned = PeftModel.from_pretrained(model, adapter, config=config, torch_device="cpu")
    if unexpected:
        raise ConfigError(
            f"{adapter / ADAPTER_WEIGHTS}: {len(unexpected)} tensors have no place in the base, the first is "
            f"{unexpected[0]}; give the base that the adapter was trained on as --base"
        )
    return tuned


def _merged(tuned: Any) -> Any:
    """The merged model. PEFT compares addresses to see whether a head is still its embedding; fake tensors have
    none, so it is seen here by their storages."""
    merged = tuned.merge_and_unload()
    config = merged.config
    if getattr(config, "tie_word_embeddings", False):
        tables = [merged.get_input_embeddings(), merged.get_output_embeddings()]
        weights: list[Any] = [getattr(table, "weight", None) for table in tables]
        if all(weight is not None for weight in weights):
            first, second = (weight.untyped_storage()._cdata for weight in weights)
            config.tie_word_embeddings = first == second
    return merged


@contextmanager
def _shards_noted(files: list[_MergedFile], recording: _MergeRecording) -> Iterator[None]:
    """Inside, ``save_pretrained`` describes its shards in ``files`` in place of writing them."""

    def noting(_: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: Mapping[str, torch.Tensor], filename: str, metadata: Mapping[str, str]) -> None:
            views = {name: recording.view_of(tensor) for name, tensor in tensors.items()}
            files.append(_MergedFile(Path(filename).name, dict(metadata), views))

        return save

    def by_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
        def remove(state: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
            # On meta, transformers tells tied weights by their parameters.
            kept = original({n: torch.empty_like(t, device="meta") for n, t in state.items()}, model)
            return {name: state[name] for name in kept}

        return remove

    def by_storage(original: Callable[..., Any]) -> Callable[..., Any]:
        def identity(tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, FakeTensor):
                return original(tensor)
            storage = tensor.untyped_storage()
            return tensor.device, storage._cdata, storage.nbytes()

        return identity

    with (
        patched(modeling_utils, "safe_save_file", noting),
        patched(modeling_utils, "remove_tied_weights_from_state_dict", by_parameter),
        patched(hub_shards, "get_torch_storage_id", by_storage),
    ):
        yield


def _save_tokenizer(adapter: Path, base: Path, folder: Path) -> None:
    """Save the tokenizer that was saved with the adapter, else the base's, if there is one."""
    for directory in (adapter, base):
        if any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
            with _as_config_error(f"{directory}: the tokenizer cannot be loaded"):
                AutoTokenizer.from_pretrained(directory).save_pretrained(folder)
            return


def _first(error: BaseException) -> str:
    first, _, rest = str(error).strip().partition("\n")
    # Of what torch lists, the first.
    return f"{first} {_first_line(rest)}" if first.endswith(":") else first or type(error).__name__


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
