"""How one amount of memory is divided among jobs that share it: pure policy, no input or output.

Each job is granted its minimum in order of arrival, the rest max-min fairly, up to the most that each can use. Memory
that a job has to give back is granted to others once it is free, so that no two jobs ever count on the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Job:
    """One job's part in the division, all in bytes.

    ``minimum``: with less it cannot run at all. ``max_useful``: with more it is no faster. ``quota``: it never gets
    more; None: as much as there is. ``held``: bytes that it has allocated now, or has claimed.
    """

    minimum: int
    max_useful: int
    quota: int | None = None
    held: int = 0

    @property
    def most(self) -> int:
        """The largest useful share: never less than ``minimum`` unless the quota says so."""
        useful = max(self.minimum, self.max_useful)
        return useful if self.quota is None else min(useful, self.quota)


def shares(total: int, jobs: Sequence[Job]) -> list[int]:
    """The share of ``total`` bytes of each of ``jobs``, in order of arrival, once none holds more than its share.

    A job whose minimum does not fit beside the minimums of earlier ones waits with 0, and no job that holds nothing yet
    overtakes it. So a large job gets its turn when jobs before it end, however many small ones come. Others get as much
    more as max-min fairness gives: no share grows at the cost of a smaller one.
    """
    low, high = [0] * len(jobs), [0] * len(jobs)
    left, waiting = max(0, total), False
    for number, job in enumerate(jobs):
        if job.minimum > job.most:
            # Its quota forbids it to run, which no other job's end will change: nobody waits behind it.
            continue
        if job.minimum <= left and (not waiting or job.held):
            low[number], high[number] = job.minimum, job.most
            left -= job.minimum
        else:
            waiting = True
    return _filled(left, low, high)


def divide(total: int, jobs: Sequence[Job]) -> list[int]:
    """The bytes that each of ``jobs``, in order of arrival, may hold now of ``total``: its share, or less as long as
    others hold more than theirs. A job that holds more than its grant gives it back at the end of its step.

    The sum is at most ``total``; so is the sum of the larger of each grant and the bytes held, unless jobs hold
    more than ``total`` already. A grant is 0 or at least the job's minimum.
    """
    ends = shares(total, jobs)
    left = max(0, total - sum(job.held for job in jobs))
    low, high = [0] * len(jobs), [0] * len(jobs)
    for number, (job, end) in enumerate(zip(jobs, ends, strict=True)):
        if job.held >= end:
            low[number] = high[number] = end
        elif job.held >= job.minimum:
            low[number], high[number] = job.held, end
        elif job.minimum - job.held <= left:
            left -= job.minimum - job.held
            low[number], high[number] = job.minimum, end
    return _filled(left, low, high)


Rule = Callable[[int, Sequence[Job]], list[int]]
"""``shares`` or ``divide``."""


def on_devices(
    rule: Rule, totals: Mapping[int, int], jobs: Sequence[Job], devices: Sequence[Collection[int]]
) -> list[int]:
    """By ``rule``, the number of bytes that each of ``jobs`` has on each of its ``devices``: one number, the bytes
    that the tightest of them leaves. ``totals``: bytes of each device.

    Memory that a job cannot use because of another of its devices is divided among the others: each round bounds jobs
    by the results of the round before. No round gives more of a device than it has.
    """
    bounded, granted = list(jobs), [0] * len(jobs)
    for _ in range(len(jobs) + 1):
        found: list[int | None] = [None] * len(jobs)
        for device, total in totals.items():
            there = [number for number, on in enumerate(devices) if device in on]
            for number, given in zip(there, rule(total, [bounded[n] for n in there]), strict=True):
                before = found[number]
                found[number] = given if before is None else min(before, given)
        granted = [given or 0 for given in found]
        tighter = [n for n, on in enumerate(devices) if len(on) > 1 and granted[n] < bounded[n].most]
        if not tighter:
            break
        for number in tighter:
            bounded[number] = replace(bounded[number], quota=granted[number])
    return granted


def runs_that_fit(
    totals: Mapping[int, int], jobs: Sequence[Job], devices: Sequence[Collection[int]], runs: Sequence[int]
) -> list[Job]:
    """``jobs``, without any share for those whose run has no room: processes of one run wait for each other in each
    step, so that one alone would hold memory in vain. ``runs``: a number for each job; 0: it is a run of its own.

    A run's place is that of its first job. As in ``shares``, no run that holds nothing overtakes one that waits, on the
    devices that this one lacks.
    """
    members: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        members.setdefault(run or ("alone", number), []).append(number)
    if len(members) == len(jobs):
        return list(jobs)
    left, lacking, fitting = dict(totals), set[int](), list(jobs)
    for of_run in members.values():
        possible = all(jobs[n].minimum <= jobs[n].most for n in of_run)
        needs = {device: 0 for n in of_run for device in devices[n]}
        for n in of_run:
            for device in devices[n]:
                needs[device] += jobs[n].minimum
        short = {device for device, need in needs.items() if need > left[device]}
        overtakes = not lacking.isdisjoint(needs) and not any(jobs[n].held for n in of_run)
        if possible and not short and not overtakes:
            for device, need in needs.items():
                left[device] -= need
            continue
        if possible:
            lacking |= short
        for n in of_run:
            fitting[n] = replace(jobs[n], quota=0)
    return fitting


def _filled(left: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """``low`` raised to one level, each at most to its ``high``, by ``left`` bytes in all."""
    granted = list(low)
    growing = sorted((n for n in range(len(low)) if low[n] < high[n]), key=lambda n: low[n])
    if not growing:
        return granted

    def cost(level: int) -> int:
        return sum(max(0, min(level, high[n]) - low[n]) for n in growing)

    below, above = 0, max(high[n] for n in growing)
    while below < above:
        level = (below + above + 1) // 2
        below, above = (level, above) if cost(level) <= left else (below, level - 1)
    for n in growing:
        granted[n] = max(low[n], min(below, high[n]))
    # Fewer bytes than jobs that could take one: to the earliest.
    left -= cost(below)
    for n in sorted(growing):
        if left > 0 and granted[n] < high[n] and granted[n] == below:
            granted[n], left = granted[n] + 1, left - 1
    return granted
