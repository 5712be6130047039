"""Changes a prepared quantised model and its eager twin alike, in a process of its own: ``changes.py FORM...``.

``FORM:CHANGE`` is one change alone. With ``--adapted`` first, LoRA models of transformers instead of small ones.
Prints one line of JSON for each form, change and moment: what the next step made of it.
"""

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import DiscoError, ExecutionError
from tests.quantised.edits import CHANGES, LASTING, Change, moments
from tests.quantised.small import EXPERTS, small_model, tokens

torch.set_num_threads(1)


def step(model: Any, between: Change | None = None) -> tuple[Any, ...]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    output = model(**tokens(1))
    loss = output if isinstance(output, torch.Tensor) else output.loss
    if between is not None:
        between(model)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return (
        torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(g, b[1][n]) for n, g in a[1].items())
    )


def tried(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def verdict(planned: Any, eager: Any, before: Any) -> tuple[str, str]:
    if (isinstance(planned, DiscoError) and not isinstance(planned, ExecutionError)) or "was changed in place" in str(
        planned
    ):
        return "refused", str(planned)
    if isinstance(planned, Exception):
        kind = "as eager" if type(planned) is type(eager) else "ERROR"
        return kind, "".join(traceback.format_exception(planned))[-1500:]
    if isinstance(eager, Exception):
        return "MORE", repr(eager)
    if not same(planned, eager):
        return "WRONG", ""
    return ("no effect" if not isinstance(before, Exception) and same(eager, before) else "followed"), ""


def adapted_model(form: str) -> Any:
    """One layer of a Llama, or of a mixture, with LoRA."""
    from tests.quantised.steps import model_of

    family = "qwen3_moe" if form == EXPERTS else "llama"
    return model_of({"form": form, "family": family, "checkpointing": False, "layers": 1})


def prepared(model: Any) -> Any:
    return prepare(model, DiscoConfig(memory_budget="256MiB", plan_cache=None))


def twins(form: str, adapted: bool) -> list[Any]:
    return [(adapted_model if adapted else small_model)(form) for _ in range(2)]


class Pair:
    """A prepared model and its eager twin."""

    def __init__(self, form: str, adapted: bool) -> None:
        self.eager, model = twins(form, adapted)
        self.model = prepared(model)
        self.before = step(self.eager)
        assert same(self.before, step(self.model))

    def both(self, action: Callable[[Any], Any]) -> tuple[str, str]:
        """What came of ``action`` on either."""
        planned, eager = (tried(functools.partial(action, of)) for of in (self.model, self.eager))
        return verdict(planned, eager, self.before)


def attack(pair: Pair, change: Change, moment: str) -> dict[str, Any]:
    """Change both and make two steps; whatever came of the first, the second is right or refused."""

    def between_steps(of: Any) -> Any:
        change(of)
        return step(of)

    said, detail = pair.both(between_steps if moment == "between steps" else lambda of: step(of, change))
    after, later = pair.both(step)
    figures = stats(pair.model)
    planned = {"planned": figures["steps_compiled"], "eager": figures["steps_eager"], "plans": figures["plans"]}
    pair.before = tried(lambda: step(pair.eager))
    return {"verdict": said, "after": after, "detail": detail or later} | planned


def attack_first(form: str, adapted: bool, change: Change) -> dict[str, Any]:
    """Change both before one of them is prepared, and make two steps."""
    eager, model = twins(form, adapted)
    before = step(eager)
    for of in (model, eager):
        change(of)
    expected = tried(lambda: step(eager))
    said, detail = verdict(tried(lambda: step(prepared(model))), expected, before)
    after, later = verdict(tried(lambda: step(model)), expected, before)
    figures = stats(model) or {"steps_compiled": 0, "steps_eager": 0, "plans": 0}
    planned = {"planned": figures["steps_compiled"], "eager": figures["steps_eager"], "plans": figures["plans"]}
    return {"verdict": said, "after": after, "detail": detail or later} | planned


def main() -> None:
    forms = [argument for argument in sys.argv[1:] if argument != "--adapted"]
    adapted = len(forms) < len(sys.argv) - 1
    for form in forms:
        form, _, only = form.partition(":")
        pair = None
        for name, change in CHANGES[form].items():
            if only and name != only:
                continue
            for moment in moments(name):
                try:
                    if moment == "before prepare":
                        result = attack_first(form, adapted, change)
                    else:
                        pair = pair or Pair(form, adapted)
                        result = attack(pair, change, moment)
                except Exception:
                    result = {"verdict": "CRASH", "detail": traceback.format_exc()[-2500:]}
                print(json.dumps({"form": form, "change": name, "moment": moment} | result), flush=True)
                good = {"followed", "no effect", "refused"}
                if name in LASTING or result["verdict"] not in good or result["after"] not in good - {"refused"}:
                    pair = None


if __name__ == "__main__":
    main()
