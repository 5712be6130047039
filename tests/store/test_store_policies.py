"""Policies: whose turn it is to leave."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.store.policies import MIB, Simulation, uses
from disco_accel.errors import ConfigError
from disco_accel.store.policies import POLICIES, Candidate, policy_of, victims, wait


def made(id: int, nbytes: int = 1, arrived: float = 0, last: float = 0, fetch: float = 1.0, **more: float) -> Candidate:
    return Candidate(id, nbytes, arrived, last, fetch, **more)


def test_each_policy_takes_its_own_kind_first() -> None:
    """One set of objects, in which each policy has another first choice."""
    now = 100.0
    old = made(1, 10, arrived=1, last=95, fetch=10)
    unused = made(2, 10, arrived=50, last=40, fetch=10)
    large = made(3, 1000, arrived=60, last=90, fetch=1000)
    cheap = made(4, 100, arrived=60, last=91, fetch=1)
    late = made(5, 10, arrived=70, last=99, fetch=10, next_use=now + 800)
    first = {name: victims(policy, [old, unused, large, cheap, late], 1, now)[0] for name, policy in POLICIES.items()}
    expected = {"fifo": old, "lru": unused, "size_aware": large, "latency_aware": cheap, "next_use": late}
    assert first == expected


def test_the_next_use_is_announced_or_guessed_from_history() -> None:
    assert wait(made(1, next_use=130.0), 100.0) == 30
    assert wait(made(1, next_use=90.0), 100.0) == 0
    assert wait(made(1, last=95, interval=8), 100.0) == 3
    assert wait(made(1, last=80, interval=8), 100.0) == 20
    assert wait(made(1, last=80), 100.0) == 20


def test_what_comes_back_unnoticed_leaves_before_what_somebody_would_wait_for() -> None:
    """Of two that are used at the same time: the announced one, as long as the link has time for it."""
    link = {"link_busy": 0.05, "link_queue": 0.0}
    guessed = made(1, 100, last=90.0, interval=30.0, fetch=0.1, **link)
    announced = made(2, 100, last=90.0, next_use=120.0, fetch=0.1, **link)
    assert wait(guessed, 100.0) == wait(announced, 100.0)
    score = POLICIES["next_use"]
    assert score(announced, 100.0) > 4 * score(guessed, 100.0)
    for busy in (
        replace(announced, link_busy=0.6),
        replace(announced, link_queue=20.0),
        replace(announced, fetch_seconds=15),
    ):
        assert score(busy, 100.0) == POLICIES["latency_aware"](busy, 100.0)


def test_next_use_makes_the_most_of_announcements() -> None:
    """In simulated time, half of the uses announced: fewer seconds of waiting than any other policy's."""
    totals = dict.fromkeys(POLICIES, 0.0)
    for seed in range(2):
        rng = random.Random(seed)
        sizes = [int(MIB * 64 ** rng.random()) for _ in range(30)]
        sequence = uses(rng, 0.5, sizes, 10.0)
        for name, policy in POLICIES.items():
            totals[name] += Simulation(policy, sizes, sum(sizes) // 2, 10e9).run(sequence)["stalled_s"]
    least = min(waited for name, waited in totals.items() if name != "next_use")
    assert 0 < totals["next_use"] < 0.95 * least, totals
    assert least < totals["lru"] < totals["fifo"]


CANDIDATES = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 90), st.floats(0, 90), st.none() | st.floats(0, 200)), max_size=12
).map(lambda rows: [made(n, size, a, b, next_use=c) for n, (size, a, b, c) in enumerate(rows)])


@given(CANDIDATES, st.integers(0, 200), st.sampled_from(list(POLICIES)))
def test_victims_suffice_where_they_can_and_none_is_needless(
    candidates: list[Candidate], nbytes: int, name: str
) -> None:
    chosen = victims(POLICIES[name], candidates, nbytes, 100.0)
    total = sum(c.nbytes for c in chosen)
    assert total >= min(nbytes, sum(c.nbytes for c in candidates))
    assert all(total - c.nbytes < nbytes for c in chosen)
    assert victims(POLICIES[name], reversed(candidates), nbytes, 100.0) == chosen


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="fifo, lru, size_aware"):
        policy_of("best")
