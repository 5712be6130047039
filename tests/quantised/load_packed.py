"""Loads packed weights, in a process of its own: ``load_packed.py make|read PLAIN PACKED SCRATCH``, directories.

``make`` packs the weights of PLAIN in two forms and saves them in PACKED; ``read`` loads these. Both print lines of
JSON: about the memory that each took, and about small models of several forms.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.modules import module as torch_modules
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.capture.parts import named_parts
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf import safetensors_file
from disco_accel.integrate.hf.adopted_parameters import freed_at_once
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.integrate.hf.checkpoint_files import checkpoint_tensors
from disco_accel.integrate.hf.packed_checkpoint import load_packed
from disco_accel.native.host_memory import HostMemory
from tests.support.models import random_batch

FORMS: dict[str, Any] = {
    "NF4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "NF4, double": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "FP4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao float8": TorchAoConfig(Float8WeightOnlyConfig()),
    "quanto int8": QuantoConfig(weights="int8"),
}
UNSTORED = ("quanto int8",)
"""transformers does not save these."""
MEASURED = ("NF4, double", "torchao int8")
ARENA = "_disco_host_memory"


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def llama(directory: Path, **changes: Any) -> Path:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        dtype=torch.bfloat16, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="200KB")
    return directory


def gpt2(directory: Path) -> Path:
    """Its layers are stored with inputs first, and its output layer is its table of tokens."""
    config = GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=96, n_positions=64, dtype=torch.bfloat16)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="200KB")
    return directory


def pretrained(directory: Path, form: Any = None) -> Any:
    told = {} if form is None else {"quantization_config": form}
    return AutoModelForCausalLM.from_pretrained(directory, dtype="bfloat16", device_map={"": "cpu"}, **told)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def difference(ours: Any, theirs: Any) -> str:
    """What of two models is not the same; empty if nothing."""
    got, wanted = ({part.name: part for part in named_parts(model)} for model in (ours, theirs))
    if list(got) != list(wanted):
        return f"names {sorted(got.keys() ^ wanted.keys())}"
    for name, part in wanted.items():
        mine, other = got[name].tensor, part.tensor
        alike = (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        if not alike or not torch.equal(bytes_of(mine), bytes_of(other)):
            return name
        if got[name].requires_grad != part.requires_grad:
            return f"requires_grad of {name}"
    if [type(m) for m in ours.modules()] != [type(m) for m in theirs.modules()]:
        return "layers"
    if ours.config.to_dict() != theirs.config.to_dict() or ours.name_or_path != theirs.name_or_path:
        return "config"
    return "" if (ours.training, ours.dtype) == (theirs.training, theirs.dtype) else "mode or data type"


def outside(model: Any) -> list[str]:
    """Parts of parameters that lie outside the arena, or leave more than a page of it unused."""
    memory: HostMemory = model.__dict__[ARENA]
    names = [p.name for p in named_parts(model) if not p.is_buffer and not memory.holds(p.tensor)]
    return names if memory.nbytes - memory.used <= 4096 else [*names, f"{memory.used} of {memory.nbytes} bytes"]


def adapted(base: Any) -> Any:
    torch.manual_seed(5)
    names = ["q_proj", "down_proj", "c_attn"]
    present = [name for name in names if any(n.endswith(name) for n, _ in base.named_modules())]
    return get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=present, init_lora_weights=False))


def gradients(model: Any) -> list[torch.Tensor]:
    model.train()
    torch.manual_seed(3)
    loss = model(**random_batch(length=20, seed=1)).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def planned_is_eager(ours: Any, theirs: Any) -> bool:
    expected = gradients(adapted(theirs))
    model = prepare(adapted(ours), DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None))
    got, figures = gradients(model), stats(model)
    planned = (figures["steps_compiled"], figures["steps_eager"]) == (1, 0)
    return planned and len(got) == len(expected) and all(map(torch.equal, got, expected))


def kept_in(model: Any, memory: HostMemory) -> bool:
    """Whether frozen weights of a prepared model are in ``memory`` still."""
    return all(memory.holds(p.tensor) for p in named_parts(model) if not (p.requires_grad or p.is_buffer))


def status(key: str) -> int:
    """Bytes from /proc/self/status; VmHWM and VmRSS count the pages of mapped files too."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) * 1024


def first_calls(small: Path) -> None:
    """What imports and first calls take is not what is measured."""
    for form in MEASURED:
        prepare(adapted(load_into_arena(small, quantization_config=FORMS[form])), DiscoConfig(device="cpu"))


def measured(directory: Path, name: str, form: Any) -> Any:
    """The model of ``directory``, prepared; tells what that cost at its peak."""
    gc.collect()
    with freed_at_once():  # The heap is trimmed: loads begin so.
        Path("/proc/self/clear_refs").write_text("5")  # The highest from now on.
    before = status("VmRSS")
    model = load_into_arena(directory, quantization_config=form)
    memory = model.__dict__[ARENA]
    model = prepare(adapted(model), DiscoConfig(memory_budget="1GiB", device="cpu"))
    peak = status("VmHWM") - before
    packed = sum(p.tensor.nbytes for p in named_parts(model) if not p.requires_grad)
    shard = max(file.stat().st_size for file in directory.glob("*.safetensors"))
    tell(measured=name, peak=peak, packed=packed, shard=shard, kept=kept_in(model, memory))
    return model


