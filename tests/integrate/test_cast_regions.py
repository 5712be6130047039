"""An autocast region keeps its casts of trained weights: steps inside one have eager's bits, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from disco_accel import prepare, stats
from disco_accel.capture.autocast import cast_generation, outside_autocast
from disco_accel.errors import CaptureError, ExecutionError
from tests.integrate.twins import SMALL, batch, config
from tests.support.models import tiny_lora

Loop = Callable[[Any, torch.optim.Optimizer], list[torch.Tensor]]
STALE = "the region spans an update: its casts are stale"


def region(**keys: Any) -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16, **keys)


def full(**keys: Any) -> Any:
    """All weights are trained, in fp32."""
    return tiny_lora(**SMALL, **keys).merge_and_unload().requires_grad_(True).train()


def lora(**keys: Any) -> Any:
    return tiny_lora(**SMALL, **keys)


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def run(model: Any, loop: Loop) -> list[torch.Tensor | None]:
    """What ``loop`` returns, then all gradients."""
    weights = trained(model)
    made = loop(model, torch.optim.AdamW(weights, lr=1e-2, fused=True))
    return [*made, *(p.grad for p in weights)]


def assert_eagers_bits(make: Callable[[], Any], loop: Loop, **keys: Any) -> Any:
    model = prepare(make(), config(**keys))
    for got, expected in zip(run(model, loop), run(make(), loop), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or expected is None or torch.equal(got, expected)
    assert stats(model)["steps_eager"] == 0
    return model


def two(model: Any, _: Any) -> list[torch.Tensor]:
    with region():
        loss = model(**batch(0)).loss + model(**batch(1)).loss
    loss.backward()
    return [loss.detach()]


def three_of_two_plans(model: Any, _: Any) -> list[torch.Tensor]:
    """The second plan is captured, and logits are read, between forwards that share casts."""
    for _step in range(2):
        with region():
            first = model(**batch(0))
            loss = first.loss + first.logits.detach().float().mean() + model(**batch(1, length=6)).loss
            loss = loss + model(**batch(2)).loss
        loss.backward()
    return [loss.detach()]


def outputs_of_two(model: Any, _: Any) -> list[torch.Tensor]:
    with region():
        first, second = (model(**batch(seed), output_hidden_states=True) for seed in range(2))
        loss = first.loss + second.loss + first.hidden_states[1].float().pow(2).mean()
    loss.backward()
    return [loss.detach()]


def one_by_one(model: Any, _: Any) -> list[torch.Tensor]:
    """Accumulation: a backward for each forward, in a region around both."""
    losses = []
    with region():
        for seed in range(3):
            loss = model(**batch(seed)).loss
            losses.append(loss.detach())
            loss.backward()
    return losses


def accelerates(model: Any, _: Any) -> list[torch.Tensor]:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    with accelerator.autocast():
        loss = model(**batch(0)).loss + model(**batch(1)).loss
    loss.backward()
    return [loss.detach()]


@pytest.mark.parametrize("loop", [two, three_of_two_plans, outputs_of_two, one_by_one, accelerates])
def test_forwards_of_one_region_have_eagers_bits(loop: Loop) -> None:
    assert_eagers_bits(full, loop)


@pytest.mark.parametrize(
    "keys",
    [{"checkpointing": True}, {"checkpointing": True, "reentrant": True}, {}],
    ids=["checkpointed", "reentrant", "plain"],
)
def test_adapters_in_one_region_have_eagers_bits(keys: dict[str, bool]) -> None:
    """A reentrant segment casts anew in its recomputation, so that its gradients meet in fp32."""

    def make() -> Any:
        model = lora(checkpointing=keys.get("checkpointing", False))
        if keys.get("reentrant"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.enable_input_require_grads()
        return model

    assert_eagers_bits(make, two)


def test_a_backward_that_an_error_ends_leaves_nothing_for_the_next() -> None:
    def loop(model: Any, _: Any) -> list[torch.Tensor]:
        def fail(_: torch.Tensor) -> None:
            raise ValueError

        with region():
            first, second = (model(**batch(seed)).loss for seed in range(2))
            scaled = first * 1.0
            scaled.register_hook(fail)
        with pytest.raises(ValueError):
            (scaled + second).backward()
        model.zero_grad()
        with region():
            loss = model(**batch(2)).loss + model(**batch(3)).loss
        loss.backward()
        return [loss.detach()]

    assert_eagers_bits(full, loop)


def test_a_weight_that_is_used_twice_is_refused_where_its_gradients_meet() -> None:
    model = prepare(full(tie_word_embeddings=True), config())
    with pytest.raises(ExecutionError, match=r"share its cast.*cache_enabled=False"):
        two(model, None)
    assert_eagers_bits(lambda: full(tie_word_embeddings=True), one_by_one)


def test_a_field_that_is_read_drops_no_cast_of_a_module_beside_the_model() -> None:
    head = torch.nn.Linear(32, 1)
    gradients = []
    model = prepare(full(), config())
    # The capture of the first step has dropped it.
    for one in (model, model, full()):
        head.zero_grad()
        with region():
            fields = [one(**batch(seed), output_hidden_states=True).hidden_states[-1] for seed in range(2)]
            loss = head(fields[0]).mean() - head(one(**batch(2), output_hidden_states=True).hidden_states[-1]).mean()
        (loss + head(fields[1].float()).mean()).backward()
        gradients.append(head.weight.grad.clone())  # type: ignore[union-attr]
    assert torch.equal(gradients[1], gradients[2])


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    loss = model(**batch(seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def around(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with region():
        return [_step(model, optimizer, seed) for seed in range(2)]


def _data_copied(model: Any, _: Any) -> list[torch.Tensor]:
    with region():
        model(**batch(0)).loss.backward()
        for weight in trained(model):
            weight.data.copy_(weight.data * 1.01)
        return [model(**batch(1)).loss.detach()]


def _evaluated(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with region():
        _step(model, optimizer, 0)
        with torch.no_grad():
            return [model(**batch(1)).loss]


def _evaluated_first(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The casts are those of an evaluation before the update."""
    with region():
        with torch.no_grad():
            model(**batch(1))
        for weight in trained(model):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        return [model(**batch(1)).loss.detach()]


