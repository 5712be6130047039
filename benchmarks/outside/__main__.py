"""``python -m benchmarks.outside``."""

from benchmarks.outside.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