def make(plain: Path, packed: Path, scratch: Path) -> None:
    first_calls(llama(scratch / "llama"))
    for name in MEASURED:
        model = restore(measured(plain, name, FORMS[name]))
        model.unload().save_pretrained(packed / name, max_shard_size="24MB")
        del model
    for family, small in {"llama": llama, "gpt2": gpt2}.items():
        directory = small(scratch / family)
        for name, form in FORMS.items():
            if family == "gpt2" and "quanto" in name:
                continue
            theirs = pretrained(directory, form)
            if name not in UNSTORED:
                theirs.save_pretrained(scratch / f"{family} {name}", max_shard_size="100KB")
            ours = load_into_arena(directory, dtype="bfloat16", quantization_config=form)
            tell(model=f"{family} {name}", different=difference(ours, theirs), outside=outside(ours))
            if name in ("NF4, double", "torchao int8"):
                tell(step=f"{family} {name}", equal=planned_is_eager(ours, theirs))


def read(_: Path, packed: Path, scratch: Path) -> None:
    first_calls(scratch / "llama")
    for name in MEASURED:
        measured(packed / name, name, None)
    for directory in sorted(d for d in scratch.iterdir() if " " in d.name):
        theirs, ours = pretrained(directory), load_into_arena(directory, dtype="bfloat16")
        tell(model=directory.name, different=difference(ours, theirs), outside=outside(ours))
        if directory.name == "llama NF4, double":
            tell(step=directory.name, equal=planned_is_eager(ours, theirs))
    for name in ("llama NF4, double", "llama torchao int8"):
        for at in (1, 0.5, 0):
            tell(killed=name, left=killed(scratch / name, at), different=reloaded(scratch / name))
    for message in faults(scratch / "llama NF4, double"):
        tell(refused=message)


def killed(directory: Path, share: float) -> list[str]:
    """What a load leaves behind that is killed while it reads a tensor with ``share`` of all before it: files that it
    has changed, made, opened to write, or shares with other processes."""
    before, tensors = content(directory), len(checkpoint_tensors(directory))
    if (child := os.fork()) == 0:
        stop_at_read(int((tensors - 1) * share))
        load_into_arena(directory)
        os._exit(1)
    if not os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
        return ["was not killed"]
    mine, its = (writable(process) for process in (os.getpid(), child))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = content(directory)
    return [*sorted(its - mine), *sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))]


def stop_at_read(count: int) -> None:
    """Stop this process when it has read ``count`` tensors and has opened the file of the next."""
    read_into, seen = safetensors_file.read_into, itertools.count()

    def reading(*arguments: Any) -> None:
        if next(seen) == count:
            os.kill(os.getpid(), signal.SIGSTOP)
        read_into(*arguments)

    safetensors_file.read_into = reading


def content(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in directory.iterdir()}


def writable(process: int) -> set[str]:
    """Files that a process may write to: opened, and mapped for others to see."""
    names = set()
    for opened in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            flags = Path(f"/proc/{process}/fdinfo/{opened.name}").read_text().split("flags:")[1].split()[0]
            if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                names.add(os.readlink(opened))
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        _, access, _, _, _, *path = line.split(maxsplit=5)
        if access[1] == "w" and access[3] == "s":
            names.update(path)
    return names


def reloaded(directory: Path) -> str:
    return difference(load_into_arena(directory, dtype="bfloat16"), pretrained(directory))


def faults(directory: Path) -> Iterator[str]:
    """What is said of a file that ends while it is read, and of weights and config that are not of one form; nothing is
    left behind, and the whole checkpoint loads after that."""
    stored = checkpoint_tensors(directory)
    file = max(stored.values(), key=lambda tensor: tensor.offset).file
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    config = AutoConfig.from_pretrained(directory)
    options = {"dtype": torch.bfloat16}
    yield refusal(lambda: load_packed(directory, config, stored, None, options))
    file.write_bytes(whole)
    left = [*torch_modules._global_parameter_registration_hooks, *(k for k in os.environ if k.startswith("HF_DEACT"))]
    assert not left, left
    assert not outside(load_into_arena(directory))
    settings = json.loads((directory / "config.json").read_text())
    text = (directory.parent / "llama" / "config.json").read_text()
    plain = {**json.loads(text), "quantization_config": settings["quantization_config"]}
    (directory.parent / "llama" / "config.json").write_text(json.dumps(plain))
    yield refusal(lambda: load_into_arena(directory.parent / "llama"))


def refusal(load: Any) -> str:
    try:
        load()
    except ConfigError as error:
        return str(error)
    return "loaded"


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    {"make": make, "read": read}[sys.argv[1]](*map(Path, sys.argv[2:]))


if __name__ == "__main__":
    main()
