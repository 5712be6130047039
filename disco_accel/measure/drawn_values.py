"""Values on which a fused kernel is compared with its ops.

They are drawn once for each data type. An input gets a window of them, in each draw the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

KINDS = ("normal", "any magnitude", "small", "all 16 bits")
"""Normal numbers; numbers of all magnitudes, with zeros, infinities and NaN; small ones; and all numbers that 16 bits
can have, for one input after the other, beside normal ones."""

Pools = dict[tuple[str, torch.dtype], torch.Tensor]
"""Drawn values of each kind and data type, kept for all kernels that are measured together."""

PATTERNS = 1 << 16
_DRAWN = (1 << 20) - 3
"""Values of a pool: no multiple of a row's length."""
_APART = 97_003
"""Places of a pool between the windows of two inputs."""
_SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"))
_LARGE = 1 << 30
"""Of whole numbers."""


def fill(values: torch.Tensor, kind: str, input_number: int, draw: int, pools: Pools) -> None:
    """Give the one-dimensional ``values`` of an input numbers of ``kind``, other ones in each ``draw``."""
    pool = _pool("normal" if kind == "all 16 bits" else kind, values.dtype, values.device, pools)
    start = (_APART * input_number + draw * values.numel()) % _DRAWN
    for at, found in _window(pool, start, values.numel()):
        values[at : at + found.numel()] = found


def fill_patterns(
    values: torch.Tensor, half: torch.dtype, turn: tuple[int, int], draw: int, results: int, pools: Pools
) -> None:
    """Put all numbers of the 16-bit type ``half`` over parts of ``values``, an input of floating-point numbers.

    ``turn``: its place among the inputs, and their number; each block of 65,536 elements belongs to one of them.
    ``results``: elements of a result. An input with fewer has these numbers alone, in every other draw.
    """
    patterns = _patterns(half, values.dtype, values.device, pools)
    place, inputs = turn
    begin = draw * values.numel()
    if values.numel() < results:
        if draw % 2:
            for at, found in _window(patterns, (draw // 2 * values.numel()) % PATTERNS, values.numel()):
                values[at : at + found.numel()] = found
        return
    for at, found in _window(patterns, begin % PATTERNS, values.numel()):
        if (begin + at) // PATTERNS % inputs == place:
            values[at : at + found.numel()] = found


def _window(pool: torch.Tensor, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """``count`` values of ``pool`` from ``start`` on, from its beginning again behind its end, in pieces with their
    places."""
    at = 0
    while at < count:
        piece = pool[start : start + count - at]
        yield at, piece
        at, start = at + piece.numel(), 0


def _patterns(half: torch.dtype, dtype: torch.dtype, device: torch.device, pools: Pools) -> torch.Tensor:
    name = f"all of {half}", dtype
    if name not in pools:
        order = torch.randperm(PATTERNS, generator=torch.Generator().manual_seed(0))
        pools[name] = (order - PATTERNS // 2).to(torch.int16).view(half).to(dtype).to(device)
    return pools[name]


def _pool(kind: str, dtype: torch.dtype, device: torch.device, pools: Pools) -> torch.Tensor:
    if (kind, dtype) not in pools:
        pools[kind, dtype] = _drawn(kind, dtype, device)
    return pools[kind, dtype]


def _drawn(kind: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    if not dtype.is_floating_point:
        large = kind == "any magnitude" and dtype is not torch.bool
        limits = torch.iinfo(dtype) if large else None
        ends = (0, 2) if limits is None else (max(limits.min, -_LARGE), min(limits.max, _LARGE))
        return torch.empty(_DRAWN, dtype=dtype, device=device).random_(*ends, generator=generator)
    drawn = torch.empty(_DRAWN, dtype=torch.float64, device=device).normal_(generator=generator)
    if kind == "small":
        drawn *= 2.0**-10
    elif kind == "any magnitude":
        drawn *= 10.0 ** torch.empty_like(drawn).uniform_(-42, 38, generator=generator)
        chance = torch.empty_like(drawn).uniform_(generator=generator)
        for number, special in enumerate(_SPECIAL):
            drawn[(chance >= number / 100) & (chance < (number + 1) / 100)] = special
    return drawn.to(dtype)
