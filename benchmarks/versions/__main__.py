"""``python -m benchmarks.versions``."""

from benchmarks.versions.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
