"""YAML files: the only reader of them in this package. No parser is imported until a file is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError

_MOST_NODES = 1 << 20
"""Of a YAML file, aliases expanded; a file of 1 MiB without any has no more."""


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys and values of a YAML (or JSON) file; nothing in it can run code, and no key may appear twice.

    Raises:
        ConfigError: the file is missing, larger than 1 MiB, not UTF-8, malformed, or not a mapping of names.
    """
    file = Path(path)
    try:
        if file.stat().st_size > 1 << 20:
            raise ConfigError(f"{path}: larger than 1 MiB, which no config is")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    content = parse_yaml(text, str(path))
    if content is None:
        raise ConfigError(f"{path}: the file is empty")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: expected lines of the form key: value")
    return content


def parse_yaml(text: str, where: str) -> Any:
    """What ``text``, found ``where``, says, as ``read_yaml`` reads it. Raises ConfigError: it is malformed."""
    import yaml

    class _Loader(yaml.SafeLoader):
        """Safe, and refuses a key that appears twice, of which YAML would keep the last without a word."""

    def mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{where}: line {key.start_mark.line + 1}: key {key.value!r} appears twice")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    def expanded(node: yaml.Node | None, sizes: dict[int, int]) -> int:
        """Nodes below and with ``node``, each alias counted as its nodes."""
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_NODES  # what holds itself has no end
            parts = node.value if isinstance(node, yaml.SequenceNode) else [n for pair in node.value for n in pair]
            sizes[id(node)] = 1 + sum(expanded(part, sizes) for part in parts)
        return sizes[id(node)]

    _Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if expanded(root, {}) >= _MOST_NODES:
                raise ConfigError(f"{where}: aliases (*name) make it larger than {_MOST_NODES} entries; write less")
            return None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{where}: {line}not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except (RecursionError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
