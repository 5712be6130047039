"""A tensor store's eviction policies in simulated time, all on the same sequences of uses:
``python -m benchmarks.store.policies``.

Mixed sizes, part of the uses announced, which a store then brings back ahead; a link that has much to spare, and one
that has not. Hit rate, and the seconds that uses wait for the link.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from disco_accel.eviction import STORE_POLICIES, Candidate, Policy
from disco_accel.graph.files import write_atomically
from disco_accel.store.objects import LEAD, BusyShare, UseHistory, victims

MIB = 1 << 20
LATENCY = 1e-4
"""Seconds of a copy beside its bytes."""
RETRY = 0.02
"""Seconds until an object that found no room ahead of its use looks again, as in a store."""
SETTINGS = ((10e9, 0.0), (10e9, 0.5), (10e9, 1.0), (2.5e9, 0.5), (2.5e9, 1.0))
"""Bytes/s of the link, and the share of uses that is announced."""


@dataclass(frozen=True)
class Use:
    """At ``time`` object ``id`` is used; ``announced``: whether its user then says when it is used next."""

    time: float
    id: int
    announced: bool


def uses(rng: random.Random, share: float, sizes: Sequence[int], seconds: float) -> list[Use]:
    """Periodic uses with jitter: each object has a period of its own, from 0.05 to 5 s, log-uniform; ``share`` of the
    uses is announced. A tenth of the objects is used once or twice and then no more."""
    made: list[Use] = []
    for id in range(len(sizes)):
        period = 0.05 * 100 ** rng.random()
        last = seconds if rng.random() > 0.1 else period * 2.5
        now = rng.random() * period
        while now < last:
            made.append(Use(now, id, rng.random() < share))
            now += period * rng.uniform(0.7, 1.3)
    return sorted(made, key=lambda use: use.time)


@dataclass
class Simulation:
    """A device of ``room`` bytes behind a link of ``bandwidth`` bytes/s, one copy at a time, in simulated time.

    A use takes no time itself; the first one of an object creates it. Evicted objects have a copy on the host already.
    Times are in seconds.
    """

    policy: Policy
    sizes: Sequence[int]
    room: int
    bandwidth: float
    hits: int = 0
    loaded: int = 0
    stalled: float = 0.0
    used: int = 0
    link: float = 0.0
    """When it is free."""
    busy: BusyShare = field(default_factory=BusyShare)
    objects: dict[int, UseHistory] = field(default_factory=dict)
    ready: dict[int, float] = field(default_factory=dict)
    """Of those on the device: when they came."""
    due: list[tuple[float, int]] = field(default_factory=list)

    def run(self, sequence: Sequence[Use]) -> dict[str, float]:
        """Hit rate, seconds that uses wait for the link, and GiB that came over it."""
        following: dict[int, float] = {}
        nexts: list[float | None] = []
        for use in reversed(sequence):
            nexts.append(following.get(use.id))
            following[use.id] = use.time
        for use, after in zip(sequence, reversed(nexts), strict=True):
            while self.due and self.due[0][0] <= use.time:
                self._bring_ahead(*heapq.heappop(self.due))
            self._use(use, after)
        return {
            "hit_rate": round(self.hits / len(sequence), 4),
            "stalled_s": round(self.stalled, 2),
            "loaded_gib": round(self.loaded / (1 << 30), 2),
        }

    def _use(self, use: Use, after: float | None) -> None:
        now, id = use.time, use.id
        created = id not in self.objects
        if created:
            self.objects[id] = UseHistory(now, now)
        else:
            self.objects[id].used(now)
        if id not in self.ready:
            self._make_room(self._candidates(now), self._missing(id), now)
            self._arrive(id, now, now if created else self._load(id, now))
        self.hits += self.ready[id] <= now
        self.stalled += max(0.0, self.ready[id] - now)
        if use.announced and after is not None:
            self.objects[id].next_use = after

    def _bring_ahead(self, now: float, id: int) -> None:
        """``id``, if only objects that are used later have to leave for it."""
        announced = self.objects[id].next_use
        if id in self.ready or announced is None:
            return
        away = announced - now
        later = {other: candidate for other, candidate in self._candidates(now).items() if candidate.wait > away}
        missing = self._missing(id)
        if sum(candidate.nbytes for candidate in later.values()) >= missing:
            self._make_room(later, missing, now)
            self._arrive(id, now, self._load(id, now))
        elif away > 0:
            heapq.heappush(self.due, (now + RETRY, id))

    def _missing(self, id: int) -> int:
        return self.sizes[id] - (self.room - self.used)

    def _candidates(self, now: float) -> dict[int, Candidate]:
        queue, busy = max(0.0, self.link - now), self.busy.at(now)
        return {
            id: self.objects[id].candidate(self.sizes[id], now, self._seconds(id), 0.0, busy, queue)
            for id, ready in self.ready.items()
            if ready <= now
        }

    def _make_room(self, candidates: Mapping[int, Candidate], missing: int, now: float) -> None:
        for id in victims(self.policy, candidates, missing):
            del self.ready[id]
            self.used -= self.sizes[id]
            announced = self.objects[id].next_use
            if announced is not None:
                lead = LEAD * (self._seconds(id) + max(0.0, self.link - now))
                heapq.heappush(self.due, (max(now, announced - lead), id))

    def _load(self, id: int, now: float) -> float:
        """When it has come over the link."""
        seconds = self._seconds(id)
        self.busy.add(seconds, now)
        self.link = max(self.link, now) + seconds
        self.loaded += self.sizes[id]
        return self.link

    def _arrive(self, id: int, now: float, ready: float) -> None:
        self.objects[id].arrived, self.ready[id] = now, ready
        self.used += self.sizes[id]

    def _seconds(self, id: int) -> float:
        return LATENCY + self.sizes[id] / self.bandwidth


def policies(seeds: int, seconds: float) -> list[dict[str, Any]]:
    """Each policy on the same sequences: medians over seeds, and the range of the stalls."""
    rows = []
    for bandwidth, share in SETTINGS:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in STORE_POLICIES}
        for seed in range(seeds):
            rng = random.Random(seed)
            sizes = [int(MIB * 64 ** rng.random()) for _ in range(60)]
            sequence = uses(rng, share, sizes, seconds)
            for name, policy in STORE_POLICIES.items():
                found[name].append(Simulation(policy, sizes, sum(sizes) // 2, bandwidth).run(sequence))
        for name, runs in found.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            stalls = [run["stalled_s"] for run in runs]
            setting = {"link_gb": bandwidth / 1e9, "announced": share}
            rows.append({**setting, "policy": name, **middle, "stalled_range": [min(stalls), max(stalls)]})
    return rows


def _cell(row: Mapping[str, Any]) -> str:
    low, high = row["stalled_range"]
    return f"{row['stalled_s']:.2f} ({low:.2f} - {high:.2f}; {row['hit_rate']:.0%})"


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a row for each policy, a column for each setting."""
    rows = found["rows"]
    settings = dict.fromkeys((row["link_gb"], row["announced"]) for row in rows)
    heads = [f"link {link:g} GB/s, {share:.0%} announced" for link, share in settings]
    lines = [f"| waited, s (range; hits) | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [_cell(row) for row in rows if row["policy"] == policy]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def title(found: Mapping[str, Any]) -> str:
    """What the table shows."""
    return (
        f"Eviction policies of the tensor store: 60 objects of 1 to 64 MiB, of which half fit, used for "
        f"{found['seconds']:g} s; medians of {found['seeds']} sequences"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print, and with ``-o`` write, what came out, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store.policies", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="sequences of uses (default: 5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each sequence (default: 60)")
    parser.add_argument("-o", "--output", help="where the results go")
    options = parser.parse_args(argv)
    words = list(sys.argv[1:] if argv is None else argv)
    head = provenance("python -m benchmarks.store.policies", words, "simulated: a device behind a link")
    found: dict[str, Any] = {"benchmark": "store-policies", **head, "seeds": options.seeds, "seconds": options.seconds}
    found["rows"] = policies(options.seeds, options.seconds)
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        write_atomically(Path(options.output), (text + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
