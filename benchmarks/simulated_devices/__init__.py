"""Steps on one to eight GPUs, in simulation: ``python -m benchmarks.simulated_devices``."""
