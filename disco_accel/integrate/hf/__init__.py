"""Hugging Face models: their traces, outputs, caches and checkpoints."""
