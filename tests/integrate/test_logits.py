"""Losses outside the model, and logits beside a loss, are eager's to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.utils import ModelOutput

from disco_accel import DiscoConfig, prepare, pure, restore, stats
from disco_accel.errors import BudgetTooSmall, ExecutionError
from disco_accel.step.run.session import current_step
from tests.support.models import random_batch, tiny_lora

Loss = Callable[[Any, int], torch.Tensor]
AMPLE = 1 << 30


def config(memory: int = AMPLE, **keys: Any) -> DiscoConfig:
    return DiscoConfig(memory_budget=str(memory), device="cpu", planner="build", plan_cache=None, **keys)


def inputs(seed: int) -> dict[str, torch.Tensor]:
    """A batch without labels."""
    batch = random_batch(seed=seed)
    del batch["labels"]
    return batch


def log_probability(model: Any, seed: int) -> torch.Tensor:
    """Of each row of a batch, as preference training sums it up."""
    batch = inputs(seed)
    chosen = model(**batch).logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])
    return chosen.sum((1, 2))


def smoothed(model: Any, seed: int) -> torch.Tensor:
    logits = model(**inputs(seed)).logits
    labels = random_batch(seed=seed)["labels"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), label_smoothing=0.1)


def preference(model: Any, seed: int) -> torch.Tensor:
    """Two forwards before the backward."""
    return -F.logsigmoid(0.1 * (log_probability(model, seed) - log_probability(model, seed + 100))).mean()


def accumulated(model: Any, seed: int) -> torch.Tensor:
    (smoothed(model, seed + 50) / 2).backward()
    return smoothed(model, seed) / 2


def both_read(model: Any, seed: int) -> torch.Tensor:
    """The loss is the model's; logits are looked at, as metrics do."""
    output = model(**random_batch(seed=seed))
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=output.logits).entropy().mean()
    loss: torch.Tensor = output.loss
    return loss * (1 + 0 * entropy)


