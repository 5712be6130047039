"""Budgets that move in each of two ranks by itself: plans compute the same, and collectives keep their order."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disco_accel.store.client import Store
from tests.integrate.test_distributed import environment
from tests.step.moving_budgets import LARGE, SMALL, until
from tests.store.serving import serving
from tests.support import forkserver

started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """Where a test fails, those that wait for it end too."""
    yield
    while started:
        started.pop().kill()


SCRIPT = Path(__file__).parent / "scripts" / "ranks.py"


def start(folder: Path, mode: str, rank: int) -> subprocess.Popen[str]:
    variables = environment() | {"RANK": str(rank), "DISCO_STORE": str(folder / "own" / "store")}
    # As a launcher has it; they meet at a file.
    variables |= {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    words = [str(forkserver.start() / "python"), str(SCRIPT), str(folder), mode]
    process = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    started.append(process)
    return process


def ended(processes: list[subprocess.Popen[str]], folder: Path) -> list[dict[str, Any]]:
    for process in processes:
        _, shown = process.communicate(timeout=1200)
        assert process.returncode == 0, shown[-3000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(len(processes))]


def test_ranks_whose_budgets_move_at_different_steps_keep_the_bits_of_fixed_ones(tmp_path: Path) -> None:
    """Set by hand, granted, and granted on two devices."""
    found = ended([start(tmp_path, "moving", rank) for rank in range(2)], tmp_path)
    for one in found:
        assert one["bits"] == [True, True, True]
        assert min(one["moves"]) >= 1 and one["planned"] > 0
    assert found[0]["weights"] == found[1]["weights"] and found[0]["losses"] != found[1]["losses"]


def meet(processes: list[subprocess.Popen[str]], folder: Path, name: str) -> None:
    """Return when all have come to ``name``, where they wait."""

    def come() -> bool:
        assert all(process.poll() is None for process in processes), "a rank has ended"
        return all((folder / f"{name}-{rank}").exists() for rank in range(2))

    until(come)


def test_a_store_that_ends_and_comes_back_while_two_ranks_hold_grants(tmp_path: Path) -> None:
    """Training goes on meanwhile; the next store knows at once what both hold."""
    processes: list[subprocess.Popen[str]] = []
    with serving(tmp_path, device=2 * LARGE):
        processes += [start(tmp_path, "store", rank) for rank in range(2)]
        meet(processes, tmp_path, "first")
    (tmp_path / "first-go").touch()
    meet(processes, tmp_path, "alone")
    with serving(tmp_path, device=2 * LARGE) as server, Store.connect(server.path) as watch:
        (tmp_path / "alone-go").touch()
        meet(processes, tmp_path, "back")
        clients = watch.stats()["clients"]
        assert sum(client["held"] > 0 for client in clients) == 2
        watch.report(0, 2 * LARGE - 2 * SMALL)
        (tmp_path / "back-go").touch()
        found = ended(processes, tmp_path)
        until(lambda: watch.stats()["jobs"] == 0)
    for one in found:
        assert one["bits"] == [True] and one["planned"] > 0 and 0 < one["held"] <= 2 * SMALL


def test_a_rank_that_is_killed_leaves_its_memory_to_one_that_waits(tmp_path: Path) -> None:
    """There is room for one of two: neither holds it in vain, wherever each of them waits."""
    with serving(tmp_path, device=LARGE) as server, Store.connect(server.path) as watch:
        processes = [start(tmp_path, "crowded", rank) for rank in range(2)]
        meet(processes, tmp_path, "crowded")

        def leasts() -> list[int]:
            return [client["minimum"] for client in watch.stats()["clients"] if client["minimum"]]

        # They are found beside the steps; one byte is what a job says before.
        until(lambda: len(leasts()) == 2 and min(leasts()) > 1)
        room = max(leasts()) + min(leasts()) // 2
        watch.report(0, LARGE - room)
        (tmp_path / "crowded-go").touch()

        def jobs() -> dict[int, int]:
            return {client["pid"]: client["grant"] for client in watch.stats()["clients"] if client["minimum"]}

        until(lambda: list(jobs().values()) == [0, 0])
        # Also one that waits for the other behind its backward gives its memory back.
        until(lambda: sum(client["held"] for client in watch.stats()["clients"]) < min(leasts()) // 2)
        first, waits = jobs()
        os.kill(first, signal.SIGKILL)
        # The other gets it, and goes on until it misses the first in the exchange.
        until(lambda: jobs().get(waits, 1) > 0)
        said = [process.communicate(timeout=600)[1] for process in processes]
        assert all(process.returncode != 0 for process in processes)
        assert any("waiting for other jobs" in text for text in said)
        until(lambda: watch.stats()["jobs"] == 0)
        assert watch.stats()["budgets"] == 0


def test_a_job_that_is_killed_in_the_middle_of_claims_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, device=LARGE) as server, Store.connect(server.path) as watch:
        chance = random.Random(0)
        for _ in range(2):
            processes = [start(tmp_path, "endless", rank) for rank in range(2)]
            until(lambda: sum(client["held"] > 0 for client in watch.stats()["clients"]) == 2)
            time.sleep(chance.uniform(0, 0.3))
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate(timeout=600)
            until(lambda: watch.stats()["jobs"] == 0)
            assert [watch.stats()[key] for key in ("budgets", "host_used", "device_used")] == [0, 0, 0]
            (tmp_path / "meeting").unlink(missing_ok=True)
