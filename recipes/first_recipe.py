"""A first recipe for a model on a device: each value by a rule of arithmetic, with its reason. No torch.

The rules, in their order:

1. A row is as long as records are: the power of two above 95 of 100 of them, else ``_ROW`` tokens. Rows are shortened
   until the logits of one fit half of the budget.
2. Weights that do not stay on the device are loaded twice in a step, for its forward and its backward. Kernels hide
   that where they take as long: four operations for each weight and token.
3. Weights keep their data type if a batch that fits half of the budget hides its loads, and the host has room for
   them. The batch is the smallest of those with ``_TOKENS`` tokens or more. Else linear layers are packed in NF4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from disco_accel.sizes import format_size

RANK = 16
_ROW = 1024
_LONGEST = 4096
_SHORTEST = 128
_TOKENS = 4096
"""Of a step on a GPU; with fewer its kernels are short for the time that starting them takes."""
_ROWS = 16
"""Of an update on a GPU."""
_HOST_ROW, _HOST_TOKENS, _HOST_ROWS = 128, 256, 2
"""The same on the host device, whose kernels are a thousand times slower."""
_LOGIT = 10
"""Bytes for each logit at the peak of a step, in 16 and 32 bits with gradients: as in the least budgets of plans."""
_TRAINED = 16
"""Bytes for each number of the adapter: it, its gradient and two moments, in float32."""
_WORTH = 0.7
"""Packed weights take less than this part of the others, or packing is not worth its noise."""
_HOST_SHARE = 0.9
"""Of the host memory may be weights: values wait there too, and other programs run."""
_TRIAL = 20
"""Steps on a text that is there to be tried."""
_PASSES = 3
_COLUMN = 36
_PLAIN = re.compile(r"(?:\.{0,2}/|[A-Za-z])[\w./-]*|[0-9.]+[KMGT]iB", re.ASCII)
_NO_TEXT = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
"""Words that YAML does not read as text."""


class BaseSizes(NamedTuple):
    """Sizes of a model without its adapter. ``numbers``: its weights, ``active``: those that a token is multiplied
    with. ``bytes`` of all in ``dtype``, ``packed``: the same with linear layers in NF4, or in the form that they are
    ``stored`` in. ``adapter``: numbers of rank 1 on all linear layers. ``positions``: the longest row, None: any.
    ``experts``: it has weights for each expert that are no linear layers."""

    numbers: int
    active: int
    bytes: int
    packed: int
    adapter: int
    vocabulary: int
    dtype: str
    positions: int | None = None
    stored: str = ""
    experts: bool = False


class Target(NamedTuple):
    """The device that trains. ``what`` in words; ``half``: FLOP/s, ``link``: bytes/s each way. ``budget``: bytes; its
    key has the value ``budget_key`` for the reason ``why``. ``host``: bytes of host memory, None: any; its key has
    ``host_key``, if any. ``on_host``: it is the host device. ``lacking``: the package that packs in NF4, where
    it is not installed."""

    what: str
    half: float
    link: float
    budget: int
    budget_key: str
    why: str
    host: int | None = None
    host_key: str = ""
    on_host: bool = False
    lacking: str = ""

    @property
    def install(self) -> str:
        """The end of the reason of weights that would be packed if the library were there."""
        return f"pip install {self.lacking}"


class DataFacts(NamedTuple):
    """Of a file of rows: its ``path``, about how many ``tokens`` it has, and the ``typical`` tokens of a record, which
    95 of 100 do not exceed. 0: it is one text. ``trial``: it is not the user's. ``counted``: by the tokenizer."""

    path: str
    tokens: int
    typical: int = 0
    trial: bool = False
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """``rows`` of ``length`` tokens a step, ``accumulation`` steps an update, ``steps`` updates. ``packed``: in NF4, or
    not, for the reason ``form``. ``loaded``: bytes of weights that a step loads, in ``link_seconds``."""

    packed: bool
    form: str
    rows: int
    length: int
    accumulation: int
    steps: int
    loaded: int
    link_seconds: float
    kernel_seconds: float

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length


