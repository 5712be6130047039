"""Plans of one model take turns in one arena: weights that both have there are not loaded again, and never stale."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from disco_accel.errors import ExecutionError
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.summary import link_bytes
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import find_state
from disco_accel.verify.static import verify
from tests.support.models import random_batch, tiny_lora

ROOMY = 2 << 20
"""All weights stay in the arena, so that what two plans share does not depend on measured times."""
TIGHT = 430 << 10
"""An arena for about two thirds of the weights."""
BATCH = random_batch(length=8)
WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def resident(step: CompiledStep) -> int:
    inputs = (v for v in step.plan.vertices if v.kind is VertexKind.INPUT and (v.id, 0) in step.plan.slots)
    return sum(v.sizes[0] for v in inputs if host_copy_exists(v))


class Pair:
    """A prepared model and its eager twin, which does the same in plain PyTorch."""

    def __init__(self, budget: int = ROOMY, **config: Any) -> None:
        self.model = tiny_lora(layers=2, hidden=64)
        self.twin = copy.deepcopy(self.model)
        plain = {"device": "cpu", "plan_cache": None, "fuse": "off", "optimizer": "device", "buckets": "off"}
        prepare(self.model, DiscoConfig(memory_budget=budget, **(plain | config)))

    def both(self, change: Callable[[torch.nn.Module], object]) -> None:
        change(self.twin)
        change(self.model)

    def train(self) -> None:
        """A step of both, whose losses and gradients have the same bits."""
        losses = []
        for model in (self.twin, self.model):
            model.train()
            losses.append(model(**BATCH).loss)
            losses[-1].backward()
        assert torch.equal(*losses)
        for (name, ours), theirs in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
            ours.grad = theirs.grad = None

    def evaluate(self) -> None:
        """An evaluation of both, whose losses and logits have the same bits."""
        with torch.no_grad():
            for model in (self.twin, self.model):
                model.eval()
            expected, found = self.twin(**BATCH), self.model(**BATCH)
        assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)

    @property
    def step(self) -> CompiledStep:
        state = find_state(self.model)
        assert state is not None and state.memory.current is not None
        return state.memory.current

    def loaded_at_begin(self) -> int:
        """Bytes of residents that the last step began with loading."""
        self.step.settle()
        return int(self.step.executor.counters()["reload_bytes"]) - link_bytes(self.step.plan)[0]

    def resident(self) -> int:
        """Bytes of all residents with which the plan that ran last begins."""
        return resident(self.step)

    def in_turn(self) -> None:
        """Both plans are there, and an evaluation was the last to run."""
        for _ in range(2):
            self.train()
            self.evaluate()
        assert self.loaded_at_begin() < self.resident() / 4


def test_a_change_of_plan_loads_the_difference_alone() -> None:
    """Train, evaluate, train: each plan finds what the other has left; both pass the judge, neither has a fallback."""
    pair = Pair()
    pair.train()
    first, training = pair.loaded_at_begin(), pair.step
    assert 0 < first == resident(training)
    pair.evaluate()
    evaluation = pair.step
    for step in (training, evaluation):
        verify(step.graph, step.plan)
    both = sum(evaluation.clean[vertex].numel() for vertex in evaluation.in_place_after(training))
    assert both >= 0.9 * resident(training)
    for _ in range(2):
        assert pair.loaded_at_begin() == resident(evaluation) - both
        pair.evaluate()
        assert pair.loaded_at_begin() == 0
        pair.train()
        assert pair.step is training and pair.loaded_at_begin() == resident(training) - both
        pair.evaluate()
    assert stats(pair.model)["fallbacks"] == []


def _in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        dict(model.named_parameters())[WEIGHT].mul_(1.5)


def _one_element(model: torch.nn.Module) -> None:
    dict(model.named_parameters())[WEIGHT].detach().numpy()[3, 5] += 1


def _by_data(model: torch.nn.Module) -> None:
    weight = dict(model.named_parameters())[WEIGHT]
    weight.data = weight.detach().clone() * 0.5


def _back_and_forth(model: torch.nn.Module) -> None:
    weight = dict(model.named_parameters())[WEIGHT]
    before = weight.data
    weight.data = torch.zeros_like(weight)
    weight.data = before
    before.add_(0.25)


def _merged(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def _loaded(model: torch.nn.Module) -> None:
    state = {name: tensor * 0.75 for name, tensor in model.state_dict().items() if name == WEIGHT}
    model.load_state_dict(state, strict=False)


def _in_a_thread(model: torch.nn.Module) -> None:
    thread = threading.Thread(target=_in_place, args=(model,))
    thread.start()
    thread.join()


CHANGES = {
    change.__name__.strip("_"): change
    for change in (_in_place, _one_element, _by_data, _back_and_forth, _merged, _loaded, _in_a_thread)
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("after", ["train", "evaluate"])
def test_weights_that_were_written_between_two_plans_are_seen(
    change: Callable[[torch.nn.Module], object], after: str
) -> None:
    """The next plan, the one behind it, and the first one again have eager's bits."""
    pair = Pair()
    pair.in_turn()
    if after == "train":
        pair.train()
    pair.both(change)
    steps = (pair.evaluate, pair.train) if after == "train" else (pair.train, pair.evaluate)
    for step in (*steps, *steps):
        step()


