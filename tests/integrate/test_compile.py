"""``torch.compile`` before, after and inside a prepared model: steps run from plans, to eager mode's bits, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import compile_regions
from transformers import Trainer, TrainingArguments

from disco_accel import DiscoCallback, DiscoPlugin, prepare, restore, stats
from disco_accel.step.run.session import find_state
from tests.integrate.twins import SMALL, assert_same_step, batch, config
from tests.support.models import tiny_lora


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def layers(model: Any) -> torch.nn.ModuleList:
    found: torch.nn.ModuleList = model.get_base_model().model.layers
    return found


def compiled_after(model: torch.nn.Module) -> Any:
    return torch.compile(prepare(model, config()), backend="eager")


def compiled_before(model: torch.nn.Module) -> Any:
    compiled: Any = torch.compile(model, backend="eager")
    assert prepare(compiled, config()) is compiled
    return compiled


def in_place_after(model: torch.nn.Module) -> Any:
    prepare(model, config()).compile(backend="eager")
    return model


def in_place_before(model: torch.nn.Module) -> Any:
    model.compile(backend="eager")
    return prepare(model, config())


def used_compiled_then_prepared(model: torch.nn.Module) -> Any:
    compiled: Any = torch.compile(model, backend="eager")
    compiled(**batch()).loss.backward()
    prepare(model, config())
    return compiled


def layer_by_layer(model: torch.nn.Module) -> Any:
    for i, layer in enumerate(layers(model)):
        layers(model)[i] = torch.compile(layer, backend="eager")
    return prepare(model, config())


def layers_in_place(model: torch.nn.Module) -> Any:
    for layer in layers(model):
        layer.compile(backend="eager")
    return prepare(model, config())


def by_regions(model: torch.nn.Module) -> Any:
    return compile_regions(prepare(model, config()), backend="eager")


WAYS: list[Callable[[torch.nn.Module], Any]] = [
    *(compiled_after, compiled_before, in_place_after, in_place_before, used_compiled_then_prepared),
    *(layer_by_layer, layers_in_place, by_regions),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_a_compiled_model_runs_from_its_plan_to_eager_bits(way: Any) -> None:
    model = tiny_lora(**SMALL)
    used, eager = way(model), tiny_lora(**SMALL)
    for seed in range(2):
        expected = eager(**batch(seed)).loss
        eager.zero_grad()
        expected.backward()
        model.zero_grad()
        loss = used(**batch(seed)).loss
        loss.backward()
        assert torch.equal(loss, expected)
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        wanted = [p.grad for p in eager.parameters() if p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))  # type: ignore[arg-type]
    assert stats(used)["steps_compiled"] == 2 and stats(used)["steps_eager"] == 0


def test_it_is_told_once_and_undone_by_restore(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_lora(**SMALL)
    compiled: Any = torch.compile(model, backend="eager")
    prepare(compiled, config())
    for seed in range(3):
        compiled(**batch(seed, 8 + seed)).loss.backward()
    told = [r for r in caplog.records if r.getMessage().startswith("torch.compile: this model is compiled")]
    assert len(told) == 1 and told[0].levelno == logging.WARNING
    assert restore(compiled) is compiled and find_state(compiled) is None
    assert_same_step(model, tiny_lora(**SMALL))


def test_layers_are_compiled_again_where_no_plan_runs() -> None:
    """Tracing leaves the user's compilation of parts alone: a model that is restored still uses it."""
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    model = tiny_lora(**SMALL)
    layers(model)[0].compile(backend=backend)
    prepare(model, config())
    model(**batch()).loss.backward()
    assert not compilations and stats(model)["steps_compiled"] == 1
    with torch.no_grad():
        planned = model(**batch()).loss
        assert not compilations and stats(model)["forwards_planned"] == 1
        planless = restore(model)(**batch()).loss
    eager = tiny_lora(**SMALL)(**batch()).loss
    assert compilations and torch.allclose(planless, eager) and torch.equal(planned, eager)


def test_a_compiled_loss_and_a_compiled_optimizer_step_go_on() -> None:
    """What is compiled around a planned step stays compiled, and the step between stays a planned one."""
    planned, eager = prepare(tiny_lora(**SMALL), config()), tiny_lora(**SMALL)
    results = []
    for model in (planned, eager):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scaled = torch.compile(lambda loss: loss * 2.0, backend="eager")
        update = torch.compile(optimizer.step, backend="eager")
        for seed in range(2):
            scaled(model(**batch(seed)).loss).backward()
            update()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert stats(planned)["steps_compiled"] == 2


def test_fullgraph_says_what_to_leave_out() -> None:
    compiled: Any = torch.compile(prepare(tiny_lora(**SMALL), config()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"leave fullgraph out|fullgraph=True"):
        compiled(**batch())


def test_a_layer_that_cannot_be_planned_still_trains_compiled_in_eager_mode() -> None:
    model, eager = tiny_lora(**SMALL), tiny_lora(**SMALL)
    prepare(model, config(on_unsupported="eager"))
    compiled: Any = torch.compile(model, backend="eager")
    arguments = {**batch(), "return_dict": False}
    assert torch.equal(compiled(**arguments)[0], eager(**arguments)[0])
    assert stats(model)["steps_eager"] == 1


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[0] for name, column in batch(row).items()}


def _losses(folder: Path, callbacks: list[Any], **arguments: Any) -> tuple[list[float], torch.nn.Module]:
    model = tiny_lora(**SMALL)
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=_Rows(), callbacks=callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@pytest.mark.parametrize("bf16", [False, True])
def test_trainers_torch_compile_is_left_to_the_plan(tmp_path: Path, bf16: bool, caplog: Any) -> None:
    """``TrainingArguments(torch_compile=True)``: the plan's steps, uncompiled eager mode's losses, told once."""
    expected, _ = _losses(tmp_path, [], bf16=bf16)
    losses, model = _losses(tmp_path, [DiscoCallback(config())], bf16=bf16, torch_compile=True)
    assert losses == expected and stats(model)["steps_compiled"] == 2
    assert sum("torch_compile, dynamo_backend: INDUCTOR is not applied" in m for m in caplog.messages) == 1


def test_accelerates_dynamo_backend_is_left_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an accelerate config with ``dynamo_config`` sets it, through a raw loop."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    model = DiscoPlugin(config()).prepare(Accelerator(cpu=True), tiny_lora(**SMALL))
    assert not isinstance(model, torch._dynamo.eval_frame.OptimizedModule)
    assert_same_step(model, tiny_lora(**SMALL))
    assert stats(model)["steps_compiled"] == 1
