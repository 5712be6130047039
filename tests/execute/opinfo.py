"""PyTorch's own op database as a source of programs: traced, recorded, planned and run as a captured step is.

``python -m tests.execute.opinfo [op ...]`` runs up to 120 samples of each op and dtype, which is all of most ops;
the tests run one of each op.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_unflatten

from disco_accel.capture.constants import bind_constants, tracing_mode
from disco_accel.capture.fake_inputs import twin
from disco_accel.capture.lower import OpLowering, lower_ops, mark, used_inputs
from disco_accel.capture.op_recorder import record_ops
from disco_accel.capture.storages import storage_key, tensor_spec
from disco_accel.capture.trace_log import TraceLog, arguments_of
from disco_accel.errors import BudgetTooSmall, CaptureError, ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor, arena_bytes
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, TensorSpec, VertexKind, with_memory
from disco_accel.graph.traits import FOREIGN, FROZEN, LATE_FOREIGN
from disco_accel.measure.record import apply, record
from disco_accel.native.arena import host_arena
from disco_accel.native.host_memory import bytes_of
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify

DTYPES = (torch.float32, torch.bfloat16, torch.int64)

POISON = 0xA5
"""Written all over the arena before each step: what a step finds there must not matter."""


KINDS = {
    "eager": "PyTorch itself refuses the sample on the CPU",
    "views": "nothing is computed",
    "random": "the op draws random numbers",
    "data": "the shape of an output depends on values",
    "trace": "a value is needed while tracing",
    "formula": "autograd takes another formula for tensors without values, so the bits are those of the trace",
    "values": "how much the op allocates depends on values: a typed error names it",
}
"""Why a sample may have no eager bits to compare with."""

KNOWN = {
    "trace": {"tensor_split"},
    "formula": {"prod", "max.reduction_no_dim", "min.reduction_no_dim", "median", "cumprod", "masked_fill"},
    "values": {
        "nn.functional.embedding_bag",
        "index_put",
        "isin",
        "masked_scatter",
        "nonzero_static",
        "repeat_interleave",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
    },
}
"""The ops to which the last three kinds happen; to no other."""


class Skipped(Exception):
    """A sample that is no planned step; ``kind`` is a key of ``KINDS``."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


