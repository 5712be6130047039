"""``python -m benchmarks.simulated``."""

from benchmarks.simulated.lora import main

if __name__ == "__main__":
    raise SystemExit(main())
