"""``python -m benchmarks.engine``."""

from benchmarks.engine.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