@dataclass(frozen=True)
class Sample:
    """One call of an op: ``run`` takes tensors in place of ``tensors`` and returns all tensors that it makes.

    Where something can be differentiated, ``run`` differentiates it as well, by the ``tangents`` it is given.
    """

    name: str
    call: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    rebuild: Callable[[list[torch.Tensor]], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    tangents: tuple[torch.Tensor, ...]

    def run(self, tensors: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Outputs, then the gradients of all tensors that require one."""
        outputs = forward(self.call, *self.rebuild(tensors))
        roots = [t for t in outputs if t.requires_grad]
        leaves = [t for t in tensors if t.requires_grad]
        if not roots or not leaves:
            return list(outputs)
        return [*outputs, *torch.autograd.grad(roots, leaves, tangents, allow_unused=True)]

    def eager(self) -> list[torch.Tensor | None]:
        """What PyTorch gives."""
        return self.run(list(self.tensors), list(self.tangents))


def forward(call: Callable[..., Any], first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors that the call returns."""
    return [t for t in tree_flatten(call(first, *args, **kwargs))[0] if isinstance(t, torch.Tensor)]


def sample_of(name: str, call: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Sample:
    """A sample of ``call(first, *args, **kwargs)``, whose tensors may require gradients. Raises Skipped."""
    leaves, shape = tree_flatten((first, args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = tuple(leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in positions)
    if any(t.is_complex() or t.layout is not torch.strided for t in tensors):
        raise Skipped("eager", "a complex or sparse tensor, which no language model has")

    def rebuild(given: list[torch.Tensor]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        items = list(leaves)
        for position, tensor in zip(positions, given, strict=True):
            items[position] = tensor
        result: tuple[Any, tuple[Any, ...], dict[str, Any]] = tree_unflatten(items, shape)
        return result

    try:
        outputs = forward(call, *rebuild(list(tensors)))
    except Exception as error:
        raise Skipped("eager", str(error).split("\n")[0]) from error
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tangents = tuple(
        torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype) for t in outputs if t.requires_grad
    )
    return Sample(name, call, tensors, rebuild, tangents)


@dataclass(frozen=True)
class Traced:
    """A sample as a TaskGraph. ``values`` pairs the position of each result that a kernel makes with where it is."""

    module: fx.GraphModule
    graph: TaskGraph
    inputs: dict[int, int]
    tangents: dict[int, int]
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, tuple[Ref, TensorSpec]] = field(default_factory=dict)


def trace(sample: Sample) -> Traced:
    """The sample's TaskGraph, made as capture makes it. Raises Skipped."""
    mode = tracing_mode()
    with mode:
        tensors = [twin(t.detach(), torch.device("cpu"), requires_grad=t.requires_grad) for t in sample.tensors]
        tangents = [twin(t, torch.device("cpu")) for t in sample.tangents]
    try:
        with mode:
            log = TraceLog({})
            read = record_ops(sample.run, (tensors, tangents), log)
        return _lower(log.graph, read, mode, len(tensors))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Skipped("data", str(error)) from error
    except RuntimeError as error:
        raise Skipped("trace", str(error).split("\n")[0]) from error


def _lower(graph: fx.Graph, read: dict[str, torch.Tensor], mode: FakeTensorMode, tensors: int) -> Traced:
    for node in graph.nodes:
        if _draws(node):
            raise Skipped("random", str(node.target))
    graph.eliminate_dead_code(is_impure_node=_must_stay)
    live = bind_constants(graph, read, mode, torch.nn.Module())
    positions = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    low = OpLowering()
    inputs: dict[int, int] = {}
    tangents: dict[int, int] = {}
    constants: dict[int, torch.Tensor] = {}
    for node in used_inputs(graph):
        position = positions.get(node)
        if position is None:
            if storage_key(node.meta["val"]) not in low.owner:
                constants[low.add_input(node.meta["val"], "constant", FROZEN)] = bytes_of(live[str(node.target)])
        elif position < tensors:
            inputs[low.add_input(node.meta["val"], "input", FOREIGN)] = position
        else:
            tangents[low.add_input(node.meta["val"], "tangent", LATE_FOREIGN)] = position - tensors
    lower_ops(graph, low)
    values: dict[int, tuple[Ref, TensorSpec]] = {}
    returned: Any = graph.output_node().args[0]
    for position, node in enumerate(returned):
        if node is None:
            continue
        ref = low.ref(node.meta["val"])
        # An empty tensor has no memory, so there is nothing to keep.
        if low.vertices[ref[0]].kind is not VertexKind.INPUT and node.meta["val"].numel():
            values[position] = ref, tensor_spec(node.meta["val"])
            mark(low, ref, keep=True)
    if not values:
        raise Skipped("views", "nothing is computed")
    device = Space(0, sum(sum(v.sizes) for v in low.vertices))
    module = fx.GraphModule(read, graph)
    return Traced(module, TaskGraph("op", (device,), tuple(low.vertices), low.ops), inputs, tangents, constants, values)


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(arguments_of(node, target).get("dropout_p", 1.0) != 0.0)


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def check(sample: Sample, seeds: int = 2) -> None:
    """The sample's step gives eager's bits in the least memory, at random order, twice in a row, allocating nothing.

    Raises Skipped, or AssertionError naming what differs.
    """
    traced = trace(sample)
    try:
        records = record(traced.graph)
        graph = apply(traced.graph, records)
        plan = _smallest_plan(graph)
        expected = traced.module(*(t.detach() for t in sample.tensors), *sample.tangents)
        for seed in range(seeds):
            options = EngineOptions(dispatch="random", seed=seed, compute_streams=1 + seed % 2)
            arena = host_arena(arena_bytes(plan))
            with Executor(plan, graph.ops, records, clean=traced.constants, options=options, arena=arena) as executor:
                for step in range(2):
                    arena.fill_(POISON)
                    _run(executor, sample, traced)
                    for position, (ref, spec) in traced.values.items():
                        what = f"result {position}, seed {seed}, step {step}"
                        assert_bits(executor.value(ref, spec), expected[position], what)
                    allocated = executor.counters()["c10_allocations"]
                    assert allocated == 0, f"{allocated} allocations in step {step}"
    except (CaptureError, ExecutionError) as error:
        if "alloca" not in str(error) and "was captured" not in str(error):
            raise
        raise Skipped("values", str(error)) from error
    eager = sample.eager()
    for position in traced.values:
        want = eager[position]
        assert want is not None, f"result {position} is None in eager"
        if not torch.equal(_bits(expected[position]), _bits(want.detach())):
            raise Skipped("formula", f"result {position}")


def _smallest_plan(graph: TaskGraph) -> MemGraph:
    memory = 256
    try:
        plan = make_plan(graph, memory=memory, cyclic=True)
    except BudgetTooSmall as error:
        memory = error.needed
        plan = make_plan(graph, memory=memory, cyclic=True)
    verify(with_memory(graph, lambda _: memory), plan)
    return plan


def _run(executor: Executor, sample: Sample, traced: Traced) -> None:
    executor.invalidate()
    executor.begin({vertex: sample.tensors[i].detach() for vertex, i in traced.inputs.items()})
    executor.wait_out()
    if traced.tangents:
        executor.deliver({vertex: sample.tangents[i] for vertex, i in traced.tangents.items()})
    executor.wait_end()


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal dtype, shape and bits, NaNs included."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (
        f"{what}: {got.dtype}{got.shape}, not {want.dtype}{want.shape}"
    )
    if not torch.equal(_bits(got), _bits(want)):
        raise AssertionError(f"{what} differs from eager: {got.flatten()[:8]} where {want.flatten()[:8]} is right")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


OPS: dict[str, str] = {
    "pointwise": """
        abs add sub mul div.no_rounding_mode div.floor_rounding div.trunc_rounding true_divide floor_divide remainder
        fmod neg pow float_power rsqrt sqrt square reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan tanh
        sigmoid erf erfc erfinv ceil floor round trunc frac sign sgn positive clamp clamp_min clamp_max maximum minimum
        fmax fmin lerp addcmul addcdiv rsub atan2 copysign hypot logaddexp logit nan_to_num xlogy heaviside
        __radd__ __rmul__ __rsub__ __rdiv__ __rpow__ __rmatmul__
        eq ne lt le gt ge isclose isnan isinf isfinite isneginf isposinf signbit logical_and logical_or logical_not
        logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift where
        masked_fill fill zero_""",
    "activation": """
        nn.functional.silu nn.functional.gelu nn.functional.relu nn.functional.relu6 nn.functional.leaky_relu
        nn.functional.elu nn.functional.selu nn.functional.celu nn.functional.mish nn.functional.softplus
        nn.functional.softsign nn.functional.hardswish nn.functional.hardsigmoid nn.functional.hardtanh
        nn.functional.logsigmoid nn.functional.tanhshrink nn.functional.threshold nn.functional.glu
        nn.functional.prelu nn.functional.dropout native_dropout_backward""",
    "reduction": """
        sum mean prod amax amin aminmax all any max.binary max.reduction_no_dim max.reduction_with_dim min.binary
        min.reduction_no_dim min.reduction_with_dim var var.unbiased var_mean std std.unbiased std_mean norm norm.fro
        linalg.vector_norm logsumexp count_nonzero argmax argmin nansum nanmean sum_to_size cumsum cumprod cummax
        cummin logcumsumexp diff median kthvalue""",
    "softmax and loss": """
        softmax softmax.with_dtype log_softmax log_softmax.with_dtype nn.functional.softmin _softmax_backward_data
        torch.ops.aten._safe_softmax.default nn.functional.nll_loss nn.functional.cross_entropy nn.functional.mse_loss
        nn.functional.l1_loss nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.kl_div
        nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
        nn.functional.linear_cross_entropy nn.functional.cosine_similarity""",
    "norm": """
        nn.functional.layer_norm native_layer_norm nn.functional.rms_norm nn.functional.group_norm native_group_norm
        nn.functional.normalize nn.functional.batch_norm""",
    "matmul": """
        mm bmm matmul addmm addmm.decomposed baddbmm addbmm mv addmv dot vdot inner outer addr einsum tensordot
        linalg.multi_dot nn.functional.linear nn.functional.bilinear kron""",
    "attention": """
        nn.functional.scaled_dot_product_attention torch.ops.aten._flash_attention_forward
        nn.functional.multi_head_attention_forward""",
    "index": """
        nn.functional.embedding nn.functional.embedding_bag gather scatter scatter_add scatter_reduce.sum
        scatter_reduce.amax scatter_reduce.mean index_select index_add index_copy index_fill index_put
        index_reduce.amax __getitem__ take take_along_dim put masked_scatter masked_select nn.functional.one_hot
        _unsafe_masked_index _unsafe_masked_index_put_accumulate select_scatter slice_scatter diagonal_scatter
        as_strided_scatter searchsorted bucketize isin bincount histc""",
    "order": "sort argsort topk msort unique unique_consecutive flip roll rot90",
    "shape": """
        cat stack hstack vstack dstack column_stack split split.list_args split_with_sizes split_with_sizes_copy chunk
        unbind tensor_split unsafe_split unsafe_chunk narrow narrow_copy select slice view view_as reshape reshape_as
        flatten unflatten ravel permute permute_copy transpose t mT movedim squeeze unsqueeze expand expand_as
        expand_copy broadcast_to broadcast_tensors repeat repeat_interleave tile unfold unfold_copy as_strided
        diagonal diag diag_embed tril triu trace block_diag meshgrid.list_of_tensors atleast_2d contiguous clone
        nn.functional.pad.constant nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.pad.circular
        constant_pad_nd nn.functional.pixel_shuffle nonzero nonzero_static argwhere item equal allclose""",
    "factory": """
        arange linspace full full_like ones zeros ones_like zeros_like new_full new_ones new_zeros eye
        scalar_tensor tril_indices triu_indices rand_like randn_like bernoulli multinomial uniform""",
    "conversion": "to bfloat16 float double half long int short byte char bool",
    "convolution and pooling": """
        nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.avg_pool1d
        nn.functional.avg_pool2d nn.functional.max_pool1d nn.functional.interpolate.nearest
        nn.functional.interpolate.bilinear nn.functional.unfold""",
}
"""The ops that language models use, or may: names of PyTorch's op database by kind, variant after the name."""


NAMES = [name for group in OPS.values() for name in group.split()]


@cache
def database() -> dict[str, Any]:
    """Name, with the variant after a dot, to PyTorch's OpInfo."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def names() -> list[str]:
    """The ops of ``NAMES`` that this PyTorch's database has."""
    return [name for name in NAMES if name in database()]


def samples(name: str, dtype: torch.dtype, most: int) -> Iterator[tuple[str, Sample | Skipped]]:
    """Up to ``most`` samples of the op, spread over all, by a label that finds each again.

    A sample with contiguous tensors and the same with others count as two.
    """
    op = database()[name]
    if dtype not in op.supported_dtypes("cpu"):
        return
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    every = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    # as_strided looks past its tensor into what lies around it, which a captured input does not have.
    layouts = ("contiguous",) if name.startswith("as_strided") else ("contiguous", "strided")
    both = [(index, layout) for index in range(len(every)) for layout in layouts]
    offset, count = zlib.crc32(f"{name} {dtype}".encode()), min(most, len(both))
    for index, layout in (both[(offset + i * len(both) // count) % len(both)] for i in range(count)):
        given = every[index] if layout == "contiguous" else every[index].noncontiguous()
        label = f"{name} {str(dtype).removeprefix('torch.')} {index} {layout}"
        try:
            yield label, sample_of(label, op.op, given.input, *given.args, **given.kwargs)
        except Skipped as skipped:
            yield label, skipped


def sweep(name: str, dtypes: tuple[torch.dtype, ...], most: int) -> tuple[Counter[str], list[str]]:
    """How many samples of the op were right (``ok``) or skipped, by kind, and what went wrong with the others."""
    counts: Counter[str] = Counter()
    wrong = []
    for dtype in dtypes:
        for label, sample in samples(name, dtype, most):
            try:
                if isinstance(sample, Skipped):
                    raise sample
                check(sample)
                counts["ok"] += 1
            except Skipped as skipped:
                counts[skipped.kind] += 1
                if name not in KNOWN.get(skipped.kind, {name}):
                    wrong.append(f"{label}: {skipped}")
            except Exception as error:  # whatever it is, the sweep goes on and tells
                wrong.append(f"{label}: {type(error).__name__}: {error}")
    return counts, wrong


def main() -> int:
    """Sweeps the ops named in the arguments (all by default) and prints a line for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    failures: list[str] = []
    for name in sys.argv[1:] or names():
        counts, wrong = sweep(name, DTYPES, 120)
        print(f"{name:48} {dict(counts)}", *wrong, sep="\n    ", flush=True)
        total += counts
        total["ops"] += 1
        failures += wrong
    print(dict(total), f"{len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