def _nested(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with region():
        losses = []
        for seed in range(2):
            with region():
                losses.append(_step(model, optimizer, seed))
        return losses


@pytest.mark.parametrize("loop", [around, _data_copied, _evaluated, _evaluated_first, _nested])
def test_a_region_that_spans_an_update_is_refused(loop: Loop) -> None:
    with pytest.raises(CaptureError, match=STALE):
        run(prepare(full(), config()), loop)


@pytest.mark.parametrize("loop", [around, _evaluated])
def test_a_region_that_spans_a_planned_update_is_refused(loop: Loop) -> None:
    with pytest.raises(CaptureError, match=STALE):
        run(prepare(full(), config(optimizer="planned", planner="timed")), loop)


def test_a_region_that_spans_an_update_is_told_once_where_eager_mode_may_stand_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = prepare(full(), config(on_unsupported="eager"))
    run(model, lambda m, o: [*around(m, o), *around(m, o)])
    assert stats(model)["steps_eager"] == 2
    assert sum(STALE in r.getMessage() for r in caplog.records if r.message.startswith("this step runs")) == 1


def _each(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for seed in range(2):
        with region():
            losses.append(_step(model, optimizer, seed))
    return losses


def _not_kept(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with region(cache_enabled=False):
        return [_step(model, optimizer, seed) for seed in range(2)]


def _evaluated_before(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with region():
        with torch.no_grad():
            loss = model(**batch(1)).loss
        return [loss, _step(model, optimizer, 0)]


def _cleared(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with region():
        first = _step(model, optimizer, 0)
        torch.clear_autocast_cache()
        return [first, _step(model, optimizer, 1)]


@pytest.mark.parametrize("loop", [_each, _not_kept, _evaluated_before, _cleared])
def test_regions_without_stale_casts_stay_planned(loop: Loop) -> None:
    assert_eagers_bits(full, loop)


def test_weights_of_which_nothing_is_cast_may_change_inside_a_region() -> None:
    assert_eagers_bits(lambda: lora().to(torch.bfloat16), around)


def test_casts_have_a_number_until_they_are_dropped() -> None:
    assert cast_generation() is None
    with region(cache_enabled=False):
        assert cast_generation() is None
    with region():
        first = cast_generation()
        with region(), torch.no_grad():
            assert cast_generation() == first
        with outside_autocast(), region():
            pass
        assert first is not None and cast_generation() == first
        torch.clear_autocast_cache()
        assert cast_generation() != first
    with torch.autocast("cpu", torch.float16):
        assert cast_generation() not in (None, first)
