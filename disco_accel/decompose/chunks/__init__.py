"""Finer than devices: large kernels run in chunks, one chunk through many kernels before the next."""
