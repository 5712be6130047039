"""The rule by which a step is eager's: its bits, or within the spread of eager runs that do not repeat theirs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from disco_accel.selfcheck.eager_spread import WHOLE_STEP, compare, eager_runs

TENSORS, ELEMENTS = 40, 256


def run(seed: int, noise: float = 1e-2) -> dict[str, torch.Tensor]:
    """A result whose noise is another one with each seed; ``loss`` and ``exact`` have none."""
    base = torch.Generator().manual_seed(0)
    drawn = torch.Generator().manual_seed(1000 + seed)
    found = {"loss": torch.ones(()), "exact": torch.arange(64.0)}
    for number in range(TENSORS):
        value = torch.randn(ELEMENTS, generator=base) * 4.0 ** (number % 5)
        found[f"{number}"] = value + noise * value.norm() / math.sqrt(ELEMENTS) * torch.randn(ELEMENTS, generator=drawn)
    return found


def test_a_further_eager_run_is_equal_and_says_how_far_it_is() -> None:
    eager = [run(seed) for seed in range(3)]
    for seed in range(3, 23):
        compared = compare(run(seed), eager)
        assert compared.equal and not compared.bits, compared.words
        assert 0.01 < compared.widest < 0.02 and 0.01 < compared.spread < 0.02
    assert compared.words.startswith("to 0.01")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t["7"].mul_(1.05), "7"),
        (lambda t: t["exact"].add_(1e-3), "exact"),
        (lambda t: t["3"].copy_(t["4"]), "3"),
        (lambda t: t["0"].fill_(math.nan), "0"),
        (lambda t: t.pop("5"), "5"),
        (lambda t: t.update({"5": t["5"].double()}), "5"),
        (lambda t: [t[k].add_(t[k].abs().mean() * 0.03) for k in t if k.isdigit()], WHOLE_STEP),
    ],
    ids=["scaled", "eager agrees", "another's", "nan", "missing", "dtype", "all a little"],
)
def test_what_no_eager_run_would_be_is_named(change: Callable[[dict[str, torch.Tensor]], object], named: str) -> None:
    """A fault that is larger than the noise of its tensor, or that is in what eager runs agree on."""
    got = run(9)
    change(got)
    compared = compare(got, [run(seed) for seed in range(3)])
    assert not compared.equal and named in compared.wrong, compared.words
    assert compared.words.startswith("no: ")


def test_bits_are_asked_for_where_eager_repeats_its_own() -> None:
    eager, other = run(0), run(0)
    assert compare(other, [eager]).bits and compare(other, [eager, run(0)]).words == "bits"
    other["8"][3] = torch.nextafter(other["8"][3], torch.tensor(math.inf))
    for runs in ([eager], [eager, run(0)]):
        assert list(compare(other, runs).wrong) == ["8"]
    signed, plain = {"x": torch.tensor([0.0] * 32)}, {"x": torch.tensor([-0.0] * 32)}
    assert not compare(signed, [plain, plain]).equal


def test_a_third_run_is_made_only_where_two_differ() -> None:
    made: list[int] = []

    def noisy() -> dict[str, torch.Tensor]:
        made.append(len(made))
        return run(len(made))

    def steady() -> dict[str, torch.Tensor]:
        made.append(0)
        return run(0)

    assert len(list(eager_runs(noisy))) == 3 and len(made) == 3
    assert len(list(eager_runs(noisy, run(7)))) == 3 and len(made) == 5
    made.clear()
    assert len(list(eager_runs(steady))) == 2 and len(made) == 2
