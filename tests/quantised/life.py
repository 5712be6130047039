"""The life of a prepared quantised model, in a process of its own: ``life.py FORM...``.

Prints one line of JSON for each form: what was seen, by the property that each is about.
"""

import copy
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.capture.parts import frozen_parts
from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.native.host_memory import ALIGNMENT
from tests.quantised.changes import same, step
from tests.quantised.edits import linear, scale
from tests.quantised.steps import model_of

torch.set_num_threads(1)


def made(form: str) -> Any:
    family = "qwen3_moe" if "experts" in form else "llama"
    return model_of({"form": form, "family": family, "checkpointing": False, "layers": 1})


def config(**keys: Any) -> DiscoConfig:
    return DiscoConfig(**{"memory_budget": "256MiB", "plan_cache": None, **keys})


def saved(model: Any) -> dict[str, str]:
    """A digest of each entry of the state dict."""
    with torch.no_grad():
        return {name: _digest(value) for name, value in model.state_dict().items()}


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    parts = [p for key in getattr(value, "__tensor_flatten__", lambda: ([], 0))()[0] for p in (getattr(value, key),)]
    if parts:
        return type(value).__name__ + "".join(map(_digest, parts))
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"


def spans(model: Any) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in frozen_parts(model).values() if t.nbytes)


def side_by_side(model: Any) -> bool:
    """Whether the frozen parts lie in one piece of memory, none over another, with nothing but padding between."""
    of, parts = spans(model), frozen_parts(model).values()
    apart = all(end <= begin for (_, end), (begin, _) in itertools.pairwise(of))
    return apart and of[-1][1] - of[0][0] <= sum(t.nbytes for t in parts) + ALIGNMENT * len(parts)


def second_copies(model: Any) -> list[str]:
    """Names of tensors on the quantised layers that hold as many bytes as the packed weight, elsewhere."""
    begin, end = spans(model)[0][0], spans(model)[-1][1]
    large = []
    for name, module in model.named_modules():
        for key, value in vars(getattr(module, "state", module)).items():
            if isinstance(value, torch.Tensor) and value.nbytes >= 4096 and not begin <= value.data_ptr() < end:
                large.append(f"{name}.{key}")
    return large


def life(form: str) -> dict[str, Any]:
    eager, model, seen = made(form), made(form), {}
    packed = sum(t.nbytes for t in frozen_parts(model).values())
    state = saved(model)
    prepare(model, config(verify_steps=2))
    seen["one arena"] = side_by_side(model)
    seen["saved as before"] = saved(model) == state
    seen["steps compared"] = all(same(step(model), step(eager)) for _ in range(3))
    seen["saved as eager"] = saved(model) == saved(eager)
    seen["still one arena"] = side_by_side(model) and second_copies(model) == []
    figures = stats(model)
    seen["figures"] = (
        figures["resident_weight_bytes"] <= packed + sum(b.nbytes for b in model.buffers())
        and figures["steps_compiled"] == 3
    )
    seen["prepared twice"] = prepare(model, config(verify_steps=2)) is model and stats(model) == figures
    prepare(model, config(memory_budget="200MiB"))
    seen["prepared otherwise"] = same(step(model), step(eager)) and stats(model)["steps_compiled"] == 1
    seen["copy"] = _copies(model, eager)
    restore(model)
    seen["restored"] = saved(model) == saved(eager) and same(step(model), step(eager)) and stats(model) == {}
    seen["names"] = sorted(frozen_parts(model)) == sorted(frozen_parts(eager))
    begins = {t.data_ptr() for t in frozen_parts(model).values()}
    prepare(model, config())
    seen["left and entered the arena"] = begins.isdisjoint(t.data_ptr() for t in frozen_parts(model).values())
    seen["prepared again"] = same(step(model), step(eager))
    seen["host memory"] = _host_memory(form, packed)
    seen["shared"] = _shared(form)
    seen["generated"] = _generated(form)
    seen["threads"] = _threads(form)
    seen["forked"] = _forked(form)
    return seen


def _copies(model: Any, eager: Any) -> Any:
    try:
        twin = copy.deepcopy(eager)
    except Exception as error:
        return f"not to be copied: {type(error).__name__}"
    copied = copy.deepcopy(model)
    expected = step(twin)
    # Also where the copy trains under a plan of its own.
    right = same(step(copied), expected) and stats(copied) == {} and same(step(prepare(copied, config())), expected)
    with torch.no_grad():
        for of in (copied, twin):
            scale(linear(of)).mul_(1.5)
    right = right and same(step(copied), step(twin)) and not same(step(twin), expected)
    return right and same(step(model), step(eager)) and same(step(model), expected)


