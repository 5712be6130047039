"""The command ``convert``: graphs and plans of any version to today's."""

from __future__ import annotations

import argparse
import json

from disco_accel.errors import ConfigError


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``convert``."""
    parser.add_argument("file", metavar="FILE.json", help="a task graph or a plan, of version 1 or 3")
    parser.add_argument("-o", "--output", metavar="OUT.json", required=True, help="where it goes")


def convert(options: argparse.Namespace) -> int:
    """Write ``options.file`` in today's version."""
    from disco_accel.graph.files import read_either, write_memgraph, write_taskgraph
    from disco_accel.graph.graph_json import VERSION
    from disco_accel.graph.memgraph import MemGraph

    graph, version = read_either(options.file, options.names)
    try:
        if isinstance(graph, MemGraph):
            write_memgraph(graph, options.output, options.names)
        else:
            write_taskgraph(graph, options.output, options.names)
    except OSError as error:
        raise ConfigError(f"{options.output}: cannot be written: {error.strerror}") from None
    kind = "memgraph" if isinstance(graph, MemGraph) else "taskgraph"
    print(json.dumps({"format": kind, "from": version, "to": VERSION, "vertices": len(graph.vertices)}))
    return 0
