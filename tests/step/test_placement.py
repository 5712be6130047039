"""Where a prepared model's tensors live, with devices that a machine without a GPU has."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from disco_accel.errors import ConfigError
from disco_accel.native.host_memory import HostMemory
from disco_accel.step.placement.model_placement import Placement, apply_to_trainable
from disco_accel.step.placement.streamed_eager import StreamedEager, visitor_of
from tests.support.models import random_batch, tiny_lora


def test_placing_and_undoing_keeps_values_and_gives_storages_of_their_own() -> None:
    model = tiny_lora()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    placement = Placement(model, torch.device("cpu"))
    placement.apply()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in frozen)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= sum(p.nbytes for p in frozen) + 64 * len(frozen), "one arena, side by side"
    placement.undo()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_moving_a_prepared_model_moves_its_adapter_alone() -> None:
    """Gradients go with it; what would change the frozen dtype is refused before anything moved."""
    model = tiny_lora()
    model(**random_batch()).loss.backward()
    homes = {n: p.data_ptr() for n, p in model.named_parameters()}
    grads = {n: p.grad.data_ptr() for n, p in model.named_parameters() if p.grad is not None}
    held = [p.detach() for p in model.parameters()] + [p.grad.detach() for p in model.parameters() if p.requires_grad]
    apply_to_trainable(model, lambda t: t.clone())
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr() != homes[name]) is parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.data_ptr() != grads[name], name
    assert held, "the old places stay taken, so that no new one can be equal by chance"
    with pytest.raises(ConfigError, match=r"cannot become torch.float16; call restore\(model\)"):
        apply_to_trainable(model, lambda t: t.half())


def test_weights_visit_while_their_module_runs_and_go_home_after() -> None:
    """Loss and gradients are eager's, also through checkpointing's recomputation, and also when a forward fails."""
    plain, model = tiny_lora(checkpointing=True), tiny_lora(checkpointing=True)
    homes = {n: p.data_ptr() for n, p in model.named_parameters()}
    visits = 0

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal visits
        visits += 1
        return (tensor if tensor.requires_grad else tensor.detach()).clone()

    streamed = StreamedEager(model, visit)
    batch = random_batch()
    for one in (plain, model):
        one(**batch).loss.backward()
    assert visits > sum(not p.requires_grad for p in model.parameters()), "forward and recomputation"
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) is (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 10**6))
    assert homes == {n: p.data_ptr() for n, p in model.named_parameters()}
    streamed.remove(model)
    visits = 0
    model(**batch)
    assert visits == 0


def test_a_tensor_that_lies_right_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert visitor_of(torch.device("cpu"))(tensor) is tensor


def test_an_arena_is_shared_by_copies_of_its_model_and_never_pickled() -> None:
    memory = HostMemory(1 << 20)
    assert copy.deepcopy(memory) is memory
    make, arguments = memory.__reduce__()
    assert make(*arguments).nbytes == 0
