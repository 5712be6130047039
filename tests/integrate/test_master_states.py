"""What becomes of fp32 masters when states are saved and loaded, and when others change weights, dtypes and models."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, prepare, restore, settle
from tests.integrate.fp32_copies import UPDATES, Copies, Net, adamw, config, go_on, pair, train
from tests.support.models import family_full


@pytest.mark.parametrize("update", UPDATES)
def test_a_state_that_is_saved_and_loaded(update: str) -> None:
    """Bits of a run without interruption, into a new model and into the same one."""
    model, optimizer, twin = pair(update)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = prepare(Net(), config(update))
    other = adamw(again.parameters())
    again.load_state_dict(saved[0])
    other.load_state_dict(copy.deepcopy(saved[1]))
    train(model, optimizer, range(7, 9))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    kept = copy.deepcopy(twin.model), copy.deepcopy(twin)
    go_on(again, other, twin)
    go_on(model, optimizer, kept[1])


def rows(count: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(0, 96, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 12, "labels": row} for row in ids]


def trainer(folder: Path, resume: str | None) -> tuple[torch.nn.Module, list[Any], Any]:
    model: Any = family_full("llama", dtype=torch.bfloat16)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        warmup_steps=2,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant_with_warmup",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    made = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(24),
        data_collator=default_data_collator,
        callbacks=[DiscoCallback(config("deferred"))],
    )
    made.train(resume_from_checkpoint=resume)
    log = [[entry.get(key) for key in ("loss", "grad_norm", "step")] for entry in made.state.log_history[:-1]]
    optimizer: Any = made.optimizer
    return model, log, optimizer.state_dict()["state"]


def test_a_trainer_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Logs, weights, masters and moments are those of a run without interruption."""
    model, log, states = trainer(tmp_path, None)
    again, later, others = trainer(tmp_path, str(tmp_path / "checkpoint-2"))
    assert log == later
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert all(torch.equal(others[n][key], value) for n, state in states.items() for key, value in state.items())
    assert all(state["master"].dtype is torch.float32 for state in others.values())


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


@pytest.mark.parametrize("update", UPDATES)
def test_a_state_without_masters_is_adopted(update: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a script that trains the weights themselves: masters begin as the weights, moments as they are."""
    plain = Net()
    script = adamw(plain.parameters())
    train(plain, script, range(2))
    twin = Copies(copy.deepcopy(plain))
    for parameter, master in zip(plain.parameters(), twin.masters.values(), strict=True):
        twin.optimizer.state[master] = {k: v.float().clone() for k, v in script.state[parameter].items()}
    model = prepare(Net(), config(update))
    optimizer = adamw(model.parameters())
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(script.state_dict()))
    go_on(model, optimizer, twin)
    assert said(caplog, "has no masters") == 1


def test_a_state_that_was_loaded_before_prepare(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch has cast its masters: they begin anew, which is said."""
    model, optimizer, _ = pair()
    late = Net()
    other = adamw(late.parameters())
    late.load_state_dict(model.state_dict())
    restore(model)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[late.first.weight]["master"].dtype is torch.bfloat16
    twin = Copies(copy.deepcopy(late))
    for parameter, master in zip(late.parameters(), twin.masters.values(), strict=True):
        state = other.state[parameter]
        twin.optimizer.state[master] = {k: v.float().clone() for k, v in state.items() if k != "master"}
    prepare(late, config())
    go_on(late, other, twin)
    assert said(caplog, "Load the state behind prepare()") == 1


def test_a_state_with_masters_goes_on_in_a_script_without() -> None:
    """PyTorch's own step takes it; nothing of ours is there."""
    model, optimizer, _ = pair()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    restore(model)
    plain, twin = Net(), Net()
    plain.load_state_dict(saved[0])
    twin.load_state_dict(saved[0])
    script, other = adamw(plain.parameters()), adamw(twin.parameters())
    script.load_state_dict(copy.deepcopy(saved[1]))
    other.load_state_dict(saved[1])
    for state in other.state.values():
        state.pop("master", None)
    train(plain, script, range(2, 4))
    train(twin, other, range(2, 4))
    assert all(map(torch.equal, plain.parameters(), twin.parameters()))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("how", ["data", "load_state_dict", "numpy"])
def test_masters_follow_weights_that_are_written_to(how: str, update: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the weight has changed, its master begins anew as the weight is; elsewhere it keeps its bits."""
    model, optimizer, twin = pair(update)
    settle(model)
    for each in (model, twin.model):
        if how == "data":
            each.first.weight.data[3:5] *= 2
        elif how == "numpy":
            each.first.weight.detach().view(torch.int16).numpy()[1, 2:9] = 16000
        else:
            each.load_state_dict({name: tensor / 2 for name, tensor in each.state_dict().items()})
    twin.follow()
    go_on(model, optimizer, twin)
    assert said(caplog, "written to by somebody else") == 1
    go_on(model, optimizer, twin, range(5, 7))


def test_a_model_that_is_restored_and_a_copy_go_on_without_masters(caplog: pytest.LogCaptureFixture) -> None:
    """As a script does with the moments that there are, in the dtype of the weights; told."""
    model, optimizer, _ = pair()
    plain, script = copy.deepcopy((model, optimizer))
    restore(model)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    other = adamw(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (plain, script), (twin, other)):
        train(each, its, range(2, 4))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(map(torch.equal, plain.parameters(), twin.parameters()))
    assert not any("master" in state for state in optimizer.state.values())
    # The third has masters that were cast when they were loaded.
    assert said(caplog, "updates these weights themselves from now on") == 3


def test_another_dtype_is_followed() -> None:
    """fp32 weights drop their masters; weights that become bf16 get some."""
    model, optimizer, twin = pair()
    model.float()
    twin.model.float()
    plain = Copies(twin.model)
    for parameter, master in twin.masters.items():
        plain.optimizer.state[parameter] = twin.optimizer.state[master]
    go_on(model, optimizer, plain, range(2, 4))
    assert not any("master" in state for state in optimizer.state.values())
    model.bfloat16()
    twin.model.bfloat16()
    back = Copies(twin.model)
    for parameter, master in back.masters.items():
        back.optimizer.state[master] = plain.optimizer.state[parameter]
    go_on(model, optimizer, back, range(4, 6))
