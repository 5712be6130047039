"""A published study's optimizer step, 13 billion parameters on one H100, simulated: its own schedule, and ours.

    disco-accel bench optimizer [--pictures FOLDER] [-o FILE]

No device runs anything. Ours are planned and verified; a step is one among others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.common.provenance import provenance
from benchmarks.optimizer.least import least_seconds
from benchmarks.optimizer.ours import BEST, PLACES, SCHEDULES
from benchmarks.optimizer.pictures import draw
from benchmarks.optimizer.study import STUDY
from benchmarks.optimizer.study_schedule import deviations, simulated_phases, study_schedule
from benchmarks.optimizer.suite import HEADER, Row, line, our_row, shared, study_rows
from benchmarks.optimizer.trace import Trace, trace
from disco_accel.graph.files import write_atomically

DEVICE = "simulated: H100 with 80 GB behind 55 GB/s each way"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit 1 if the study's schedule is not within a tenth of its table."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="disco-accel bench optimizer", description=__doc__.split("\n")[0])
    parser.add_argument("--places", type=lambda t: t.split(","), default=list(PLACES), help="of our updates")
    parser.add_argument("--pictures", type=Path, help="folder for memory, links and transfers over time")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    if wrong := set(args.places) - set(PLACES):
        parser.error(f"--places: {', '.join(sorted(wrong))} unknown; there are {', '.join(PLACES)}")
    agrees = _say_agreement()
    rows: list[Row] = []
    print(f"\nSimulated, no device ran it:\n\n{HEADER}", flush=True)
    for row in study_rows(STUDY):
        _say(rows, row)
    traces: list[tuple[str, Trace]] = [("the study's schedule", trace(*study_schedule(STUDY)))]
    # Some seconds each, for those who choose times.
    leasts = {clip: least_seconds(STUDY, clip=clip) for clip in (False, True) if "timed" in args.places}
    for schedule in SCHEDULES:
        if schedule.places in args.places:
            row, made = our_row(STUDY, schedule, leasts.get(schedule.clip))
            _say(rows, row)
            if schedule in BEST:
                title = f"ours, {'' if schedule.clip else 'no '}clipping"
                traces.append((title, trace(made.plan, made.machine)))
    for schedule in BEST:
        if schedule.places in args.places:
            row, _ = our_row(shared(STUDY), schedule)
            _say(rows, replace(row, name=f"{row.name}, host memory shared"))
    if args.pictures is not None:
        draw(args.pictures / "optimizer.png", traces, STUDY.machine.memory)
    if args.output is not None:
        head = provenance("disco-accel bench optimizer", words, DEVICE)
        result = {"benchmark": "simulated-optimizer", **head, "rows": [asdict(row) for row in rows]}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps(result, indent=1).encode())
    return 0 if agrees else 1


def _say(rows: list[Row], row: Row) -> None:
    rows.append(row)
    print(line(asdict(row)), flush=True)


def _say_agreement() -> bool:
    phases, _ = simulated_phases(STUDY)
    figures = list(deviations(STUDY, phases))
    print("| the study's schedule | simulated | measured | difference |\n|---|---|---|---|")
    for name, simulated, measured in figures:
        print(f"| {name} | {simulated:.2f} | {measured:.2f} | {simulated / measured - 1:+.1%} |")
    return all(abs(simulated / measured - 1) <= 0.1 for _, simulated, measured in figures)


if __name__ == "__main__":
    raise SystemExit(main())
