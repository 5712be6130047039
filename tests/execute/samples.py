"""Programs over real ops, in the shapes that a LoRA step uses them."""

from __future__ import annotations

import torch

from tests.execute.programs import Builder


def _weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 7) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5).to(dtype)


def dense(b: Builder, g: torch.Generator, dtype: torch.dtype = torch.float32) -> None:
    """Matmuls, residuals, softmax, casts and reductions over two layers, with a gate before the backward part."""
    x = b.input(torch.randn(48, 64, generator=g).to(dtype))
    scale = b.input(torch.rand((), generator=g))
    weights = [b.weight(_weights(64, 64, dtype=dtype, seed=s)) for s in range(4)]
    hidden = x
    saved = []
    for i, weight in enumerate(weights):
        saved.append(hidden)
        hidden = b.call("mm", hidden, weight.view(lambda t: t.t()), module=f"layers.{i}")
        hidden = b.call("add.Tensor", hidden, x)
        hidden = b.call("silu", hidden) if i % 2 else b.call("_softmax", hidden, -1, False)
    wide = b.call("_to_copy", hidden, dtype=torch.float32)
    squared = b.call("pow.Tensor_Scalar", wide, 2)
    mean = b.call("mean.dim", squared, [-1], True)
    shifted = b.call("add.Scalar", mean, 1e-6)
    normal = b.call("mul.Tensor", wide, b.call("rsqrt", shifted))
    loss = b.call("sum", b.call("mul.Tensor", normal, scale), out="loss")
    tangent = b.input(torch.rand((), generator=g) + 0.5, late=True)
    grad = b.call("mul.Tensor", normal, tangent)
    grad = b.call("_to_copy", b.call("mul.Tensor", grad, loss), dtype=dtype)
    for i in reversed(range(4)):
        b.call("mm", saved[i].view(lambda t: t.t()), grad, keep=f"grad_w{i}")
        grad = b.call("mm", grad, weights[i])
        grad = b.call("mul.Tensor", grad, 0.5)
    b.call("clone", grad, keep="grad_x")


def dense_bf16(b: Builder, g: torch.Generator) -> None:
    """The same in bfloat16."""
    dense(b, g, torch.bfloat16)


def language_model(b: Builder, g: torch.Generator) -> None:
    """Embedding, layer norm, attention forward and backward, loss and its gradients: multi-output and index ops."""
    tokens = b.input(torch.randint(0, 50, (2, 16), generator=g))
    labels = b.input(torch.randint(0, 50, (32,), generator=g))
    table = b.weight(_weights(50, 32, seed=1))
    gain, bias = b.weight(_weights(32, seed=2)), b.weight(_weights(32, seed=3))
    projection = b.weight(_weights(96, 32, seed=4))
    hidden = b.call("embedding", table, tokens, module="embed")
    normal, mean, rstd = b.call("native_layer_norm", hidden, [32], gain, bias, 1e-5)
    fused = b.call("mm", normal.view(lambda t: t.view(32, 32)), projection.view(lambda t: t.t()))
    heads = [
        fused.view(lambda t, i=i: t.view(2, 16, 3, 4, 8)[:, :, i].transpose(1, 2))  # type: ignore[misc]
        for i in range(3)
    ]
    attended, logsumexp = b.call("_scaled_dot_product_flash_attention_for_cpu", *heads, 0.0, True)
    flat = b.call("clone", attended.view(lambda t: t.transpose(1, 2)), memory_format=torch.contiguous_format)
    logits = b.call("mm", flat.view(lambda t: t.view(32, 32)), table.view(lambda t: t.t()))
    logp = b.call("_log_softmax", logits, 1, False)
    loss, total = b.call("nll_loss_forward", logp, labels, None, 1, -100)
    b.call("clone", loss, out="loss")
    tangent = b.input(torch.rand((), generator=g), late=True)
    grad = b.call("nll_loss_backward", tangent, logp, labels, None, 1, -100, total)
    grad = b.call("_log_softmax_backward_data", grad, logp, 1, torch.float32, keep="grad_logits")
    grad = b.call("mm", grad, table)
    grad_attended = grad.view(lambda t: t.view(2, 16, 4, 8).transpose(1, 2))
    grads = b.call(
        "_scaled_dot_product_flash_attention_for_cpu_backward", grad_attended, *heads, attended, logsumexp, 0.0, True
    )
    stacked = b.call("cat", [g.view(lambda t: t.transpose(1, 2)) for g in grads], -1, keep="grad_heads")
    grad_hidden = b.call("mm", stacked.view(lambda t: t.reshape(32, 96)), projection)
    norm_grads = b.call(
        "native_layer_norm_backward",
        grad_hidden.view(lambda t: t.view(2, 16, 32)), hidden, [32], mean, rstd, gain, bias, [True, True, True],
    )  # fmt: skip
    b.call("clone", norm_grads[1], keep="grad_gain")
    b.call("embedding_dense_backward", norm_grads[0], tokens, 50, -1, False, keep="grad_table")


def indexing(b: Builder, g: torch.Generator) -> None:
    """Index ops, masks, arange, where, cumulative sums and integers."""
    x = b.input(torch.randn(6, 10, generator=g))
    rows = b.input(torch.randint(0, 6, (4,), generator=g))
    picked = b.call("index.Tensor", x, [rows], keep="picked")
    ranks = b.call("arange.start_step", 0, 10, 2, dtype=torch.int64, device=torch.device("cpu"))
    b.call("index_select", x, 1, ranks, keep="columns")
    mask = b.call("gt.Scalar", picked, 0.0, keep="mask")
    filled = b.call("where.self", mask, picked, b.call("full", [], -1.5, dtype=torch.float32), keep="filled")
    b.call("cumsum", filled, 1, keep="cumulated")
    b.call("gather", filled, 1, b.call("argsort", filled, 1), keep="sorted")
    b.call("index_put", x, [rows], filled, True, keep="put")
    b.call("constant_pad_nd", filled, [1, 1], 0.0, keep="padded")
    b.call("bitwise_not", mask, keep="inverted")


def in_place(b: Builder, g: torch.Generator) -> None:
    """Ops that write over their first argument."""
    x = b.input(torch.randn(8, 8, generator=g))
    y = b.call("mul.Tensor", x, 3.0)
    doubled = b.call("mul.Tensor", y, 2.0, keep="doubled")
    y = b.call("add_.Tensor", y, x, inplace=True)
    y = b.call("mul_.Tensor", y, doubled, inplace=True)
    b.call("copy_", b.call("new_empty", x, [8, 8]), y, inplace=True, keep="copied")


ALL = [dense, dense_bf16, language_model, indexing, in_place]
