"""Happens-before against brute force, with a window so small that every branch for long spans is taken."""

from __future__ import annotations

import random

import pytest

from disco_accel.verify import happens_before
from disco_accel.verify.happens_before import Claim, first_violated

GRAPHS = 300


def random_predecessors(rng: random.Random) -> list[list[int]]:
    """A graph by position: sparse or dense, of long chains or of many short ones."""
    size = rng.randint(2, 90)
    near = rng.choice((2, 6, size))
    degree = rng.choice((0.5, 1.0, 2.0))
    predecessors: list[list[int]] = []
    for position in range(size):
        count = round(rng.expovariate(1 / degree))
        lanes = rng.choice((1, 1, 3))
        earlier = [p for p in range(max(0, position - near * lanes), position) if (position - p) % lanes == 0]
        predecessors.append(sorted(set(rng.choices(earlier, k=count)) if earlier else set()))
    return predecessors


def closure(predecessors: list[list[int]]) -> list[set[int]]:
    """All ancestors of each position, by definition."""
    ancestors: list[set[int]] = []
    for waits_for in predecessors:
        ancestors.append({a for p in waits_for for a in (p, *ancestors[p])})
    return ancestors


def no_reason() -> str:
    return ""


@pytest.mark.parametrize("span", [1, 2, 5, 1 << 13])
@pytest.mark.parametrize("paths", [0, 1, 4])
def test_claims_hold_or_not_as_the_closure_says(span: int, paths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each claim by itself; ``paths`` long paths to cut the search short with."""
    monkeypatch.setattr(happens_before, "_SPAN", span)
    monkeypatch.setattr(happens_before, "_LONG_PATHS", paths)
    rng = random.Random(100 * span + paths)
    held = far = 0
    for _ in range(GRAPHS // 3):
        predecessors = random_predecessors(rng)
        ancestors = closure(predecessors)
        true = [(first, then) for then, before in enumerate(ancestors) for first in sorted(before)]
        size = len(predecessors)
        guesses = [(rng.randrange(size), rng.randrange(size)) for _ in range(12)]
        for first, then in (*guesses, *rng.sample(true, min(12, len(true)))):
            claim: Claim = (first, then, no_reason)
            wrong = first_violated(predecessors, [claim])
            assert (wrong is None) == (first in ancestors[then]), (predecessors, first, then)
            held += wrong is None
            far += then - first >= 2 * span
    assert held > 300 and (far > 300 or span > 100)


@pytest.mark.parametrize("span", [1, 3, 8])
def test_many_claims_at_once_are_right_if_each_is(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that hold are accepted together; with one more that does not, that one is named, wherever it stands."""
    monkeypatch.setattr(happens_before, "_SPAN", span)
    rng = random.Random(span)
    for _ in range(GRAPHS):
        predecessors = random_predecessors(rng)
        ancestors = closure(predecessors)
        true = [(a, then, no_reason) for then, before in enumerate(ancestors) for a in before]
        rng.shuffle(true)
        assert first_violated(predecessors, true) is None
        pairs = [(a, b) for b in range(len(predecessors)) for a in range(len(predecessors))]
        false = [(a, b, no_reason) for a, b in pairs if a not in ancestors[b]]
        wrong = rng.choice(false)
        at = rng.randint(0, len(true))
        assert first_violated(predecessors, [*true[:at], wrong, *true[at:]]) == wrong
