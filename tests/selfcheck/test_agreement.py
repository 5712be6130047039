"""The rule by which a run agrees with eager PyTorch: bits where eager repeats them, else as near as eager to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from disco_accel.selfcheck.agreement import Agreement, agreement, distance

Run = dict[str, torch.Tensor]
TENSORS = 100


class Noisy:
    """A step whose gradients never have the same bits twice: their noise is between 1e-4 and 2e-2 of their norm."""

    def __init__(self, seed: int, elements: int = 256, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.true = self._draw(elements, dtype)
        self.noise = 10 ** (torch.rand(TENSORS, generator=self.generator) * 2.3 - 4)
        self.drawn = 0

    def _draw(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(TENSORS, elements, generator=self.generator).to(dtype)

    def run(self) -> Run:
        self.drawn += 1
        noise = torch.randn(self.true.shape, generator=self.generator) * self.noise[:, None]
        rows = (self.true * (1 + noise)).to(self.true.dtype)
        return {"loss": torch.tensor(10.787), **{str(number): row for number, row in enumerate(rows)}}

    def eager(self) -> Iterator[Run]:
        while True:
            yield self.run()


def judged(step: Noisy, ours: Run) -> Agreement:
    return agreement(ours, step.eager(), outputs=("loss",))


def agrees(found: Agreement) -> bool:
    return not found.wrong


def test_one_run_of_eager_is_enough_where_bits_agree_and_two_where_eager_repeats_its_own() -> None:
    run = Noisy(0).run()
    taken: list[int] = []

    def eager() -> Iterator[Run]:
        for number in range(9):
            taken.append(number)
            yield dict(run)

    assert agreement(dict(run), eager()).bits and taken == [0]
    taken.clear()
    last_bit = run | {"7": run["7"].nextafter(torch.tensor(9.0))}
    found = agreement(last_bit, eager())
    assert list(found.wrong) == ["7"] and found.spread == 0 and taken == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_further_run_of_eager_agrees_and_takes_three(dtype: torch.dtype) -> None:
    for seed in range(4):
        step = Noisy(seed, dtype=dtype)
        found = judged(step, step.run())
        assert agrees(found) and not found.bits and found.runs == 3 and step.drawn == 4, found.wrong
        assert found.spread is not None and found.farthest < 1.2 * found.spread


@pytest.mark.parametrize("elements", [1, 4, 64])
def test_tensors_of_a_few_elements_agree_too(elements: int) -> None:
    refused = 0
    for seed in range(4):
        step = Noisy(seed, elements)
        refused += not agrees(judged(step, step.run()))
    assert refused == 0


def _stale(run: Run) -> Run:
    return run | {"11": run["12"]}


def _loss(run: Run) -> Run:
    return run | {"loss": run["loss"].nextafter(torch.tensor(11.0))}


def _everywhere(run: Run) -> Run:
    return {n: t if n == "loss" else t + 0.03 * t.flip(0) for n, t in run.items()}


def _in_one(run: Run) -> Run:
    return run | {"11": run["11"] * 1.1}


def _missing(run: Run) -> Run:
    return {name: tensor for name, tensor in run.items() if name != "11"}


def _wider(run: Run) -> Run:
    return run | {"11": run["11"].double()}


def _not_a_number(run: Run) -> Run:
    return run | {"11": run["11"].where(run["11"] != run["11"].max(), torch.nan)}


def _too_many(run: Run) -> Run:
    return run | {"more": run["11"]}


def _a_little_everywhere(run: Run) -> Run:
    """In no tensor twice the noise."""
    step = Noisy(3)
    _, other = step.run(), step.run()
    return {n: t + 0.7 * (t - other[n]) for n, t in run.items()}


FAULTS = (_a_little_everywhere, _stale, _loss, _everywhere, _in_one, _missing, _wider, _not_a_number, _too_many)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.strip("_"))
def test_faults_in_a_noisy_step_are_found(fault: Callable[[Run], Run]) -> None:
    step = Noisy(3)
    found = judged(step, fault(step.run()))
    assert found.wrong and (fault in (_everywhere, _a_little_everywhere) or len(found.wrong) == 1), found.wrong
    if fault is _a_little_everywhere:
        assert all(found.distances[name] <= found.limits[name] for name in found.distances), "the middle ratio alone"


def test_an_allowance_is_added_to_what_eager_is_apart_from_itself() -> None:
    step = Noisy(4)
    ours = {n: t * 1.02 for n, t in step.run().items()}
    assert not agrees(agreement(ours, step.eager()))
    assert agrees(agreement(ours, step.eager(), allowance=2e-2))
    assert agreement(ours, step.eager(), allowance=0.5).runs == 1
    run = step.run()
    assert list(agreement(run | {"7": run["7"] * 1.1}, iter([run, run]), allowance=0.05).wrong) == ["7"]


def test_noise_that_seldom_comes_refuses_nothing_once_it_has_come() -> None:
    """Of three runs of eager one differs, in a single rounding of one tensor; ours differs in another."""
    run = Noisy(5, dtype=torch.bfloat16).run()
    rounded = {name: run | {name: run[name].nextafter(torch.tensor(9.0, dtype=torch.bfloat16))} for name in ("3", "8")}
    assert agrees(agreement(rounded["8"], [run, rounded["3"], run], outputs=("loss",)))


def test_infinite_gradients_agree_where_the_same_elements_are_infinite() -> None:
    infinite = torch.tensor([1.0, torch.inf, torch.nan, 2.0])
    assert distance(infinite, infinite.clone()) == 0
    assert distance(infinite, infinite + 1e-3) == pytest.approx(1e-3 * 2**0.5 / 5**0.5, rel=1e-3)
    assert distance(infinite, torch.ones(4)) == float("inf")
