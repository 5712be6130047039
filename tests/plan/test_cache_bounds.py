"""A stored plan that names memory outside its arenas is as good as absent, however its file came to say so."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_accel.graph.copies import swaps_out
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from disco_accel.plan import plan_cache as module
from disco_accel.plan.plan_cache import PlanCache
from disco_accel.verify.static import verify
from tests.support.oracles.adversary import run_reference

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
KEY = "5" * 64
FLIPS = int(os.environ.get("DISCO_BIT_FLIPS", "1500"))
"""Of the 17,000 bits of the file."""


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    """So small a device that values must leave it."""
    toy = read_taskgraph(GRAPHS / "toy.taskgraph.json")
    return replace(toy, spaces=tuple(replace(d, memory=1024) for d in toy.devices))


@pytest.fixture(scope="module")
def plan(graph: TaskGraph) -> MemGraph:
    made = make_plan(graph, cyclic=True)
    assert any(swaps_out(v) for v in made.vertices)
    return made


@pytest.fixture
def file(tmp_path: Path, plan: MemGraph, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_said", set())
    PlanCache(tmp_path).store(KEY, plan)
    return tmp_path / "plans" / f"{KEY}.json"


def _host(data: dict[str, Any]) -> dict[str, Any]:
    return next(space for space in data["spaces"] if space["id"] == HOST)


def _offloads(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [v for v in data["vertices"] if v["space"] == HOST]


def _end(data: dict[str, Any]) -> int:
    return max(v["offset"] + v["size"] for v in _offloads(data))


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "memory 0": lambda d: _host(d).update(memory=0),
    "memory missing": lambda d: _host(d).pop("memory"),
    "host missing": lambda d: d["spaces"].remove(_host(d)),
    "memory negative": lambda d: _host(d).update(memory=-256),
    "memory one byte short": lambda d: _host(d).update(memory=_end(d) - 1),
    "memory 0 and an absolute address": lambda d: (_host(d).update(memory=0), _offloads(d)[0].update(offset=1 << 46)),
    "alignment 0": lambda d: _host(d).update(alignment=0),
    "an offload without an offset": lambda d: _offloads(d)[0].pop("offset"),
    "an offload far away": lambda d: _offloads(d)[0].update(offset=1 << 46),
    "an offload whose end overflows": lambda d: _offloads(d)[0].update(offset=(1 << 62) - 256),
    "an offset of 65 bits": lambda d: _offloads(d)[0].update(offset=1 << 64),
    "an offload before the arena": lambda d: _offloads(d)[0].update(offset=-256),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_offsets_outside_the_hosts_arena_are_refused(
    damage: str, file: Path, graph: TaskGraph, caplog: pytest.LogCaptureFixture
) -> None:
    data = json.loads(file.read_text())
    DAMAGE[damage](data)
    file.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING, "disco_accel"):
        assert PlanCache(file.parent.parent).load(KEY, graph, cyclic=True) is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()


def test_whatever_bit_flips_the_plan_is_refused_or_safe(
    file: Path, graph: TaskGraph, plan: MemGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of the file at a time: what is still taken passes both judges, in the memory that was given."""
    monkeypatch.setattr(module, "_say", lambda path, reason: None)
    whole = file.read_bytes()
    cache = PlanCache(file.parent.parent)
    taken: set[str] = set()
    refused = 0
    bits = range(8 * len(whole))
    for bit in random.Random(4).sample(bits, min(FLIPS, len(bits))):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        got = cache.load(KEY, graph, cyclic=True)
        if got is None:
            refused += 1
        elif repr(got) not in taken:
            taken.add(repr(got))
            verify(graph, got)
            run_reference(graph, got, seed=bit)
            assert got.devices == graph.devices and 0 < got.host.memory <= plan.host.memory + 2 * 256
            sizes = {(v.id, 0): v.sizes[0] for v in got.vertices if swaps_out(v)}
            assert all(0 <= got.slots[offload].offset <= got.host.memory - size for offload, size in sizes.items())
    assert refused > min(FLIPS, len(bits)) / 4 and len(taken) > 1
