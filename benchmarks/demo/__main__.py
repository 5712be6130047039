"""``python -m benchmarks.demo``."""

from benchmarks.demo.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
