"""Policies: whose turn it is to leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    late = made(5, 10, arrived=70, last=99, fetch=10, next_use=now + 80)
    first = {name: victims(policy, [old, unused, large, cheap, late], 1, now)[0] for name, policy in POLICIES.items()}
    expected = {"fifo": old, "lru": unused, "size_aware": large, "latency_aware": cheap, "next_use": late}
    assert first == expected


def test_the_next_use_is_announced_or_guessed_from_history() -> None:
    assert wait(made(1, next_use=130.0), 100.0) == 30
    assert wait(made(1, next_use=90.0), 100.0) == 0
    assert wait(made(1, last=95, interval=8), 100.0) == 3
    assert wait(made(1, last=80, interval=8), 100.0) == 20
    assert wait(made(1, last=80), 100.0) == 20


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
