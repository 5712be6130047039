"""The command ``merge``: an adapter into its base, within a limit of host memory."""

from __future__ import annotations

import argparse
import dataclasses
import json

from disco_accel.sizes import parse_size


def merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``merge``."""
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder that PEFT saved")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where the merged model goes")
    parser.add_argument("--base", metavar="DIR", help="the base: a folder or a hub name (default: the adapter's)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="tensors held at a time, such as 8GiB (default: what the machine has left)"
    )
    parser.add_argument("--dtype", default="auto", help="bfloat16, float16 or float32 (default: auto, the base's)")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="50GB", help="of a file, such as 5GB (default: save_pretrained's)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def merge(options: argparse.Namespace) -> int:
    """Merge an adapter into its base, and print sizes as JSON."""
    memory = None if options.memory is None else parse_size(options.memory)

    from disco_accel.observe.log_to_stderr import say, show_messages

    show_messages(options.quiet)
    # Before libraries are imported, which takes seconds.
    say(f"merge: {options.adapter} into {options.output}")

    from disco_accel.integrate.hf.merge import merge_adapter

    report = merge_adapter(
        options.adapter,
        options.output,
        base=options.base,
        memory=memory,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
    )
    print(json.dumps(dataclasses.asdict(report)))
    return 0
