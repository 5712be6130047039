"""Tokens a second of ``generate`` with a static cache under a budget, beside eager in memory and streamed weights.

    python -m benchmarks.prefill.decoding [--hidden 512 --layers 8 --prompt 32 --tokens 16] [--budgets 0.5] [--rounds 5]
        [--experts 64] [--capacity 4096 --vocabulary 2048] [--offloaded | --growing]

Random weights of a Llama, or of a Qwen3-MoE with 4 of so many experts for a token, with LoRA; the host device, a
throttled link, one thread. The engines take turns, and every round starts with another one. ``streamed`` is eager with
the weights of each module brought over the same link before the module runs, none resident: so accelerate's
``cpu_offload`` works on a GPU. Seconds of a token are those of a generation less those of one that ends with its first
token, divided by the tokens behind it. ``bound``: the seconds that the plan's loads for a token take of the link alone,
or eager's seconds of a token, if those are more. Budgets are shares of the weights and, with ``--capacity``, of a cache
for so many tokens; what does not fit of it is in host memory, with ``--offloaded`` all. With ``--growing`` the cache is
``generate``'s default, which grows. Tokens and logits have eager's bits, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StaticCache

from benchmarks.common.subjects import Shape, Times, lora_llama
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.sizes import format_size
from tests.support.models import family_lora

Result = tuple[torch.Tensor, torch.Tensor]
"""Token ids, (batch, tokens), and logits, (tokens, batch, vocabulary)."""


def generated(
    model: Any, ids: torch.Tensor, tokens: int, capacity: int = 0, *, offloaded: bool = False, growing: bool = False
) -> Result:
    """Greedy tokens behind ``ids``; no token ends a row. ``capacity``: of the cache, in tokens; 0: as few as do."""
    cache = StaticCache(config=model.config, max_cache_len=capacity, offloading=offloaded) if capacity else None
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        cache_implementation=None if cache or growing else "static",
        past_key_values=cache,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        eos_token_id=0,
    )
    return made.sequences, torch.stack(made.logits)


@contextmanager
def streamed(model: torch.nn.Module, bandwidth: float) -> Iterator[None]:
    """Inside, the weights of each module are copied over a link of so many bytes/s before it runs."""

    def bring(module: torch.nn.Module, _: Any) -> None:
        own = list(module.parameters(recurse=False))
        arrive = time.perf_counter() + sum(parameter.nbytes for parameter in own) / bandwidth
        for parameter in own:
            parameter.detach().clone()
        time.sleep(max(0.0, arrive - time.perf_counter()))

    modules = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(bring) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _model(shape: Shape, experts: int) -> Any:
    """The same weights in each call."""
    if not experts:
        return lora_llama(shape).eval()
    sizes = {"hidden_size": shape.hidden, "moe_intermediate_size": shape.hidden // 2, "vocab_size": shape.vocabulary}
    chosen = {"num_experts": experts, "num_experts_per_tok": 4, "num_hidden_layers": shape.layers}
    return family_lora("qwen3_moe", **sizes, **chosen).eval()


def _cache_bytes(model: Any, rows: int, capacity: int) -> int:
    config = model.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    return 2 * rows * capacity * heads * size * int(config.num_hidden_layers) * model.dtype.itemsize


def measure(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a token of each engine, and the bytes that each plan loads for one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, shape.vocabulary, (shape.batch, args.prompt), generator=generator)
    eager = _model(shape, args.experts)
    weights = sum(p.nbytes for p in eager.parameters())
    cache = _cache_bytes(eager, shape.batch, args.capacity)
    engines: dict[str, Callable[[int], Result]] = {
        "in memory": lambda tokens: generated(eager, ids, tokens, args.capacity, growing=args.growing)
    }
    models: dict[str, Any] = {}
    for share in args.budgets:
        config = DiscoConfig(
            memory_budget=int(share * (weights + cache)),
            compute_threads=1,
            link_bandwidth=args.bandwidth,
            plan_cache=None,
        )
        models[f"{share:g}"] = model = prepare(_model(shape, args.experts), config).eval()
        engines[f"{share:g}"] = lambda tokens, model=model: generated(  # type: ignore[misc]
            model, ids, tokens, args.capacity, offloaded=args.offloaded, growing=args.growing
        )

    def over_link(tokens: int) -> Result:
        with streamed(eager, args.bandwidth):
            return generated(eager, ids, tokens, args.capacity, growing=args.growing)

    engines["streamed"] = over_link
    wanted = {tokens: engines["in memory"](tokens) for tokens in (1, args.tokens)}
    for name in models:
        engines[name](args.tokens)
    loads = {name: stats(model)["reload_bytes"] for name, model in models.items()}
    seconds: dict[str, list[float]] = {}
    names = list(engines)
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken = {}
            for tokens in (1, args.tokens):
                began = time.perf_counter()
                found = engines[name](tokens)
                taken[tokens] = time.perf_counter() - began
                assert all(map(torch.equal, found, wanted[tokens])), f"{name}: other bits than eager's"
            seconds.setdefault(name, []).append((taken[args.tokens] - taken[1]) / (args.tokens - 1))
    reasons = [reason for model in models.values() for reason in stats(model)["fallbacks"]]
    assert not reasons, f"forwards had no plan: {reasons}"
    return {
        "weights": weights,
        "cache": cache,
        "loads": loads,
        "seconds": {name: Times(tuple(t)) for name, t in seconds.items()},
    }


def show(found: dict[str, Any], bandwidth: float) -> str:
    """The table."""
    seconds: dict[str, Times] = found["seconds"]
    eager, over_link = seconds["in memory"], seconds["streamed"]
    lines = [
        f"weights {format_size(found['weights'])}, cache {format_size(found['cache'])}, link {bandwidth:g} bytes/s",
        "| engine | token, s | tokens/s | loads a token | token / bound | streamed / token |",
        "|---|---|---|---|---|---|",
    ]
    for name, times in seconds.items():
        row = [name, f"{times.median:.4f} ±{times.spread:.4f}", f"{1 / times.median:.2f}"]
        if name in found["loads"]:
            bound = max(found["loads"][name] / bandwidth, eager.median)
            row += [format_size(found["loads"][name]), f"{times.median / bound:.2f}"]
        else:
            row += ["", ""]
        lines.append(f"| {' | '.join([*row, f'{over_link.median / times.median:.2f}'])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 8), ("batch", 1), ("prompt", 32), ("vocabulary", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a Llama, without experts")
    parser.add_argument("--capacity", type=int, default=0, help="tokens of the cache; 0: as many as there are")
    parser.add_argument("--offloaded", action="store_true", help="all of the cache in host memory")
    parser.add_argument("--growing", action="store_true", help="generate's default cache; without --capacity")
    parser.add_argument("--tokens", type=int, default=16, help="generated, two or more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=4e8, help="of the link, bytes/s")
    parser.add_argument("--budgets", type=lambda text: [float(x) for x in text.split(",")], default=[0.5])
    args = parser.parse_args(argv)
    if args.growing and (args.capacity or args.offloaded):
        parser.error("--growing: such a cache has no capacity, and does not offload itself")
    torch.set_num_threads(1)
    shape = Shape(
        hidden=args.hidden, layers=args.layers, vocabulary=args.vocabulary, batch=args.batch, tokens=args.prompt
    )
    print(show(measure(shape, args), args.bandwidth))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