def test_a_step_that_is_not_over_leaves_nothing() -> None:
    """An evaluation between a forward and its backward, and one after a loss was dropped, load all; then as before."""
    pair = Pair()
    pair.in_turn()
    losses = [model.train()(**BATCH).loss for model in (pair.twin, pair.model)]
    pair.evaluate()
    assert pair.loaded_at_begin() == pair.resident()
    for loss in losses:
        loss.backward()
    assert pair.loaded_at_begin() < pair.resident() / 4, "the evaluation before it ended whole"
    for (name, ours), theirs in zip(pair.model.named_parameters(), pair.twin.parameters(), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
        ours.grad = theirs.grad = None
    pair.evaluate()
    del loss, losses
    dropped = pair.model.train()(**BATCH).loss
    del dropped
    pair.evaluate()
    assert pair.loaded_at_begin() == pair.resident()
    pair.train()
    pair.evaluate()
    assert pair.loaded_at_begin() < pair.resident() / 4


def test_a_step_that_failed_leaves_nothing() -> None:
    """Whichever plan fails in mid-run, the next one of the other and of its own kind loads all."""
    pair = Pair()
    pair.in_turn()
    evaluation = pair.step
    evaluation.executor._engine.fail_at(len(evaluation.graph.ops) // 2)
    with pytest.raises(ExecutionError), torch.no_grad():
        pair.model.eval()(**BATCH)
    evaluation.executor._engine.fail_at(-1)
    pair.train()
    assert pair.loaded_at_begin() == pair.resident()
    # Residents in place were for the evaluation that fails now; it loads all when it runs again.
    evaluation.executor._engine.fail_at(len(evaluation.graph.ops) // 2)
    with pytest.raises(ExecutionError), torch.no_grad():
        pair.model.eval()(**BATCH)
    evaluation.executor._engine.fail_at(-1)
    pair.evaluate()
    assert pair.loaded_at_begin() == pair.resident()


def test_other_arenas_leave_nothing() -> None:
    """After a budget has moved, and back, plans load what is not there, and have eager's bits."""
    pair = Pair(TIGHT)
    for budget in (ROOMY, TIGHT + (96 << 10), TIGHT):
        set_memory_budget(pair.model, budget)
        for _ in range(2):
            pair.train()
            pair.evaluate()
    restore(pair.model)
    pair.both(_in_place)
    prepare(pair.model, DiscoConfig(memory_budget=ROOMY, device="cpu", plan_cache=None, fuse="off"))
    pair.train()
    pair.evaluate()


@pytest.mark.parametrize("budget", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_trained_weights_are_never_taken_for_those_in_place(optimizer: str, budget: int) -> None:
    """Evaluations see new weights, with the update at the head of a plan, or beside it on the host."""
    pair = Pair(budget, optimizer=optimizer)
    steppers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for model in (pair.twin, pair.model)
    ]
    for _ in range(4):
        for model, stepper in zip((pair.twin, pair.model), steppers, strict=True):
            model.train()
            model(**BATCH).loss.backward()
            stepper.step()
            stepper.zero_grad()
        pair.evaluate()
        pair.evaluate()


def test_accumulation_takes_turns_without_loads() -> None:
    """The plan that adds to gradients begins as the plain one does."""
    pair = Pair(optimizer="host")
    for turn in range(4):
        for micro in range(2):
            for model in (pair.twin, pair.model):
                model.train()(**BATCH).loss.backward()
            if turn > 1:
                assert pair.loaded_at_begin() <= pair.resident() / 4, micro
        for ours, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
            ours.grad = theirs.grad = None