def choose(base: BaseSizes, target: Target, data: DataFacts, most: int | None = None) -> Choice:
    """The values for ``base`` on ``target``. ``most``: tokens of a step at most, None: any."""
    length = _length(base, target, data)
    if most is not None and most < length:
        length = _power_of_two(most)
    available = max(1, data.tokens // length)
    largest = min(_HOST_ROWS if target.on_host else _ROWS, _power_of_two(available))
    rows = [n for n in (1, 2, 4, 8, 16) if n <= largest and (most is None or n * length <= most)]
    rows = [n for n in rows if n == 1 or _work(base, n * length) <= target.budget // 2]
    enough = [n for n in rows if n * length >= (_HOST_TOKENS if target.on_host else _TOKENS)] or rows[-1:]
    packed, batch, form = _form(base, target, length, enough)
    loads, link, kernels = _seconds(base, target, batch * length, packed)
    accumulation = max(1, largest // batch)
    updates = _TRIAL if data.trial else max(1, _PASSES * available // (batch * accumulation))
    return Choice(packed, form, batch, length, accumulation, updates, loads, link, kernels)


def choose_fewer(base: BaseSizes, target: Target, data: DataFacts, choice: Choice, over: int) -> Choice | None:
    """The values for a step that takes ``over`` bytes less than that of ``choice``; None where it has as few tokens as
    any."""
    least = min(_SHORTEST, choice.length)
    if choice.tokens <= least:
        return None
    most = min(choice.tokens // 2, choice.tokens - over // (_LOGIT * base.vocabulary))
    return choose(base, target, data, max(least, most))


def _power_of_two(number: int) -> int:
    """The largest that is no more than ``number``, which is 1 or more."""
    return 1 << number.bit_length() - 1


def _length(base: BaseSizes, target: Target, data: DataFacts) -> int:
    length = _HOST_ROW if target.on_host else _ROW
    if data.typical:
        length = max(_SHORTEST, min(_LONGEST, 1 << (data.typical - 1).bit_length()))
    length = min(length, base.positions or length, _power_of_two(max(1, data.tokens // 2)))
    while length > _SHORTEST and _work(base, length) > target.budget // 2:
        length //= 2
    return length


def _work(base: BaseSizes, tokens: int) -> int:
    """Bytes that a step holds beside its frozen weights."""
    return _LOGIT * tokens * base.vocabulary + _TRAINED * RANK * base.adapter


def _seconds(base: BaseSizes, target: Target, tokens: int, packed: bool) -> tuple[int, float, float]:
    """Bytes of weights that a step loads, seconds that the link takes for them, and those of kernels."""
    weights = base.packed if packed or base.stored else base.bytes
    loaded = 2 * min(weights, max(0, weights + _work(base, tokens) - target.budget))
    return loaded, loaded / target.link, 4 * base.active * tokens / target.half


def _form(base: BaseSizes, target: Target, length: int, rows: list[int]) -> tuple[bool, int, str]:
    """Whether weights are packed, the rows of a batch, and the reason. ``rows``: those to choose from, fewest first."""
    has_room = target.host is None or base.bytes <= _HOST_SHARE * target.host
    if base.stored:
        return False, rows[0], f"the checkpoint has them as {base.stored}"
    hidden = []
    for n in rows:
        _, link, kernels = _seconds(base, target, n * length, packed=False)
        hidden += [n] if link <= kernels else []
    if hidden and has_room:
        loaded, link, kernels = _seconds(base, target, hidden[0] * length, packed=False)
        size = format_size(base.bytes)
        if not loaded:
            return False, hidden[0], f"all {size} fit beside a step"
        return False, hidden[0], f"of {size} a step loads {format_size(loaded)}: {link:.2g} s, kernels {kernels:.2g} s"
    if has_room:
        _, link, kernels = _seconds(base, target, rows[-1] * length, packed=False)
        why = f"as {base.dtype} a step loads weights for {link:.2g} s, kernels take {kernels:.2g} s"
    else:
        there = format_size(target.host or 0)
        why = f"as {base.dtype} they take {format_size(base.bytes)} of host memory, of {there}"
    if base.packed >= _WORTH * base.bytes:
        return False, rows[-1], f"{why}; NF4 packs linear layers, which this model has few of"
    if target.lacking:
        return False, rows[-1], f"{why}; true after: {target.install}"
    smallest = [n for n in rows if _is_hidden(base, target, n * length)] or rows[-1:]
    return True, smallest[0], f"{format_size(base.packed)} in NF4; {why}"


def _is_hidden(base: BaseSizes, target: Target, tokens: int) -> bool:
    _, link, kernels = _seconds(base, target, tokens, packed=True)
    return link <= kernels


class Line(NamedTuple):
    """``key: value  # why``; without a key an empty line."""

    key: str
    value: object = ""
    why: str = ""

    def __str__(self) -> str:
        if not self.key:
            return ""
        pair = f"{self.key}: {_yaml(self.value)}".rstrip()
        return f"{pair:<{_COLUMN}}  # {self.why}"


def recipe_text(
    title: str, name: str, output: str, base: BaseSizes, target: Target, data: DataFacts, choice: Choice, attention: str
) -> str:
    """The file. ``title``: its first lines; ``name`` of the model; ``attention``: the implementation that it takes."""
    lines = [
        *_model_lines(name, base, target, choice, attention),
        *_data_lines(base, data, choice),
        *_adapter_lines(base),
        *_step_lines(target, data, choice),
        Line("output_dir", output, "the adapter, as PEFT writes it"),
        Line(""),
        Line("disco_config", "", "docs/config.md has all keys"),
        Line("  memory_budget", target.budget_key, target.why),
    ]
    if target.host_key:
        lines.append(Line("  host_memory", target.host_key, "as asked for: weights, and values that wait"))
    return "\n".join([*(f"# {line}" for line in title.splitlines()), *map(str, lines)]) + "\n"


def _model_lines(name: str, base: BaseSizes, target: Target, choice: Choice, attention: str) -> Iterator[Line]:
    yield Line("model_name_or_path", name, f"{_count(base.numbers)} weights")
    if base.stored or target.on_host:
        yield Line("dtype", "auto", f"{base.dtype}, as the checkpoint says")
    else:
        yield Line("dtype", base.dtype, "half the bytes of float32, and its range")
    yield Line("load_in_4bit", choice.packed, choice.form)
    why = "PyTorch's fused attention" if attention == "sdpa" else "this model has no other"
    yield Line("attn_implementation", attention, why)
    yield Line("")


def _data_lines(base: BaseSizes, data: DataFacts, choice: Choice) -> Iterator[Line]:
    about = "" if data.counted else "about "
    if data.trial:
        yield Line("dataset", data.path, "a novel, to try it; give your rows: .jsonl of messages, prompts, texts")
    else:
        yield Line("dataset", data.path, f"{about}{data.tokens} tokens")
    if data.typical:
        why = f"95 of 100 records have at most {data.typical} tokens"
    elif base.positions == choice.length:
        why = "the longest row of this model"
    else:
        why = "tokens of a row; longer ones take more memory"
    yield Line("max_length", choice.length, why)
    yield Line("packing", True, "records are joined and cut to full rows: no token is padding")
    yield Line("")


def _adapter_lines(base: BaseSizes) -> Iterator[Line]:
    numbers = RANK * base.adapter
    size = format_size(_TRAINED * numbers)
    yield Line("lora_r", RANK, f"{_count(numbers)} numbers; {size} with gradients and moments")
    yield Line("lora_alpha", 2 * RANK, "twice lora_r: adapters count double")
    but = "; experts of a mixture stay as they are" if base.experts else ", where LoRA learns most"
    yield Line("lora_target_modules", "all-linear", f"all layers but the output{but}")
    yield Line("adapter_dtype", "float32", "bfloat16 would round small updates away")
    yield Line("")


def _step_lines(target: Target, data: DataFacts, choice: Choice) -> Iterator[Line]:
    if choice.loaded and choice.link_seconds <= choice.kernel_seconds:
        why = f"{choice.tokens} tokens a step: kernels hide the loads of weights"
    elif choice.loaded:
        why = f"{choice.tokens} tokens a step, as many as fit"
    else:
        why = f"{choice.tokens} tokens a step"
    yield Line("per_device_train_batch_size", choice.rows, why)
    yield Line(
        "gradient_accumulation_steps", choice.accumulation, f"{choice.rows * choice.accumulation} rows an update"
    )
    yield Line("gradient_checkpointing", True, "plans keep what fits in the place of recomputation")
    yield Line("learning_rate", 0.0002, "usual for LoRA; a tenth of it if the loss jumps")
    yield Line("lr_scheduler_type", "cosine", "to 0 at the last step")
    yield Line("warmup_steps", choice.steps * 3 // 100, "three in a hundred")
    if data.trial:
        yield Line("max_steps", choice.steps, "a trial; three passes over your rows are usual")
    else:
        yield Line("max_steps", choice.steps, f"{_PASSES} passes over the rows, or nearly")
    save = 100 if choice.steps > 100 else 0
    yield Line("save_steps", save, "checkpoints to resume from" if save else "0: at the end alone")
    yield Line("save_total_limit", 2, "of them are kept")
    yield Line("seed", 42, "the same seed, the same bits")


def _count(numbers: int) -> str:
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if numbers >= scale:
            return f"{numbers / scale:.3g} {unit}"
    return f"{numbers}"


def _yaml(value: object) -> str:
    """``value`` as YAML reads it back."""
    if isinstance(value, str):
        plain = not value or (_PLAIN.fullmatch(value) is not None and value.lower() not in _NO_TEXT)
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
