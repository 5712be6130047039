"""A tensor store's speed: ``disco-accel bench store``.

Calls through a store in a process of its own, and gets of evicted objects over bytes / link. ``--real`` runs a part of
a sequence of uses through a store with each policy; ``policies.py`` has them in simulated time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.provenance import provenance
from benchmarks.store.policies import MIB, uses
from disco_accel.eviction import STORE_POLICIES
from disco_accel.graph.files import write_atomically
from disco_accel.store.client import Store

ROOT = Path(__file__).resolve().parents[2]


def serve(folder: Path, *options: str) -> tuple[subprocess.Popen[str], Store]:
    """A store and a connection to it."""
    path = folder / "own" / "store"
    words = [sys.executable, "-m", "disco_accel.cli.main", "store", "serve", "--socket", str(path), *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    return process, Store.connect(path)


def timed(call: Callable[[], object], count: int) -> dict[str, float]:
    """Microseconds of ``call``: the median, the middle half's ends and the 99th of a hundred, over ``count`` calls."""
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        kept = call()
        seconds.append(time.perf_counter() - begun)
        # What the call brought ends outside of its time.
        del kept
    cuts = statistics.quantiles(seconds, n=100)
    return {
        name: round(cuts[place] * 1e6, 1) for name, place in (("p25", 24), ("median", 49), ("p75", 74), ("p99", 98))
    }


def calls(count: int) -> dict[str, dict[str, float]]:
    """ping, create + free, get of a resident object."""
    with tempfile.TemporaryDirectory(prefix="disco-store-") as folder:
        process, store = serve(Path(folder), "--host", "64MiB", "--device", "64MiB")
        with store:
            made = store.create((1024,), torch.float32, "device")
            store.get(made).fill_(1)
            store.put(made)
            found = {
                "ping": timed(store.ping, count),
                "create + free": timed(lambda: store.free(store.create((1024,), torch.float32, "device")), count),
                "get, resident": timed(lambda: store.get(made), count),
            }
        process.send_signal(signal.SIGTERM)
        process.communicate()
    return found


def evicted(rounds: int, link: float, nbytes: int) -> dict[str, float]:
    """Seconds of gets of evicted objects over bytes / link: clean ones leave for them, the link is otherwise idle."""
    ratios = []
    with tempfile.TemporaryDirectory(prefix="disco-store-") as folder:
        size = (
            "--host",
            "1GiB",
            "--device",
            f"{4 * nbytes}B",
            "--link-bandwidth",
            f"{int(link)}B/s",
            "--policy",
            "lru",
        )
        process, store = serve(Path(folder), *size)
        with store:
            made = []
            for value in range(5):
                made.append(store.create((nbytes,), torch.uint8, "device"))
                store.get(made[-1]).fill_(value)
                store.put(made[-1])
            for turn in range(rounds + 5):
                # The store copies ahead what is not clean yet.
                time.sleep(2 * nbytes / link if turn < 5 else 0.02)
                begun = time.perf_counter()
                tensor = store.get(made[turn % 5])
                seconds = time.perf_counter() - begun
                assert int(tensor[turn]) == turn % 5
                del tensor
                if turn >= 5:
                    ratios.append(seconds / (nbytes / link))
        process.send_signal(signal.SIGTERM)
        process.communicate()
    cuts = statistics.quantiles(ratios, n=4)
    return {
        "p25": round(cuts[0], 3),
        "median": round(cuts[1], 3),
        "p75": round(cuts[2], 3),
        "min": round(min(ratios), 3),
    }


def real(seconds: float) -> list[dict[str, Any]]:
    """The sequence with half of the uses announced, sizes over 16, through a store for each policy, in real time."""
    rows = []
    rng = random.Random(0)
    sizes = [int(MIB * 64 ** rng.random()) // 16 for _ in range(60)]
    sequence = uses(rng, 0.5, sizes, seconds)
    nexts: dict[int, list[float]] = {}
    for use in sequence:
        nexts.setdefault(use.id, []).append(use.time)
    for name in STORE_POLICIES:
        with tempfile.TemporaryDirectory(prefix="disco-store-") as folder:
            options = ("--host", "1GiB", "--device", f"{sum(sizes) // 2}B", "--link-bandwidth", "625000000B/s")
            process, store = serve(Path(folder), *options, "--policy", name)
            with store:
                made = {}
                for id, nbytes in enumerate(sizes):
                    made[id] = store.create((nbytes,), torch.uint8, "device")
                    store.get(made[id]).fill_(id)
                    store.put(made[id])
                before = store.stats()
                place = dict.fromkeys(nexts, 0)
                begun = time.monotonic()
                for use in sequence:
                    time.sleep(max(0.0, begun + use.time - time.monotonic()))
                    tensor = store.get(made[use.id])
                    assert int(tensor[0]) == use.id
                    del tensor
                    place[use.id] += 1
                    later = nexts[use.id][place[use.id] :]
                    ahead = later[0] - (time.monotonic() - begun) if later else 0
                    store.put(made[use.id], ahead if use.announced and ahead > 0 else None)
                after = store.stats()
                moved = {
                    key: after[key] - before[key] for key in ("gets", "hits", "prefetched", "stalled_microseconds")
                }
            process.send_signal(signal.SIGTERM)
            process.communicate()
        rows.append(
            {
                "policy": name,
                "hit_rate": round(moved["hits"] / moved["gets"], 4),
                "stalled_s": round(moved["stalled_microseconds"] / 1e6, 2),
                "prefetched": moved["prefetched"],
            }
        )
    return rows


def table(found: Mapping[str, Any]) -> str:
    """Markdown: calls and evicted gets, then the policies, if they ran."""
    lines = ["| call | median | middle half | p99 |", "|---|---|---|---|"]
    for row in found["rows"]:
        last = f"{row['p99']:g}" if "p99" in row else ""
        lines.append(f"| {row['what']} | {row['median']:g} | {row['p25']:g} - {row['p75']:g} | {last} |")
    ran = found.get("policies_through_a_store", [])
    if ran:
        lines += ["", "| policy, through a store | waited, s | hits | brought back ahead |", "|---|---|---|---|"]
        lines += [f"| {r['policy']} | {r['stalled_s']:.2f} | {r['hit_rate']:.0%} | {r['prefetched']} |" for r in ran]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print, and with ``-o`` write, what was measured, as JSON."""
    parser = argparse.ArgumentParser(prog="disco-accel bench store", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="calls of each kind (default: 10000)")
    parser.add_argument("--rounds", type=int, default=25, help="gets of evicted objects (default: 25)")
    real_help = "also run the policies, each on S seconds of uses"
    parser.add_argument("--real", type=float, default=0.0, metavar="S", help=real_help)
    parser.add_argument("-o", "--output", help="where the results go")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    words = list(sys.argv[1:] if argv is None else argv)
    found: dict[str, Any] = {"benchmark": "store"} | provenance("disco-accel bench store", words, "cpu")
    found["rows"] = [
        *({"what": f"{name}, us", **times} for name, times in calls(options.count).items()),
        *(
            {"what": f"get of {size // MIB} MiB, evicted, at {rate / 1e6:g} MB/s, over bytes / link"}
            | evicted(options.rounds, rate, size)
            for rate, size in ((250e6, 16 * MIB), (100e6, 4 * MIB))
        ),
    ]
    if options.real:
        found["policies_through_a_store"] = real(options.real)
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        write_atomically(Path(options.output), (text + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