def train(model: Any, loss_of: Loss, steps: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, and the trainable parameters at the end."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in trainable]


def assert_same(one: tuple[list[torch.Tensor], ...], other: tuple[list[torch.Tensor], ...]) -> None:
    for a, b in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loss_of", [smoothed, preference, accumulated, both_read], ids=lambda f: f.__name__)
def test_training_is_bitwise_eager(loss_of: Loss, checkpointing: bool) -> None:
    """Whatever the user computes from logits, losses and adapters are eager's, also in half the memory."""
    make = lambda: tiny_lora(checkpointing=checkpointing)  # noqa: E731
    expected = train(make(), loss_of)
    model = prepare(make(), config(4096))
    with pytest.raises(BudgetTooSmall) as caught:
        loss_of(model, 0)
    restore(model)
    for memory in (int(caught.value.needed * 1.3), AMPLE):
        model = prepare(make(), config(memory))
        assert_same(train(model, loss_of), expected)
        assert stats(model)["steps_eager"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scaled_loss_under_autocast_is_bitwise_eager(dtype: torch.dtype) -> None:
    """The gradient that reaches the logits is the user's own, in the logits' dtype."""

    def loss_of(model: Any, seed: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return smoothed(model, seed) * 65536

    expected = train(tiny_lora(dtype=dtype), loss_of)
    assert_same(train(prepare(tiny_lora(dtype=dtype), config()), loss_of), expected)


def test_logits_that_are_read_again_and_again_are_planned() -> None:
    """From the second time on they are an output of the plan and cost no forward more."""
    model, eager = prepare(tiny_lora(), config()), tiny_lora()
    forwards = []
    model.get_input_embeddings().register_forward_hook(pure(lambda *_: forwards.append(1)))
    for seed in range(4):
        forwards.clear()
        output, expected = model(**random_batch(seed=seed)), eager(**random_batch(seed=seed))
        assert torch.equal(output.logits, expected.logits) and torch.equal(output["loss"], expected.loss)
        assert torch.equal(output[1], output["logits"])
        if seed != 2:  # the capture is a forward of its own
            assert len(forwards) == (2 if seed == 0 else 1 if seed == 1 else 0)
    step = current_step(model)
    assert step is not None and [o.name for o in step.captured.outputs] == ["loss", "logits"]


def _own_loss(model: Any, length: int) -> torch.Tensor:
    """As TRL's trainers: a loss of the script's own beside labels, and metrics of other fields."""
    batch = {name: tensor[:, :length] for name, tensor in random_batch().items()}
    output = model(**batch)
    weight = 1 + 0 * output.loss.detach()
    return weight * output.logits.float().square().mean()


def _gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_new_length_is_captured_once_for_what_the_last_one_was_used_for() -> None:
    model, eager = prepare(tiny_lora(), config(buckets="off")), tiny_lora()
    for seen, length in enumerate((6, 7, 8, 6, 7, 8, 6, 7)):
        for got, expected in zip(*(_gradients(m, _own_loss(m, length)) for m in (model, eager)), strict=True):
            assert torch.equal(got, expected)
        # The first forward cannot know what its outputs are for.
        assert stats(model)["plans"] == min(seen, 2) + 2
    step = current_step(model)
    assert step is not None and [o.name for o in step.captured.outputs] == ["logits", "loss"]


_METRICS = ("entropy", "is_top1", "label_mask")


def _fused(metrics: tuple[str, ...]) -> Any:
    """A model with the head of TRL's trainers, which returns ``metrics`` beside ``log_probs``."""
    model: Any = tiny_lora()
    base = model.get_base_model()
    own = base.forward

    def forward(fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        assert fused_lm_head and labels is not None
        logits, targets = own(**kwargs).logits[:, :-1].float().log_softmax(-1), labels[:, 1:]
        log_probs = logits.gather(-1, targets[..., None])[..., 0]
        fields = {
            "entropy": -(logits.exp() * logits).sum(-1),
            "is_top1": logits.argmax(-1) == targets,
            "label_mask": targets != -100,
        }
        return ModelOutput(loss=-log_probs.mean(), log_probs=log_probs, **{name: fields[name] for name in metrics})

    base.forward = forward
    return model


@pytest.mark.parametrize("metrics", [_METRICS, _METRICS[:1], ()], ids=["SFT", "GRPO", "DPO"])
def test_losses_of_trl_are_captured_once_a_length(metrics: tuple[str, ...]) -> None:
    def loss_of(model: Any, length: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        batch = {name: tensor[:, :length] for name, tensor in random_batch().items()}
        output = model(**batch, fused_lm_head=True)
        return -output.log_probs.sum() / 7, [output[name].detach() for name in metrics]

    model, eager = prepare(_fused(metrics), config()), _fused(metrics)
    lengths = (6, 7, 8)
    for length in lengths:
        (loss, read), (expected, expected_read) = (loss_of(m, length) for m in (model, eager))
        assert all(map(torch.equal, read, expected_read))
        for got, wanted in zip(_gradients(model, loss), _gradients(eager, expected), strict=True):
            assert torch.equal(got, wanted)
    assert stats(model)["plans"] == len(lengths) and stats(model)["steps_eager"] == 0


def test_a_length_that_is_used_otherwise_is_followed() -> None:
    """Another gradient, none, no read: eager's bits, and the next length begins with what was done last."""
    model, eager = prepare(tiny_lora(), config(buckets="off")), tiny_lora()

    def of_loss(model: Any, length: int) -> torch.Tensor:
        loss: torch.Tensor = model(**{n: t[:, :length] for n, t in random_batch().items()}).loss
        return loss

    def unused(model: Any, length: int) -> torch.Tensor:
        of_loss(model, length)
        return of_loss(model, length)

    plans = []
    for length, loss_of in ((6, _own_loss), (7, of_loss), (8, unused), (7, _own_loss), (6, of_loss), (5, of_loss)):
        for got, expected in zip(*(_gradients(m, loss_of(m, length)) for m in (model, eager)), strict=True):
            assert torch.equal(got, expected)
        plans.append(stats(model)["plans"])
    assert plans == [2, 4, 5, 5, 6, 7]


def test_what_is_read_is_no_reason_to_refuse_a_step_that_fits() -> None:
    """Logits that were returned at one length may not fit at another: they are made again there when they are read."""
    model, eager = prepare(tiny_lora(), config(buckets="off")), tiny_lora()

    def both(model: Any, rows: int) -> torch.Tensor:
        output = model(**{name: tensor.repeat(rows, 1) for name, tensor in random_batch().items()})
        loss: torch.Tensor = output.loss + 0 * output.logits.detach().mean()
        return loss

    both(model, 8).backward()
    step = current_step(model)
    assert step is not None and [o.name for o in step.captured.outputs] == ["loss"]
    tight = prepare(tiny_lora(), config(8192, buckets="off"))
    with pytest.raises(BudgetTooSmall) as caught:
        tight(**{name: tensor.repeat(8, 1) for name, tensor in random_batch().items()})
    restore(tight)
    model = prepare(tiny_lora(), config(caught.value.needed, buckets="off"))
    for rows in (1, 2, 8, 8, 8):
        for got, expected in zip(*(_gradients(m, both(m, rows)) for m in (model, eager)), strict=True):
            assert torch.equal(got, expected)
    assert stats(model)["steps_eager"] == 0


def test_the_budget_counts_logits() -> None:
    """The user's copy and its gradient lie outside the arena, inside the budget."""
    model = prepare(tiny_lora(), config())
    model(**inputs(0))
    step = current_step(model)
    assert step is not None
    logits = model(**inputs(0)).logits
    assert step.budget.outputs == 2 * logits.nbytes
    assert step.budget.total - step.budget.arena >= step.budget.outputs


@pytest.mark.parametrize("reads", [0, 2])
def test_a_gradient_through_logits_beside_a_loss_is_eagers(reads: int) -> None:
    """What was planned for the loss is run again for the logits, with the same draws; after that it is planned so."""
    batch = random_batch()

    def run(model: Any) -> list[torch.Tensor | None]:
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        output = model(**batch)
        (output.logits.float() ** 2).mean().backward()
        return [torch.rand(1), *(p.grad for p in model.parameters() if p.requires_grad)]

    model, eager = (tiny_lora(attention_dropout=0.1) for _ in range(2))
    prepare(model, config())
    for _ in range(reads):
        _ = model(**batch).logits
    for _ in range(3):
        for a, b in zip(run(model), run(eager), strict=True):
            assert (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
    step = current_step(model)
    assert step is not None and step.captured.outputs[0].name == "logits"
    assert stats(model)["fallbacks"] == []


def test_gradients_of_loss_and_logits_add_up() -> None:
    """Both at once: each takes a run, and autograd adds what they give."""

    def loss_of(model: Any, seed: int) -> torch.Tensor:
        output = model(**random_batch(seed=seed))
        loss: torch.Tensor = output.loss + 0.01 * (output.logits.float() ** 2).mean()
        return loss

    (got, trained), (expected, wanted) = train(prepare(tiny_lora(), config()), loss_of), train(tiny_lora(), loss_of)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(trained, wanted)


def test_what_changed_since_the_forward_is_refused() -> None:
    """A run for logits, at their backward, must see what the forward saw."""
    model = prepare(tiny_lora(), config())
    loss = (model(**random_batch()).logits.float() ** 2).mean()
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1)
    with pytest.raises(ExecutionError, match="changed in place"):
        loss.backward()


def test_fields_are_those_of_the_models_own_output() -> None:
    """Fields that the model leaves empty are None, and unknown ones an AttributeError, as in eager mode."""
    model = prepare(tiny_lora(), config())
    output = model(**inputs(0))
    assert output.loss is None and output.hidden_states is None and output.get("loss") is None
    assert "logits" in output and list(output.keys()) == ["logits"]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = output.nonsense


class _LogProbabilities(torch.nn.Module):
    """Returns log-probabilities and masks of its own making beside a loss, as fused language model heads do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        logits = self.model(input_ids=input_ids, **kwargs).logits[:, :-1].float()
        mask = labels[:, 1:] != -100
        chosen = logits.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0].masked_fill(~mask, 0)
        output = ModelOutput(loss=-chosen.sum() / mask.sum(), log_probs=chosen, label_mask=mask)
        output["is_top1"] = logits.argmax(-1) == labels[:, 1:]
        return output


def test_any_field_may_be_differentiated_or_read() -> None:
    """Log-probabilities with a loss of the user's own, and masks beside them, are planned once they were used."""

    def loss_of(model: Any, seed: int) -> torch.Tensor:
        output = model(**random_batch(seed=seed))
        accuracy = (output.is_top1 & output.label_mask).sum() / output.label_mask.sum()
        assert 0 <= float(accuracy) <= 1
        loss: torch.Tensor = -output.log_probs.sum() / output.label_mask.sum()
        return loss

    planned = prepare(_LogProbabilities(tiny_lora()), config())
    assert_same(train(planned, loss_of), train(_LogProbabilities(tiny_lora()), loss_of))
    step = current_step(planned)
    assert step is not None
    assert [o.name for o in step.captured.outputs] == ["log_probs", "is_top1", "label_mask"]
