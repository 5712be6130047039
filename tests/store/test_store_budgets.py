"""Budgets that a store grants, first-class memory, and objects that make way for both."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from disco_accel.errors import ConfigError, StoreError, StoreFull, StoreGone
from disco_accel.store.client import Store
from tests.store.serving import MIB, filled, serving, until


def test_grants_follow_wishes_and_come_back_at_the_end(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as one:
        with pytest.raises(StoreError, match="nothing was wanted"):
            one.granted()
        one.wanted(MIB, 20 * MIB)
        assert one.granted() == 8 * MIB
        one.held(8 * MIB)
        with Store.connect(server.path) as two:
            two.wanted(2 * MIB, 4 * MIB)
            # The first has to come down before the second may use it.
            assert one.granted() == 4 * MIB and two.granted() == 0
            one.held(4 * MIB)
            until(lambda: two.granted() == 4 * MIB)
            two.held(4 * MIB)
            assert two.stats()["budgets"] == 8 * MIB
        until(lambda: one.granted() == 8 * MIB)
        one.held(0)
        one.wanted(0, 0)
        assert one.granted() == 0 and one.stats()["jobs"] == 0


def test_a_job_that_does_not_fit_waits_with_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as one, Store.connect(server.path) as two:
        one.wanted(6 * MIB, 6 * MIB)
        one.held(6 * MIB)
        two.wanted(3 * MIB, 3 * MIB)
        assert two.granted() == 0
        one.held(0)
        one.wanted(0, 0)
        until(lambda: two.granted() == 3 * MIB)


def test_a_quota_bounds_a_budget(tmp_path: Path) -> None:
    with serving(tmp_path, quota=3 * MIB) as server, Store.connect(server.path) as store:
        store.wanted(MIB, 8 * MIB)
        assert store.granted() == 3 * MIB


def test_first_class_memory_comes_before_budgets_and_objects(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made = [filled(store, MIB, value) for value in range(4)]
        store.wanted(MIB, 4 * MIB)
        assert store.granted() == 4 * MIB
        store.held(4 * MIB)
        with Store.connect(server.path) as program:
            program.report(0, 3 * MIB)
            program.report(5, 9 * MIB)
            # Objects that nobody uses leave first; the budget only shrinks for what is missing then.
            until(lambda: store.stats()["device_used"] == MIB)
            assert store.granted() == 4 * MIB
            program.report(0, 3 * MIB)
            until(lambda: store.granted() == 2 * MIB)
            assert store.stats()["first_class"] == 6 * MIB and store.stats()["device_used"] == 0
            program.report(0, -MIB)
            until(lambda: store.granted() == 3 * MIB)
            store.held(3 * MIB)
            assert store.stats()["device_used"] == 0
            program.report(0, -100 * MIB)
            until(lambda: store.stats()["first_class"] == 0)
            program.report(0, 3 * MIB)
        until(lambda: store.stats()["first_class"] == 0)
        assert all((store.get(name) == value).all() for value, name in enumerate(made))


def test_objects_in_use_are_taken_off_what_is_granted_and_idle_ones_leave(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made = [filled(store, MIB, value) for value in range(8)]
        used = store.get(made[0])
        store.wanted(MIB, 8 * MIB)
        until(lambda: store.granted() == 7 * MIB)
        store.held(7 * MIB)
        assert store.stats()["device_used"] == MIB and (used == 0).all()


def test_an_object_that_is_needed_has_a_budget_come_down_first(tmp_path: Path) -> None:
    """Within its job's minimum, of course."""
    with serving(tmp_path) as server, Store.connect(server.path) as job, Store.connect(server.path) as store:
        job.wanted(6 * MIB, 8 * MIB)
        job.held(8 * MIB)
        assert job.granted() == 8 * MIB
        made: list[int] = []
        thread = threading.Thread(target=lambda: made.append(store.create((2 * MIB,), torch.uint8, "device")))
        thread.start()
        until(lambda: job.granted() == 6 * MIB)
        assert not made
        job.held(6 * MIB)
        thread.join(20)
        assert made and job.stats()["device_used"] == 2 * MIB
        with pytest.raises(StoreFull, match="budgets 6MiB"):
            store.create((MIB,), torch.uint8, "device")


def test_what_is_wanted_is_checked(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        store = Store.connect(server.path)
        for minimum, max_useful, says in ((-1, 1, "minimum"), (2, 1, "max_useful"), (0, 1 << 63, "max_useful")):
            with pytest.raises(ConfigError, match=says):
                store.wanted(minimum, max_useful)
        with pytest.raises(ConfigError, match="held"):
            store.held(-1)
        store.wanted(0, 1)
    until(lambda: _gone(store))
    store.close()


def _gone(store: Store) -> bool:
    """Without a message: the page is silent, and then the connection turns out to have ended."""
    try:
        store.granted()
    except StoreGone:
        return True
    return False


def test_each_device_is_divided_by_itself(tmp_path: Path) -> None:
    """Jobs on other devices take nothing from each other; first-class memory of a device is its own."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path))
        one, two, both, program = (stack.enter_context(Store.connect(server.path)) for _ in range(4))
        one.wanted(MIB, 8 * MIB, devices=[0])
        two.wanted(MIB, 8 * MIB, devices=[1])
        assert one.granted() == two.granted() == 8 * MIB
        program.report(1, 6 * MIB)
        until(lambda: two.granted() == 2 * MIB)
        assert one.granted() == 8 * MIB
        both.wanted(MIB, 8 * MIB, devices=[0, 1])
        # The second device has room for one each.
        until(lambda: (one.granted(), two.granted(), both.granted()) == (7 * MIB, MIB, MIB))
        made = filled(program, MIB, 1)
        assert torch.equal(program.get(made), torch.full((MIB,), 1, dtype=torch.uint8))
        for wrong in ([], [-1], [64]):
            with pytest.raises(ConfigError, match="devices"):
                one.wanted(1, 1, wrong)


def test_two_runs_of_two_processes_get_all_or_nothing(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path))
        jobs = [stack.enter_context(Store.connect(server.path)) for _ in range(4)]
        for job, run in zip(jobs, (7, 9, 7, 9), strict=True):
            job.wanted(3 * MIB, 3 * MIB, run=run)
        assert [job.granted() for job in jobs] == [3 * MIB, 0, 3 * MIB, 0]
        jobs[0].close()
        # What is left of the first run, and holds nothing yet, came behind the second one.
        until(lambda: [job.granted() for job in jobs[1:]] == [3 * MIB, 0, 3 * MIB])
        jobs[3].close()
        until(lambda: [job.granted() for job in jobs[1:3]] == [3 * MIB, 3 * MIB])
        with pytest.raises(ConfigError, match="run"):
            jobs[1].wanted(1, 1, run=-1)
