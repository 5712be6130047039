"""The key of a step changes with everything its graph depends on, and with nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from disco_accel.errors import CaptureError
from disco_accel.step.state import python_state
from disco_accel.step.state import step_key as keys
from disco_accel.step.state.step_key import is_packed, step_key
from tests.support.models import random_batch, tiny_lora

Batch = dict[str, Any]
Change = Callable[[Any, Batch], Any]


def _autocast(_model: Any, _batch: Batch) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _no_grad(_model: Any, _batch: Batch) -> Any:
    return torch.no_grad()


def _set(key: str, value: Any) -> Change:
    return lambda _model, batch: batch.update({key: value})


def _pad(_model: Any, batch: Batch) -> None:
    batch["attention_mask"][0, -3:] = 0


def _longer(_model: Any, batch: Batch) -> None:
    batch.update(random_batch(length=24))


def _transpose(_model: Any, batch: Batch) -> None:
    batch["input_ids"] = batch["input_ids"].t().contiguous().t()


def _int32(_model: Any, batch: Batch) -> None:
    batch["input_ids"] = batch["input_ids"].int()


def _freeze_one(model: Any, _batch: Batch) -> None:
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


def _eval_one(model: Any, _batch: Batch) -> None:
    model.base_model.model.model.layers[0].eval()


def _checkpointing(model: Any, _batch: Batch) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _scale(model: Any, _batch: Batch) -> None:
    model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] = 3.0


def _replace_module(model: Any, _batch: Batch) -> None:
    layer = model.base_model.model.model.layers[0].mlp
    layer.act_fn = torch.nn.GELU()


def _replace_parameter(model: Any, _batch: Batch) -> None:
    norm = model.base_model.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)


def _replace_table(model: Any, _batch: Batch) -> None:
    norm = model.base_model.model.model.norm
    norm._parameters = {n: torch.nn.Parameter(p.clone(), requires_grad=False) for n, p in norm._parameters.items()}


def _rename_parameter(model: Any, _batch: Batch) -> None:
    norm = model.base_model.model.model.norm
    norm._parameters["scale"] = norm._parameters.pop("weight")


def _dropout(model: Any, _batch: Batch) -> None:
    model.base_model.model.model.layers[0].self_attn.attention_dropout = 0.25


def _merged_in_place(model: Any, _batch: Batch) -> None:
    model.base_model.model.model.layers[0].mlp.up_proj.merged_adapters.append("default")


def _disabled_alone(model: Any, _batch: Batch) -> None:
    model.base_model.model.model.layers[0].mlp.up_proj._disable_adapters = True


def _scalings(model: Any, _batch: Batch) -> None:
    model.base_model.model.model.layers[0].mlp.up_proj.scaling = {"default": 3.0}


def _checkpoint_keyword(model: Any, _batch: Batch) -> Any:
    """Changed in place, as no library does."""
    _checkpointing(model, _batch)
    before = step_key(model, _batch)
    segment = model.base_model.model.model.layers[0]
    segment._gradient_checkpointing_func.keywords["use_reentrant"] = True
    assert step_key(model, _batch) != before


def _bf16_base(model: Any, _batch: Batch) -> None:
    head = model.base_model.model.lm_head.weight
    head.data = head.data.bfloat16()


def _add_adapter(model: Any, _batch: Batch) -> None:
    model.add_adapter("other", model.peft_config["default"])


def _other_attention(model: Any, _batch: Batch) -> None:
    model.base_model.model.set_attn_implementation("eager")


@contextmanager
def _matmul_precision(_model: Any, _batch: Batch) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


CHANGES: dict[str, Change] = {
    "shape": _longer,
    "stride": _transpose,
    "dtype": _int32,
    "padding": _pad,
    "python value": _set("logits_to_keep", 1),
    "bool for int": _set("flag", True),
    "packing": _set("position_ids", torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)),
    "new tensor": _set("extra", torch.ones(2)),
    "autocast": _autocast,
    "grad mode": _no_grad,
    "matmul precision": _matmul_precision,
    "eval": lambda model, _: model.eval() and None,
    "eval of one layer": _eval_one,
    "frozen parameter": _freeze_one,
    "checkpointing": _checkpointing,
    "merged": lambda model, _: model.merge_adapter(),
    "disabled": lambda model, _: model.base_model.disable_adapter_layers(),
    "scaling": _scale,
    "new adapter": _add_adapter,
    "module replaced": _replace_module,
    "parameter replaced": _replace_parameter,
    "parameter recast": _bf16_base,
    "parameter table replaced": _replace_table,
    "parameter renamed": _rename_parameter,
    "dropout": _dropout,
    "merged in place": _merged_in_place,
    "disabled, of one layer": _disabled_alone,
    "scalings replaced": _scalings,
    "checkpoint keyword": _checkpoint_keyword,
    "attention": _other_attention,
    "unloaded": lambda model, _: model.unload() and None,
}


def _start() -> tuple[Any, Batch]:
    batch: Batch = dict(random_batch())
    batch["flag"] = 1
    batch["num_items_in_batch"] = torch.tensor(5)
    return tiny_lora(hidden=32), batch


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_that_matters_changes_the_key(change: Change) -> None:
    model, batch = _start()
    before = step_key(model, batch)
    with change(model, batch) or nullcontext():
        after = step_key(model, batch)
        assert after != before
        assert after == step_key(model, batch) and hash(after) == hash(step_key(model, batch))


def test_a_change_that_does_not_matter_keeps_the_key() -> None:
    """Contents of the batch and of the weights, gradients, and per-step numbers."""
    model, batch = _start()
    before = step_key(model, batch)
    again = random_batch(seed=9) | {"flag": 1, "num_items_in_batch": torch.tensor(8)}
    loss = model(**{k: v for k, v in again.items() if k != "flag"}).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= parameter.grad
    assert step_key(model, again) == before
    seven, eight = ({**batch, "num_items_in_batch": n} for n in (7, 8))
    assert step_key(model, seven) == step_key(model, eight)


def test_returning_to_an_earlier_state_returns_to_its_key() -> None:
    """A plan made before an evaluation is found again after it."""
    model, batch = _start()
    before = step_key(model, batch)
    model.eval()
    with model.disable_adapter():
        assert step_key(model, batch) != before
    model.train()
    assert step_key(model, batch) == before


@pytest.mark.parametrize("change", [CHANGES[name] for name in CHANGES if not name.startswith("eval")])
def test_a_change_between_evaluations_is_seen_in_both_modes(change: Change) -> None:
    """The state of the other mode is kept meanwhile: neither it nor this one may be taken for what it was."""
    model, batch = _start()
    keys = []
    for _ in range(2):
        for training in (True, False):
            model.train(training)
            keys.append(step_key(model, batch))
    assert keys[:2] == keys[2:] and keys[0] != keys[1]
    with change(model, batch) or nullcontext():
        for training in (True, False):
            model.train(training)
            assert step_key(model, batch) not in keys


def test_a_switch_costs_no_walk_and_keeps_no_lost_object_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _start()
    keys = [step_key(model.train(mode), batch) for mode in (True, False)]
    with monkeypatch.context() as patch:
        patch.setattr(python_state, "Walk", None)
        assert [step_key(model.train(mode), batch) for mode in (True, False) * 2] == keys * 2
    norm = model.base_model.model.model.norm
    lost = weakref.ref(norm.weight)
    _replace_parameter(model, batch)
    step_key(model, batch)
    step_key(model.train(), batch)
    gc.collect()
    assert lost() is None


def test_a_key_does_not_keep_its_model_alive() -> None:
    """Models come and go in one process; each would hold its weights."""
    model, batch = _start()
    key = step_key(model, batch)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and key is not None


def test_an_argument_that_no_key_describes_is_refused() -> None:
    model, batch = _start()
    with pytest.raises(CaptureError, match=r"past_key_values.*object"):
        step_key(model, {**batch, "past_key_values": object()})


@pytest.mark.parametrize(
    ("positions", "packed"),
    [([0, 1, 2, 3], False), ([5, 6, 7, 8], False), ([0, 1, 0, 1], True), ([0, 0, 1, 2], True), ([0, 2, 4, 6], True)],
)
def test_packing_is_seen_in_position_ids(positions: list[int], packed: bool) -> None:
    """Consecutive positions are one sequence wherever they start."""
    assert is_packed({"position_ids": torch.tensor([positions])}) is packed


class _Forbidding:
    """As objects of pydantic: to ask for an attribute that is not there is an error of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked for")


def test_objects_that_forbid_to_be_looked_at_are_looked_at_without_asking_them() -> None:
    model, batch = _start()
    model.odd = _Forbidding()
    key = step_key(model, batch)
    assert step_key(model, batch) == key
    model.odd.value = 1
    assert step_key(model, batch) != key


def _other_bias(model: Any, _batch: Batch) -> None:
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features), requires_grad=False)


def test_a_forward_walks_through_the_layers_after_a_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first forward changes of packed weights hangs by modules, tensors and switches."""
    model, batch = _start()
    walks: list[torch.nn.Module] = []
    monkeypatch.setattr(keys, "run_first_forward_changes", lambda model, _device, gradients: walks.append(model))

    def walked(change: Change) -> bool:
        before = len(walks)
        change(model, batch)
        for _ in range(3):
            step_key(model, batch, forward_on=torch.device("cpu"))
        assert len(walks) - before <= 1
        return len(walks) > before

    assert walked(lambda *_: None) and not walked(lambda *_: None) and not walked(_pad)
    assert all(walked(change) for change in (_eval_one, _other_bias, _replace_module, _freeze_one))
    step_key(model, batch)
    assert not walked(lambda *_: None)
