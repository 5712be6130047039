"""What a capture declares overwritable is: written over its input, every op still gives eager's bits."""

from __future__ import annotations

import pytest
import torch

from disco_accel.capture.step import capture_step
from disco_accel.graph.op_traits import OP_TRAITS
from disco_accel.graph.taskgraph import VertexKind
from tests.capture.steps import Case, assert_same_bits, capture, feeds, run_eager
from tests.support.interpret import interpret, view

BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    Case(checkpointing=True),
    Case("qwen2", base=BF16, padded=True),
    Case(attention="eager", base=BF16, adapters=BF16, padded=True),
    Case(autocast=True, checkpointing=True, tied=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_with_every_overwrite_taken_has_eagers_bits(case: Case) -> None:
    model, batch = case.model(), case.batch()
    with case.region():
        step = capture(model, batch)
    values = interpret(step.graph, feeds(step, model, batch), overwrite=True)
    loss = step.outputs[0]
    got = view(values[loss.ref], loss.spec), {g.name: view(values[g.ref], g.spec) for g in step.gradients}
    assert_same_bits(got, run_eager(model, batch, case.region()))
    made = sum(len(v.sizes) for v in step.graph.vertices)
    assert len(values) < made - 20, "overwritten values are gone"


OPS = {
    "sub": lambda x, y: x - y,
    "reciprocal": lambda x, y: (x + y).reciprocal(),
    "exp": lambda x, y: (x * y).exp(),
    "gelu": lambda x, y: torch.nn.functional.gelu(x * y, approximate="tanh"),
    "tanh": lambda x, y: (x * y).tanh(),
    "sigmoid": lambda x, y: (x * y).sigmoid(),
    "where": lambda x, y: torch.where(x > 0, x * y, x + y),
    "masked_fill": lambda x, y: (x * y).masked_fill(y > 0, 0.5),
    "cos sin": lambda x, y: (x * y).cos() + (x + y).sin(),
    "softmax": lambda x, y: (x * y).softmax(-1) * y,
    "log_softmax": lambda x, y: (x * y).log_softmax(-1) * y,
    "div": lambda x, y: (x * y) / (y * y + 1),
    "silu": lambda x, y: torch.nn.functional.silu(x * y),
    "pow rsqrt": lambda x, y: ((x * y).pow(2) + 1).rsqrt(),
    "neg": lambda x, y: -(x * y),
}
TESTED: set[str] = set()


class Chain(torch.nn.Module):
    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.rule = OPS[name]
        self.weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.rule(x * self.weight, self.weight).float().sum()}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_each_op_can_be_written_over_its_input(name: str, dtype: torch.dtype) -> None:
    """Shapes around the vector width, and one large enough to be split over threads."""
    torch.manual_seed(0)
    for shape in ((1, 1), (3, 7), (2, 5, 33), (4, 64), (70, 1000)):
        model = Chain(name, shape, dtype)
        x = torch.randn(shape, dtype=dtype)
        step = capture_step(model, {"x": x})
        values = interpret(step.graph, feeds(step, model, {"x": x}), overwrite=True)
        apart = interpret(step.graph, feeds(step, model, {"x": x}))
        for binding in (*step.outputs, *step.gradients):
            # Bytes, since a NaN is unequal to itself.
            assert torch.equal(values[binding.ref], apart[binding.ref])
        gone = apart.keys() - values.keys()
        vertices = step.graph.vertices
        TESTED.update(v.op for v in vertices if any(v.inputs[p] in gone for p in v.may_inplace))


def test_every_op_on_the_list_was_written_over_an_input() -> None:
    """So that nothing can be added to the list without a test (run together with the tests above)."""
    if not TESTED:
        pytest.skip("the tests of single ops were not run")
    assert {name for name, traits in OP_TRAITS.items() if traits.pointwise or traits.row_by_row} <= TESTED


def test_an_input_seen_in_another_way_is_not_overwritable() -> None:
    """x + x.T reads elements that it has already written."""

    class Transposed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = x * self.weight
            wide = (x * 2)[:, :1] * self.weight
            return {"loss": ((y + y.t()) * wide).sum()}

    step = capture_step(Transposed(), {"x": torch.ones(4, 4)})
    for vertex in step.graph.vertices:
        if vertex.kind is VertexKind.KERNEL:
            args = [a for a in step.graph.ops[vertex.id].args if hasattr(a, "spec")]
            for position in vertex.may_inplace:
                specs = {a.spec for a in args if a.input == position}
                assert specs == {step.graph.ops[vertex.id].results[0].spec}
    both = [v for v in step.graph.vertices if v.op == "aten::add" and len(v.inputs) == 1]
    assert both and all(v.may_inplace == () for v in both)
