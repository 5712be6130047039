"""All that a forward can read beside its batch: Python state, side effects, settings of PyTorch's."""
