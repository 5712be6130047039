"""Budgets that move in each of two ranks by itself: plans compute the same, and collectives keep their order."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from disco_accel.store.client import Store
from tests import forkserver
from tests.integrate.moving_budgets import LARGE, SMALL, until
from tests.integrate.test_distributed import environment
from tests.store.serving import serving

SCRIPT = Path(__file__).parent / "scripts" / "ranks.py"


def start(folder: Path, mode: str, rank: int) -> subprocess.Popen[str]:
    variables = environment() | {"RANK": str(rank), "DISCO_STORE": str(folder / "own" / "store")}
    words = [str(forkserver.start() / "python"), str(SCRIPT), str(folder), mode]
    return subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)


def ended(processes: list[subprocess.Popen[str]], folder: Path) -> list[dict[str, Any]]:
    for process in processes:
        _, shown = process.communicate(timeout=200)
        assert process.returncode == 0, shown[-3000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(len(processes))]


def test_ranks_whose_budgets_move_at_different_steps_keep_the_bits_of_fixed_ones(tmp_path: Path) -> None:
    """Set by hand, granted, and granted on two devices."""
    found = ended([start(tmp_path, "moving", rank) for rank in range(2)], tmp_path)
    for one in found:
        assert one["bits"] == [True, True, True]
        assert min(one["moves"]) >= 1 and one["planned"] > 0
    assert found[0]["weights"] == found[1]["weights"] and found[0]["losses"] != found[1]["losses"]


def test_a_store_that_ends_and_comes_back_while_two_ranks_hold_grants(tmp_path: Path) -> None:
    """Training goes on meanwhile; the next store knows at once what both hold."""
    processes: list[subprocess.Popen[str]] = []

    def meeting(name: str) -> None:
        def come() -> bool:
            assert all(process.poll() is None for process in processes), "a rank has ended"
            return all((tmp_path / f"{name}-{rank}").exists() for rank in range(2))

        until(come)

    with serving(tmp_path, device=2 * LARGE):
        processes += [start(tmp_path, "store", rank) for rank in range(2)]
        meeting("first")
    (tmp_path / "first-go").touch()
    meeting("alone")
    with serving(tmp_path, device=2 * LARGE) as server, Store.connect(server.path) as watch:
        (tmp_path / "alone-go").touch()
        meeting("back")
        clients = watch.stats()["clients"]
        assert sum(client["held"] > 0 for client in clients) == 2
        watch.report(0, 2 * LARGE - 2 * SMALL)
        (tmp_path / "back-go").touch()
        found = ended(processes, tmp_path)
        until(lambda: watch.stats()["jobs"] == 0)
    for one in found:
        assert one["bits"] == [True] and one["planned"] > 0 and 0 < one["held"] <= 2 * SMALL
