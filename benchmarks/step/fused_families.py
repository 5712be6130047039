"""Steps of ten families with fused kernels beside eager steps: whether bits agree, and how many kernels there are.

    python -m benchmarks.step.fused_families [--families llama,gpt2] [--forms fp32,bf16] [-o out/fused-families.json]

Tiny random models with LoRA on the host device; their kernels are compiled, compared and used as in a training, however
short a step is. Losses and all gradients of three steps are compared with eager mode's in the same process. A cell has
the kernels of a step before and after, how many are fused, and the runs whose kernels were refused for a bit. Rows that
the file of ``-o`` has stay, those that are measured again excepted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.any_plan import wait_for_plans
from benchmarks.common.provenance import provenance
from benchmarks.common.quantised import folder_of, quantise_of
from benchmarks.step.options import names_of, save
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.fuse.kernels import compile_kernels
from disco_accel.graph.taskgraph import OpCall
from disco_accel.measure import fused_kernels
from disco_accel.measure.fused_kernels import Fusing, fusing_on
from disco_accel.step.run.session import current_step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch

_SIZES = {"hidden_size": 64, "intermediate_size": 128}
_ROWS, _TOKENS = 2, 64
_STEPS = 3
HEADER = (
    "| family | form | kernels | with fused ones | fused | refused for a bit | bits of eager |\n" + "|---" * 7 + "|"
)


@dataclass(frozen=True, slots=True)
class Form:
    """How a model trains. ``options``: of ``family_lora``; ``inside``: where its forward runs; ``quant``: a form of
    frozen weights."""

    options: Mapping[str, Any] = field(default_factory=dict)
    inside: Callable[[], AbstractContextManager[object]] = nullcontext
    quant: str = "none"


_NOT_PACKED = {("gpt2", "nf4")}
"""Its layers are convolutions, which bitsandbytes leaves as they are."""

_HALF = {"dtype": torch.bfloat16}
FORMS: Mapping[str, Form] = {
    "fp32": Form(),
    "bf16": Form(_HALF),
    "autocast": Form(inside=lambda: torch.autocast("cpu", torch.bfloat16)),
    "nf4": Form(_HALF, quant="nf4"),
    "dropout": Form({"dropout": 0.1, "lora_dropout": 0.1, "attention": "eager"}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """``before`` and ``after``: kernels of the step without and with ``fused`` ones; ``refused``: runs whose kernels
    have other bits than their ops; ``equal``: all of ``tensors`` losses and gradients have eager's bits."""

    family: str
    form: str
    before: int
    after: int
    fused: int
    refused: int
    equal: bool
    tensors: int


class _Cell:
    """A family in one form: its model, eager's steps, and its runs."""

    def __init__(self, family: str, name: str) -> None:
        self.family, self.name, self.form = family, name, FORMS[name]
        model = self.model()
        self.expected = [self.step(model, seed) for seed in range(_STEPS)]
        planned = prepare(model, self.config("off"))
        self.step(planned, 0)
        found = current_step(planned)
        assert found is not None, f"{family} {name} ran in eager mode: {stats(planned)['fallbacks']}"
        self.graph, self.before = found.graph, int(stats(planned)["kernels"])
        self.fusing = Fusing("cpu", 1)

    def model(self) -> Any:
        """The same in each call."""
        sizes = {"n_embd": 64} if self.family == "gpt2" else _SIZES
        return family_lora(self.family, quantise=quantise_of(self.form.quant), **self.form.options, **sizes)

    def config(self, fuse: str) -> DiscoConfig:
        """With room for everything."""
        return DiscoConfig(memory_budget="256MiB", device="cpu", plan_cache=None, compute_threads=1, fuse=fuse)

    def step(self, model: Any, seed: int) -> dict[str, torch.Tensor]:
        """Loss and gradients of a step on a batch of its own."""
        model.zero_grad()
        torch.manual_seed(seed)
        with self.form.inside():
            loss = model(**random_batch(batch=_ROWS, length=_TOKENS, seed=seed)).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach().clone(), **gradients}

    def row(self) -> Row:
        """Three steps with the fused kernels that there are."""
        fusing_on.cache_clear()
        model = prepare(self.model(), self.config("auto"))
        wait = [self.step(model, 0)]
        wait_for_plans(model, lambda: wait.append(self.step(model, 0)))
        pairs = [(self.expected[seed], self.step(model, seed)) for seed in range(_STEPS)]
        pairs += [(self.expected[0], found) for found in (wait[0], wait[-1])]
        found = stats(model)
        same = not found["steps_eager"] and all(_same(*pair) for pair in pairs)
        tensors = sum(len(expected) for expected, _ in pairs)
        counts = self.before, found["kernels"], found["fused"], found["fused_refused"]
        return Row(self.family, self.name, *counts, equal=same, tensors=tensors)


