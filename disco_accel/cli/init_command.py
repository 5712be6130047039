"""``init``: a recipe for a model and the GPU that is here, or one of the data file; nothing is asked, nothing runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_accel.cli.plan_answers import _Device, answers_about, device_of
from disco_accel.cli.recipe_commands import say
from disco_accel.cli.step_question import _Step
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.simulate.gpus import gpu_like
from disco_accel.sizes import format_size, parse_size

if TYPE_CHECKING:
    from disco_accel.recipes.first_recipe import BaseSizes, Choice, DataFacts, Target
    from disco_accel.recipes.model_names import FoundModel

_MOST_LAYERS = 48
"""Of a model whose step is planned: with more it takes longer than half a minute."""
_SEARCH_SECONDS = "4"
"""For a plan: a longer search makes a step some hundredths shorter."""


def init_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``init``."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, a preset, or a name of the hub's cache")
    parser.add_argument("-o", "--output", metavar="RECIPE.yaml", default="recipe.yaml", help="(default: recipe.yaml)")
    parser.add_argument("--data", metavar="FILE", help="your rows: .jsonl or text (default: a novel, to try it)")
    parser.add_argument("--gpu", metavar="NAME", help="that trains, as plan names it (default: the one that is here)")
    parser.add_argument("--budget", metavar="SIZE", help="device memory (default: nine tenths of the GPU's)")
    parser.add_argument("--host-memory", metavar="SIZE", help="that training may take (default: this machine's)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def init(options: argparse.Namespace) -> int:
    """Write a recipe; name it, missing parts of the model, and the next command. Raises ConfigError, BudgetTooSmall."""
    from disco_accel.recipes.model_names import find_model, name_on_hub

    output = _free_place(options)
    found = find_model(name_on_hub(options.model), "MODEL")
    device = _device(options.gpu)
    target = _target(device, options)
    say(f"{found.name}: reading {found.source}")
    from disco_accel.recipes.base_sizes import base_sizes, data_facts

    base, attention = base_sizes(found, on_host=target.on_host)
    data = data_facts(options.data, found)
    choice, text, figures = _planned(found, base, target, data, device, attention)
    _write(output, text)
    form = "weights in NF4" if choice.packed else f"weights in {base.stored or base.dtype}"
    for line in _summary(options, found, target, f"{choice.rows} x {choice.length} tokens, {form}", figures):
        print(line)
    return 0


def _free_place(options: argparse.Namespace) -> Path:
    """Where the recipe goes. Raises ConfigError."""
    output = Path(options.output)
    if output.is_dir():
        raise ConfigError(f"-o: {output}: is a folder; give a file's name, such as {output / 'recipe.yaml'}")
    if output.exists() and not options.force:
        raise ConfigError(f"-o: {output}: is there already; give --force to write over it, or another name")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"-o: {output}: cannot be written: there is no folder {output.parent}")
    if not os.access(output.absolute().parent, os.W_OK):
        raise ConfigError(f"-o: {output}: cannot be written: the folder {output.parent} is read-only")
    return output


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _rounded_down(size: int) -> str:
    """``size`` for people, but no more than it is."""
    unit, scale = next((u, s) for u, s in (("GiB", 1 << 30), ("MiB", 1 << 20), ("B", 1)) if size >= s)
    # Nine tenths of 24GiB are 21.60GiB, though the last byte is cut off.
    hundredths = int(size * 100 / scale + 1e-6)
    return f"{hundredths // 100}{unit}" if scale == 1 else f"{hundredths // 100}.{hundredths % 100:02}{unit}"


def _device(gpu: str | None) -> _Device:
    """The GPU of that name, the one that is here, or the host device. Raises ConfigError."""
    from disco_accel.native.backend import first_accelerator

    kinds = tuple(DEVICE_TYPES)
    if gpu is not None and gpu != "this":
        return device_of(argparse.Namespace(gpu=gpu, device=kinds[-1]))
    backend = first_accelerator()
    if backend is None and gpu is None:
        return _Device(kinds[0])
    here = device_of(argparse.Namespace(gpu="this", device=kinds[-1]))
    assert backend is not None and here.speed is not None and here.memory is not None, "it was measured"
    known = gpu_like(backend.hardware(), here.memory)
    if known is None:
        speed = replace(here.speed, name=f"{backend.hardware()}, its kernels by an A100's rates")
    else:
        # The link is measured, rates of kernels are not: that would take longer than all else here.
        rates = known.speed
        speed = replace(here.speed, half=rates.half, single=rates.single, memory=rates.memory, name=backend.hardware())
    return replace(here, speed=speed, here=None)


def _target(device: _Device, options: argparse.Namespace) -> Target:
    """The device that trains, with its memory or that of ``options``. Raises ConfigError."""
    from disco_accel.graph.spaces import TO_DEVICE
    from disco_accel.host_limits import host_limits
    from disco_accel.native.backend import backend_of_kind
    from disco_accel.quantised.forms import PackedForm
    from disco_accel.quantised.libraries import library_of_form
    from disco_accel.recipes.first_recipe import Target

    kind, memory = DEVICE_TYPES[device.kind], min(limit.total for limit in host_limits())
    speed = device.speed or backend_of_kind(device.kind).speed
    on_host = not kind.separate_memory
    total = memory if device.memory is None else device.memory
    key = options.budget or _rounded_down(int(total * kind.auto_share))
    given = _size("--budget", key)
    if given > total:
        raise ConfigError(f"--budget: {key} is more than the {format_size(total)} of {speed.name}; give less")
    if options.budget is not None:
        why = f"as asked for, of {format_size(total)}: all that training holds on the device"
    elif on_host:
        why = f"half of this machine's {format_size(total)}, which stand for a device's"
    else:
        why = f"nine tenths of {format_size(total)}: all that training holds on the device"
    # The machine of a GPU by its name is another one, of which nothing is known.
    left = memory - given if on_host else memory if device.name in (None, "this") else None
    packer = library_of_form(PackedForm.NF4)
    return Target(
        what="the host device: no GPU is here" if on_host else speed.name,
        half=speed.half,
        link=speed.machine.link(TO_DEVICE).bandwidth,
        budget=given,
        budget_key=key,
        why=why,
        host=left if options.host_memory is None else _size("--host-memory", options.host_memory),
        host_key=options.host_memory or "",
        on_host=on_host,
        lacking="" if importlib.util.find_spec(packer.module) else packer.package,
    )


def _planned(
    found: FoundModel, base: BaseSizes, target: Target, data: DataFacts, device: _Device, attention: str
) -> tuple[Choice, str, Mapping[str, Any]]:
    """Values with which a plan fits, the file, and the plan's figures; none of a model of many layers.

    Raises:
        BudgetTooSmall: no step fits, however few its tokens.
        CaptureError: the model does something that cannot be planned.
    """
    from disco_accel.config.settings import DiscoConfig
    from disco_accel.config.strict_yaml import parse_yaml
    from disco_accel.recipes.first_recipe import choose, choose_fewer, recipe_text
    from disco_accel.recipes.settings import parse_recipe

    choice = choose(base, target, data)
    if target.lacking and choice.form.endswith(target.install):
        say(f"weights are not packed: {choice.form}")
    layers = found.config.get("num_hidden_layers")
    plannable = not (isinstance(layers, int) and layers > _MOST_LAYERS)
    while True:
        words = (found.name, _output_dir(found.name), base, target, data, choice, attention)
        if not plannable:
            return choice, recipe_text(_title(found, target, choice, {}), *words), {}
        recipe = parse_recipe(parse_yaml(recipe_text("", *words), "init"), source="init")
        step = _Step(found, recipe, DiscoConfig.from_env(DiscoConfig.from_dict(recipe.disco_config or {})))
        say(f"planning a step of {choice.rows} x {choice.length} tokens in {target.budget_key}")
        asked = argparse.Namespace(quant=None, passes=False, plan_seconds=_SEARCH_SECONDS, model=None)
        # It notes that the search is short; training has a longer one.
        with contextlib.redirect_stderr(io.StringIO()):
            figures, refusal = answers_about(step, device, asked).answer(target.budget)
        if not isinstance(refusal, BudgetTooSmall):
            return choice, recipe_text(_title(found, target, choice, figures), *words), figures
        fewer = choose_fewer(base, target, data, choice, refusal.needed - target.budget)
        if fewer is None:
            raise refusal
        choice = fewer


def _output_dir(name: str) -> str:
    stem = Path(name).resolve().name if Path(name).is_dir() else name.rpartition("/")[2]
    return f"out/{stem}-lora"


def _title(found: FoundModel, target: Target, choice: Choice, figures: Mapping[str, Any]) -> str:
    """The first lines of the file: for which device it is, and how fast a step is by estimate."""
    first = f"LoRA of {' '.join(found.name.split())} on {target.what}. Written by disco-accel init; change any value."
    if figures:
        size, seconds = format_size(figures["peak_bytes"]), figures["step_seconds"]
        second = (
            f"A plan of {choice.rows} x {choice.length} tokens takes {size}; a step takes {seconds:.2g} s by estimate, "
            "or less."
        )
        return f"{first}\n{second}"
    return f"{first}\nNot planned: that takes long for a model of so many layers; disco-accel plan does it."


def _write(output: Path, text: str) -> None:
    from disco_accel.graph.files import write_atomically

    try:
        write_atomically(output, text.encode())
    except OSError as error:
        raise ConfigError(f"-o: {output}: cannot be written: {error.strerror}") from None


def _summary(
    options: argparse.Namespace, found: FoundModel, target: Target, step: str, figures: Mapping[str, Any]
) -> Iterator[str]:
    """Lines about the file, missing parts of the model, and the next command. ``step`` in words."""
    yield f"{options.output}: LoRA of {found.name} on {target.what}, {step}, budget {target.budget_key}"
    if figures:
        host = sum(figures["host_memory"].values())
        yield (
            f"by estimate {figures['tokens_per_second']:.0f} tokens/s or more, limited by {figures['limit']}; "
            f"{format_size(host)} of host memory"
        )
    yield from (f"missing: {what}" for what in _missing(found))
    if found.folder is None or not Path(found.name).is_dir():
        yield f"train takes the weights of {found.name} from the hub's cache, or downloads them"
    if options.data is None:
        yield "dataset is a novel, to try it: give your rows with --data FILE"
    named = options.gpu not in (None, "this")
    then = f"disco-accel plan {options.output} --gpu {options.gpu}" if named else ""
    yield f"next: {then or f'disco-accel train {options.output}'}"
    if then:
        yield f"then, on a machine with that GPU: disco-accel train {options.output}"


def _missing(found: FoundModel) -> Iterator[str]:
    """Files that training needs and the model's folder lacks."""
    from disco_accel.recipes.loading import check_checkpoint

    folder = Path(found.name).expanduser()
    if not folder.is_dir():
        return
    try:
        check_checkpoint(folder)
    except ConfigError as error:
        yield str(error).removeprefix("model_name_or_path: ")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        yield f"{folder}: has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
