"""The op that optimum-quanto compiles when it first unpacks weights: compiled before the tests, beside lint.

python -m tests.support.quanto_op    compiles it where the library looks for it, which must be on the path
"""

from __future__ import annotations

import importlib.util


def main() -> None:
    """Nothing to do where the library is not installed: its tests skip."""
    if importlib.util.find_spec("optimum") is None:
        return
    from optimum.quanto.library.extensions.cpp import ext

    assert ext.lib is not None


if __name__ == "__main__":
    main()
