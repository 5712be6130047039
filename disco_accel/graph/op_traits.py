"""All that is known about an op by its name: one table, which every other file asks.

An op that is not in the table has the defaults, which hold of any op: it is measured, planned and run like every other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any


class Arithmetic(Enum):
    """How many additions and multiplications a call makes; ``simulate/roofline.py`` has the formulas."""

    NONE = "none"
    """So few that memory traffic bounds the op."""
    PRODUCT = "product"
    """The last two tensors are multiplied: (.., m, k) times (.., k, n)."""
    LINEAR = "linear"
    """The first tensor, (.., k), times the transpose of the second, (n, k)."""
    GROUPED = "grouped"
    """(tokens, k) times (experts, k, n), one expert for each token."""
    ATTENTION = "attention"
    """Query and key come first."""
    ATTENTION_BACKWARD = "attention_backward"
    """The gradient of the output comes first, then query and key."""


@dataclass(frozen=True, slots=True)
class _OpTraits:
    """Facts about one op."""

    pointwise: bool = False
    """An element is computed from the same elements of the inputs: a plan may let the result replace any of them."""
    fuses: bool = False
    """A result's element is computed from single elements of the inputs: kernels of such ops may become one."""
    function: bool = False
    """Its results have no one right rounding: those of two ways to compute it differ in last bits."""
    row_by_row: bool = False
    """The same along a last dimension of stride 1: a row is read to its end before it is written."""
    same_calls: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    """Overload to the (name, overload) that ATen implements it by; that one has a native out overload."""
    resizes: bool = False
    """In place it may need more memory than its input has, unlike other ops that change a tensor's shape alone."""
    fake_rule: bool = False
    """Torch's fake tensors refuse data types that the kernels take; ``capture/fake_kernels.py`` has a rule for it."""
    refused: str = ""
    """Why a step with this op is not planned, and a remedy; empty if it is planned."""
    data_hint: str = "a planned step cannot branch on values (.item(), .tolist(), if tensor:, .nonzero())"
    """A remedy where the shapes of its results depend on values."""
    undefined_hint: str = ""
    """A remedy for a step that needs a result which this op leaves undefined."""
    scratch_by_value: bool = False
    """Its allocations depend on the values that it is given; ``measure/dynamic_scratch.py`` bounds them."""
    arithmetic: Arithmetic = Arithmetic.NONE
    """For estimates of its duration."""
    gathers: bool = False
    """Of its first input it reads only the elements that it returns."""
    row_lookup: bool = False
    """Its second argument holds row numbers of the table that is its first one."""
    unordered_on_gpu: bool = False
    """CUDA's kernels may add or write in an order that differs from run to run, and so in the last bits."""
    wraps_numbers: bool = False
    """A number among its arguments is computed with in the tensors' data type (``runtime_ext/torch/ops.cpp``)."""
    direct: tuple[str, ...] = ()
    """Overloads that the engine computes itself on the host, without the dispatcher (``runtime_ext/torch/direct.cpp``);
    recording compares the bits."""
    pure: bool = False
    """Of an op that is not PyTorch's own: it makes the same bits of the same inputs, and changes nothing else."""
    inside_reader: bool = False
    """Its reader's own call does it, so that it is left out only with the reader; it is a kernel for its estimate."""
    unpacks_blocks: bool = False
    """Of numbers, scales, a count, a type, a shape and a dtype. Each so many elements of the result come from numbers
    of their own and one scale."""
    moves: bool = False
    """It only moves elements, and its out overload is a generated one, which calls the op and copies: of use only where
    the engine computes it itself."""


_DEFAULT = _OpTraits()

_CUDNN_ATTENTION = (
    "cuDNN's attention takes memory that a plan does not know; call attention as "
    "torch.nn.functional.scaled_dot_product_attention, or torch.backends.cuda.enable_cudnn_sdp(False)"
)


