"""``python -m benchmarks.full``."""

from benchmarks.full.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
