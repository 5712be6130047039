"""Policies: whose turn it is to leave."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.store.policies import MIB, Simulation, uses
from disco_accel.errors import ConfigError
from disco_accel.eviction import STORE_POLICIES, Candidate, store_policy_named
from disco_accel.store.objects import UseHistory, victims

NOW = 100.0


def made(
    nbytes: int = 1, fetch: float = 1.0, busy: float = 0.0, queue: float = 0.0, **times: float | None
) -> Candidate:
    """An object at ``NOW``. ``times``: of ``UseHistory``."""
    history = UseHistory(**{"arrived": 0.0, "last_use": 0.0, **times})  # type: ignore[arg-type]
    return history.candidate(nbytes, NOW, fetch, 0.0, busy, queue)


def test_each_policy_takes_its_own_kind_first() -> None:
    """One set of objects, in which each policy has another first choice."""
    objects = {
        1: made(10, fetch=10, arrived=1, last_use=95),
        2: made(10, fetch=10, arrived=50, last_use=40),
        3: made(1000, fetch=1000, arrived=60, last_use=90),
        4: made(100, fetch=1, arrived=60, last_use=91),
        5: made(10, fetch=10, arrived=70, last_use=99, next_use=NOW + 800),
    }
    first = {name: victims(policy, objects, 1) for name, policy in STORE_POLICIES.items()}
    assert first == {"fifo": [1], "lru": [2], "size_aware": [3], "latency_aware": [4], "next_use": [5]}


def test_the_next_use_is_announced_or_guessed_from_history() -> None:
    assert made(next_use=130.0).wait == 30
    assert made(next_use=90.0).wait == 0
    assert made(last_use=95, interval=8).wait == 3
    assert made(last_use=80, interval=8).wait == 20
    assert made(last_use=80).wait == 20


def test_what_comes_back_unnoticed_leaves_before_what_somebody_would_wait_for() -> None:
    """Of two that are used at the same time: the announced one, as long as the link has time for it."""

    def announced(fetch: float = 0.1, busy: float = 0.05, queue: float = 0.0) -> Candidate:
        return made(100, fetch, busy, queue, last_use=90.0, next_use=120.0)

    guessed = made(100, 0.1, 0.05, last_use=90.0, interval=30.0)
    assert guessed.wait == announced().wait
    rank = STORE_POLICIES["next_use"]
    assert rank(announced()) > 4 * rank(guessed)
    for late in (announced(busy=0.6), announced(queue=20.0), announced(fetch=15)):
        assert rank(late) == STORE_POLICIES["latency_aware"](late)


def test_next_use_makes_the_most_of_announcements() -> None:
    """In simulated time, half of the uses announced: fewer seconds of waiting than any other policy's."""
    totals = dict.fromkeys(STORE_POLICIES, 0.0)
    for seed in range(2):
        rng = random.Random(seed)
        sizes = [int(MIB * 64 ** rng.random()) for _ in range(30)]
        sequence = uses(rng, 0.5, sizes, 10.0)
        for name, policy in STORE_POLICIES.items():
            totals[name] += Simulation(policy, sizes, sum(sizes) // 2, 10e9).run(sequence)["stalled_s"]
    least = min(waited for name, waited in totals.items() if name != "next_use")
    assert 0 < totals["next_use"] < 0.95 * least, totals
    assert least < totals["lru"] < totals["fifo"]


CANDIDATES = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 90), st.floats(0, 90), st.none() | st.floats(0, 200)), max_size=12
).map(lambda rows: {n: made(size, arrived=a, last_use=b, next_use=c) for n, (size, a, b, c) in enumerate(rows)})


@given(CANDIDATES, st.integers(0, 200), st.sampled_from(list(STORE_POLICIES)))
def test_victims_suffice_where_they_can_and_none_is_needless(
    candidates: dict[int, Candidate], nbytes: int, name: str
) -> None:
    chosen = victims(STORE_POLICIES[name], candidates, nbytes)
    total = sum(candidates[id].nbytes for id in chosen)
    assert total >= min(nbytes, sum(c.nbytes for c in candidates.values()))
    assert all(total - candidates[id].nbytes < nbytes for id in chosen)
    assert victims(STORE_POLICIES[name], dict(reversed(candidates.items())), nbytes) == chosen


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="fifo, lru, size_aware"):
        store_policy_named("best")
