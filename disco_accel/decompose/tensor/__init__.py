"""Tensor parallelism: each device has a part of each large weight, and works on it for the whole batch."""
