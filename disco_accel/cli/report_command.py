"""The command ``report``: the page of a step from its folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``report``."""
    parser.add_argument("folder", metavar="DIR", help="what report_dir or plan -o wrote")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the page goes (default: report.html in DIR)")
    parser.add_argument("--json", action="store_true", help="the page's file, and the source of its events, as JSON")


def report(options: argparse.Namespace) -> int:
    """Write the page, and print the step in words, or as one JSON line whether its events were measured or
    simulated."""
    from disco_accel.observe.headline import step_words
    from disco_accel.observe.step_folder import read_step
    from disco_accel.observe.step_page import write_step_page

    step = read_step(options.folder)
    target = Path(options.folder) / "report.html" if options.output is None else Path(options.output)
    write_step_page(target, step)
    if options.json:
        print(json.dumps({"page": str(target), "events": step.source, "seconds": step.finish}))
    else:
        print(*step_words(step), f"The page: {target}", sep="\n")
    return 0