def _host_memory(form: str, packed: int) -> Any:
    """A limit below the packed weights is refused; one of a little more, far below their bf16 size, is enough."""
    try:
        step(prepare(made(form), config(host_memory=packed // 2)))
    except ConfigError as error:
        if "host_memory" not in str(error):
            raise
        step(prepare(made(form), config(host_memory=packed + (1 << 14))))
        return True
    return False


def _generated(form: str) -> bool:
    """Tokens and logits between steps, twice. On some CPUs bitsandbytes repacks its weights then, and back to save."""
    model, eager = prepare(made(form), config()), made(form)
    right = [same(step(model), step(eager))]
    for _ in range(2):
        right += [_alike(_generate(model), _generate(eager)), same(step(model), step(eager))]
        right.append(saved(model) == saved(eager))
    return all(right)


def _generate(model: Any) -> Any:
    """What ``generate`` returns, or what bitsandbytes says of a layer that it cannot repack, on such a CPU."""
    model.eval()
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        try:
            made = model.generate(
                input_ids=BATCH["input_ids"], **settings, output_logits=True, return_dict_in_generate=True
            )
        except AssertionError as refused:
            made = str(refused)
    model.train()
    return made


def _alike(got: Any, expected: Any) -> bool:
    if isinstance(got, str) or isinstance(expected, str):
        return bool(got == expected)
    logits = zip(got.logits, expected.logits, strict=True)
    return torch.equal(got.sequences, expected.sequences) and all(torch.equal(a, b) for a, b in logits)


def _shared(form: str) -> bool:
    """Two models around the same quantised layer: both follow it, also after one of them was restored."""
    models, eagers = [made(form), made(form)], [made(form), made(form)]
    for pair in (models, eagers):
        pair[1].get_submodule(BASE).layers = pair[0].get_submodule(BASE).layers
    right = []
    for model in models:
        prepare(model, config())
    right += [same(step(m), step(e)) for m, e in zip(models, eagers, strict=True)]
    with torch.no_grad():
        for of in (models[0], eagers[0]):
            scale(linear(of)).mul_(1.5)
    right += [same(step(m), step(e)) for m, e in zip(models, eagers, strict=True)]
    restore(models[0])
    right += [same(step(m), step(e)) for m, e in zip(models, eagers, strict=True)]
    return all(right)


BASE = "base_model.model.model"


def _threads(form: str) -> bool:
    """Another model of the same form trains in eager mode while this one is captured."""
    other, model, eager = made(form), made(form), made(form)
    expected, results = step(eager), []
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            loss = other(**BATCH).loss
            loss.backward()
            results.append(loss.detach())

    other.eval()
    for module in other.modules():
        if "Linear" in type(module).__name__ or "Experts" in type(module).__name__:
            module.train()
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    alone = other(**BATCH).loss.detach()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        got = step(prepare(model, config()))
    finally:
        stop.set()
        thread.join()
    return same(got, expected) and bool(results) and all(torch.equal(alone, loss) for loss in results)


def _forked(form: str) -> bool:
    """A child forked after the engine has started is refused planned steps, evaluates, and trains once it is prepared
    itself; the parent's pending step and the next one are eager's."""
    model, eager = prepare(made(form), config()), made(form)
    loss, expected = (_seeded(of).loss for of in (model, eager))
    if (child := os.fork()) == 0:
        signal.alarm(60)
        sys.exit(7 if _refused_in_child(model, loss) and _used_in_child(model, eager) else 1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for of in (loss, expected):
        of.backward()
    grads = [{n: p.grad for n, p in of.named_parameters() if p.grad is not None} for of in (model, eager)]
    return ended == 7 and same((loss, grads[0]), (expected, grads[1])) and same(step(model), step(eager))


def _seeded(model: Any) -> Any:
    torch.manual_seed(3)
    return model(**BATCH)


def _refused_in_child(model: Any, loss: torch.Tensor) -> bool:
    said = []
    for use in (lambda: model(**BATCH), loss.backward):
        try:
            use()
        except ExecutionError as error:
            said.append("forked" in str(error))
    return said == [True, True]


def _used_in_child(model: Any, eager: Any) -> bool:
    with torch.no_grad():
        evaluated = torch.equal(_seeded(model).logits, _seeded(eager).logits)
    return evaluated and same(step(prepare(restore(model), config())), step(eager))


BATCH = {"input_ids": torch.arange(16).reshape(2, 8), "labels": torch.arange(16).reshape(2, 8)}


def main() -> None:
    for form in sys.argv[1:]:
        try:
            seen = life(form)
        except Exception:
            seen = {"error": traceback.format_exc()}
        print(json.dumps({"form": form, "seen": seen}), flush=True)


if __name__ == "__main__":
    main()
