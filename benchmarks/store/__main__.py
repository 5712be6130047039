"""``python -m benchmarks.store``."""

from benchmarks.store.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
