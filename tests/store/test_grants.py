"""The division of one amount of memory among jobs: nothing is granted twice, nobody starves, shares are fair."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from disco_accel.store.grants import Job, divide, on_devices, runs_that_fit, shares

SIZES = st.integers(0, 120)
JOBS = st.lists(st.builds(Job, SIZES, SIZES, st.none() | SIZES, SIZES), max_size=6)


def at_rest(jobs: list[Job]) -> list[Job]:
    """The same jobs before any of them holds anything."""
    return [replace(job, held=0) for job in jobs]


@given(SIZES, JOBS)
def test_no_byte_is_granted_twice_even_while_jobs_come_down(total: int, jobs: list[Job]) -> None:
    granted = divide(total, jobs)
    assert sum(granted) <= total
    if sum(job.held for job in jobs) <= total:
        assert sum(max(job.held, grant) for job, grant in zip(jobs, granted, strict=True)) <= total


@given(SIZES, JOBS)
def test_a_grant_is_zero_or_between_its_minimum_and_what_is_useful(total: int, jobs: list[Job]) -> None:
    for job, grant, end in zip(jobs, divide(total, jobs), shares(total, jobs), strict=True):
        assert grant == 0 or job.minimum <= grant <= job.most
        assert grant <= end


@given(SIZES, JOBS)
def test_grants_become_the_shares_when_jobs_follow_them(total: int, jobs: list[Job]) -> None:
    """Each takes what it is granted; two rounds are enough, as all that must come down has done so after one."""
    assume(sum(job.held for job in jobs) <= total)
    # Jobs that wait behind others are told apart by what they hold, which following changes: admit all or none.
    assume(sum(job.minimum for job in jobs) <= total)
    ends = shares(total, jobs)
    for _ in range(2):
        jobs = [replace(job, held=grant) for job, grant in zip(jobs, divide(total, jobs), strict=True)]
    assert divide(total, jobs) == ends


@given(SIZES, JOBS)
def test_shares_are_max_min_fair(total: int, jobs: list[Job]) -> None:
    """Whoever could use more has at most one byte less than anybody who has more than the minimum they need."""
    jobs = at_rest(jobs)
    ends = shares(total, jobs)
    for job, end in zip(jobs, ends, strict=True):
        if job.minimum <= end < job.most and end:
            for other, more in zip(jobs, ends, strict=True):
                assert more <= max(end + 1, other.minimum)
    running = [(job, end) for job, end in zip(jobs, ends, strict=True) if end >= max(job.minimum, 1)]
    if any(end < job.most for job, end in running):
        assert sum(ends) == total, "memory lies idle that a job could use"


@given(SIZES, SIZES, JOBS)
def test_more_memory_takes_nothing_from_whoever_runs_with_both(total: int, more: int, jobs: list[Job]) -> None:
    jobs = at_rest(jobs)
    before, after = shares(total, jobs), shares(total + more, jobs)
    if [grant > 0 for grant in before] == [grant > 0 for grant in after]:
        assert all(a >= b for a, b in zip(after, before, strict=True))


@given(SIZES, JOBS, st.integers(0, 5), st.integers(1, 60))
def test_coming_down_takes_nothing_from_others(total: int, jobs: list[Job], which: int, above: int) -> None:
    """What one job gives back goes to others, who keep at least what they hold or need."""
    jobs = [*jobs, Job(0, 50)]
    which %= len(jobs)
    jobs = [*jobs[:which], replace(jobs[which], held=1), *jobs[which + 1 :]]
    end = shares(total, jobs)[which]
    high = [*jobs[:which], replace(jobs[which], held=end + above), *jobs[which + 1 :]]
    low = [*jobs[:which], replace(jobs[which], held=end), *jobs[which + 1 :]]
    if end:
        for number, (a, b) in enumerate(zip(divide(total, low), divide(total, high), strict=True)):
            assert a >= min(b, max(jobs[number].minimum, jobs[number].held))


def test_small_jobs_do_not_overtake_a_large_one_that_waits() -> None:
    runs, large = Job(60, 60, held=60), Job(50, 50)
    assert divide(100, [runs, large, Job(10, 10), Job(10, 10)]) == [60, 0, 0, 0]
    assert divide(100, [large, Job(10, 10), Job(10, 10)]) == [50, 10, 10]


def test_a_quota_below_its_minimum_stops_a_job_and_nobody_behind_it() -> None:
    assert divide(100, [Job(60, 80, quota=50), Job(70, 70)]) == [0, 70]


def test_a_quota_leaves_room_for_the_minimum_of_others() -> None:
    assert divide(100, [Job(10, 500, quota=70), Job(30, 30)]) == [70, 30]


def test_memory_is_granted_only_when_it_has_come_down() -> None:
    first = Job(20, 100, held=100)
    assert divide(100, [first, Job(20, 100)]) == [50, 0]
    assert divide(100, [replace(first, held=70), Job(20, 100)]) == [50, 30]
    assert divide(100, [replace(first, held=50), Job(20, 100)]) == [50, 50]


def test_jobs_that_hold_more_than_there_is_all_come_down() -> None:
    """Memory that programs outside the division took is gone from the total."""
    assert divide(50, [Job(20, 100, held=60), Job(20, 100, held=40)]) == [25, 25]


DEVICES = st.sets(st.integers(0, 2), min_size=1)


@given(st.tuples(SIZES, SIZES, SIZES), JOBS, st.data())
def test_a_job_of_several_devices_has_as_much_on_each_as_the_tightest_leaves(
    totals: tuple[int, int, int], jobs: list[Job], data: st.DataObject
) -> None:
    of = [data.draw(DEVICES) for _ in jobs]
    granted = on_devices(divide, dict(enumerate(totals)), jobs, of)
    for device, total in enumerate(totals):
        there = [n for n, devices in enumerate(of) if device in devices]
        assert sum(granted[n] for n in there) <= total
        if sum(jobs[n].held for n in there) <= total:
            assert sum(max(jobs[n].held, granted[n]) for n in there) <= total
    for job, grant in zip(jobs, granted, strict=True):
        assert grant == 0 or job.minimum <= grant <= job.most


@given(SIZES, JOBS)
def test_one_device_is_divided_as_by_the_rule_alone(total: int, jobs: list[Job]) -> None:
    for rule in (divide, shares):
        assert on_devices(rule, {0: total}, jobs, [{0}] * len(jobs)) == rule(total, jobs)


def test_what_a_job_cannot_use_because_of_another_device_goes_to_others() -> None:
    both, first = Job(minimum=10, max_useful=100), Job(minimum=10, max_useful=100)
    assert on_devices(divide, {0: 100, 1: 30}, [both, first], [{0, 1}, {0}]) == [30, 70]
    # One that has no place on its second device keeps nobody from the first.
    assert on_devices(divide, {0: 100, 1: 5}, [both, first], [{0, 1}, {0}]) == [0, 100]


@given(st.tuples(SIZES, SIZES, SIZES), JOBS, st.data())
def test_a_run_has_the_minimums_of_all_its_jobs_or_nothing(
    totals: tuple[int, int, int], jobs: list[Job], data: st.DataObject
) -> None:
    of, runs = [data.draw(DEVICES) for _ in jobs], [data.draw(st.integers(0, 3)) for _ in jobs]
    there = dict(enumerate(totals))
    fitting = runs_that_fit(there, at_rest(jobs), of, runs)
    granted = on_devices(divide, there, fitting, of)
    for run in {*runs} - {0}:
        members = [n for n, each in enumerate(runs) if each == run and jobs[n].minimum]
        whole = all(granted[n] >= jobs[n].minimum for n in members)
        assert whole or not any(granted[n] for n in members)
    assert runs_that_fit(there, jobs, of, [0] * len(jobs)) == jobs


def test_two_runs_of_two_never_wait_for_each_other() -> None:
    """Without runs the first of each would hold its minimum, and wait for the second."""
    jobs, devices = [Job(minimum=40, max_useful=40)] * 4, [{0}] * 4
    runs = [1, 2, 1, 2]
    assert divide(100, jobs) == [40, 40, 0, 0]
    assert on_devices(divide, {0: 100}, runs_that_fit({0: 100}, jobs, devices, runs), devices) == [40, 0, 40, 0]
    # A run that has grown too large gives its memory to one that fits, as soon as it has come down.
    for held, expected in ((40, [0, 40, 0, 0]), (0, [0, 40, 0, 40])):
        jobs = [Job(40, 40, held=held), Job(40, 40, held=40), Job(90, 90), Job(40, 40)]
        fitting = runs_that_fit({0: 100}, jobs, devices, runs)
        assert on_devices(divide, {0: 100}, fitting, devices) == expected
