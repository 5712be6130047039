"""Eviction policies: each ranks as its name says, and unknown names are answered with the known ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError
from disco_accel.eviction import AUTO, POLICIES, Candidate, policy_named
from disco_accel.plan.buildmemgraph import residents
from disco_accel.plan.buildmemgraph.sim_malloc import copies_cost

MIB = 1 << 20
NOW = 40
GRAPH = Path(__file__).parent.parent / "data" / "graphs" / "lora_small.taskgraph.json"


def copied(size: int = MIB, arrived: int = 10, last_use: int = 20, next_use: int = 60, clean: bool = True) -> Candidate:
    """A copy of a value as the planner ranks it."""
    return Candidate(size, arrived, last_use, NOW, next_use - NOW, copies_cost(size, clean))


@pytest.mark.parametrize(
    ("name", "sooner"),
    [
        ("fifo", {"arrived": 5}),
        ("lru", {"last_use": 15}),
        ("belady", {"next_use": 70}),
        ("size_aware", {"size": 2 * MIB}),
        ("size_aware", {"next_use": 70}),
        ("latency_aware", {"next_use": 70}),
        ("latency_aware", {"size": MIB // 2}),
        ("cost", {"next_use": 70}),
        ("cost", {"size": 2 * MIB}),
    ],
)
def test_who_goes_first(name: str, sooner: dict[str, int]) -> None:
    policy = POLICIES[name]
    assert policy(copied(**sooner)) > policy(copied())


@pytest.mark.parametrize("name", ["latency_aware", "cost"])
def test_what_the_host_has_is_cheaper_to_evict(name: str) -> None:
    assert POLICIES[name](copied()) == pytest.approx(2 * POLICIES[name](copied(clean=False)))


@pytest.mark.parametrize("name", ["fifo", "lru", "belady", "size_aware"])
def test_the_others_do_not_ask_what_the_host_has(name: str) -> None:
    assert POLICIES[name](copied()) == POLICIES[name](copied(clean=False))


def test_policies_that_look_at_size_and_time_disagree() -> None:
    """A large value needed soon, a small one needed late: freed room against copies that are in time."""
    large, small = copied(size=64 * MIB, next_use=45), copied(size=MIB, next_use=70)
    assert POLICIES["size_aware"](large) > POLICIES["size_aware"](small)
    assert POLICIES["latency_aware"](large) < POLICIES["latency_aware"](small)
    assert POLICIES["cost"](large) < POLICIES["cost"](small)


def compiled(folder: Path, *options: str) -> bytes:
    plan = folder / "plan.json"
    assert main(["compile", str(GRAPH), "-o", str(plan), "--memory", "80MiB", "--cyclic", *options]) == 0
    return plan.read_bytes()


def test_the_command_line_and_the_config_take_every_policy_and_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the planner that evicts by policy, that is; who leaves it to the planner gets belady."""
    monkeypatch.setattr(residents, "EFFORT", 0)
    plans = {}
    for name in (*POLICIES, AUTO):
        assert DiscoConfig(policy=name, planner="build").without_effect == ""
        plans[name] = compiled(tmp_path, "--planner", "build", "--policy", name)
        assert main(["verify", str(GRAPH), str(tmp_path / "plan.json")]) == 0
    assert plans.pop(AUTO) == plans["belady"]
    # What goes on this graph has one size, so that several of them agree.
    assert len(set(plans.values())) > 1


def test_a_policy_beside_a_planner_that_has_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are in one config of the contract, so it is no error; one line names both keys and what to do."""
    assert DiscoConfig(planner="timed").without_effect == ""
    for name in POLICIES:
        line = DiscoConfig(planner="timed", policy=name).without_effect
        assert f"policy: {name} has no effect with planner: timed" in line and "set planner: build" in line
    compiled(tmp_path, "--plan-seconds", "0")
    assert "policy" not in capsys.readouterr().err
    compiled(tmp_path, "--plan-seconds", "0", "--policy", "lru")
    assert capsys.readouterr().err.count("policy: lru has no effect with planner: timed") == 1


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    known = "belady, cost, fifo, latency_aware, lru, size_aware"
    assert sorted(POLICIES) == known.split(", ")
    with pytest.raises(ConfigError, match=f"'luck'.*{known}"):
        policy_named("luck")
    with pytest.raises(ConfigError) as caught:
        DiscoConfig(policy="luck")
    assert all(name in str(caught.value) for name in POLICIES)
