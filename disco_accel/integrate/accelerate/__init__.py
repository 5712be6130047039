"""Trainer, Accelerate and DeepSpeed: entry points and patches."""
