"""A plan's distance from the bound as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from disco_accel.plan.bound.ladder import ROWS, Why
from disco_accel.plan.bound.link_time import IDLE
from disco_accel.sizes import format_size


def as_json(why: Why) -> dict[str, Any]:
    """Return ``why`` as plain data."""
    return {
        "sentence": why.sentence,
        "step": why.step,
        "bound": {**asdict(why.bound), "bound": why.bound.bound},
        "distance": why.distance,
        "rows": dict(why.rows),
        "reload_bytes": why.reload_bytes,
        "offload_bytes": why.offload_bytes,
        "links": [asdict(link) for link in why.links],
        "waited": why.waited,
        "waits": [asdict(wait) for wait in why.waits],
        "dip": why.dip,
    }


def as_text(why: Why) -> str:
    """Return the sentence, the sum, the time of each link, and the longest waits."""
    return "\n".join(_lines(why))


def _lines(why: Why) -> Iterator[str]:
    yield why.sentence
    yield ""
    yield f"{'ms':>10} {'of bound':>9}"
    bound = why.bound.bound
    for seconds, name in (
        (bound, f"the bound: loads of {format_size(int(why.bound.lp_reload_bytes))} at least"),
        *((seconds, ROWS[row]) for row, seconds in why.rows.items() if seconds),
        (why.step, f"the plan: loads of {format_size(why.reload_bytes)}, offloads of {format_size(why.offload_bytes)}"),
    ):
        yield f"{seconds * 1e3:10.3f} {_share(seconds, bound):>9} {name}"
    if why.dip:
        share = _share(why.dip, bound)
        yield f"{why.dip * 1e3:10.3f} {share:>9} of the bound: the largest kernels, one in a hundred, leave less room"
    for link in why.links:
        yield ""
        yield f"{'ms':>10} {'of step':>9} {link.link}, {link.copies} loads"
        parts = [(link.bytes, "bytes move"), (link.latency, "latency of copies"), (link.other, "other copies")]
        parts += [(seconds, IDLE[reason]) for reason, seconds in link.idle.items()]
        for seconds, name in parts:
            if seconds:
                yield f"{seconds * 1e3:10.3f} {_share(seconds, why.step):>9} {name}"
    if why.waits:
        yield ""
        yield f"{'ms':>10} {'of step':>9} kernels wait for copies"
        yield f"{why.waited * 1e3:10.3f} {_share(why.waited, why.step):>9} all of them"
        for wait in why.waits:
            what = f"at {wait.begin * 1e3:.3f} ms {wait.op} ({wait.kernel}) for {wait.name} ({wait.value})"
            yield f"{wait.seconds * 1e3:10.3f} {_share(wait.seconds, why.step):>9} {what}, {format_size(wait.size)}"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else "-"
