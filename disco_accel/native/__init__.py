"""Compiled libraries and what they need: memory that plans point into, ops as the engine reads them, CUDA."""