def _same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    words = torch.uint8
    return a.keys() == b.keys() and all(torch.equal(a[n].view(-1).view(words), b[n].view(-1).view(words)) for n in a)


def rows(families: Sequence[str], forms: Sequence[str], say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """A row for each family in each form. Kernels of all are compiled together, as one has many of another's.

    Raises:
        ConfigError: the library of a form is not installed.
        ExtensionError: there is no compiler, or it fails.
    """
    sys.path += [folder for name in forms if (folder := folder_of(FORMS[name].quant))]
    torch.set_num_threads(1)
    worth, fused_kernels.WORTH_SECONDS = fused_kernels.WORTH_SECONDS, 0.0
    try:
        pairs = [(family, form) for family in families for form in forms]
        cells = [_Cell(*pair) for pair in pairs if pair not in _NOT_PACKED]
        while True:
            runs = [cell.fusing.unknown(cell.graph) for cell in cells]
            wanted: dict[str, OpCall] = {name: call for each in runs for name, call in each.items()}
            if not wanted:
                break
            say(f"{len(wanted)} kernels are to be compiled")
            compile_kernels(wanted.values(), "cpu", say)
            for cell, each in zip(cells, runs, strict=True):
                cell.fusing.measure(each)
        return [cell.row() for cell in cells]
    finally:
        fused_kernels.WORTH_SECONDS = worth
        fusing_on.cache_clear()


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each family, a cell for each form."""
    found = {(row["family"], row["form"]): row for row in result["rows"]}
    families, forms = (dict.fromkeys(pair[place] for pair in found) for place in (0, 1))
    lines = [f"| family | {' | '.join(forms)} | bits of eager |", "|---" * (len(forms) + 2) + "|"]
    for family in families:
        own = [found.get((family, form)) for form in forms]
        same = all(row is None or row["equal"] for row in own)
        lines.append(f"| {family} | {' | '.join(map(_cell, own))} | {'yes' if same else 'NO'} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    return "—" if row is None else f"{row['before']} → {row['after']}; {row['fused']}, {row['refused']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 where a bit is not eager's."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=lambda text: names_of(tuple(TEN_FAMILIES), text), default=list(TEN_FAMILIES))
    parser.add_argument("--forms", type=lambda text: names_of(tuple(FORMS), text), default=list(FORMS))
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    found = [asdict(row) for row in rows(args.families, args.forms, lambda line: print(line, file=sys.stderr))]
    if args.output is not None and args.output.exists():
        measured = {(row["family"], row["form"]) for row in found}
        found += [r for r in json.loads(args.output.read_text())["rows"] if (r["family"], r["form"]) not in measured]
        words = []
    found.sort(key=lambda row: (list(TEN_FAMILIES).index(row["family"]), list(FORMS).index(row["form"])))
    head = provenance("python -m benchmarks.step.fused_families", words, "cpu")
    result = {"benchmark": "fused-families", **head, "batch": _ROWS, "tokens": _TOKENS, "rows": found}
    print(table(result))
    save(args.output, result)
    return int(not all(row["equal"] for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
