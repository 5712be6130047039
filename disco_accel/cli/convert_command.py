"""The command ``convert``: graphs and plans from one version of their files to the other."""

from __future__ import annotations

import argparse
import json

from disco_accel.errors import ConfigError


def schema_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--schema`` to ``parser``; ``default`` says what is written without it."""
    parser.add_argument("--schema", type=int, choices=(1, 2), help=f"version of the file (default: {default})")


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``convert``."""
    parser.add_argument("file", metavar="FILE.json", help="a task graph or a plan, of version 1 or 2")
    parser.add_argument("-o", "--output", metavar="OUT.json", required=True, help="where it goes")
    schema_argument(parser, "the one that FILE.json does not have")


def convert(options: argparse.Namespace) -> int:
    """Write ``options.file`` in the other version; what that cannot say is bad input, and nothing is written."""
    from disco_accel.graph.files import read_either, write_memgraph, write_taskgraph
    from disco_accel.graph.memgraph import MemGraph

    graph, version = read_either(options.file, options.names)
    schema = options.schema or 3 - version
    try:
        if isinstance(graph, MemGraph):
            write_memgraph(graph, options.output, options.names, schema)
        else:
            write_taskgraph(graph, options.output, options.names, schema)
    except OSError as error:
        raise ConfigError(f"{options.output}: cannot be written: {error.strerror}") from None
    kind = "memgraph" if isinstance(graph, MemGraph) else "taskgraph"
    print(json.dumps({"format": kind, "from": version, "to": schema, "vertices": len(graph.vertices)}))
    return 0