def _rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and traits, from one row or several."""
    yield from _fusing_rows()
    yield from _all("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data", row_by_row=True)
    # ATen wraps the number of a Scalar overload and calls the Tensor one, or the other way round.
    for base in ("add", "sub", "mul", "div"):
        yield f"aten::{base}", {"same_calls": MappingProxyType({"Scalar": (f"aten::{base}", "Tensor")})}
    yield "aten::lift_fresh_copy", {"same_calls": MappingProxyType({"default": ("aten::clone", "default")})}
    yield from _all("add sub mul div add_ sub_ mul_ div_", wraps_numbers=True)
    yield from _all("resize_ resize_as_", resizes=True)

    yield from _all("mm add sub mul div neg rsqrt cat clone slice_backward constant_pad_nd", direct=("out",))
    yield "aten::pow", {"direct": ("Tensor_Scalar_out",)}
    yield from _all("clone slice_backward constant_pad_nd", moves=True)

    yield from _all("mm addmm bmm baddbmm matmul", arithmetic=Arithmetic.PRODUCT)
    yield "aten::linear", {"arithmetic": Arithmetic.LINEAR}
    for product in ("gemm_4bit", "int8_scaled_mm"):
        yield f"bitsandbytes::{product}", {"pure": True}
        yield f"bitsandbytes::{product}.dequantise", {"pure": True, "inside_reader": True}
    yield "bitsandbytes::dequantize_4bit", {"unpacks_blocks": True}
    yield from _all("embedding index index_select gather", gathers=True)
    yield "aten::embedding", {"row_lookup": True}
    yield (
        "aten::_grouped_mm",
        {"arithmetic": Arithmetic.GROUPED, "scratch_by_value": True, "fake_rule": True, "unordered_on_gpu": True},
    )
    yield from _all("_scaled_grouped_mm _scaled_grouped_mm_v2", unordered_on_gpu=True)
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        name = f"aten::_scaled_dot_product_{kind}"
        yield name, {"arithmetic": Arithmetic.ATTENTION}
        yield f"{name}_backward", {"arithmetic": Arithmetic.ATTENTION_BACKWARD}
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention"):
        yield from _all(f"_scaled_dot_product_{kind}_backward _{kind}_backward", unordered_on_gpu=True)
    yield from _all(
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward", refused=_CUDNN_ATTENTION
    )
    yield from _all(
        "embedding_dense_backward index_add index_add_ index_put index_put_ _index_put_impl _index_put_impl_ "
        "_unsafe_index_put _unsafe_masked_index_put_accumulate scatter scatter_ scatter_add scatter_add_ "
        "scatter_reduce scatter_reduce_ masked_scatter masked_scatter_ masked_scatter_backward",
        unordered_on_gpu=True,
    )
    yield (
        "bitsandbytes::int8_vectorwise_quant",
        {
            "data_hint": "it looks for outliers; set llm_int8_threshold=0.0 in BitsAndBytesConfig (threshold=0.0 of "
            "Linear8bitLt), or load_in_4bit=True"
        },
    )
    yield (
        "aten::mkldnn_rnn_layer",
        {"undefined_hint": "torch.backends.mkldnn.set_flags(False) before training lets an LSTM be planned"},
    )


def _fusing_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    # tests/capture/test_inplace.py runs every op that is overwritable over its own input.
    yield from _all(
        "add sub mul div neg pow exp rsqrt reciprocal cos sin where masked_fill silu silu_backward gelu gelu_backward "
        "tanh tanh_backward sigmoid sigmoid_backward",
        pointwise=True,
        fuses=True,
    )
    yield from _all(
        "pow exp rsqrt cos sin silu silu_backward gelu gelu_backward tanh tanh_backward sigmoid sigmoid_backward",
        function=True,
    )
    yield from _all("_to_copy clone cat slice_backward constant_pad_nd", fuses=True)


def _all(names: str, **traits: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"aten::{name}", traits) for name in names.split())


def _table(rows: Iterable[tuple[str, dict[str, Any]]]) -> Mapping[str, _OpTraits]:
    table: dict[str, _OpTraits] = {}
    for name, traits in rows:
        table[name] = replace(table.get(name, _DEFAULT), **traits)
    return MappingProxyType(table)


OP_TRAITS: Mapping[str, _OpTraits] = _table(_rows())
"""Name, such as ``aten::mm``, to traits: every op of which anything is known."""


def op_traits(name: str) -> _OpTraits:
    """Traits of the op ``name``, such as ``aten::mm``; the defaults for an op that is not in the table."""
    return OP_TRAITS.get(name, _DEFAULT)
